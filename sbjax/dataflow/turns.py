"""Workers that take tasks in planned turns: a plan's schedule, kept to while the step drifts.

The rule of `queue.ReadyQueue` never lets a worker idle while it may run something. So a task that
is a moment late may find that the worker which was to judge it has just begun a replay, and a plan
whose tasks meet to the instant falls apart by a whole task (Graham's anomaly of list scheduling).
A worker with turns waits for its next one instead: where every task takes at most 2 % longer, so
does the step.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from sbjax.dataflow.graph import StepGraph, Task
from sbjax.dataflow.plan import Turn
from sbjax.dataflow.queue import Order, ReadyQueue

MayStart = Callable[[Task, str], bool]


_LATE = 0.5
"""Share of a turn's length by which it must be late before somebody else takes it over."""

_SUMMING = ("fold", "reduce", "update")

_FAR = 100
"""Needs of needs that are followed to tell when a task can be ready."""

Turns = Mapping[str, Sequence[Turn]]
"""Worker -> its turns."""


def queue_of(
  graph: StepGraph,
  workers: Callable[[Task], tuple[str, ...]],
  order: Order,
  turns: Turns,
  now: Callable[[], float],
) -> "ReadyQueue | TurnQueue":
  """The queue by which workers take tasks; arguments as for `TurnQueue`, without turns the rule."""
  if turns:
    return TurnQueue(graph, workers, order, turns, now)
  return ReadyQueue(workers, order)


