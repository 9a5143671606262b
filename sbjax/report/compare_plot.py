"""Pictures of several schemes: timelines on one axis, and step times with their bounds."""

import dataclasses
import os
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from sbjax import files
from sbjax.report import timeline, timeline_plot
from sbjax.report.waiting import Window
from sbjax.runtime.records import Span

_WAIT = "#c8504e"
_WIDTH_IN = 12.0
_ROW_IN = 0.42
_TITLE_IN = 0.30


@dataclasses.dataclass(frozen=True)
class Panel:
  """One scheme's step, as a picture shows it.

  Attributes:
    name: the scheme.
    spans: every task of the step.
    waits: worker -> windows in which it waits for a reward.
    step_s: the step's length.
    note: what stands beside the name, e.g. its speed-up.
  """

  name: str
  spans: Sequence[Span]
  waits: Mapping[str, Sequence[Window]]
  step_s: float
  note: str = ""


def representatives(spans: Sequence[Span]) -> tuple[tuple[str, str], ...]:
  """Gives (group, worker) of the first worker of each group, in order of display."""
  first: dict[str, str] = {}
  for group, worker in timeline.workers(spans):
    first.setdefault(group, worker)
  return tuple(first.items())


def write_timelines(
  path: str | os.PathLike[str], panels: Sequence[Panel], *, mark: str = "", title: str = ""
) -> None:
  """Draws one actor and one reward worker per scheme, schemes stacked on the same time axis.

  In the manner of StageBreaker's figure 16: colours by kind, hatches by mini-batch, an outlined
  block where the actor worker waits for a reward, a line where the step ends.

  Args:
    path: the PNG, written atomically.
    panels: one per scheme, from top to bottom.
    mark: `emulated` or `simulated` where no model was computed; it stands over every panel.
    title: the picture's title.

  Raises:
    ValueError: where a panel has no spans.
    OutputError: where the file cannot be written.
  """
  for panel in panels:
    if not panel.spans:
      raise ValueError(f"scheme {panel.name!r} has no spans; draw a step that has run")
  rows = [representatives(panel.spans) for panel in panels]
  top_in, bottom_in = 0.8, 0.5
  body_in = sum(_TITLE_IN + _ROW_IN * len(r) for r in rows)
  height_in = top_in + body_in + bottom_in
  figure = Figure(figsize=(_WIDTH_IN, height_in), dpi=150)
  FigureCanvasAgg(figure)
  longest_s = max(panel.step_s for panel in panels)
  everything = [span for panel in panels for span in panel.spans]
  colours = timeline_plot.palette(everything)
  at_in = height_in - top_in
  for number, (panel, workers) in enumerate(zip(panels, rows, strict=True)):
    at_in -= _TITLE_IN + _ROW_IN * len(workers)
    axes = figure.add_axes(
      (0.085, at_in / height_in, 0.865, _ROW_IN * len(workers) / height_in),
    )
    _panel(axes, panel, workers, longest_s, colours, last=number == len(panels) - 1)
    if mark:
      timeline_plot.watermark(axes, 20, mark)
  figure.text(0.085, 1 - 0.25 / height_in, title, fontsize=11, fontweight="bold", va="center")
  handles = timeline_plot.legend(everything, colours)
  if any(windows for panel in panels for windows in panel.waits.values()):
    wait = Patch(facecolor="white", edgecolor=_WAIT, hatch="\\\\\\", label="wait for reward")
    handles.append(wait)
  figure.legend(
    handles=handles,
    loc="center left",
    bbox_to_anchor=(0.078, 1 - 0.62 / height_in),
    ncols=14,
    fontsize=8,
    frameon=False,
    handlelength=1.4,
    handleheight=1.0,
    columnspacing=1.1,
  )
  with files.atomic_output(path) as temporary:
    figure.savefig(temporary)


