"""Who waits for a verdict: idle time in which a task lacks nothing else, from needs and spans."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from sbjax.dataflow.graph import DRIVER_KINDS, Task
from sbjax.dataflow.plan import Plan, WorkerSlot, allowed_workers
from sbjax.dataflow.schemes import Scheme
from sbjax.runtime.records import Span

Window = tuple[float, float]
"""Start and end in seconds, on the clock of the spans."""

_OWNERS = ("actor", "both")


def runners(
  scheme: Scheme, plan: Plan, slots: Sequence[WorkerSlot], spans: Sequence[Span]
) -> Callable[[Task], Collection[str]]:
  """Gives the function that names the workers which may run a task of a step.

  Args:
    scheme: its bindings hold where the plan says nothing.
    plan: the step's plan.
    slots: the workers.
    spans: what has run; a sum, a folding or an update may run only where it did.
  """
  ran: dict[str, set[str]] = {}
  for span in spans:
    ran.setdefault(span.task, set()).add(span.worker)

  def allowed(task: Task) -> Collection[str]:
    if task.kind in scheme.bindings:
      return allowed_workers(task.kind, plan.groups.get(task.id), scheme, slots)
    return tuple(sorted(ran.get(task.id, ())))

  return allowed


def reward_waits(
  spans: Sequence[Span],
  tasks: Iterable[Task],
  allowed: Callable[[Task], Collection[str]],
  step_s: float | None = None,
) -> dict[str, tuple[Window, ...]]:
  """Finds when a worker idles although a task it may run lacks verdicts only.

  A task's inputs are the worker tasks that it needs, directly or through what the driver does at
  once (advantages, coefficients, barriers). It waits for a reward from the moment when all of them
  but judgements are there until the last judgement is. This is the "wait for reward" block of
  StageBreaker's figure 16b, for any graph: a worker that waits for another one's replay, or for an
  adapter, does not wait for a reward, whatever is judged meanwhile.

  Args:
    spans: the step's executed tasks.
    tasks: the step's graph.
    allowed: the workers that may run a task.
    step_s: the step's length; None: from the first start to the last end.

  Returns:
    Worker -> disjoint windows in order, for the workers that have spans.
  """
  if not spans:
    return {}
  graph = {task.id: task for task in tasks}
  began, ended = _times(spans)
  known: dict[str, tuple[float, float]] = {}

  def arrival(name: str) -> tuple[float, float]:
    """When a need's judgements, and everything else of it, are there."""
    task = graph[name]
    if task.kind not in DRIVER_KINDS:
      end_s = ended.get(name, math.inf)
      return (end_s, -math.inf) if task.kind == "judge" else (-math.inf, end_s)
    if name not in known:
      pairs = [arrival(need) for need in task.needs]
      verdicts_s = max((a for a, _ in pairs), default=-math.inf)
      known[name] = (verdicts_s, max((b for _, b in pairs), default=-math.inf))
    return known[name]

  waiting: dict[tuple[str, ...], list[Window]] = {}
  for task in graph.values():
    if task.kind in DRIVER_KINDS or not task.needs:
      continue
    pairs = [arrival(need) for need in task.needs]
    verdicts_s, others_s = max(a for a, _ in pairs), max(b for _, b in pairs)
    window = (others_s, min(verdicts_s, began.get(task.id, math.inf)))
    if window[0] < window[1]:
      waiting.setdefault(tuple(allowed(task)), []).append(window)
  by_worker: dict[str, list[Window]] = {}
  for workers, windows in waiting.items():
    for worker in workers:
      by_worker.setdefault(worker, []).extend(union(windows))

  first_s = min(span.start_s for span in spans)
  last_s = max(span.end_s for span in spans) if step_s is None else first_s + step_s
  busy: dict[str, list[Window]] = {}
  for span in spans:
    busy.setdefault(span.worker, []).append((span.start_s, span.end_s))
  return {
    worker: _intersection(union(by_worker.get(worker, ())), _gaps(union(windows), first_s, last_s))
    for worker, windows in sorted(busy.items())
  }


def wait_frac(waits: Mapping[str, Sequence[Window]], spans: Sequence[Span], step_s: float) -> float:
  """Gives the share of a step in which the actor workers wait for rewards.

  Args:
    waits: what `reward_waits` has found.
    spans: the step's executed tasks; they tell whose group a worker is of.
    step_s: the step's length.

  Returns:
    Waiting time / (actor workers x step), 0 to 1.
  """
  owners = {span.worker for span in spans if span.group in _OWNERS}
  if not owners or step_s <= 0:
    return 0.0
  waited_s = sum(end - start for worker in owners for start, end in waits.get(worker, ()))
  return waited_s / (len(owners) * step_s)


def union(windows: Iterable[Window]) -> tuple[Window, ...]:
  """Merges windows that touch or overlap."""
  merged: list[Window] = []
  for start, end in sorted(windows):
    if merged and start <= merged[-1][1]:
      merged[-1] = (merged[-1][0], max(merged[-1][1], end))
    else:
      merged.append((start, end))
  return tuple(merged)


def _times(spans: Sequence[Span]) -> tuple[dict[str, float], dict[str, float]]:
  """First start and last good end of each task; a sum or a retried judgement has several spans."""
  began: dict[str, float] = {}
  ended: dict[str, float] = {}
  for span in spans:
    began[span.task] = min(began.get(span.task, math.inf), span.start_s)
    if not span.failed:
      ended[span.task] = max(ended.get(span.task, -math.inf), span.end_s)
  return began, ended


def _gaps(busy: Sequence[Window], first_s: float, last_s: float) -> list[Window]:
  gaps, at = [], first_s
  for start, end in busy:
    if start > at:
      gaps.append((at, min(start, last_s)))
    at = max(at, end)
  if at < last_s:
    gaps.append((at, last_s))
  return gaps


def _intersection(one: Sequence[Window], other: Sequence[Window]) -> tuple[Window, ...]:
  out, i, j = [], 0, 0
  while i < len(one) and j < len(other):
    start, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
    if start < end:
      out.append((start, end))
    if one[i][1] < other[j][1]:
      i += 1
    else:
      j += 1
  return tuple(out)
