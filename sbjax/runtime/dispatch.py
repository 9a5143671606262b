"""Runs a step graph on a pool: ready task × idle worker → submit → wait."""

from collections.abc import Callable, Sequence
from typing import Protocol

from sbjax.dataflow.graph import DRIVER_KINDS, StepGraph, Task
from sbjax.runtime.executor import Call, Deadline, Handle, Result, TaskRaised, WorkerLost
from sbjax.runtime.pool import Pool, RunFailed
from sbjax.runtime.records import Span

MAX_ATTEMPTS = 5
"""How often one task may be lost with its worker before the run ends."""


class Program(Protocol):
  """What the tasks of a graph mean: their calls, and what becomes of their results."""

  def on_driver(self, task: Task) -> None:
    """Does a task that moves scalars only."""
    ...

  def workers(self, task: Task) -> Sequence[str]:
    """Workers that may run the task, best first; for a `reduce` all that still hold a part."""
    ...

  def call(self, task: Task, worker: str) -> tuple[Call, Sequence[Handle], Sequence[str]]:
    """The operation, its heavy inputs, and the adapter versions that it names."""
    ...

  def adapter(self, version: str) -> Handle:
    """Where an adapter version is."""
    ...

  def timeout_s(self, task: Task) -> float:
    """How long the task may take."""
    ...

  def finish(self, task: Task, worker: str, result: Result) -> bool:
    """Takes a result; False where the task needs another call."""
    ...

  def lost(self, task: Task, error: Exception) -> bool:
    """Hears that an attempt was lost with its worker; True where the task is settled by that."""
    ...

  def forget(self, worker: str) -> Sequence[str]:
    """Gives the done tasks whose results were lost with a worker's memory."""
    ...


class Dispatcher:
  """Runs graphs on a pool.

  Args:
    pool: the workers.
    step: number of the step, for spans.
    on_progress: called with the graph whenever a task has ended.
  """

  def __init__(self, pool: Pool, step: int, on_progress: Callable[[StepGraph], None]):
    self._pool = pool
    self._step = step
    self._on_progress = on_progress
    self.spans: list[Span] = []
    self._attempts: dict[str, int] = {}
    self._gang: dict[str, set[str]] = {}

  def run(self, graph: StepGraph, program: Program) -> None:
    """Runs every task of the graph.

    Raises:
      RunFailed: a task raised, or was lost too often.
    """

    def died(worker: str) -> None:
      for name in program.forget(worker):
        graph.reopen(name)
      # A sum that this worker owed waits until its parts exist again; sums that others have given
      # stay.
      for name in [n for n in self._gang if worker in self._gang[n]]:
        self._gang.pop(name)
        graph.fail(name)

    self._pool.on_death = died
    while graph.is_active():
      self._start_ready(graph, program)
      if not graph.is_active():
        break
      self._pool.wait()
    self._pool.on_death = lambda name: None

  def _start_ready(self, graph: StepGraph, program: Program) -> None:
    progress = True
    while progress:
      progress = False
      for task in graph.get_ready():
        if task.kind in DRIVER_KINDS:
          graph.start(task.id)
          program.on_driver(task)
          graph.done(task.id)
          progress = True
          break
        allowed = program.workers(task)
        if task.kind == "reduce":
          if not allowed:  # every part has its sum already
            graph.start(task.id)
            graph.done(task.id)
            progress = True
            break
          if all(self._pool.workers[w].ticket is None for w in allowed):
            self._start_gang(graph, program, task, allowed)
            progress = True
            break
          continue
        free = [w for w in allowed if self._pool.workers[w].ticket is None]
        if free:
          graph.start(task.id)
          self._submit(graph, program, task, free[0])

  def _start_gang(
    self, graph: StepGraph, program: Program, task: Task, workers: Sequence[str]
  ) -> None:
    graph.start(task.id)
    self._gang[task.id] = set(workers)
    for worker in workers:
      if task.id in self._gang:  # a death while submitting ends the gang
        self._submit(graph, program, task, worker)

  def _submit(self, graph: StepGraph, program: Program, task: Task, worker: str) -> None:
    call, inputs, versions = program.call(task, worker)

    def ended(result: Result | Exception) -> None:
      self._ended(graph, program, task, worker, result)

    try:
      for version in versions:
        self._pool.give_adapter(worker, version, program.adapter(version))
      self._pool.submit(worker, call, inputs, task.id, program.timeout_s(task), ended)
    except WorkerLost as error:
      self._pool.workers[worker].on_end = ended
      self._pool.workers[worker].busy_with = task.id
      self._pool.lost(worker, error)

  def _ended(
    self,
    graph: StepGraph,
    program: Program,
    task: Task,
    worker: str,
    result: Result | Exception,
  ) -> None:
    now = self._pool.executor.now()
    if isinstance(result, TaskRaised):
      raise RunFailed(str(result)) from result
    failed = isinstance(result, Exception)
    took = now - self._pool.workers[worker].since_s if failed else result.seconds
    self._span(task, worker, now - took, now, failed)
    if failed:
      self._lost(graph, program, task, result)
      return
    if task.kind == "reduce":
      program.finish(task, worker, result)
      gang = self._gang.get(task.id)
      if gang is None:
        return  # a death broke the gang up; it forms again for the parts that lack a sum
      gang.discard(worker)
      if gang:
        return
      self._gang.pop(task.id)
      graph.done(task.id)
    elif program.finish(task, worker, result):
      graph.done(task.id)
    else:
      graph.fail(task.id)
    self._on_progress(graph)

  def _lost(self, graph: StepGraph, program: Program, task: Task, error: Exception) -> None:
    if task.kind == "reduce":
      if self._gang.pop(task.id, None) is not None:
        graph.fail(task.id)
      return
    if program.lost(task, error):
      graph.done(task.id)
      return
    self._attempts[task.id] = self._attempts.get(task.id, 0) + 1
    if self._attempts[task.id] >= MAX_ATTEMPTS:
      kind = "did not end in time" if isinstance(error, Deadline) else "was lost with its worker"
      raise RunFailed(f"task {task.id} {kind} {self._attempts[task.id]} times; last: {error}")
    graph.fail(task.id)

  def _span(self, task: Task, worker: str, start_s: float, end_s: float, failed: bool) -> None:
    group = self._pool.workers[worker].spec.group
    self.spans.append(
      Span(
        worker,
        group,
        task.kind,
        task.id,
        self._step,
        start_s,
        end_s,
        candidate=task.candidates[0] if len(task.candidates) == 1 else None,
        minibatch=task.update if task.update >= 0 else None,
        failed=failed,
      )
    )
