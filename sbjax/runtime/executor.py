"""The executor protocol: how a driver reaches workers, and the errors it must expect."""

import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from sbjax.settings import Settings

Handle = Any
"""A reference to a result that stays where it was made (or in the object store)."""

Ticket = Any
"""A running call."""


class WorkerLost(RuntimeError):
  """The worker's process died; its unsent results and its memory are gone."""


class TaskRaised(RuntimeError):
  """The operation itself raised; doing it again elsewhere would raise again."""


class InputLost(RuntimeError):
  """Inputs of a call are gone with the node that kept them; the worker lives.

  Attributes:
    handles: the inputs, as they were passed.
  """

  def __init__(self, text: str, handles: Sequence["Handle"]):
    super().__init__(text)
    self.handles = tuple(handles)


class Deadline(RuntimeError):
  """A wait took longer than it may; the message names what was waited for."""


@dataclasses.dataclass(frozen=True)
class WorkerSpec:
  """How to make a worker.

  Attributes:
    name: e.g. `actor-0`.
    group: actor, reward or both.
    index: position among all workers; picks devices and cores.
    settings: the run's settings, from which the worker builds its models.
    log_file: where its output goes.
    builder: `module:function` that gives the worker's models from the settings and `judges`.
    judges: whether it may be asked to judge; only then it loads the judge.
  """

  name: str
  group: str
  index: int
  settings: Settings
  log_file: str
  builder: str = "sbjax.runtime.roles:build_roles"
  judges: bool = True


@dataclasses.dataclass(frozen=True)
class Call:
  """One operation on a worker.

  Attributes:
    op: the worker's method.
    args: small plain arguments.
    outputs: how many heavy results it gives beside its scalars.
  """

  op: str
  args: Mapping[str, Any]
  outputs: int = 0


@dataclasses.dataclass(frozen=True)
class Result:
  """What a finished call gave.

  Attributes:
    scalars: small results, here in the driver.
    heavy: handles of the heavy ones, in order.
    seconds: how long the operation itself ran on the worker.
  """

  scalars: Mapping[str, Any]
  heavy: tuple[Handle, ...]
  seconds: float


def load_models(spec: WorkerSpec) -> Any:
  """Imports what builds a worker's models, and lets it."""
  module, _, function = spec.builder.partition(":")
  return getattr(importlib.import_module(module), function)(spec.settings, spec.judges)


class Executor(Protocol):
  """Runs calls on workers. A worker runs its calls in the order in which they were submitted."""

  def start(self, specs: Sequence[WorkerSpec]) -> None:
    """Creates the workers; returns before they are ready."""
    ...

  def submit(self, worker: str, call: Call, inputs: Sequence[Handle] = ()) -> Ticket:
    """Starts a call; its heavy inputs do not pass through the driver."""
    ...

  def wait(self, tickets: Sequence[Ticket], timeout_s: float) -> list[Ticket]:
    """Gives the tickets that have ended, at least one unless the time is over."""
    ...

  def result(self, ticket: Ticket) -> Result:
    """Gives an ended call's result.

    Raises:
      WorkerLost: the worker died.
      TaskRaised: the operation raised.
      InputLost: an input is gone.
    """
    ...

  def discard(self, ticket: Ticket) -> None:
    """Forgets a call whose result nobody will ask for; one that is unknown already is no error."""
    ...

  def fetch(self, handle: Handle) -> Any:
    """Brings a heavy result here; for samples and checkpoints, never within a step's path."""
    ...

  def put(self, value: Any) -> Handle:
    """Makes a value available to workers."""
    ...

  def keep(self, handles: Sequence[Handle]) -> None:
    """Has copies made on the driver's node, so that results outlive the node that made them."""
    ...

  def kill(self, worker: str) -> None:
    """Ends a worker's process at once."""
    ...

  def respawn(self, worker: str) -> None:
    """Makes a worker anew after its death; it holds no adapter and no buffer."""
    ...

  def describe(self, worker: str) -> str:
    """Names role, node, device and log file of a worker, for messages."""
    ...

  def now(self) -> float:
    """Seconds on the executor's clock."""
    ...

  def shutdown(self) -> None:
    """Ends every worker and whatever the executor started."""
    ...
