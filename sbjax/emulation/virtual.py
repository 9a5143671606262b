"""An executor on a virtual clock: emulated workers in this process, no waiting at all."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from sbjax.emulation.device import STEP_KINDS, EmulatedWorker, Emulation
from sbjax.runtime.executor import Call, Result, TaskRaised, WorkerLost, WorkerSpec


@dataclasses.dataclass
class _Running:
  worker: str
  end_s: float
  outcome: Result | Exception


class VirtualExecutor:
  """Runs calls in the order of their virtual ends; the clock moves only while someone waits.

  Args:
    emulation: what the workers are; its costs' `dispatch_s` precedes every task of a step.
  """

  def __init__(self, emulation: Emulation):
    self._emulation = emulation
    self._specs: dict[str, WorkerSpec] = {}
    self._workers: dict[str, EmulatedWorker] = {}
    self._free_s: dict[str, float] = {}
    self._calls: dict[int, _Running] = {}
    self._ids = itertools.count()
    self._now_s = 0.0

  def start(self, specs: Sequence[WorkerSpec]) -> None:
    """Makes the workers."""
    self._specs = {spec.name: spec for spec in specs}
    for name in self._specs:
      self.respawn(name)

  def submit(self, worker: str, call: Call, inputs: Sequence[Any] = ()) -> int:
    """Works out when a call will end, behind what its worker has been given before."""
    ticket = next(self._ids)
    if worker not in self._workers:
      lost = WorkerLost(f"{self.describe(worker)} was ended")
      self._calls[ticket] = _Running(worker, self._now_s, lost)
      return ticket
    begin_s = max(self._now_s, self._free_s[worker])
    if call.op in STEP_KINDS:
      begin_s += self._emulation.costs.dispatch_s * self._emulation.costs.scale
    try:
      seconds, scalars, heavy = self._workers[worker].run(call.op, call.args, *inputs)
      outcome: Result | Exception = Result({**scalars, "seconds": seconds}, heavy, seconds)
    except LookupError as error:  # it lacks an adapter
      seconds, outcome = 0.0, TaskRaised(f"{call.op} on {self.describe(worker)}: {error}")
    self._free_s[worker] = begin_s + seconds
    self._calls[ticket] = _Running(worker, begin_s + seconds, outcome)
    return ticket

  def wait(self, tickets: Sequence[int], timeout_s: float) -> list[int]:
    """Moves the clock to the first end among the tickets, by at most `timeout_s`."""
    first_s = min(self._calls[ticket].end_s for ticket in tickets)
    self._now_s = max(self._now_s, min(first_s, self._now_s + timeout_s))
    return [ticket for ticket in tickets if self._calls[ticket].end_s <= self._now_s]

  def result(self, ticket: int) -> Result:
    """Gives an ended call's result or raises its failure."""
    outcome = self._calls.pop(ticket).outcome
    if isinstance(outcome, Exception):
      raise outcome
    return outcome

  def discard(self, ticket: int) -> None:
    """Forgets a call."""
    self._calls.pop(ticket, None)

  def fetch(self, handle: Any) -> Any:
    """A handle is the value itself."""
    return handle

  def put(self, value: Any) -> Any:
    """A handle is the value itself."""
    return value

  def keep(self, handles: Sequence[Any]) -> None:
    """There is one node."""

  def kill(self, worker: str) -> None:
    """Ends a worker; its calls are lost now."""
    self._workers.pop(worker, None)
    for call in self._calls.values():
      if call.worker == worker and call.end_s > self._now_s:
        call.end_s = self._now_s
        call.outcome = WorkerLost(f"{self.describe(worker)} was ended")

  def respawn(self, worker: str) -> None:
    """Makes an empty worker."""
    self._workers[worker] = EmulatedWorker(self._emulation, self._specs[worker])
    self._free_s[worker] = self._now_s

  def describe(self, worker: str) -> str:
    """Names the worker."""
    return f"{worker} (emulated, virtual clock)"

  def now(self) -> float:
    """Virtual seconds since the executor was made."""
    return self._now_s

  def shutdown(self) -> None:
    """Forgets the workers."""
    self._workers.clear()
    self._calls.clear()
