"""What a comparison of schemes says: figures of each scheme, what each idea gains, and a table."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from sbjax.report import timeline
from sbjax.report.waiting import Window, wait_frac
from sbjax.runtime.records import Span

BASELINE = "colocated"

_GAINS = (
  ("overlap", "async_reward", "async_train"),
  ("merged replay", "async_train", "merged_replay"),
  ("balance", "merged_replay", "stagebreaker"),
  ("fused, split and planned together", "stagebreaker", "sbjax"),
)


@dataclasses.dataclass(frozen=True)
class MeasuredStep:
  """One step of one scheme.

  Attributes:
    step_s: first generate submitted to last adapter acknowledged.
    spans: its executed tasks.
    waits: worker -> windows in which it waits for a reward.
    replays_per_candidate: chunks replayed / (chunks of the trajectories x updates).
  """

  step_s: float
  spans: tuple[Span, ...]
  waits: Mapping[str, tuple[Window, ...]]
  replays_per_candidate: float


@dataclasses.dataclass(frozen=True)
class Measured:
  """One scheme's part of a comparison.

  Attributes:
    scheme: its name.
    steps: the measured steps, in order.
    gradient: combined gradient of the first update of the run, before clipping.
    rewards: rewards of the first step's candidates, None where judging failed; equal rewards show
      that the schemes' gradients were taken on the same videos.
    plan: the plan of the measured steps, in words.
    searched: how the plan was found.
    simulated_s: the step's simulated length under that plan; None where nothing was simulated.
    bound_s: no plan of the scheme can be faster at the costs that were planned with; None likewise.
    own_simulated_s: the simulated length at the measured steps' own task times; None likewise.
    own_bound_s: the bound at those times; None likewise.
  """

  scheme: str
  steps: tuple[MeasuredStep, ...]
  gradient: Float[np.ndarray, " parameters"]
  rewards: tuple[float | None, ...]
  plan: str
  searched: str
  simulated_s: float | None
  bound_s: float | None
  own_simulated_s: float | None = None
  own_bound_s: float | None = None

  @property
  def step_s(self) -> float:
    """Median length of the measured steps."""
    return statistics.median(step.step_s for step in self.steps)

  @property
  def typical(self) -> MeasuredStep:
    """The measured step whose length is nearest to the median: the one to draw."""
    return min(self.steps, key=lambda step: abs(step.step_s - self.step_s))


def summarise(
  measured: Sequence[Measured], *, emulated: bool, paired: bool, facts: Mapping[str, Any]
) -> dict[str, Any]:
  """Gives the content of `report.json`.

  Args:
    measured: the schemes, in order of display.
    emulated: True where workers only waited as long as a profile says.
    paired: True where steps of the schemes took turns; then a speed-up is the median over rounds
      of the two steps of a round, and noise that lasts longer than a round cancels.
    facts: what else is to be told: config, workers, numbers of steps.
  """
  return {
    "emulated": emulated,
    "paired": paired,
    **facts,
    "same_rewards": len({m.rewards for m in measured}) == 1,
    "schemes": {m.scheme: _figures(m, measured, paired) for m in measured},
    "gain": gains(measured, paired),
  }


def _figures(mine: Measured, every: Sequence[Measured], paired: bool) -> dict[str, Any]:
  by_name = {m.scheme: m for m in every}
  baseline = by_name.get(BASELINE)
  return {
    "step_s": {"median": mine.step_s, "all": [step.step_s for step in mine.steps]},
    "speedup_vs_colocated": speedup(mine, baseline, paired) if baseline else None,
    "speedup_vs": {m.scheme: speedup(mine, m, paired) for m in every if m is not mine},
    "utilisation": utilisation(mine.steps),
    "wait_for_reward_frac": statistics.fmean(
      wait_frac(step.waits, step.spans, step.step_s) for step in mine.steps
    ),
    "replays_per_candidate": statistics.fmean(s.replays_per_candidate for s in mine.steps),
    "busy_shares": busy_shares(mine.steps),
    "lower_bound_s": mine.bound_s,
    "simulated_s": mine.simulated_s,
    "share_of_bound": mine.bound_s / mine.step_s if mine.bound_s is not None else None,
    "simulated_error": mine.simulated_s / mine.step_s - 1 if mine.simulated_s is not None else None,
    "own_simulated_s": mine.own_simulated_s,
    "own_lower_bound_s": mine.own_bound_s,
    "share_of_allowed_speedup": _share_of_allowed(mine, baseline, paired),
    "max_rel_gradient_diff": _gradient_differs(mine, every),
    "plan": mine.plan,
    "searched": mine.searched,
  }


def _share_of_allowed(mine: Measured, baseline: Measured | None, paired: bool) -> float | None:
  """Measured speed-up over the one that the bound allows, both over the measured baseline."""
  if baseline is None or baseline is mine or mine.own_bound_s is None:
    return None
  return speedup(mine, baseline, paired) * mine.own_bound_s / baseline.step_s


def _gradient_differs(mine: Measured, every: Sequence[Measured]) -> float | None:
  """Largest difference from the schemes that made the same videos; where none did, from all.

  A rollout that takes its gradient on the way is another program, which may round otherwise: its
  videos then differ in the last bits from the other schemes', and rewards carry that on.
  """
  others = [m for m in every if m is not mine]
  same = [m for m in others if m.rewards == mine.rewards]
  return max((gradient_difference(mine.gradient, m.gradient) for m in same or others), default=None)


def speedup(mine: Measured, other: Measured, paired: bool) -> float:
  """How many times as fast as another scheme: of medians, or the median over paired steps."""
  if paired:
    return statistics.median(
      b.step_s / a.step_s for a, b in zip(mine.steps, other.steps, strict=True)
    )
  return other.step_s / mine.step_s


def utilisation(steps: Sequence[MeasuredStep]) -> dict[str, float]:
  """Share of the step in which each group executes tasks, the mean over steps.

  Workers with both roles count for both groups.
  """
  shares: dict[str, list[float]] = {}
  for step in steps:
    for group, share in timeline.utilisation(step.spans, step.step_s).items():
      for name in ("actor", "reward") if group == "both" else (group,):
        shares.setdefault(name, []).append(share)
  return {name: statistics.fmean(values) for name, values in sorted(shares.items())}


def busy_shares(steps: Sequence[MeasuredStep]) -> dict[str, float]:
  """Share of each task kind in the time in which workers execute tasks."""
  seconds: dict[str, float] = {}
  for step in steps:
    for span in step.spans:
      seconds[span.kind] = seconds.get(span.kind, 0.0) + span.end_s - span.start_s
  total = sum(seconds.values())
  return {kind: s / total for kind, s in sorted(seconds.items())} if total > 0 else {}


def gradient_difference(
  one: Float[np.ndarray, " parameters"], other: Float[np.ndarray, " parameters"]
) -> float:
  """Norm of the difference, relative to the larger norm; 0 where both are zero."""
  a, b = np.asarray(one, np.float64), np.asarray(other, np.float64)
  scale = max(np.linalg.norm(a), np.linalg.norm(b))
  return float(np.linalg.norm(a - b) / scale) if scale > 0 else 0.0


def gains(measured: Sequence[Measured], paired: bool) -> dict[str, dict[str, Any]]:
  """What each idea gains: from one scheme to the next that has it as well.

  `overlap` is what remains of async_reward when training no longer waits for rewards, `merged
  replay` what one replay instead of two saves, `balance` what moving decodes and replays saves.

  Args:
    measured: the schemes; a gain is left out where one of its two is not among them.
    paired: as for `speedup`.

  Returns:
    Idea -> `from`, `to`, `saved_s` (of medians) and `factor`.
  """
  by_name = {m.scheme: m for m in measured}
  return {
    idea: {
      "from": before,
      "to": after,
      "saved_s": by_name[before].step_s - by_name[after].step_s,
      "factor": speedup(by_name[after], by_name[before], paired),
    }
    for idea, before, after in _GAINS
    if before in by_name and after in by_name
  }


COLUMNS = (
  "scheme",
  "step, s",
  "speed-up",
  "actor busy",
  "reward busy",
  "wait for reward",
  "replays",
  "simulated, s",
  "bound, s",
  "of bound",
  "gradient differs",
)

_WORDS = ("scheme", "search", "plan")


def rows(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
  """The table's cells as text, one row per scheme, under `COLUMNS`."""
  out = []
  for name, s in report["schemes"].items():
    busy = s["utilisation"]
    out.append(
      (
        name,
        f"{s['step_s']['median']:.4g}",
        _cell(s["speedup_vs_colocated"], "{:.2f}"),
        _cell(busy.get("actor"), "{:.0%}"),
        _cell(busy.get("reward"), "{:.0%}"),
        _cell(s["wait_for_reward_frac"], "{:.1%}"),
        _cell(s["replays_per_candidate"], "{:.2f}"),
        _cell(s["simulated_s"], "{:.4g}"),
        _cell(s["lower_bound_s"], "{:.4g}"),
        _cell(s["share_of_bound"], "{:.1%}"),
        _cell(s["max_rel_gradient_diff"], "{:.1e}"),
      )
    )
  return out


