"""The step timeline as a picture: a row a worker, in the manner of StageBreaker's figure 16."""

import os
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from sbjax import files
from sbjax.report import timeline
from sbjax.runtime.records import Span

# Told apart by colour-blind readers too; replay kinds share a hue.
_COLOURS = {
  "generate": "#4878a8",
  "decode": "#7fc0c4",
  "judge": "#eda33b",
  "reference": "#9d86bd",
  "replay": "#5b9f57",
  "forward": "#a9d08e",
  "backward": "#3f7a45",
  "update": "#c8504e",
}
_OTHERS = ("#b07d5b", "#d68ab0", "#8c8c8c", "#b5bd4c")
_HATCHES = ("", "////", "xxxx", "....")
IDLE = "#f0f0f0"
BAR = 0.78
"""Height of a worker's bar, its row being 1."""
_ROW_IN = 0.46
_WIDTH_IN = 12.0


def write_timeline(
  path: str | os.PathLike[str],
  spans: Sequence[Span],
  *,
  scheme: str,
  step: int,
  step_s: float | None = None,
  emulated: bool = False,
) -> None:
  """Draws the tasks of a step: colours by kind, hatches by mini-batch, grey where a worker idles.

  Each row's right end tells how much of the step its worker was busy. A task that was lost or
  raised has a red frame.

  Args:
    path: the PNG, written atomically.
    spans: the step's tasks.
    scheme: the scheme's name, for the title.
    step: the RL step, for the title.
    step_s: the step's length; None: from the spans.
    emulated: True puts a watermark over the picture: no model was computed.

  Raises:
    ValueError: where there are no spans.
    OutputError: where the file cannot be written.
  """
  if not spans:
    raise ValueError(f"step {step} has no spans; draw a step that has run")
  rows = timeline.workers(spans)
  height_in = 1.45 + _ROW_IN * len(rows)
  figure = Figure(figsize=(_WIDTH_IN, height_in), dpi=150)
  FigureCanvasAgg(figure)
  axes = figure.add_axes((0.095, 0.52 / height_in, 0.845, _ROW_IN * len(rows) / height_in))
  origin_s = min(s.start_s for s in spans)
  length_s = step_s or max(s.end_s for s in spans) - origin_s
  colours = palette(spans)
  for row, (group, worker) in enumerate(rows):
    mine = [s for s in spans if (s.group, s.worker) == (group, worker)]
    axes.barh(row, length_s, height=BAR, color=IDLE, zorder=0)
    for span in mine:
      draw_span(axes, span, row, origin_s, length_s, colours)
    busy = timeline.utilisation(mine, length_s)[group]
    axes.text(
      1.008, row, f"{busy:.0%}", transform=axes.get_yaxis_transform(), va="center", fontsize=8
    )
  _decorate(axes, rows, length_s)
  title = f"{scheme}, step {step}: {length_s:.2f} s"
  figure.text(0.095, 1 - 0.3 / height_in, title, fontsize=11, fontweight="bold", va="center")
  figure.text(0.948, 1 - 0.82 / height_in, "busy", fontsize=8, va="center", color="#555555")
  figure.legend(
    handles=legend(spans, colours),
    loc="center left",
    bbox_to_anchor=(0.085, 1 - 0.66 / height_in),
    ncols=12,
    fontsize=8,
    frameon=False,
    handlelength=1.4,
    handleheight=1.0,
    columnspacing=1.2,
  )
  if emulated:
    watermark(axes, min(44, 16 * len(rows)))
  with files.atomic_output(path) as temporary:
    figure.savefig(temporary)


def watermark(axes: Axes, size: float, text: str = "emulated") -> None:
  """Says over a picture that no model was computed for it.

  Args:
    axes: where.
    size: of the letters, in points.
    text: the word.
  """
  axes.text(
    0.5,
    0.5,
    text,
    transform=axes.transAxes,
    fontsize=size,
    color="#000000",
    alpha=0.16,
    ha="center",
    va="center",
    rotation=8,
    zorder=5,
    fontweight="bold",
  )


