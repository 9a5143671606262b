"""Runs a step graph on a pool: ready task × idle worker → submit → wait."""

from collections.abc import Callable, Sequence
from typing import Protocol

from sbjax.dataflow.graph import DRIVER_KINDS, StepGraph, Task
from sbjax.dataflow.queue import Order, ReadyQueue
from sbjax.dataflow.turns import Turns, queue_of
from sbjax.runtime.executor import (
  Call,
  Deadline,
  Handle,
  InputLost,
  Result,
  TaskRaised,
  WorkerLost,
)
from sbjax.runtime.pool import Pool, RunFailed
from sbjax.runtime.records import Span

MAX_ATTEMPTS = 5
"""How often one task may be lost with its worker before the run ends."""


class Program(Protocol):
  """What the tasks of a graph mean: their calls, and what becomes of their results."""

  @property
  def order(self) -> Order:
    """Which of several ready tasks a worker takes."""
    ...

  @property
  def turns(self) -> Turns:
    """What each worker is to run, one after the other; empty where the order alone decides."""
    ...

  def on_driver(self, task: Task) -> None:
    """Does a task that moves scalars only."""
    ...

  def workers(self, task: Task) -> tuple[str, ...]:
    """Workers that may run the task, best first; for a `reduce` all that still owe a sum."""
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

  def makers(self, handles: Sequence[Handle]) -> Sequence[str]:
    """Hears that results are gone; gives the done tasks that make them again."""
    ...


class Dispatcher:
  """Runs graphs on a pool.

  Args:
    pool: the workers.
    step: number of the step, for spans.
    on_progress: called with the graph whenever a task has ended.
  """

  def __init__(
    self, pool: Pool, step: int, on_progress: Callable[[StepGraph], None] = lambda graph: None
  ):
    self._pool = pool
    self._step = step
    self._on_progress = on_progress
    self.spans: list[Span] = []
    self._attempts: dict[str, int] = {}
    self._living: frozenset[str] | None = None
    self._queue = ReadyQueue(lambda task: ())
    self._turns: Turns = {}

  def run(self, graph: StepGraph, program: Program) -> None:
    """Runs every task of the graph.

    Raises:
      RunFailed: a task raised, or was lost too often.
    """

    def died(worker: str) -> None:
      self._living = None  # who may run what has changed
      _reopen(graph, program.forget(worker))

    self._pool.on_death = died
    self._living = None
    self._turns = program.turns
    while graph.is_active():
      started = self._start_ready(graph, program)
      if graph.is_active() and started:
        self._pool.wait()
    self._pool.on_death = lambda name: None

  def _start_ready(self, graph: StepGraph, program: Program) -> bool:
    """Starts what can start; False where a death in between asks for another look."""
    living = frozenset(n for n, state in self._pool.workers.items() if not state.starting)
    if living != self._living:
      self._living = living
      # Turns hold for the workers they were planned for, as long as all of them live.
      turns = self._turns if living.issuperset(self._turns) else {}
      self._turns = {}
      now = self._pool.executor.now
      self._queue = queue_of(graph, program.workers, program.order, turns, now)
      graph.get_ready()
      self._list(graph, program, [t for t in graph.tasks.values() if graph.is_ready(t.id)])
      for task in graph.tasks.values():
        if task.kind == "reduce" and graph.is_running(task.id):
          self._list_sums(task, program)
    self._list(graph, program, graph.get_ready())
    for name, state in self._pool.workers.items():
      (self._queue.free if state.ticket is None else self._queue.busy)(name)

    def may_start(task: Task, worker: str) -> bool:
      if task.kind == "reduce":
        return graph.is_running(task.id) and worker in program.workers(task)
      return graph.is_ready(task.id)

    while (pair := self._queue.pop(may_start)) is not None:
      task, worker = pair
      if task.kind != "reduce":
        graph.start(task.id)
      self._submit(graph, program, task, worker)
      if self._living is None:  # the worker died while the call was submitted
        return False
    return True

  def _list(self, graph: StepGraph, program: Program, ready: Sequence[Task]) -> None:
    """Lists what is ready; what moves scalars only is done at once and may free more."""
    while ready:
      for task in ready:
        if task.kind in DRIVER_KINDS:
          graph.start(task.id)
          program.on_driver(task)
          graph.done(task.id)
        elif task.kind == "reduce":
          graph.start(task.id)
          self._list_sums(task, program)
          self._end_sum(graph, program, task)  # every part may have its sum already
        else:
          self._queue.push([task])
      ready = graph.get_ready()

  def _list_sums(self, task: Task, program: Program) -> None:
    """Each holder adds up its own buffers as soon as it is idle."""
    for worker in program.workers(task):
      self._queue.push_for(task, worker)

  def _end_sum(self, graph: StepGraph, program: Program, task: Task) -> None:
    if graph.is_running(task.id) and not program.workers(task):
      graph.done(task.id)

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
      self._failed(graph, program, task, result)
      return
    if task.kind == "reduce":
      program.finish(task, worker, result)
      self._end_sum(graph, program, task)
    elif program.finish(task, worker, result):
      graph.done(task.id)
    else:
      graph.fail(task.id)
    self._on_progress(graph)

  def _failed(self, graph: StepGraph, program: Program, task: Task, error: Exception) -> None:
    if isinstance(error, InputLost):
      names = program.makers(error.handles)
      if not names:
        raise RunFailed(f"{error}; continue with --config.resume=auto") from error
      _reopen(graph, names)
    elif task.kind == "reduce":
      return  # what its worker held is made again, and the sum asked for again
    elif program.lost(task, error):
      graph.done(task.id)
      return
    self._attempts[task.id] = self._attempts.get(task.id, 0) + 1
    if self._attempts[task.id] >= MAX_ATTEMPTS:
      kind = "did not end in time" if isinstance(error, Deadline) else "was lost"
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


def _reopen(graph: StepGraph, names: Sequence[str]) -> None:
  """Takes back what done tasks have given."""
  for name in names:
    if not graph.is_done(name):
      continue
    graph.reopen(name)
    # A sum waits until its parts exist again; the shares that others have given stay.
    for other in graph.dependents[name]:
      if graph.tasks[other].kind == "reduce":
        graph.fail(other)
