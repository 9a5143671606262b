"""Evaluations: paired statistics of adapters on the same prompts and seeds, as table and files."""

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from sbjax import files
from sbjax.report import samples, writers
from sbjax.report import video as video_lib
from sbjax.runtime.records import EvalResult

_COLOURS = {"base": "#9a9a9a", "online": "#4878a8", "ema": "#5b9f57"}
_OTHER_COLOUR = "#eda33b"


@dataclasses.dataclass(frozen=True)
class PairedStatistic:
  """One component of one adapter compared with the base, over the videos valid under both.

  Attributes:
    adapter: e.g. `online`.
    component: e.g. `reward`, `digit`, `heldout`.
    videos: how many pairs are valid.
    mean: mean under the adapter, NaN where no pair is valid.
    base_mean: mean under the base, of the same pairs.
    difference: `mean - base_mean`.
    standard_error: of the difference, from the pairs' differences; NaN below two pairs.
    z: difference / standard error; 0 where both are 0, infinite where only the error is.
  """

  adapter: str
  component: str
  videos: int
  mean: float
  base_mean: float
  difference: float
  standard_error: float
  z: float


def paired_statistic(
  adapter: str,
  component: str,
  values: Float[np.ndarray, " videos"],
  base: Float[np.ndarray, " videos"],
) -> PairedStatistic:
  """Compares two columns video by video, in float64.

  Args:
    adapter: name for the record.
    component: name for the record.
    values: one value a video under the adapter, NaN where judging failed.
    base: the same videos under the base adapter.

  Returns:
    The statistic.

  Raises:
    ValueError: where the columns differ in length.
  """
  values, base = np.asarray(values, np.float64), np.asarray(base, np.float64)
  if values.shape != base.shape or values.ndim != 1:
    raise ValueError(
      f"{component} has shapes {values.shape} ({adapter}) and {base.shape} (base); "
      "evaluate both on the same videos"
    )
  valid = np.isfinite(values) & np.isfinite(base)
  count = int(valid.sum())
  if count == 0:
    return PairedStatistic(adapter, component, 0, *([math.nan] * 5))
  differences = values[valid] - base[valid]
  difference = float(differences.mean())
  error = float(differences.std(ddof=1) / math.sqrt(count)) if count > 1 else math.nan
  if error == 0:
    z = 0.0 if difference == 0 else math.copysign(math.inf, difference)
  else:
    z = difference / error
  return PairedStatistic(
    adapter=adapter,
    component=component,
    videos=count,
    mean=float(values[valid].mean()),
    base_mean=float(base[valid].mean()),
    difference=difference,
    standard_error=error,
    z=z,
  )


def statistics(result: EvalResult, base: str = "base") -> tuple[PairedStatistic, ...]:
  """Compares every adapter of an evaluation with its base, component by component.

  Args:
    result: the evaluation.
    base: name of the adapter to compare with; itself it is not compared.

  Returns:
    Component by component (the reward first), adapters in the evaluation's order; empty where
    the base was not evaluated or nothing else was.
  """
  if base not in result.scores:
    return ()
  return tuple(
    paired_statistic(adapter, component, scores[component], result.scores[base][component])
    for component in _components(result)
    for adapter, scores in result.scores.items()
    if adapter != base and component in scores and component in result.scores[base]
  )


def scalars(result: EvalResult) -> dict[str, float]:
  """Gives an evaluation as metrics: `val/<adapter>/<component>` and, beside the base, `…/z` etc.

  Args:
    result: the evaluation.

  Returns:
    Metrics by key; docs/metrics.md defines them.
  """
  metrics = {}
  for adapter, columns in result.scores.items():
    for component, values in columns.items():
      metrics[f"val/{adapter}/{component}"] = _mean(values)
  for s in statistics(result):
    metrics[f"val/{s.adapter}/{s.component}/difference"] = s.difference
    metrics[f"val/{s.adapter}/{s.component}/standard_error"] = s.standard_error
    metrics[f"val/{s.adapter}/{s.component}/z"] = s.z
  return metrics


def table(result: EvalResult) -> str:
  """Lays an evaluation out as plain text, one line a component and adapter.

  Args:
    result: the evaluation.

  Returns:
    Several lines without a newline at the end.
  """
  videos = max((len(v) for columns in result.scores.values() for v in columns.values()), default=0)
  lines = [f"evaluation after step {result.step}: {videos} videos, differences paired with base"]
  lines.append(
    f"  {'component':<12} {'adapter':<8} {'mean':>9} {'difference':>11} {'std. error':>11} {'z':>7}"
  )
  compared = {(s.component, s.adapter): s for s in statistics(result)}
  for component in _components(result):
    for adapter, columns in result.scores.items():
      if component not in columns:
        continue
      line = f"  {component:<12} {adapter:<8} {_mean(columns[component]):>9.4f}"
      if (s := compared.get((component, adapter))) is not None:
        line += f" {s.difference:>+11.4f} {s.standard_error:>11.4f} {s.z:>+7.2f}"
        if s.videos < videos:
          line += f"  ({s.videos} valid pairs)"
      lines.append(line)
  return "\n".join(lines)


