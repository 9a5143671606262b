"""The end of a run: `summary.json` and the reward curve."""

import dataclasses
import json
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from sbjax import files
from sbjax.report import writers

_ENDS = 5  # steps that `first` and `last` average over
_ADAPTER_COLOURS = {"online": "#c8504e", "ema": "#5b9f57", "base": "#777777"}


@dataclasses.dataclass(frozen=True)
class RunFacts:
  """What the summary tells that is not in the metrics.

  Attributes:
    steps: RL steps completed.
    candidates_per_step: candidates a step.
    seed: the run's seed.
    scheme: the scheme's name.
    wall_s: seconds since the command began (of the last start, where resumed).
    chunk_tokens: tokens of a chunk.
    minibatches: mini-batches a step.
    outputs: output name -> path.
    next: one sentence: what to do with it now.
    shares_of_colocated_step: kind -> share of the colocated step's busy time, where measured.
    status: `done`, or why it ended early.
    extra: further JSON values.
  """

  steps: int
  candidates_per_step: int
  seed: int
  scheme: str
  wall_s: float
  chunk_tokens: int
  minibatches: int
  outputs: Mapping[str, str]
  next: str
  shares_of_colocated_step: Mapping[str, float] | None = None
  status: str = "done"
  extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def by_step(rows: Sequence[Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
  """Merges the lines of `metrics.jsonl` into one dictionary a step, in rising order."""
  merged: dict[int, dict[str, Any]] = {}
  for line in rows:
    merged.setdefault(int(line["step"]), {}).update(line)
  return dict(sorted(merged.items()))


def summarise(
  facts: RunFacts,
  rows: Sequence[Mapping[str, Any]],
  evaluations: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
  """Computes the summary from a run's own files, so that a resumed run's covers all of it.

  Args:
    facts: what the metrics do not have.
    rows: the lines of `metrics.jsonl`.
    evaluations: the lines of `evaluation/evaluation.jsonl`.

  Returns:
    JSON values. `step_s`, `clipfrac_second_minibatch` and the components are statistics over steps:
    `first` and `last` average the first and last five. `task_ms` is the median over steps of each
    step's median task. `evaluation` has the last evaluation, without its single values.
  """
  steps = by_step(rows)
  clipfrac = _series(steps, "actor/pg_clipfrac/m1")
  last = dict(evaluations[-1]) if evaluations else None
  if last is not None:
    last.pop("values", None)
  return {
    "status": facts.status,
    "steps": facts.steps,
    "candidates_per_step": facts.candidates_per_step,
    "seed": facts.seed,
    "scheme": facts.scheme,
    "wall_s": round(facts.wall_s, 3),
    "step_s": _statistics(_series(steps, "timing_s/step")),
    "task_ms": {
      kind: round(statistics.median(_series(steps, f"timing_task_ms/{kind}")), 3)
      for kind in _suffixes(steps, "timing_task_ms/")
    },
    "shares_of_colocated_step": (
      None if facts.shares_of_colocated_step is None else dict(facts.shares_of_colocated_step)
    ),
    "chunk_tokens": facts.chunk_tokens,
    "minibatches": facts.minibatches,
    "clipfrac_second_minibatch": statistics.fmean(clipfrac) if clipfrac else None,
    "reward": _statistics(_series(steps, "critic/rewards/mean")),
    "components": {
      name: _statistics(_series(steps, f"reward/{name}")) for name in component_names(steps)
    },
    "failed_rewards": sum(_series(steps, "reward/failed")),
    "skipped_updates": sum(_series(steps, "training/skipped_updates")),
    "evaluation": last,
    **facts.extra,
    "outputs": dict(facts.outputs),
    "next": facts.next,
  }


def write_summary(
  path: str | os.PathLike[str],
  facts: RunFacts,
  metrics: str | os.PathLike[str],
  evaluations: str | os.PathLike[str],
) -> dict[str, Any]:
  """Writes `summary.json`, atomically.

  Args:
    path: the file.
    facts: what the metrics do not have.
    metrics: path of `metrics.jsonl`.
    evaluations: path of `evaluation/evaluation.jsonl`; it need not exist.

  Returns:
    What was written; see `summarise`.

  Raises:
    ValueError: where a line of those files is not JSON.
    OutputError: where the file cannot be written.
  """
  summary = summarise(facts, writers.read_jsonl(metrics), writers.read_jsonl(evaluations))
  files.atomic_write(path, json.dumps(summary, indent=2, allow_nan=False) + "\n")
  return summary


def write_reward_curve(
  path: str | os.PathLike[str],
  rows: Sequence[Mapping[str, Any]],
  evaluations: Sequence[Mapping[str, Any]] = (),
  title: str = "",
) -> None:
  """Draws reward and components against the step, in the manner of StageBreaker's figure 15.

  Light: a step's mean over its candidates. Dark: moving average over ten steps. Points: the
  evaluations, with the standard error of their paired difference from the base.

  Args:
    path: the PNG, written atomically.
    rows: the lines of `metrics.jsonl`.
    evaluations: the lines of `evaluation.jsonl`.
    title: what stands above.

  Raises:
    OutputError: where the file cannot be written.
  """
  steps = by_step(rows)
  components = component_names(steps)
  figure = Figure(
    figsize=(7.5, 2.9 + (1.0 + 0.35 * len(components) if components else 0)),
    dpi=130,
    layout="constrained",
  )
  FigureCanvasAgg(figure)
  axes = figure.subplots(2 if components else 1, 1, sharex=True, squeeze=False)[:, 0]
  _curve(axes[0], steps, "critic/rewards/mean", "#4878a8", "training")
  for adapter in ("base", "online", "ema"):
    _points(axes[0], evaluations, adapter)
  axes[0].set_ylabel("reward")
  if axes[0].get_legend_handles_labels()[0]:
    axes[0].legend(fontsize=7, frameon=False, ncols=4)
  colours = ("#4878a8", "#eda33b", "#5b9f57", "#9d86bd", "#c8504e", "#7fc0c4", "#b07d5b")
  for number, name in enumerate(components):
    _curve(axes[1], steps, f"reward/{name}", colours[number % len(colours)], name)
  if components:
    axes[1].set_ylabel("components")
    axes[1].legend(fontsize=7, frameon=False, ncols=4)
  axes[-1].set_xlabel("RL step")
  for panel in axes:
    panel.grid(alpha=0.25, linewidth=0.5)
    panel.tick_params(labelsize=8)
    for side in ("top", "right"):
      panel.spines[side].set_visible(False)
  axes[0].set_title(title, fontsize=10)
  with files.atomic_output(path) as temporary:
    figure.savefig(temporary)


def component_names(steps: Mapping[int, Mapping[str, Any]]) -> list[str]:
  """Names the reward components that a run's metrics have (`reward/<component>`)."""
  return [
    name for name in _suffixes(steps, "reward/") if name.split("/")[0] not in ("failed", "left_out")
  ]


def _curve(
  axes: Axes, steps: Mapping[int, Mapping[str, Any]], key: str, colour: str, label: str
) -> None:
  points = [(step, line[key]) for step, line in steps.items() if _is_number(line.get(key))]
  if not points:
    return
  xs, ys = zip(*points, strict=True)
  smooth = [statistics.fmean(ys[max(0, i - 9) : i + 1]) for i in range(len(ys))]
  axes.plot(xs, ys, color=colour, alpha=0.3, linewidth=1)
  axes.plot(xs, smooth, color=colour, linewidth=1.8, label=label)


def _points(axes: Axes, evaluations: Sequence[Mapping[str, Any]], adapter: str) -> None:
  found = [e for e in evaluations if _is_number(e["mean"].get(adapter, {}).get("reward"))]
  if not found:
    return
  errors = [
    next(
      (
        s["standard_error"] or 0.0
        for s in e["paired"]
        if s["adapter"] == adapter and s["component"] == "reward"
      ),
      0.0,
    )
    for e in found
  ]
  axes.errorbar(
    [e["step"] for e in found],
    [e["mean"][adapter]["reward"] for e in found],
    yerr=errors,
    fmt={"base": "x", "online": "o", "ema": "s"}.get(adapter, "d"),
    markersize=4,
    capsize=3,
    linewidth=1,
    color=_ADAPTER_COLOURS[adapter],
    label=f"evaluation, {adapter}",
  )


def _series(steps: Mapping[int, Mapping[str, Any]], key: str) -> list[float]:
  return [float(line[key]) for line in steps.values() if _is_number(line.get(key))]


def _statistics(values: Sequence[float]) -> dict[str, float] | None:
  if not values:
    return None
  return {
    "median": statistics.median(values),
    "mean": statistics.fmean(values),
    "min": min(values),
    "max": max(values),
    "first": statistics.fmean(values[:_ENDS]),
    "last": statistics.fmean(values[-_ENDS:]),
  }


def _suffixes(steps: Mapping[int, Mapping[str, Any]], prefix: str) -> list[str]:
  """Names what follows `prefix` in the keys that have a number in some step."""
  names = dict.fromkeys(
    key.removeprefix(prefix)
    for line in steps.values()
    for key, value in line.items()
    if key.startswith(prefix) and _is_number(value)
  )
  return list(names)


def _is_number(value: Any) -> bool:
  return isinstance(value, (int, float)) and math.isfinite(value)
