"""The inline executor: the same graph and operations in this process, one after another."""

import dataclasses
import itertools
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from sbjax.runtime.executor import Call, Result, TaskRaised, WorkerLost, WorkerSpec, load_models
from sbjax.runtime.roles import Roles
from sbjax.runtime.worker import Worker


class InlineExecutor:
  """Runs calls when they are waited for; workers share one set of models."""

  def __init__(self):
    self._roles: Roles | None = None
    self._specs: dict[str, WorkerSpec] = {}
    self._workers: dict[str, Worker] = {}
    self._queue: deque[tuple[int, str, Call, tuple[Any, ...], Worker | None]] = deque()
    self._ended: dict[int, Result | Exception] = {}
    self._ids = itertools.count()
    self._origin = time.perf_counter()

  def _shared(self, judges: bool) -> Roles:
    """The models; a worker that may not judge gets no judge, as in a process of its own."""
    if self._roles is None:
      # One that judges, if any does: its models are everybody's.
      spec = max(self._specs.values(), key=lambda spec: spec.judges)
      self._roles = load_models(spec)
    assert self._roles is not None
    return self._roles if judges else dataclasses.replace(self._roles, judge=None)

  def _worker(self, spec: WorkerSpec) -> Worker:
    return Worker(spec.name, lambda: self._shared(spec.judges))

  def start(self, specs: Sequence[WorkerSpec]) -> None:
    """Makes the workers; models are loaded by the first operation."""
    self._specs = {spec.name: spec for spec in specs}
    self._workers = {spec.name: self._worker(spec) for spec in specs}

  def submit(self, worker: str, call: Call, inputs: Sequence[Any] = ()) -> int:
    """Queues a call."""
    ticket = next(self._ids)
    self._queue.append((ticket, worker, call, tuple(inputs), self._workers.get(worker)))
    return ticket

  def wait(self, tickets: Sequence[int], timeout_s: float) -> list[int]:
    """Runs queued calls until one of the tickets has ended.

    One process cannot interrupt itself, so a deadline does not apply here.
    """
    del timeout_s
    wanted = set(tickets)
    while self._queue and not wanted & set(self._ended):
      ticket, name, call, inputs, worker = self._queue.popleft()
      # A worker that was killed after the call was queued never runs it.
      if worker is None or self._workers.get(name) is not worker:
        self._ended[ticket] = WorkerLost(f"{self.describe(name)} was ended")
        continue
      try:
        scalars, *heavy = worker.call(call.op, call.args, *inputs)
        self._ended[ticket] = Result(scalars, tuple(heavy), scalars["seconds"])
      except Exception as error:
        failure = TaskRaised(f"{call.op} on {self.describe(name)}: {error}")
        failure.__cause__ = error
        self._ended[ticket] = failure
    return [ticket for ticket in tickets if ticket in self._ended]

  def result(self, ticket: int) -> Result:
    """Gives an ended call's result or raises its failure."""
    outcome = self._ended.pop(ticket)
    if isinstance(outcome, Exception):
      raise outcome
    return outcome

  def discard(self, ticket: int) -> None:
    """Forgets a call."""
    self._ended.pop(ticket, None)

  def fetch(self, handle: Any) -> Any:
    """A handle is the value itself."""
    return handle

  def put(self, value: Any) -> Any:
    """A handle is the value itself."""
    return value

  def keep(self, handles: Sequence[Any]) -> None:
    """There is one node."""

  def kill(self, worker: str) -> None:
    """Drops a worker with everything it holds."""
    self._workers.pop(worker, None)

  def respawn(self, worker: str) -> None:
    """Makes an empty worker of the same name."""
    self._workers[worker] = self._worker(self._specs[worker])

  def describe(self, worker: str) -> str:
    """Names the worker."""
    group = self._specs[worker].group if worker in self._specs else "unknown"
    return f"{worker} ({group}, this process)"

  def now(self) -> float:
    """Seconds since the executor was made."""
    return time.perf_counter() - self._origin

  def shutdown(self) -> None:
    """Forgets the workers."""
    self._workers.clear()
    self._queue.clear()
