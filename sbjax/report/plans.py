"""A plan in words, for tables and reports."""

import collections
from collections.abc import Iterable

from sbjax.dataflow.graph import Task
from sbjax.dataflow.plan import Plan, allowed_workers, worker_slots
from sbjax.dataflow.schemes import Scheme

_NOUNS = {
  "generate": "generations",
  "decode": "decodes",
  "reference": "references",
  "forward": "scorings",
  "replay": "replays",
  "backward": "gradients",
}


def words(plan: Plan, scheme: Scheme, tasks: Iterable[Task]) -> str:
  """Says what a plan moves to reward workers, splits and fuses, and how it batches judging.

  Args:
    plan: the plan.
    scheme: its scheme.
    tasks: the graph that was built from both.

  Returns:
    One line, e.g. `5 of 24 decodes and 3 + 4 of 12 + 12 replays on reward workers; judging 6, 6`.
  """
  parts = []
  moved, free = _placed(plan, scheme, list(tasks)) if scheme.separate_groups else ([], [])
  if moved:
    parts.append(f"{' and '.join(moved)} on reward workers")
  if free:
    parts.append(f"{', '.join(free)} on whoever is idle")
  if plan.fused:
    parts.append(f"{len(plan.fused)} fused")
  if plan.splits:
    parts.append(f"{len(plan.splits)} replays split")
  parts.append(f"judge tasks of {_sizes(plan)}")
  if plan.order == "update":
    parts.append("one mini-batch after the other")
  return "; ".join(parts)


def _placed(plan: Plan, scheme: Scheme, tasks: list[Task]) -> tuple[list[str], list[str]]:
  """What reward workers alone do, and what either group does."""
  slots = worker_slots(scheme, 1, 1)
  moved, anywhere = [], []
  for kind, noun in _NOUNS.items():
    every: collections.Counter[int] = collections.Counter()
    there: collections.Counter[int] = collections.Counter()
    free = 0
    for task in tasks:
      if task.kind != kind:
        continue
      # A rollout's tasks are counted over the step, a replay's per mini-batch.
      key = task.update if kind in ("replay", "forward", "backward") else 0
      workers = allowed_workers(kind, plan.groups.get(task.id), scheme, slots)
      every[key] += 1
      there[key] += workers == ("reward-0",)
      free += len(workers) > 1
    if sum(there.values()):
      mine = " + ".join(str(there[k]) for k in sorted(every))
      moved.append(f"{mine} of {' + '.join(str(every[k]) for k in sorted(every))} {noun}")
    if free:
      anywhere.append(f"{free} {noun}")
  return moved, anywhere


def _sizes(plan: Plan) -> str:
  """Sizes of judge tasks, equal neighbours together: `4 x 6, 2` for 6, 6, 6, 6, 2."""
  runs: list[list[int]] = []
  for jobs in plan.judge_batches:
    if runs and runs[-1][1] == len(jobs):
      runs[-1][0] += 1
    else:
      runs.append([1, len(jobs)])
  return ", ".join(f"{count} x {size}" if count > 1 else str(size) for count, size in runs)
