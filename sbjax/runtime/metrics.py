"""The numbers of one RL step, from its program; docs/metrics.md defines every key."""

from collections import defaultdict

import numpy as np

from sbjax.runtime.recipe import Recipe
from sbjax.runtime.scalars import weighted_reward
from sbjax.runtime.step import StepProgram


def step_metrics(
  recipe: Recipe, program: StepProgram, step: int, step_s: float
) -> dict[str, float]:
  """Gives the step's scalars, but for those that reports derive from its spans.

  Args:
    recipe: the run's recipe.
    program: the step, all of whose tasks have ended.
    step: its number.
    step_s: first generate submitted to last adapter acknowledged.
  """
  metrics: dict[str, float] = {"training/global_step": float(step), "timing_s/step": step_s}
  metrics |= _rewards(recipe, program)
  metrics |= _updates(program)
  trained = sum(len(members) for members in program.shape.updates)
  metrics["training/replays_per_candidate"] = program.chunks_replayed / (
    recipe.geometry.chunks * trained
  )
  metrics["check/logp_diff_rollout_replay"] = _replay_error(program)
  metrics["perf/buffer_bytes"] = float(program.buffer_bytes)
  return metrics


def _rewards(recipe: Recipe, program: StepProgram) -> dict[str, float]:
  out: dict[str, float] = {}
  rewards = [program.rewards[c] for c in range(len(program.candidates))]
  totals = [weighted_reward(recipe, r) for r in rewards]
  values = np.array([t for t in totals if t is not None])
  if values.size:
    out["critic/rewards/mean"] = float(values.mean())
    out["critic/rewards/max"] = float(values.max())
    out["critic/rewards/min"] = float(values.min())
  for name in recipe.settings.reward.components:
    valid = [r.components for r in rewards if r.components is not None]
    got = [values[name] for values in valid if name in values]
    if got:
      out[f"reward/{name}"] = float(np.mean(got))
    if name in recipe.settings.reward.optional:
      out[f"reward/left_out/{name}"] = float(len(valid) - len(got))
  spread = []
  for members in program.shape.groups:
    group = np.array([totals[c] for c in members if totals[c] is not None], np.float64)
    if group.size >= 2:
      spread.append(float(group.std(ddof=1)))
  if spread:
    out["critic/rewards/std_mean"] = float(np.mean(spread))
    out["critic/rewards/zero_std_ratio"] = float(np.mean([s == 0.0 for s in spread]))
  causes: dict[str, int] = defaultdict(int)
  for reward in rewards:
    if reward.components is None:
      causes[reward.cause] += 1
  out["reward/failed"] = float(sum(causes.values()))
  for cause, count in causes.items():
    out[f"reward/failed/{cause}"] = float(count)
  return out


def _updates(program: StepProgram) -> dict[str, float]:
  out: dict[str, float] = {}
  gathered: dict[str, list[float]] = defaultdict(list)
  for update, scalars in sorted(program.updates.items()):
    outcome = program.outcomes[update]
    values = dict(scalars.metrics)
    values["actor/grad_norm"] = outcome["grad_norm"]
    values["actor/lr"] = outcome["lr"]
    for key, value in values.items():
      out[f"{key}/m{update}"] = value
      gathered[key].append(value)
  for key, numbers in gathered.items():
    out[key] = float(np.mean(numbers))
  outcomes = program.outcomes.values()
  out["training/skipped_updates"] = float(sum(o["skipped"] for o in outcomes))
  out["training/non_finite_gradients"] = float(sum(o["not_finite"] for o in outcomes))
  out["training/dropped_gradients"] = float(program.dropped)
  return out


def _replay_error(program: StepProgram) -> float:
  """Largest |s_c − s_c^old| per chunk and step before the first update, where they must agree."""
  worst = 0.0
  for c in program.shape.updates[0]:
    scores = program.chunk_scores(0, c)
    worst = max(worst, float(np.max(np.abs(scores - program.old_scores_of(c)))))
  return worst
