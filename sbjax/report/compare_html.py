"""The comparison as one HTML page that needs nothing else: no scripts, pictures inside."""

import base64
import html
from collections.abc import Mapping, Sequence
from typing import Any

from sbjax.report import compare_report

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1b1b1b; max-width: 1180px; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 0.25rem 0.7rem; text-align: right; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; } th { font-weight: 600; font-size: 0.85rem; }
img { max-width: 100%; border: 1px solid #ddd; } p.facts { color: #555; }
.mark { background: #eda33b; padding: 0.1rem 0.5rem; font-weight: 600; }
dt { font-weight: 600; } dd { margin: 0 0 0.5rem 1rem; }
"""

_MEANINGS = (
  ("step", "median of the measured steps: first generation submitted to last adapter received"),
  ("speed-up", "how many times as fast as colocated"),
  (
    "busy",
    "time in which the group's workers execute tasks / step; colocated workers belong to both",
  ),
  (
    "wait for reward",
    "share of the step in which actor workers idle while a task of theirs lacks only a verdict",
  ),
  (
    "replays",
    "chunks replayed / (chunks of the trajectories x updates): 2 two-pass, 1 merged, less if fused",
  ),
  ("simulated", "the same plan under the simulator, with the costs measured before these steps"),
  ("bound", "no plan of the scheme can be faster at these costs; of bound: bound / step"),
  (
    "gradient differs",
    "largest relative difference of the first update's combined gradient from the schemes with the "
    "same videos (from all others, where a fused rollout made its own)",
  ),
)


def render(
  report: Mapping[str, Any], pictures: Mapping[str, bytes], title: str = "Schemes compared"
) -> str:
  """Gives the page.

  Args:
    report: what `compare_report.summarise` gives.
    pictures: caption -> PNG.
    title: its heading.
  """
  mark = "emulated" if report["emulated"] else ""
  badge = f' <span class="mark">{mark}</span>' if mark else ""
  parts = [
    "<!doctype html>",
    '<html lang="en"><head><meta charset="utf-8">',
    f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>",
    f"<h1>{html.escape(title)}{badge}</h1>",
    f'<p class="facts">{html.escape(_facts(report))}</p>',
    _table(compare_report.COLUMNS, compare_report.rows(report), mark),
  ]
  for caption, png in pictures.items():
    data = base64.b64encode(png).decode()
    parts.append(f"<h2>{html.escape(caption)}{badge}</h2>")
    parts.append(
      f'<img alt="{html.escape(caption, quote=True)}" src="data:image/png;base64,{data}">'
    )
  parts.append(f"<h2>Plans and gains{badge}</h2><ul>")
  tail = f" ({mark})" if mark else ""
  parts += [f"<li>{html.escape(s + tail)}</li>" for s in compare_report.sentences(report)]
  parts.append("</ul><h2>How to read this</h2><dl>")
  for name, text in _MEANINGS:
    parts.append(f"<dt>{html.escape(name)}</dt><dd>{html.escape(text)}</dd>")
  parts.append("</dl></body></html>")
  return "\n".join(parts) + "\n"


def _facts(report: Mapping[str, Any]) -> str:
  order = "steps of the schemes took turns" if report["paired"] else "one scheme after another"
  return (
    f"{report['config']}, seed {report['seed']}: {report['candidates']} candidates, "
    f"{report['updates']} updates a step, {report['actor_workers']} actor and "
    f"{report['reward_workers']} reward workers ({report['executor']} executor); "
    f"{report['warm_up_steps']} warm-up and {report['measured_steps']} measured steps, {order}"
  )


def _table(columns: Sequence[str], cells: Sequence[Sequence[str]], mark: str) -> str:
  columns = (*columns, *([""] if mark else []))
  lines = ["<table><tr>", *(f"<th>{html.escape(c)}</th>" for c in columns), "</tr>"]
  for row in cells:
    row = (*row, *([mark] if mark else []))
    lines.append(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>")
  return "".join([*lines, "</table>"])
