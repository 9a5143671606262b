"""The step graph: small immutable tasks and their true dependencies.

Simulator and driver run the same graph object through a protocol in the manner of the standard
library's `graphlib.TopologicalSorter`: `get_ready`, `start`, `done`, and `reopen` for a result that
was lost with its worker.
"""

import dataclasses
from collections.abc import Iterable

DRIVER_KINDS = frozenset({"barrier", "advantage", "early", "coefficients"})
"""Kinds that move scalars only; the driver does them itself."""


@dataclasses.dataclass(frozen=True)
class Task:
  """One unit of work: a pure function of versioned inputs.

  Attributes:
    id: unique in the step, e.g. `replay/u1/c3/b0-1`.
    kind: generate, decode, judge, reference, replay, forward, backward, advantage, early, fold,
      coefficients, reduce, update or barrier.
    needs: ids of the tasks whose results it reads or waits for.
    candidates: candidates it works on.
    update: index of the update it belongs to (mini-batch within epoch); −1 where it serves all.
    blocks: folding blocks of a replay, or of the gradient that a fused generation takes.
    jobs: judge jobs.
    scope: index of an advantage's group, mini-batch or step.
    fused: True for a generation that takes its candidate's gradient on the way.
  """

  id: str
  kind: str
  needs: tuple[str, ...] = ()
  candidates: tuple[int, ...] = ()
  update: int = -1
  blocks: tuple[int, ...] = ()
  jobs: tuple[int, ...] = ()
  scope: int = -1
  fused: bool = False


class StepGraph:
  """The tasks of one step and how far they are.

  Args:
    tasks: every task; needs must name tasks among them.

  Raises:
    ValueError: for a doubled id, an unknown need or a cycle.
  """

  def __init__(self, tasks: Iterable[Task]):
    self.tasks: dict[str, Task] = {}
    for task in tasks:
      if task.id in self.tasks:
        raise ValueError(f"task {task.id!r} stands in the graph twice")
      self.tasks[task.id] = task
    self.dependents: dict[str, list[str]] = {name: [] for name in self.tasks}
    for task in self.tasks.values():
      for need in task.needs:
        if need not in self.dependents:
          raise ValueError(f"task {task.id!r} needs {need!r}, which is not in the graph")
        self.dependents[need].append(task.id)
    self._waiting = {name: len(task.needs) for name, task in self.tasks.items()}
    self._done: set[str] = set()
    self._running: set[str] = set()
    self._check_acyclic()
    self._fresh = [task for name, task in self.tasks.items() if not self._waiting[name]]

  def _check_acyclic(self) -> None:
    waiting = dict(self._waiting)
    queue = [name for name, count in waiting.items() if count == 0]
    seen = 0
    while queue:
      name = queue.pop()
      seen += 1
      for other in self.dependents[name]:
        waiting[other] -= 1
        if waiting[other] == 0:
          queue.append(other)
    if seen != len(self.tasks):
      stuck = sorted(name for name, count in waiting.items() if count > 0)
      raise ValueError(f"the step graph has a cycle through {stuck[0]!r}")

  def is_active(self) -> bool:
    """Tells whether any task is not done."""
    return len(self._done) < len(self.tasks)

  def is_ready(self, name: str) -> bool:
    """Tells whether a task may start now."""
    return self._waiting[name] == 0 and name not in self._done and name not in self._running

  def get_ready(self) -> list[Task]:
    """Gives the tasks that have become ready since the last call, each once.

    A task that a `reopen` has made wait again is listed anew when it is ready again; who keeps
    the list asks `is_ready` before starting.
    """
    fresh = {task.id: task for task in self._fresh if self.is_ready(task.id)}
    self._fresh = []
    return list(fresh.values())

  def start(self, name: str) -> None:
    """Marks a ready task as running.

    Raises:
      ValueError: if it is not ready.
    """
    if not self.is_ready(name):
      raise ValueError(f"task {name!r} is not ready")
    self._running.add(name)

  def fail(self, name: str) -> None:
    """Puts a running task back: its attempt was lost."""
    self._running.discard(name)
    if self.is_ready(name):
      self._fresh.append(self.tasks[name])

  def done(self, name: str) -> None:
    """Marks a running task as done and frees what waited for it."""
    self._running.discard(name)
    if name in self._done:
      return
    self._done.add(name)
    for other in self.dependents[name]:
      self._waiting[other] -= 1
      if self.is_ready(other):
        self._fresh.append(self.tasks[other])

  def is_done(self, name: str) -> bool:
    """Tells whether a task is done."""
    return name in self._done

  def is_running(self, name: str) -> bool:
    """Tells whether a task was started and is not done."""
    return name in self._running

  def reopen(self, name: str) -> None:
    """Takes a done task's result back: it was lost with the worker that held it.

    Tasks that have used it already stay done; those that have not wait for it again.
    """
    if name not in self._done:
      return
    self._done.discard(name)
    for other in self.dependents[name]:
      self._waiting[other] += 1
    if self.is_ready(name):
      self._fresh.append(self.tasks[name])

  def counts(self) -> dict[str, tuple[int, int]]:
    """Gives (done, all) per kind, for progress."""
    totals: dict[str, tuple[int, int]] = {}
    for name, task in self.tasks.items():
      ready, every = totals.get(task.kind, (0, 0))
      totals[task.kind] = (ready + (name in self._done), every + 1)
    return totals


def replay_id(update: int, candidate: int, blocks: tuple[int, ...]) -> str:
  """Names the replay of some blocks of a candidate."""
  return f"replay/u{update}/c{candidate}/b{'-'.join(map(str, blocks))}"


def fold_id(update: int, candidate: int, blocks: tuple[int, ...]) -> str:
  """Names the folding of a replayed part."""
  return f"fold/u{update}/c{candidate}/b{'-'.join(map(str, blocks))}"
