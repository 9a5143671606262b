"""Which ready task an idle worker takes: the one rule that the driver and the simulator share."""

import heapq
import itertools
from collections.abc import Callable, Iterable
from typing import Literal

from sbjax.dataflow.graph import Task

Order = Literal["kind", "update", "rollout"]
"""`kind` starts all generations before any replay; `update` finishes one mini-batch's work first,
so that the next adapter comes early; `rollout` is `kind`, but generates before it decodes."""

# What others wait for longest comes first: a judgement frees an update, a decoded video a
# judgement, a generation everything else; replays fill the time. The optimizer's tasks take no time
# and hold everyone up.
_RANK = {
  "update": 0,
  "reduce": 0,
  "fold": 0,
  "judge": 1,
  "decode": 2,
  "generate": 3,
  "reference": 4,
  "forward": 5,
  "replay": 5,
  "backward": 5,
}


def priority(task: Task, order: Order) -> tuple[int, int, int, str]:
  """Sort key among ready tasks, the smallest first; ties follow the candidates' order."""
  rank, update = _RANK.get(task.kind, 0), max(task.update, 0)
  first = task.candidates[0] if task.candidates else 0
  if order == "rollout" and task.kind == "generate":
    rank = 2
  elif order == "rollout" and task.kind == "decode":
    rank = 3
  if order == "update" and rank > 0:
    # 1 keeps the optimizer's tasks ahead of everything.
    return (1 + update, rank, first, task.id)
  return (rank, update, first, task.id)


class _Workers:
  """The workers that may run some tasks, those of them that are idle, and the tasks."""

  def __init__(self, names: tuple[str, ...], number: int, idle: set[str]):
    self.names, self.number = names, number
    self.place = {name: i for i, name in enumerate(names)}
    # Idle ones, best first; entries that are no longer idle are dropped when they come up, so that
    # a thousand workers cost a logarithm each time.
    self.free = [i for i, name in enumerate(names) if name in idle]
    self.tasks: list[tuple[tuple, int, Task]] = []

  def first_idle(self, idle: set[str]) -> str | None:
    while self.free and self.names[self.free[0]] not in idle:
      heapq.heappop(self.free)
    return self.names[self.free[0]] if self.free else None


class ReadyQueue:
  """Ready tasks and idle workers; pairs the most urgent task with a worker that may run it.

  Args:
    workers: gives the workers that may run a task, best first.
    order: which of several ready tasks is most urgent.
  """

  def __init__(self, workers: Callable[[Task], tuple[str, ...]], order: Order = "kind"):
    self._workers = workers
    self._order: Order = order
    self._number = itertools.count()  # a task may be listed twice; tasks themselves have no order
    self._idle: set[str] = set()
    self._known: dict[tuple[str, ...], _Workers] = {}
    self._of: dict[str, list[_Workers]] = {}
    # By their most urgent task, the known sets of workers of which one may be idle. A set without
    # is put back by the first of its workers that comes free. Entries may be stale.
    self._open: list[tuple[tuple, int, _Workers]] = []

  def push(self, tasks: Iterable[Task]) -> None:
    """Adds tasks that are ready."""
    for task in tasks:
      self._push(task, self._workers(task))

  def push_for(self, task: Task, worker: str) -> None:
    """Adds one worker's share of a task that every holder does a part of, a sum."""
    self._push(task, (worker,))

  def _push(self, task: Task, names: tuple[str, ...]) -> None:
    known = self._known.get(names)
    if known is None:
      known = self._known[names] = _Workers(names, len(self._known), self._idle)
      for name in names:
        self._of.setdefault(name, []).append(known)
    entry = (priority(task, self._order), next(self._number), task)
    heapq.heappush(known.tasks, entry)
    if known.tasks[0] is entry:
      self._offer(known)

  def _offer(self, known: _Workers) -> None:
    # Where nobody who may run a task is there at present, it waits.
    if known.tasks and known.names:
      heapq.heappush(self._open, (known.tasks[0][0], known.number, known))

  def free(self, worker: str) -> None:
    """Hears that a worker is idle."""
    if worker in self._idle:
      return
    self._idle.add(worker)
    for known in self._of.get(worker, ()):
      heapq.heappush(known.free, known.place[worker])
      self._offer(known)

  def busy(self, worker: str) -> None:
    """Hears that a worker is not idle."""
    self._idle.discard(worker)

  def pop(self, may_start: Callable[[Task, str], bool]) -> tuple[Task, str] | None:
    """Takes the most urgent task that an idle worker may run, with the best such worker.

    The worker counts as busy afterwards.

    Args:
      may_start: tells whether a task may still start on the first of its workers; if not, it is
        dropped.

    Returns:
      Task and worker, or None where nothing can start.
    """
    while self._open:
      urgency, _, known = heapq.heappop(self._open)
      if not known.tasks or known.tasks[0][0] != urgency:  # stale: another entry stands for it
        continue
      if not may_start(known.tasks[0][2], known.names[0]):
        heapq.heappop(known.tasks)
        self._offer(known)
        continue
      worker = known.first_idle(self._idle)
      if worker is None:
        continue
      _, _, task = heapq.heappop(known.tasks)
      self._idle.discard(worker)
      self._offer(known)
      return task, worker
    return None
