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


class ReadyQueue:
  """Ready tasks and idle workers; pairs the most urgent task with a worker that may run it.

  Args:
    workers: gives the workers that may run a task, best first.
    order: which of several ready tasks is most urgent.
  """

  def __init__(self, workers: Callable[[Task], tuple[str, ...]], order: Order = "kind"):
    self._workers, self._order = workers, order
    self._tasks: dict[tuple[str, ...], list[tuple[tuple, int, Task]]] = {}
    self._number = itertools.count()  # a task may be listed twice; tasks themselves have no order
    self._idle: set[str] = set()
    # Per set of workers its idle ones, best first; entries that are no longer idle are dropped when
    # they come up, so that a thousand workers cost a logarithm each time.
    self._free: dict[tuple[str, ...], list[int]] = {}
    self._place: dict[tuple[str, ...], dict[str, int]] = {}
    self._sets_of: dict[str, list[tuple[str, ...]]] = {}
    # Sets of workers by their most urgent task, among those that may have an idle worker; a set
    # without one is put back by the first of its workers that comes free. Entries may be stale.
    self._open: list[tuple[tuple, int, tuple[str, ...]]] = []
    self._known: dict[tuple[str, ...], int] = {}

  def push(self, tasks: Iterable[Task]) -> None:
    """Adds tasks that are ready."""
    for task in tasks:
      self._push(task, self._workers(task))

  def push_for(self, task: Task, worker: str) -> None:
    """Adds one worker's share of a task that every holder does a part of, a sum."""
    self._push(task, (worker,))

  def _push(self, task: Task, workers: tuple[str, ...]) -> None:
    if workers not in self._tasks:
      self._know(workers)
    entry = (priority(task, self._order), next(self._number), task)
    heapq.heappush(self._tasks[workers], entry)
    if self._tasks[workers][0] is entry:
      self._offer(workers)

  def _offer(self, workers: tuple[str, ...]) -> None:
    tasks = self._tasks[workers]
    if tasks and workers:  # where nobody who may run it is there at present, it waits
      heapq.heappush(self._open, (tasks[0][0], self._known[workers], workers))

  def _know(self, workers: tuple[str, ...]) -> None:
    self._tasks[workers] = []
    self._known[workers] = len(self._known)
    self._place[workers] = {name: i for i, name in enumerate(workers)}
    self._free[workers] = [i for i, name in enumerate(workers) if name in self._idle]
    for name in workers:
      self._sets_of.setdefault(name, []).append(workers)

  def free(self, worker: str) -> None:
    """Hears that a worker is idle."""
    if worker in self._idle:
      return
    self._idle.add(worker)
    for workers in self._sets_of.get(worker, ()):
      heapq.heappush(self._free[workers], self._place[workers][worker])
      self._offer(workers)

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
      urgency, _, workers = heapq.heappop(self._open)
      tasks = self._tasks[workers]
      if not tasks or tasks[0][0] != urgency:  # stale: another entry stands for the set
        continue
      if not may_start(tasks[0][2], workers[0]):
        heapq.heappop(tasks)
        self._offer(workers)
        continue
      worker = self._first_idle(workers)
      if worker is None:
        continue
      _, _, task = heapq.heappop(tasks)
      self._idle.discard(worker)
      self._offer(workers)
      return task, worker
    return None

  def _first_idle(self, workers: tuple[str, ...]) -> str | None:
    free = self._free[workers]
    while free and workers[free[0]] not in self._idle:
      heapq.heappop(free)
    return workers[free[0]] if free else None