def _panel(
  axes: Axes,
  panel: Panel,
  workers: Sequence[tuple[str, str]],
  longest_s: float,
  colours: Mapping[str, str],
  *,
  last: bool,
) -> None:
  origin_s = min(span.start_s for span in panel.spans)
  for row, (group, worker) in enumerate(workers):
    axes.barh(row, panel.step_s, height=timeline_plot.BAR, color=timeline_plot.IDLE, zorder=0)
    mine = [s for s in panel.spans if s.worker == worker]
    if group != "reward":
      for start, end in panel.waits.get(worker, ()):
        _wait(axes, row, start - origin_s, end - start, longest_s)
    for span in mine:
      timeline_plot.draw_span(axes, span, row, origin_s, longest_s, colours)
    busy = timeline.utilisation(mine, panel.step_s)[group]
    axes.text(
      1.006, row, f"{busy:.0%}", transform=axes.get_yaxis_transform(), va="center", fontsize=8
    )
  axes.axvline(panel.step_s, color="#333333", linewidth=1.2, zorder=5)
  axes.set_xlim(0, longest_s * 1.002)
  axes.set_ylim(len(workers) - 0.5, -0.5)
  axes.set_yticks(range(len(workers)), [worker for _, worker in workers], fontsize=8)
  axes.tick_params(axis="y", length=0)
  axes.tick_params(axis="x", labelsize=8, labelbottom=last)
  for side in ("top", "right", "left"):
    axes.spines[side].set_visible(False)
  axes.spines["bottom"].set_color("#333333" if last else "#cccccc")
  note = f"   {panel.note}" if panel.note else ""
  axes.set_title(f"{panel.name}: {panel.step_s:.3g} s{note}", fontsize=9, loc="left", pad=3)
  if last:
    axes.set_xlabel("seconds since the first task of the step", fontsize=8)


def _wait(axes: Axes, row: int, start_s: float, length_s: float, longest_s: float) -> None:
  axes.barh(
    row,
    length_s,
    left=start_s,
    height=timeline_plot.BAR,
    facecolor="white",
    edgecolor=_WAIT,
    hatch="\\\\\\",
    linewidth=0.8,
    zorder=1,
  )
  if length_s > 0.09 * longest_s:
    text = axes.text(
      start_s + length_s / 2,
      row,
      "wait for reward",
      ha="center",
      va="center",
      fontsize=7,
      color=_WAIT,
      zorder=4,
    )
    text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.8})


def write_steps(
  path: str | os.PathLike[str],
  steps_s: Mapping[str, Sequence[float]],
  bounds_s: Mapping[str, float | None],
  *,
  mark: str = "",
) -> None:
  """Draws each scheme's step time as a bar, its measured steps as dots, its lower bound as a line.

  Args:
    path: the PNG, written atomically.
    steps_s: scheme -> its measured steps; the bar is their median.
    bounds_s: scheme -> its lower bound, None where there is none.
    mark: `emulated` or `simulated` where no model was computed.

  Raises:
    OutputError: where the file cannot be written.
  """
  names = list(steps_s)
  height_in = 1.0 + 0.42 * len(names)
  figure = Figure(figsize=(9.0, height_in), dpi=150)
  FigureCanvasAgg(figure)
  axes = figure.add_axes((0.22, 0.55 / height_in, 0.70, 0.42 * len(names) / height_in))
  for row, name in enumerate(names):
    ordered = sorted(steps_s[name])
    middle = len(ordered) // 2
    median_s = ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
    axes.barh(row, median_s, height=0.62, color="#4878a8", zorder=1)
    axes.scatter(ordered, [row] * len(ordered), s=9, color="#1b1b1b", zorder=3)
    bound_s = bounds_s.get(name)
    if bound_s is not None:
      axes.plot([bound_s, bound_s], [row - 0.4, row + 0.4], color="#eda33b", linewidth=2, zorder=4)
    axes.text(0.01 * max(ordered), row, f"{median_s:.3g} s", va="center", fontsize=8, color="white")
  axes.set_yticks(range(len(names)), names, fontsize=9)
  axes.set_ylim(len(names) - 0.5, -0.5)
  axes.set_xlim(left=0)
  axes.tick_params(axis="x", labelsize=8)
  axes.set_xlabel("step, seconds: median; dots: measured steps; orange: lower bound", fontsize=8)
  for side in ("top", "right"):
    axes.spines[side].set_visible(False)
  if mark:
    timeline_plot.watermark(axes, 34, mark)
  with files.atomic_output(path) as temporary:
    figure.savefig(temporary)