class TurnQueue:
  """Ready tasks and idle workers; pairs a worker with its next turn as soon as that is ready.

  While its next turn is not ready, a worker takes a later one of its own if the next cannot
  become ready before that has ended. A worker that has had its turns, or only has a sum left that
  waits for others, takes over the last one of whoever has most left, if that is late by more than
  half its length and will be done sooner here, which is known of kinds of tasks that both have
  turns of; in front of a sum, only what the sum waits for. Sums have a turn on every worker that
  was to hold a part. Tasks without a turn, such as those that are run a second time, go by the
  rule of `ReadyQueue` and come first.

  Args:
    graph: the step's graph; what is running and done is read from it.
    workers: gives the workers that may run a task, best first.
    order: see `ReadyQueue`.
    turns: worker -> its turns.
    now: the clock, in seconds; turns that ran for twice their planned time count as lost.
  """

  def __init__(
    self,
    graph: StepGraph,
    workers: Callable[[Task], tuple[str, ...]],
    order: Order,
    turns: Turns,
    now: Callable[[], float],
  ):
    self._graph, self._workers, self._now = graph, workers, now
    self._rule = ReadyQueue(workers, order)
    self._began_s = now()
    self._seconds: dict[str, float] = {}
    self._end_s: dict[str, float] = {}
    self._worker: dict[str, str] = {}
    # What a kind of task takes on a worker, from its own turns.
    self._typical: dict[tuple[str, str], float] = {}
    self._due: dict[str, list[str]] = {worker: [] for worker in turns}
    for worker, mine in turns.items():
      for turn in mine:
        key = _key(graph.tasks[turn.task], worker)
        self._seconds[key], self._end_s[key] = turn.seconds, turn.end_s
        self._worker[key] = worker
        self._due[worker].append(key)
        kind = worker, graph.tasks[turn.task].kind
        self._typical[kind] = max(self._typical.get(kind, 0.0), turn.seconds)
    self._open = set(self._worker)  # turns that nobody has taken, and that still mean something
    self._ready: dict[str, Task] = {}
    self._since: dict[str, float] = {}
    self._at: dict[str, str] = {}
    self._idle: set[str] = set()

  def push(self, tasks: Iterable[Task]) -> None:
    """Adds tasks that are ready."""
    for task in tasks:
      planned = self._worker.get(task.id)
      if task.id not in self._open or planned not in self._workers(task):
        self._open.discard(task.id)
        self._rule.push([task])
      else:
        self._ready[task.id] = task

  def push_for(self, task: Task, worker: str) -> None:
    """Adds one worker's share of a task that every holder does a part of, a sum."""
    key = _key(task, worker)
    if key in self._open:
      self._ready[key] = task
    else:
      self._rule.push_for(task, worker)

  def free(self, worker: str) -> None:
    """Hears that a worker is idle."""
    self._idle.add(worker)
    self._rule.free(worker)

  def busy(self, worker: str) -> None:
    """Hears that a worker is not idle."""
    self._idle.discard(worker)
    self._rule.busy(worker)

  def pop(self, may_start: MayStart) -> tuple[Task, str] | None:
    """Takes a task and the worker that is to run it, which counts as busy afterwards.

    Args:
      may_start: tells whether a task may still start on a worker.

    Returns:
      Task and worker, or None where nothing can start.
    """
    pair = self._rule.pop(may_start)
    if pair is not None:
      self._idle.discard(pair[1])
      return pair
    if not self._ready:  # nothing to look for, on however many workers
      return None
    idle = [worker for worker in self._due if worker in self._idle]
    for choose in (self._next, self._filler, self._left_by_others):
      for worker in idle:
        key = choose(worker)
        if key is not None and may_start(self._ready[key], worker):
          return self._take(key, worker), worker
    return None

  def _take(self, key: str, worker: str) -> Task:
    self._open.discard(key)
    self._since[key] = self._now()
    self._at[worker] = key
    self.busy(worker)
    return self._ready.pop(key)

  def _left(self, worker: str) -> list[str]:
    """A worker's turns that are still to come."""
    due = self._due[worker] = [key for key in self._due[worker] if not self._past(key)]
    return due

  def _past(self, key: str) -> bool:
    # A sum that has begun elsewhere only: this worker holds no part of it, as it was planned to.
    name = key.partition(_ON)[0]
    if name != key and key not in self._ready and self._begun(name):
      self._open.discard(key)
    return key not in self._open

  def _begun(self, name: str) -> bool:
    return self._graph.is_running(name) or self._graph.is_done(name)

  def _next(self, worker: str) -> str | None:
    left = self._left(worker)
    return left[0] if left and left[0] in self._ready else None

  def _filler(self, worker: str) -> str | None:
    """A later turn that ends before the next one can start."""
    left = self._left(worker)
    later = [key for key in left[1:] if key in self._ready]
    if not later:
      return None
    room_s = self._ready_at(left[0].partition(_ON)[0], {}) - self._now()
    return next((key for key in later if self._seconds[key] <= room_s), None)

  def _left_by_others(self, worker: str) -> str | None:
    """The last turn of whoever has most left, if it is late there and done sooner here."""
    left = [key.partition(_ON)[0] for key in self._left(worker)]
    if any(self._graph.tasks[name].kind not in _SUMMING for name in left):
      return None
    awaited = self._awaited(left[0]) if left else None
    best: tuple[float, str] | None = None
    passed_s = self._now() - self._began_s
    for other in self._due:
      ends_s, mine = self._rest_s(other), []
      for key in self._left(other):
        ends_s += self._seconds[key]
        if awaited is not None and key not in awaited:
          continue
        if key in self._ready and self._may_run(worker, key):
          late = passed_s + ends_s > self._end_s[key] + _LATE * self._seconds[key]
          took_s = self._typical.get((worker, self._ready[key].kind), math.inf)
          mine += [key] if late and took_s < ends_s else []
      if mine and (best is None or ends_s > best[0]):
        best = (ends_s, mine[-1])
    return None if best is None else best[1]

  def _awaited(self, name: str) -> set[str]:
    """What has to end before a task can start, other than by what is done already."""
    found: set[str] = set()
    new = [name]
    while new:
      needs = self._graph.tasks[new.pop()].needs
      fresh = [need for need in needs if need not in found and not self._graph.is_done(need)]
      found.update(fresh)
      new += fresh
    return found

  def _rest_s(self, worker: str) -> float:
    """What is left of the turn that a worker is at."""
    key = self._at.get(worker)
    if key is None or worker in self._idle:
      return 0.0
    return max(self._since[key] + self._seconds[key] - self._now(), 0.0)

  def _may_run(self, worker: str, key: str) -> bool:
    return _ON not in key and worker in self._workers(self._ready[key])

  def _ready_at(self, name: str, known: dict[str, float], depth: int = 0) -> float:
    """No earlier than this a task can be ready; infinite where it waits for one that is lost."""
    if depth > _FAR:
      return self._now()  # a moment that is too early only means that less is filled
    if name not in known:
      ends = (self._ends_at(need, known, depth) for need in self._graph.tasks[name].needs)
      known[name] = max(ends, default=self._now())
    return known[name]

  def _ends_at(self, name: str, known: dict[str, float], depth: int) -> float:
    now = self._now()
    if self._graph.is_done(name):
      return now
    took = self._seconds.get(name, 0.0)
    since = self._since.get(name)
    if since is None or not self._graph.is_running(name):
      return self._ready_at(name, known, depth + 1) + took
    return math.inf if now > since + 2.0 * took else max(now, since + took)


_ON = " on "


def _key(task: Task, worker: str) -> str:
  """What a turn is known by; every holder of a part has its own turn of a sum."""
  return f"{task.id}{_ON}{worker}" if task.kind == "reduce" else task.id
