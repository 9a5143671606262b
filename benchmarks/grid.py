"""Every scheme over the grid of settings, simulated, each plan beside its lower bound.

    python -m benchmarks.grid [--budget_s=3] [--every=1] [--priors]

Prints a row for each cell, and the cells that cannot exist with the reason. Exit code 1 where
`stagebreaker` is slower than another of the paper's schemes, where the gap of `sbjax` is above 7 %
in the median or 25 % in a cell. Costs are the paper's, fitted to its baselines
(`benchmarks.paper_fit`); nothing here is measured on a device. With --priors it only counts the
cells in which `stagebreaker` is slower for other values of what the paper leaves open.
"""

import argparse
import dataclasses
import statistics
import sys

from benchmarks.paper_fit import fit
from sbjax.dataflow.grid import (
  PAPER_SCHEMES,
  Cell,
  all_schemes,
  cells,
  plan_cell,
  without,
)
from sbjax.dataflow.paper import PaperCosts
from sbjax.dataflow.plan import Plan
from sbjax.dataflow.schemes import scheme
from sbjax.report.console import Progress

MEDIAN_GAP, WORST_GAP = 0.07, 0.25
EQUAL = 1e-3
"""Share of a step within which two schemes are equally fast: which worker happens to sum four
buffers and which three is worth that much where both wait for the judge."""
PRIORS = ((0.5, 0.5), (0.3, 0.5), (0.7, 0.5), (0.5, 0.0), (0.5, 1.0))
"""(what a further video adds to a batch, what of a judgement grows with the frames); the first is
the one that the grid has."""

PROVEN = ("exhaustive", "branch_and_bound")
UNSPLIT = "sbjax, no splits"


@dataclasses.dataclass(frozen=True)
class Row:
  """A planned cell.

  Attributes:
    cell: the setting.
    group: candidates of a group.
    plans: scheme -> plan.
  """

  cell: Cell
  group: int
  plans: dict[str, Plan]

  def seconds(self, name: str) -> float:
    """Simulated seconds of a scheme."""
    took = self.plans[name].simulated_s
    assert took is not None
    return took

  @property
  def faster(self) -> list[str]:
    """The paper's schemes that beat `stagebreaker`."""
    limit = self.seconds("stagebreaker") / (1 + EQUAL)
    return [name for name in PAPER_SCHEMES if self.seconds(name) < limit]

  @property
  def excess(self) -> float:
    """By how much of its step `stagebreaker` is above the fastest of the paper's schemes."""
    return self.seconds("stagebreaker") / min(map(self.seconds, PAPER_SCHEMES)) - 1.0

  @property
  def gap(self) -> float:
    """Of `sbjax` above its bound."""
    gap = self.plans["sbjax"].gap
    assert gap is not None
    return gap


def main() -> int:
  """Runs the benchmark."""
  parser = argparse.ArgumentParser(description="The grid of settings, simulated.")
  parser.add_argument("--budget_s", type=float, default=3.0, help="search of one plan")
  parser.add_argument("--every", type=int, default=1, help="plan only every n-th cell")
  parser.add_argument("--priors", action="store_true", help="only vary what the paper leaves open")
  arguments = parser.parse_args()
  possible, missing = [], []
  for cell in list(cells())[:: arguments.every]:
    try:
      cell.shape()
    except ValueError as error:
      missing.append((cell, str(error)))
    else:
      possible.append(cell)
  if arguments.priors:
    return vary_priors(possible, arguments.budget_s)
  parameters, rows = fit().costs, []
  with Progress("cells", len(possible)) as progress:
    for cell in possible:
      rows.append(plan_row(cell, parameters, arguments.budget_s))
      progress.advance()
  return report(rows, missing)