def row(result: EvalResult) -> dict[str, Any]:
  """Gives an evaluation as one JSON object: means, paired statistics and the values themselves.

  Args:
    result: the evaluation.

  Returns:
    JSON values; null stands for what is not finite.
  """
  return {
    "step": result.step,
    "mean": {
      adapter: {component: _json(_mean(values)) for component, values in columns.items()}
      for adapter, columns in result.scores.items()
    },
    "paired": [
      {key: _json(value) for key, value in dataclasses.asdict(s).items()}
      for s in statistics(result)
    ],
    "values": {
      adapter: {c: [_json(float(v)) for v in values] for c, values in columns.items()}
      for adapter, columns in result.scores.items()
    },
  }


def write_evaluation(
  root: str | os.PathLike[str], result: EvalResult, *, fps: int, cap: int
) -> pathlib.Path:
  """Writes an evaluation: a line of `evaluation.jsonl`, and its folder `step_NNNNNN`.

  The folder has `table.txt`, `means.png`, up to `cap` videos `NN.mp4` with the adapters side by
  side, and `videos.jsonl` with prompt, seed and rewards. An earlier line of the same or a later
  step, which a resumed run left behind, goes.

  Args:
    root: the workdir's `evaluation`.
    result: the evaluation.
    fps: frames per second.
    cap: how many videos at most.

  Returns:
    The folder.

  Raises:
    OutputError: where a file cannot be written.
  """
  folder = samples.step_folder(root, result.step)
  files.atomic_write(folder / "table.txt", table(result) + "\n")
  write_means(folder / "means.png", result)
  lines = []
  for name, line, video in _videos(result, cap):
    video_lib.write_mp4(folder / name, video, fps)
    lines.append(json.dumps(line | {"file": name}, ensure_ascii=False))
  files.atomic_write(folder / "videos.jsonl", "".join(f"{line}\n" for line in lines))
  history = pathlib.Path(root) / "evaluation.jsonl"
  kept = [r for r in writers.read_jsonl(history) if r["step"] < result.step]
  text = "".join(json.dumps(r) + "\n" for r in [*kept, row(result)])
  files.atomic_write(history, text)
  return folder


def write_means(path: str | os.PathLike[str], result: EvalResult) -> None:
  """Draws the mean of each component under each adapter; bars of error are those of the paired
  difference with the base.

  Args:
    path: the PNG, written atomically.
    result: the evaluation.

  Raises:
    OutputError: where the file cannot be written.
  """
  components = _components(result)
  figure = Figure(figsize=(1.6 + 1.5 * len(components), 3.4), dpi=130, layout="constrained")
  FigureCanvasAgg(figure)
  axes = figure.add_subplot()
  errors = {(s.adapter, s.component): s.standard_error for s in statistics(result)}
  width = 0.8 / max(len(result.scores), 1)
  for number, (adapter, columns) in enumerate(result.scores.items()):
    shown = [(i, c) for i, c in enumerate(components) if c in columns]
    axes.bar(
      [i + (number - (len(result.scores) - 1) / 2) * width for i, _ in shown],
      [_mean(columns[c]) for _, c in shown],
      width * 0.92,
      yerr=[errors.get((adapter, c), 0.0) for _, c in shown],
      error_kw={"linewidth": 1, "capsize": 2},
      color=_COLOURS.get(adapter, _OTHER_COLOUR),
      label=adapter,
    )
  axes.set_xticks(range(len(components)), list(components))
  axes.set_title(f"evaluation after step {result.step}", fontsize=10)
  axes.legend(fontsize=8, frameon=False, ncols=3)
  axes.margins(y=0.18)
  for side in ("top", "right"):
    axes.spines[side].set_visible(False)
  with files.atomic_output(path) as temporary:
    figure.savefig(temporary)


def _videos(result: EvalResult, cap: int) -> list[tuple[str, dict[str, Any], np.ndarray]]:
  """Pairs the adapters' records; gives file name, facts and the joined video of the first ones."""
  adapters = [name for name in result.scores if result.records.get(name)]
  found = []
  for records in zip(*(result.records[name] for name in adapters), strict=True):
    videos = [r.video for r in records if r.video is not None]
    if len(found) < cap and videos and len(videos) == len(records):
      line = {
        "prompt": records[0].prompt,
        "seed": int(records[0].seed),
        "adapters": {
          name: {k: v for k, v in samples.facts(r).items() if k not in ("index", "prompt", "seed")}
          for name, r in zip(adapters, records, strict=True)
        },
      }
      found.append((f"{len(found):02d}.mp4", line, video_lib.side_by_side(videos, adapters)))
  return found


def _components(result: EvalResult) -> Sequence[str]:
  names = dict.fromkeys(name for columns in result.scores.values() for name in columns)
  return [*(["reward"] if "reward" in names else []), *(n for n in names if n != "reward")]


def _mean(values: Float[np.ndarray, " videos"]) -> float:
  valid = np.asarray(values, np.float64)
  valid = valid[np.isfinite(valid)]
  return float(valid.mean()) if valid.size else math.nan


def _json(value: Any) -> Any:
  return None if isinstance(value, float) and not math.isfinite(value) else value
