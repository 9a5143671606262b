"""The Ray executor: one actor process per worker, references instead of data, deadlines."""

import contextlib
import os
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import (
  GetTimeoutError,
  ObjectLostError,
  RayActorError,
  RayError,
  RayTaskError,
)
from ray.util.placement_group import (
  placement_group,
  placement_group_table,
  remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from sbjax.runtime import placement
from sbjax.runtime.executor import (
  Call,
  InputLost,
  Result,
  TaskRaised,
  WorkerLost,
  WorkerSpec,
)
from sbjax.runtime.pool import RunFailed
from sbjax.runtime.ray_worker import Process, RayWorker, real_worker

LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Environment variable; "0" makes a Ray that is started here listen on 127.0.0.1 only."""

REGISTER = "RAY_worker_register_timeout_seconds"
"""Environment variable of a node: how long a new process may take to say that it is there."""

ROOM_TIMEOUT_S = 60.0
"""How long the workers' places may stay taken by other users of a cluster."""

CONNECT_TIMEOUT_S = 5.0
"""How long a cluster's address may take to answer."""


@contextlib.contextmanager
def _one_sentence(what: str):
  """Turns what Ray raises while something starts into `RunFailed` of one sentence.

  Ray has no type of its own for it: a node that an overloaded machine does not bring up in time is
  a plain `Exception`.
  """
  try:
    yield
  except Exception as error:
    said = " ".join(str(error).split()).split(". ")[0].rstrip(".") or type(error).__name__
    raise RunFailed(
      f"{what}: {said}; try again when the machine is less busy, and see the logs in Ray's "
      "temporary folder if it stays so"
    ) from error


@contextlib.contextmanager
def _own_signal_handlers():
  """Keeps the program's signal handlers: Ray's own end the process without a checkpoint."""
  if threading.current_thread() is not threading.main_thread():
    yield
    return
  before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
  try:
    yield
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)


