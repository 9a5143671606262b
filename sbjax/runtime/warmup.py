"""Warm-up: every shape compiled on every worker before step 1, timed, and compared."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from sbjax.rewards.protocol import Job
from sbjax.runtime.executor import Call, Handle, Result, WorkerLost
from sbjax.runtime.pool import Pool, RunFailed
from sbjax.runtime.recipe import Recipe

_STEP = -1  # buffers of the warm-up belong to no step


@dataclasses.dataclass(frozen=True)
class WarmUp:
  """What the warm-up found.

  Attributes:
    seconds: kind -> group -> seconds of one warm task; a group that does not judge has none there.
    score_difference: largest difference of one trajectory's scores between two workers.
  """

  seconds: Mapping[str, Mapping[str, float]]
  score_difference: float


def warm_up(
  pool: Pool,
  recipe: Recipe,
  adapter: Handle,
  prompt: str,
  *,
  judge_jobs: Sequence[Job],
  kinds: Sequence[str],
  timeout_s: float,
  say: Callable[[str], None],
) -> WarmUp:
  """Runs one candidate through every task kind on every worker, twice; the second time counts.

  Judging runs on the workers that hold the judge alone.

  Args:
    pool: workers that have loaded their models.
    recipe: the run's recipe.
    adapter: the adapter to warm up with.
    prompt: any prompt of the run.
    judge_jobs: judge jobs, all of whose candidates are played by the one video.
    kinds: kinds to run, in the order of a step.
    timeout_s: deadline of one task with its compilation.
    say: prints progress.
  """
  names = list(pool.workers)
  results: dict[str, dict[str, Any]] = {name: {} for name in names}
  seconds: dict[str, dict[str, float]] = {}
  scores: list[np.ndarray] = []

  def everywhere(
    kind: str,
    call_of: Callable[[str], tuple[Call, Sequence[Handle]]],
    workers: Sequence[str] = names,
  ) -> None:
    say(f"compiling {kind}")
    for attempt in range(2):
      for name in workers:
        call, inputs = call_of(name)

        def ended(result: Result | Exception, name: str = name) -> None:
          if isinstance(result, WorkerLost):
            raise RunFailed(f"warm-up: {result}")
          if isinstance(result, Exception):
            raise RunFailed(f"warm-up of {kind}: {result}")
          results[name][kind] = result

        pool.submit(name, call, inputs, f"warm-up of {kind}", timeout_s, ended)
      pool.drain()
      if attempt == 1:
        for name in workers:
          group = pool.workers[name].spec.group
          times = seconds.setdefault(kind, {})
          times[group] = max(times.get(group, 0.0), results[name][kind].seconds)

  for name in names:
    pool.give_adapter(name, "warm", adapter)
  trained = recipe.trained_steps(0, 0, 0)
  args = {"prompt": prompt, "seed": 1, "seed_initial": 1, "version": "warm"}
  everywhere("generate", lambda name: (Call("generate", args, 2), ()))
  if "fused" in kinds:
    fused = {**args, "fused": (_STEP, 0, 1), "trained": trained}
    everywhere("fused", lambda name: (Call("generate", fused, 2), ()))

  def heavy(name: str, kind: str, index: int = 0) -> Handle:
    return results[name][kind].heavy[index]

  everywhere("decode", lambda name: (Call("decode", {}, 1), (heavy(name, "generate", 1),)))
  if "judge" in kinds:
    needed = tuple(sorted({c for job in judge_jobs for c in job.candidates}))
    judge = {"jobs": tuple(judge_jobs), "candidates": needed, "retries": 0}
    everywhere(
      "judge",
      lambda name: (Call("judge", judge), (heavy(name, "decode"),) * len(needed)),
      pool.judges,
    )
  if recipe.needs_reference:
    reference = {"trained": trained, "version": "warm"}
    everywhere(
      "reference",
      lambda name: (Call("reference", reference, 1), (heavy(name, "generate"),)),
    )

  def trajectory(name: str) -> tuple[Handle, ...]:
    extra = (heavy(name, "reference"),) if recipe.needs_reference else ()
    return (heavy(name, "generate"), *extra)

  prefix = {"trained": trained, "version": "warm"}
  everywhere("prefix", lambda name: (Call("prefix", prefix), (heavy(name, "generate"),)))
  common = {"trained": trained, "version": "warm"}
  every_block = tuple(range(len(recipe.blocks)))
  updates = range(min(2, recipe.updates))
  if "replay" in kinds:
    for update in updates:
      replay = {"key": (_STEP, update, 0), "blocks": every_block, **common}
      everywhere("replay", lambda name, a=replay: (Call("replay", a), trajectory(name)))
  everywhere("forward", lambda name: (Call("forward", common), trajectory(name)))
  scores = [results[name]["forward"].scalars["channels"][..., 0] for name in names]
  weights = np.zeros((recipe.geometry.chunks, recipe.trained, len(recipe.objective.channels)))
  backward = {"key": (_STEP, 0, 0), "weights": weights, **common}
  everywhere("backward", lambda name: (Call("backward", backward), trajectory(name)))
  _forget(pool)
  spread = max(float(np.max(np.abs(s - scores[0]))) for s in scores)
  return WarmUp(seconds, spread)


def _forget(pool: Pool) -> None:
  for name, state in pool.workers.items():
    keep = Call("keep", {"versions": (), "step": 0})
    pool.submit(name, keep, (), "end of warm-up", 60.0, lambda result: None)
    state.versions = set()
  pool.drain()