def draw_span(
  axes: Axes,
  span: Span,
  row: int,
  origin_s: float,
  length_s: float,
  colours: Mapping[str, str],
) -> None:
  """Draws one task into a row.

  Args:
    axes: x in seconds since `origin_s`, y in rows.
    span: the task.
    row: the worker's row.
    origin_s: the step's start.
    length_s: what the axes show, in seconds; a bar too narrow for its candidate's number has none.
    colours: what `palette` gives.
  """
  start_s, duration_s = span.start_s - origin_s, span.end_s - span.start_s
  hatch = _HATCHES[(span.minibatch or 0) % len(_HATCHES)]
  # Hatches take the edge's colour: a first bar carries them, a second one the frame.
  axes.barh(
    row,
    duration_s,
    left=start_s,
    height=BAR,
    color=colours[span.kind],
    edgecolor="#ffffff66",
    hatch=hatch,
    linewidth=0,
    zorder=2,
  )
  axes.barh(
    row,
    duration_s,
    left=start_s,
    height=BAR,
    fill=False,
    edgecolor="#c00000" if span.failed else "white",
    linewidth=1.6 if span.failed else 0.7,
    zorder=4 if span.failed else 3,
  )
  if span.candidate is not None and duration_s > 0.016 * length_s:
    text = axes.text(
      start_s + duration_s / 2,
      row,
      str(span.candidate),
      ha="center",
      va="center",
      fontsize=7,
      color="white" if _dark(colours[span.kind]) else "#222222",
      zorder=4,
    )
    if hatch:
      text.set_bbox({"facecolor": colours[span.kind], "edgecolor": "none", "pad": 0.8})


def _decorate(axes: Axes, rows: Sequence[tuple[str, str]], length_s: float) -> None:
  axes.set_xlim(0, length_s)
  axes.set_ylim(len(rows) - 0.5, -0.5)
  axes.set_yticks(range(len(rows)), [worker for _, worker in rows], fontsize=9)
  axes.tick_params(axis="y", length=0)
  axes.tick_params(axis="x", labelsize=8)
  axes.set_xlabel("seconds since the first task of the step", fontsize=8)
  for side in ("top", "right", "left"):
    axes.spines[side].set_visible(False)
  for number in range(1, len(rows)):
    if rows[number][0] != rows[number - 1][0]:
      axes.axhline(number - 0.5, color="#888888", linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)


def palette(spans: Sequence[Span]) -> dict[str, str]:
  """Gives each kind among the spans a colour, in order of display."""
  kinds = _kinds(spans)
  others = [kind for kind in kinds if kind not in _COLOURS]
  extra = {kind: _OTHERS[i % len(_OTHERS)] for i, kind in enumerate(others)}
  return {kind: _COLOURS.get(kind) or extra[kind] for kind in kinds}


def _kinds(spans: Sequence[Span]) -> list[str]:
  order = list(_COLOURS)
  kinds = {s.kind for s in spans}
  return sorted(kinds, key=lambda k: (order.index(k) if k in order else len(order), k))


def legend(spans: Sequence[Span], colours: Mapping[str, str]) -> list[Patch]:
  """Gives the entries of a legend: kinds, mini-batches where there are several, lost, idle."""
  handles = [Patch(facecolor=colours[kind], label=kind) for kind in _kinds(spans)]
  numbers = sorted({s.minibatch for s in spans if s.minibatch is not None})
  if len(numbers) > 1:
    handles += [
      Patch(
        facecolor="#8a8a8a",
        edgecolor="white",
        linewidth=0,
        hatch=_HATCHES[number % len(_HATCHES)],
        label=f"mini-batch {number}",
      )
      for number in numbers
    ]
  if any(s.failed for s in spans):
    handles.append(Patch(facecolor="white", edgecolor="#c00000", label="lost"))
  return [*handles, Patch(facecolor=IDLE, label="idle")]


def _dark(colour: str) -> bool:
  red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
  return 0.299 * red + 0.587 * green + 0.114 * blue < 150
