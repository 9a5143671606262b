"""The workers of a run as the driver sees them: who is idle, who holds which adapter, who died."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sbjax.runtime.executor import (
  Call,
  Deadline,
  Executor,
  Handle,
  InputLost,
  Result,
  TaskRaised,
  WorkerLost,
  WorkerSpec,
)

FIRST_WORD_S = 10.0
"""Seconds of waiting for workers after which the user is told for whom."""


class RunFailed(RuntimeError):
  """The run cannot go on; the message says what happened and where to look."""


@dataclasses.dataclass
class WorkerState:
  """What the driver knows of one worker; the only mutable record of the runtime.

  Attributes:
    spec: how it was made.
    versions: adapters it holds or will hold once its queued calls have run.
    ticket: the call that is running, None where the worker is idle.
    busy_with: what the call is, for messages.
    since_s: when it was submitted.
    deadline_s: when it must have ended.
    on_end: what to do with its result.
    queued: adapters that were submitted before it.
    deaths: how often the worker has died since a step was last completed.
    starting: True until it has loaded its models.
  """

  spec: WorkerSpec
  versions: set[str] = dataclasses.field(default_factory=set)
  ticket: Any = None
  busy_with: str = ""
  since_s: float = 0.0
  deadline_s: float = 0.0
  on_end: Callable[[Result | Exception], None] | None = None
  queued: list[Any] = dataclasses.field(default_factory=list)
  deaths: int = 0
  starting: bool = True


class Pool:
  """Submits calls to workers, watches deadlines, and replaces workers that die.

  Args:
    executor: reaches the workers.
    specs: the workers, in order.
    startup_timeout_s: how long a worker may take to load its models.
    max_deaths: how often one worker may die within a step before the run ends.
    say: prints one line for the user.
  """

  def __init__(
    self,
    executor: Executor,
    specs: Sequence[WorkerSpec],
    *,
    startup_timeout_s: float,
    max_deaths: int = 3,
    say: Callable[[str], None] = print,
  ):
    self.executor = executor
    self.workers = {spec.name: WorkerState(spec) for spec in specs}
    self.on_death: Callable[[str], None] = lambda name: None
    self._startup_timeout_s = startup_timeout_s
    self._max_deaths = max_deaths
    self._say = say
    self.facts: dict[str, Mapping[str, Any]] = {}
    self.executor.start(specs)
    for name in self.workers:
      self._load(name)

  def _load(self, name: str) -> None:
    state = self.workers[name]
    state.starting = True

    def loaded(result: Result | Exception) -> None:
      if isinstance(result, Exception):
        if isinstance(result, TaskRaised):
          raise RunFailed(f"{self.executor.describe(name)} cannot load its models: {result}")
        return
      state.starting = False
      self.facts[name] = result.scalars

    self.submit(name, Call("load", {}), (), "loading models", self._startup_timeout_s, loaded)

  def members(self, groups: Sequence[str]) -> list[str]:
    """Names of the workers of some groups, in order."""
    return [name for name, state in self.workers.items() if state.spec.group in groups]

  @property
  def judges(self) -> list[str]:
    """Names of the workers that hold the judge, in order."""
    return [name for name, state in self.workers.items() if state.spec.judges]

  def idle(self, groups: Sequence[str]) -> list[str]:
    """Names of the idle workers of some groups, in order."""
    return [name for name in self.members(groups) if self.workers[name].ticket is None]

  def submit(
    self,
    name: str,
    call: Call,
    inputs: Sequence[Handle],
    what: str,
    timeout_s: float,
    on_end: Callable[[Result | Exception], None],
  ) -> None:
    """Starts a call on an idle worker.

    Args:
      name: the worker.
      call: the operation.
      inputs: its heavy inputs.
      what: what it is, for messages.
      timeout_s: how long it may take from now.
      on_end: receives the result, or WorkerLost, InputLost or TaskRaised.

    Raises:
      WorkerLost: the worker is dead already; hand it to `lost`.
    """
    state = self.workers[name]
    if state.ticket is not None:
      raise RuntimeError(f"{name} is busy with {state.busy_with}; it cannot take {what}")
    now = self.executor.now()
    state.ticket = self.executor.submit(name, call, inputs)
    state.busy_with, state.since_s = what, now
    state.deadline_s, state.on_end = now + timeout_s, on_end

  def give_adapter(self, name: str, version: str, handle: Handle) -> None:
    """Queues an adapter before the next call, where the worker lacks it; calls run in order."""
    state = self.workers[name]
    if version in state.versions:
      return
    ticket = self.executor.submit(name, Call("set_adapter", {"version": version}), (handle,))
    state.versions.add(version)
    state.queued.append(ticket)

  def wait(self, timeout_s: float = 1.0) -> None:
    """Waits for calls to end and hands out their results; kills workers past their deadline."""
    running = {s.ticket: name for name, s in self.workers.items() if s.ticket is not None}
    if not running:
      return
    now = self.executor.now()
    nearest = min(self.workers[name].deadline_s for name in running.values())
    ready = self.executor.wait(list(running), max(0.0, min(timeout_s, nearest - now)))
    for ticket in ready:
      self._end(running[ticket], ticket)
    now = self.executor.now()
    for name, state in self.workers.items():
      if state.ticket is not None and now > state.deadline_s:
        allowed = state.deadline_s - state.since_s
        text = f"{self.executor.describe(name)} did not end within {allowed:.3g} s"
        self._tell(text, state.busy_with)
        self.executor.kill(name)
        self._died(name, Deadline(text))

  def _end(self, name: str, ticket: Any) -> None:
    state = self.workers[name]
    on_end = state.on_end
    try:
      result: Result | Exception = self.executor.result(ticket)
    except WorkerLost as error:
      self._tell(str(error), state.busy_with)
      self._died(name, error)
      return
    except (TaskRaised, InputLost) as error:
      result = error
    state.ticket, state.on_end = None, None
    for queued in state.queued:
      try:
        self.executor.result(queued)
      except (TaskRaised, InputLost) as error:
        result = error  # the cause; what named the adapter fails for want of it
    state.queued.clear()
    if on_end is not None:
      on_end(result)

  def lost(self, name: str, error: Exception) -> None:
    """Handles a death that showed when a call was submitted."""
    self._tell(str(error), self.workers[name].busy_with)
    self._died(name, error)

  def _tell(self, happened: str, what: str) -> None:
    self._say(f"{happened}; last task: {what or 'none'}; the worker is started again")

  def _died(self, name: str, error: Exception) -> None:
    state = self.workers[name]
    on_end, what = state.on_end, state.busy_with
    if state.ticket is not None:
      self.executor.discard(state.ticket)
    state.ticket, state.on_end = None, None
    for ticket in state.queued:
      self.executor.discard(ticket)
    state.queued.clear()
    state.versions = set()
    state.deaths += 1
    if state.deaths > self._max_deaths:
      raise RunFailed(
        f"{self.executor.describe(name)} died {state.deaths} times, last during {what}: {error}"
      )
    if on_end is not None:
      on_end(error)
    self.on_death(name)
    self.executor.respawn(name)
    self._load(name)

  def drain(self) -> None:
    """Waits until every worker is idle; each running call has a deadline of its own.

    A long wait says what for, at intervals that double.
    """
    start_s, told_s = self.executor.now(), FIRST_WORD_S
    while any(s.ticket is not None for s in self.workers.values()):
      self.wait()
      if self.executor.now() - start_s > told_s:
        told_s *= 2
        self._say_waiting()

  def _say_waiting(self) -> None:
    now = self.executor.now()
    busy = [(name, s) for name, s in self.workers.items() if s.ticket is not None]
    for name, state in busy:
      self._say(
        f"waiting for {self.executor.describe(name)}: {state.busy_with}, "
        f"{now - state.since_s:.0f} s of at most {state.deadline_s - state.since_s:.0f} s"
      )