def text_table(columns: Sequence[str], cells: Sequence[Sequence[str]], mark: str = "") -> str:
  """Lays cells out under their columns: words to the left, numbers to the right.

  Args:
    columns: heads.
    cells: rows of as many cells.
    mark: a word that ends every line, e.g. `emulated`.
  """
  widths = [max(len(row[i]) for row in (columns, *cells)) for i in range(len(columns))]
  lines = []
  for row in (columns, *cells):
    parts = [
      cell.ljust(width) if name in _WORDS else cell.rjust(width)
      for name, cell, width in zip(columns, row, widths, strict=True)
    ]
    lines.append("  ".join([*parts, *([mark] if mark else [])]).rstrip())
  return "\n".join(lines)


def sentences(report: Mapping[str, Any]) -> list[str]:
  """What the table does not say: plans, shares of the colocated step, gains, the gradients."""
  out = [f"{name}: {s['plan']} ({s['searched']})" for name, s in report["schemes"].items()]
  if BASELINE in report["schemes"]:
    shares = report["schemes"][BASELINE]["busy_shares"]
    parts = ", ".join(f"{kind} {share:.1%}" for kind, share in shares.items())
    out.append(f"work of the {BASELINE} step: {parts}")
  for name, s in report["schemes"].items():
    if s["share_of_allowed_speedup"] is not None:
      out.append(
        f"{name}: {s['share_of_allowed_speedup']:.1%} of the speed-up over {BASELINE} that its "
        f"bound allows ({s['own_lower_bound_s']:.4g} s at the measured tasks' own times, "
        f"simulated {s['own_simulated_s']:.4g} s)"
      )
  for idea, gain in report["gain"].items():
    out.append(
      f"{idea}: {gain['saved_s']:+.3g} s, {gain['factor']:.3f} x ({gain['from']} to {gain['to']})"
    )
  if not report["same_rewards"]:
    out.append(
      "the first step's rewards differ between schemes, so not all gradients are of the same "
      "videos: fused rollouts round otherwise than plain ones, or rollouts are not repeatable here"
    )
  return out


def _cell(value: float | None, form: str) -> str:
  return "-" if value is None else form.format(value)