class RayExecutor:
  """Runs calls on Ray actors.

  Args:
    cores_per_worker: CPU cores that a worker is pinned to where it runs on CPUs; 0 pins none.
    gpus_per_worker: accelerators that Ray reserves for a worker.
    devices_per_worker: devices of a worker's mesh; without accelerators JAX makes as many of a CPU.
    address: a running cluster's address, or None to start Ray on this machine, on 127.0.0.1 only.
    cache_dir: compilation cache of workers on this machine. On a cluster, unless the environment
      names one for all, each machine uses one of its own: programs for CPUs differ by processor.
    make_worker: makes what answers a worker's calls, in the worker's process.
  """

  def __init__(
    self,
    *,
    cores_per_worker: int,
    gpus_per_worker: int,
    devices_per_worker: int = 1,
    cache_dir: str,
    address: str | None = None,
    make_worker: Callable[[WorkerSpec], Any] = real_worker,
  ):
    self._address = address
    self._make_worker = make_worker
    self._cores_per_worker = cores_per_worker
    self._gpus_per_worker = gpus_per_worker
    self._specs: dict[str, WorkerSpec] = {}
    self._actors: dict[str, Any] = {}
    self._processes: dict[str, Any] = {}
    self._places: Any = None
    self._started_here = False
    self._owner: dict[Any, tuple[str, Call]] = {}
    self._heavy: dict[Any, tuple[Any, ...]] = {}
    self._inputs: dict[Any, tuple[Any, ...]] = {}
    env = {"PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])}
    if not address:
      env[LOOPBACK] = "0"
    if not address or "JAX_COMPILATION_CACHE_DIR" in os.environ:
      env["JAX_COMPILATION_CACHE_DIR"] = cache_dir
    if not gpus_per_worker:
      env["JAX_PLATFORMS"] = "cpu"
      env["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices_per_worker}"
    self._env = env
    self._origin = time.perf_counter()

  # Start.

  def start(self, specs: Sequence[WorkerSpec]) -> None:
    """Connects to Ray and creates the actors, which come up in parallel.

    Raises:
      ValueError: no cluster answers, or its nodes have no room for the workers.
      RunFailed: Ray does not start, or does not answer.
    """
    self._specs = {spec.name: spec for spec in specs}
    bundles = [placement.bundle(spec) for spec in specs]
    if not ray.is_initialized():
      self._connect(sum(b["CPU"] for b in bundles))
    with _one_sentence("Ray does not answer"):
      nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    placement.check_room(specs, nodes)
    places = self._places = placement_group(bundles, strategy="PACK")
    if not places.wait(ROOM_TIMEOUT_S):
      free = {
        k: v for k, v in ray.available_resources().items() if k in {n for b in bundles for n in b}
      }
      raise ValueError(
        f"the Ray cluster at {self._address or 'this machine'} is in use: {len(specs)} workers "
        f"found no room within {ROOM_TIMEOUT_S:.0f} s ({free or 'nothing'} is free), so use fewer "
        "workers or wait."
      )
    with _one_sentence("Ray does not create the workers"):
      for spec in specs:
        self._create(spec.name)

  def _connect(self, cpus: float) -> None:
    options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    if self._address:
      _must_answer(self._address)
      options["address"] = self._address
    else:
      if os.environ.get(LOOPBACK) != "0":
        raise RuntimeError(f"{LOOPBACK} must be '0' before Ray is imported: it would open ports")
      # On a busy machine a process needs more than Ray's minute to import what it must; Ray would
      # end it and start another, again and again. The driver's own deadline counts instead.
      longest_s = max(spec.settings.runtime.startup_timeout_s for spec in self._specs.values())
      os.environ.setdefault(REGISTER, str(int(longest_s) + 1))
      # Workers may outnumber cores, for tests; on this machine the check of settings bounds them.
      options |= {
        "address": "local",  # else Ray joins whatever cluster it finds on this machine
        "include_dashboard": False,
        "num_cpus": max(int(cpus), len(os.sched_getaffinity(0))),
      }
    with _own_signal_handlers(), warnings.catch_warnings():
      # JAX warns of a fork after its threads have started; Ray's children exec at once.
      warnings.filterwarnings("ignore", message="os.fork", category=RuntimeWarning)
      where = f"no cluster at {self._address}" if self._address else "Ray did not start"
      try:
        with _one_sentence(where):
          ray.init(**options)
      except RunFailed:
        ray.shutdown()  # what came up before the failure
        raise
    self._started_here = True

  def _create(self, worker: str) -> None:
    spec = self._specs[worker]
    bundle = dict(placement.bundle(spec))
    actor = (
      ray.remote(RayWorker)
      .options(
        num_cpus=bundle.pop("CPU"),
        num_gpus=bundle.pop("GPU", 0.0),
        resources=bundle,
        max_restarts=0,
        max_task_retries=0,
        runtime_env={"env_vars": self._env},
        scheduling_strategy=PlacementGroupSchedulingStrategy(
          self._places, placement_group_bundle_index=list(self._specs).index(worker)
        ),
      )
      .remote(spec, self._slots()[worker], self._cores_per_worker, self._make_worker)
    )
    self._actors[worker] = actor
    self._processes[worker] = actor.process.remote()

  def _slots(self) -> dict[str, int]:
    """The workers' numbers on their machines; Ray moves the places of a node that is lost."""
    hosts = {node["NodeID"]: node["NodeManagerHostname"] for node in ray.nodes()}
    taken = placement_group_table(self._places)["bundles_to_node_id"]
    return placement.core_slots({w: hosts.get(taken[i], "") for i, w in enumerate(self._specs)})

  # Calls.

  def submit(self, worker: str, call: Call, inputs: Sequence[Any] = ()) -> Any:
    """Submits a call; references among the inputs are resolved on the worker's node.

    Raises:
      WorkerLost: the worker is dead.
    """
    try:
      refs = (
        self._actors[worker]
        .call.options(num_returns=1 + call.outputs)
        .remote(call.op, dict(call.args), *inputs)
      )
    except RayActorError as error:  # one that Ray already knows to be dead
      raise WorkerLost(f"{self.describe(worker)} died before {call.op!r}") from error
    first, *heavy = refs if call.outputs else [refs]
    self._owner[first] = (worker, call)
    self._heavy[first], self._inputs[first] = tuple(heavy), tuple(inputs)
    return first

  def wait(self, tickets: Sequence[Any], timeout_s: float) -> list[Any]:
    """Gives the calls that have ended, at least one unless the time is over."""
    ready, rest = ray.wait(list(tickets), num_returns=1, timeout=max(timeout_s, 0.0))
    if ready and rest:
      more, _ = ray.wait(rest, num_returns=len(rest), timeout=0)
      ready += more
    return ready

  def result(self, ticket: Any) -> Result:
    """Gives an ended call's result."""
    worker, call = self._owner.pop(ticket)
    heavy, inputs = self._heavy.pop(ticket), self._inputs.pop(ticket)
    try:
      scalars: Any = ray.get(ticket, timeout=60)
    except RayActorError as error:
      raise WorkerLost(f"{self.describe(worker)} died during {call.op!r}") from error
    except GetTimeoutError as error:
      raise WorkerLost(f"{self.describe(worker)}: the result of {call.op!r} is lost") from error
    except RayTaskError as error:
      cause = error.cause if isinstance(error.cause, Exception) else error
      if isinstance(cause, ObjectLostError):
        text = f"{call.op} on {self.describe(worker)}: an input was lost with its node"
        named = [ref for ref in inputs if ref.hex() == cause.object_ref_hex]
        raise InputLost(text, named or inputs) from cause
      raise TaskRaised(f"{call.op} on {self.describe(worker)}: {cause}") from cause
    except RayError as error:  # an actor that could not be created, an object that is gone
      said = " ".join(str(error).split())
      raise WorkerLost(f"{self.describe(worker)} is lost during {call.op!r}: {said}") from error
    return Result(scalars, heavy, scalars["seconds"])

  def discard(self, ticket: Any) -> None:
    """Forgets a call."""
    self._owner.pop(ticket, None)
    self._heavy.pop(ticket, None)
    self._inputs.pop(ticket, None)

  def fetch(self, handle: Any) -> Any:
    """Brings a heavy result here (shared memory on one node).

    Raises:
      RunFailed: it is lost, or does not come within two minutes.
    """
    if not isinstance(handle, ray.ObjectRef):
      return handle
    try:
      return ray.get(handle, timeout=120)
    except (ObjectLostError, GetTimeoutError) as error:
      raise RunFailed(
        "a result was lost with the node that kept it; continue with --config.resume=auto"
      ) from error

  def put(self, value: Any) -> Any:
    """Puts a value into the object store."""
    return ray.put(value)

  def keep(self, handles: Sequence[Any]) -> None:
    """Has the driver's node pull copies; nothing waits for them."""
    refs = [handle for handle in handles if isinstance(handle, ray.ObjectRef)]
    if refs:
      ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=True)

  def kill(self, worker: str) -> None:
    """Ends a worker's process at once."""
    ray.kill(self._actors[worker], no_restart=True)
    process = self.process(worker)
    if process is not None and process.host == socket.gethostname():
      # Ray asks the process first and ends one that does not answer after five seconds.
      _end_at_once(process.pid)

  def respawn(self, worker: str) -> None:
    """Creates a fresh actor of the same name, in the same place while its node lives."""
    # One that was only out of reach would keep the place.
    ray.kill(self._actors[worker], no_restart=True)
    self._create(worker)

  def process(self, worker: str) -> Process | None:
    """Where a worker runs; None while it starts, or where it died before it could say."""
    told = self._processes[worker]
    if not isinstance(told, Process):
      ready, _ = ray.wait([told], timeout=0)
      if not ready:
        return None
      try:
        self._processes[worker] = ray.get(told, timeout=1)
      except RayError:
        return None
    return self._processes[worker]

  def describe(self, worker: str) -> str:
    """Names role, node, device and log file."""
    spec, process = self._specs[worker], self.process(worker)
    where = str(process) if process else "node not known: it has not begun"
    return f"{worker} ({spec.group}, {where}, log {spec.log_file})"

  def now(self) -> float:
    """Seconds since the executor was made."""
    return time.perf_counter() - self._origin

  def shutdown(self) -> None:
    """Ends the actors, and Ray where this executor started it."""
    for worker in self._actors:
      self.kill(worker)
    self._actors = {}
    if self._places is not None:
      remove_placement_group(self._places)
      self._places = None
    if self._started_here:
      ray.shutdown()


def _end_at_once(pid: int) -> None:
  """Ends a worker on this machine, unless it has ended and another process has its number."""
  try:
    with open(f"/proc/{pid}/cmdline", "rb") as file:
      if RayWorker.__name__.encode() in file.read():  # Ray titles an actor by its class
        os.kill(pid, signal.SIGKILL)
  except OSError:
    return  # it has ended already


def _must_answer(address: str) -> None:
  """Refuses a cluster's address that nobody answers at; Ray would try for a minute."""
  if address == "auto":
    return
  host, _, port = address.rpartition(":")
  try:
    socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S).close()
  except OSError as error:
    raise ValueError(
      f"runtime.ray_address is {address!r}, where nothing answers ({error}); start a cluster as "
      "docs/clusters.md says, or leave it empty to run on this machine."
    ) from error