def vary_priors(chosen: list[Cell], budget_s: float) -> int:
  """Prints for each prior in which cells `stagebreaker` is slower than another scheme."""
  print("| a further video adds | grows with the frames | cells where stagebreaker is slower |")
  print("|---|---|---|", flush=True)
  for batch_share, frames_share in PRIORS:
    costs = fit(batch_share=batch_share).costs
    judges = {
      name: dataclasses.replace(judge, frames_share=frames_share)
      for name, judge in costs.judges.items()
    }
    costs, slower = dataclasses.replace(costs, judges=judges), []
    with Progress("cells", len(chosen), stream=sys.stderr) as progress:
      for cell in chosen:
        schemes = map(scheme, PAPER_SCHEMES)
        row = row_of(cell, {s.name: plan_cell(cell, s, costs, budget_s=budget_s) for s in schemes})
        slower += [f"{cell}: {row.excess:+.1%}"] if row.faster else []
        progress.advance()
    print(f"| {batch_share} | {frames_share} | {'; '.join(slower) or 'none'} |", flush=True)
  return 0


def plan_row(cell: Cell, parameters: PaperCosts, budget_s: float) -> Row:
  """Plans every scheme in a cell."""
  plans = {s.name: plan_cell(cell, s, parameters, budget_s=budget_s) for s in all_schemes()}
  if cell.minibatches >= 3:
    unsplit = without(scheme("sbjax"), "split_replays")
    plans[UNSPLIT] = plan_cell(cell, unsplit, parameters, budget_s=budget_s)
  return row_of(cell, plans)


def row_of(cell: Cell, plans: dict[str, Plan]) -> Row:
  """A cell's row."""
  return Row(cell, len(cell.shape().groups[0]), plans)


def report(rows: list[Row], missing: list[tuple[Cell, str]]) -> int:
  """Prints the table; gives the exit code."""
  names = [s.name for s in all_schemes()]
  print(
    "| algorithm, judge | frames | candidates / mini-batches / group | " + " | ".join(names), end=""
  )
  print(" | bound | gap | splits gain |")
  print("|---" * (len(names) + 6) + "|")
  for row in rows:
    cell = row.cell
    took = " | ".join(f"{row.seconds(name):.2f}" for name in names)
    gain = f"{gain_of(row):+.1%}" if UNSPLIT in row.plans else ""
    print(
      f"| {cell.algorithm}, {cell.judge} | {cell.frames} | "
      f"{cell.candidates} / {cell.minibatches} / {row.group} | {took} | "
      f"{row.plans['sbjax'].bound_s:.2f} | {row.gap:.1%} | {gain} |"
    )
  for cell, why in missing:
    print(f"no cell {cell.algorithm}, {cell.judge}, {cell.frames} frames: {why}")
  slower = [row for row in rows if row.faster]
  for row in slower:
    how = row.plans["stagebreaker"].searched
    best = "no plan of its space is faster" if how in PROVEN else "its space was not seen whole"
    print(f"stagebreaker is slower than {', '.join(row.faster)} in {row.cell}; {best} ({how})")
  gaps = [row.gap for row in rows]
  excess = max(row.excess for row in rows)
  print(
    f"{len(rows)} cells; stagebreaker is slower than another of the paper's schemes in "
    f"{len(slower)} by more than {EQUAL:.1%}, at most by {excess:.2%}"
  )
  print(f"sbjax above its bound: median {statistics.median(gaps):.1%}, worst {max(gaps):.1%}")
  gains = [gain_of(row) for row in rows if UNSPLIT in row.plans]
  if gains:
    print(
      f"split replays at three and more mini-batches, {len(gains)} cells: "
      f"median {statistics.median(gains):+.1%}, best {max(gains):+.1%}"
    )
  ok = not slower and statistics.median(gaps) <= MEDIAN_GAP and max(gaps) <= WORST_GAP
  return 0 if ok else 1


def gain_of(row: Row) -> float:
  """What splitting replays gains, as a share of the step with it."""
  return row.seconds(UNSPLIT) / row.seconds("sbjax") - 1.0


if __name__ == "__main__":
  sys.exit(main())
