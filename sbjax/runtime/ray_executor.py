"""The Ray executor: one actor process per worker, references instead of data, deadlines."""

import contextlib
import os
import signal
import threading
import time
import warnings
from collections.abc import Sequence
from typing import Any

# Ray listens on every interface unless it believes that it runs on a single machine; see
# docs/design.md. It reads the variable when it is imported, its processes when they start.
_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
os.environ.update(_LOOPBACK)

import ray  # noqa: E402
from ray.exceptions import (  # noqa: E402
  GetTimeoutError,
  RayActorError,
  RayError,
  RayTaskError,
)

from sbjax.runtime.executor import (  # noqa: E402
  Call,
  Result,
  TaskRaised,
  WorkerLost,
  WorkerSpec,
  load_builder,
)
from sbjax.runtime.pool import RunFailed  # noqa: E402


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
      f"{what}: {said}; try again when the machine is less busy, and see Ray's logs in "
      "/tmp/ray/session_latest/logs if it stays so"
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


class _RayWorker:
  """The actor: sets its environment up before JAX is imported, then runs operations."""

  def __init__(self, spec: WorkerSpec, cores: tuple[int, ...]):
    os.makedirs(os.path.dirname(spec.log_file), exist_ok=True)
    log = os.open(spec.log_file, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if cores:
      # JAX sizes its thread pool by this thread's affinity when it starts; one core per worker
      # keeps workers out of each other's way and sums in one order for every number of workers.
      os.sched_setaffinity(0, cores)
    from sbjax.runtime.worker import Worker

    self._worker = Worker(spec.name, lambda: load_builder(spec)(spec.settings))

  def call(self, op: str, args: dict[str, Any], *inputs: Any):
    """Runs one operation; Ray splits the tuple into separate objects."""
    scalars, *heavy = self._worker.call(op, args, *inputs)
    return (scalars, *heavy) if heavy else scalars


class RayExecutor:
  """Runs calls on Ray actors.

  Args:
    workdir: folder for worker logs.
    cores_per_worker: CPU cores that a worker is pinned to where it runs on CPUs; 0 pins none.
    gpus_per_worker: accelerators that Ray reserves for a worker.
    devices_per_worker: devices of a worker's mesh; without accelerators JAX makes as many of a CPU.
    address: a running cluster's address, or None to start Ray on this machine, on 127.0.0.1 only.
    cache_dir: compilation cache that all workers share.

  Raises:
    RunFailed: Ray does not start, or its cluster is not reached.
  """

  def __init__(
    self,
    workdir: str,
    *,
    cores_per_worker: int,
    gpus_per_worker: int,
    devices_per_worker: int = 1,
    cache_dir: str,
    address: str | None = None,
  ):
    self._cores_per_worker = cores_per_worker
    self._gpus_per_worker = gpus_per_worker
    self._specs: dict[str, WorkerSpec] = {}
    self._actors: dict[str, Any] = {}
    self._started_here = not ray.is_initialized()
    self._owner: dict[Any, tuple[str, Call]] = {}
    self._heavy: dict[Any, tuple[Any, ...]] = {}
    env = {
      **_LOOPBACK,
      "JAX_COMPILATION_CACHE_DIR": cache_dir,
      "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5",
      "PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")]),
    }
    if not gpus_per_worker:
      env["JAX_PLATFORMS"] = "cpu"
      env["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices_per_worker}"
    self._env = env
    if self._started_here:
      with _own_signal_handlers(), warnings.catch_warnings():
        # JAX warns of a fork after its threads have started; Ray's children exec at once.
        warnings.filterwarnings("ignore", message="os.fork", category=RuntimeWarning)
        what = f"no cluster at runtime.ray_address={address!r}" if address else "Ray did not start"
        try:
          with _one_sentence(what):
            ray.init(
              address=address,
              include_dashboard=False,
              log_to_driver=False,
              configure_logging=False,
            )
        except RunFailed:
          ray.shutdown()  # what came up before the failure
          raise
    self._origin = time.perf_counter()
    self._workdir = workdir

  def _create(self, spec: WorkerSpec) -> Any:
    remote = ray.remote(_RayWorker)
    return remote.options(
      num_cpus=0,
      num_gpus=self._gpus_per_worker,
      max_restarts=0,
      max_task_retries=0,
      runtime_env={"env_vars": self._env},
    ).remote(spec, self._cores(spec.index))

  def _cores(self, index: int) -> tuple[int, ...]:
    if self._gpus_per_worker or not self._cores_per_worker:
      return ()
    usable = sorted(os.sched_getaffinity(0))
    first = index * self._cores_per_worker
    return tuple(usable[(first + i) % len(usable)] for i in range(self._cores_per_worker))

  def start(self, specs: Sequence[WorkerSpec]) -> None:
    """Creates the actors; they come up in parallel.

    Raises:
      ValueError: if the cluster has fewer accelerators than the workers need.
      RunFailed: if Ray does not answer.
    """
    with _one_sentence("Ray does not answer"):
      there = int(ray.cluster_resources().get("GPU", 0))
    if self._gpus_per_worker * len(specs) > there:
      # Ray itself would wait for them without a word.
      raise ValueError(
        f"runtime.gpus_per_worker={self._gpus_per_worker} with {len(specs)} workers needs "
        f"{self._gpus_per_worker * len(specs)} accelerators, but Ray has {there}; ask for fewer"
      )
    self._specs = {spec.name: spec for spec in specs}
    with _one_sentence("Ray does not create the workers"):
      self._actors = {spec.name: self._create(spec) for spec in specs}

  def submit(self, worker: str, call: Call, inputs: Sequence[Any] = ()) -> Any:
    """Submits a call; references among the inputs are resolved on the worker's node."""
    refs = (
      self._actors[worker]
      .call.options(num_returns=1 + call.outputs)
      .remote(call.op, dict(call.args), *inputs)
    )
    first, *heavy = refs if call.outputs else [refs]
    self._owner[first] = (worker, call)
    self._heavy[first] = tuple(heavy)
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
    heavy = self._heavy.pop(ticket)
    try:
      scalars: Any = ray.get(ticket, timeout=60)
    except RayActorError as error:
      raise WorkerLost(f"{self.describe(worker)} died during {call.op!r}") from error
    except GetTimeoutError as error:
      raise WorkerLost(f"{self.describe(worker)}: the result of {call.op!r} is lost") from error
    except RayTaskError as error:
      cause = error.cause if isinstance(error.cause, Exception) else error
      raise TaskRaised(f"{call.op} on {self.describe(worker)}: {cause}") from cause
    except RayError as error:  # an actor that could not be created, an object that is gone
      said = " ".join(str(error).split())
      raise WorkerLost(f"{self.describe(worker)} is lost during {call.op!r}: {said}") from error
    return Result(scalars, heavy, scalars["seconds"])

  def discard(self, ticket: Any) -> None:
    """Forgets a call."""
    self._owner.pop(ticket, None)
    self._heavy.pop(ticket, None)

  def fetch(self, handle: Any) -> Any:
    """Brings a heavy result here (shared memory on one node)."""
    return ray.get(handle, timeout=120) if isinstance(handle, ray.ObjectRef) else handle

  def put(self, value: Any) -> Any:
    """Puts a value into the object store."""
    return ray.put(value)

  def kill(self, worker: str) -> None:
    """Ends a worker's process at once."""
    ray.kill(self._actors[worker], no_restart=True)

  def respawn(self, worker: str) -> None:
    """Creates a fresh actor of the same name."""
    self._actors[worker] = self._create(self._specs[worker])

  def describe(self, worker: str) -> str:
    """Names role, device and log file."""
    spec = self._specs[worker]
    cores = self._cores(spec.index)
    device = f"cores {','.join(map(str, cores))}" if cores else "its own accelerator"
    return f"{worker} ({spec.group}, {device}, log {spec.log_file})"

  def now(self) -> float:
    """Seconds since the executor was made."""
    return time.perf_counter() - self._origin

  def shutdown(self) -> None:
    """Ends the actors, and Ray where this executor started it."""
    for actor in self._actors.values():
      ray.kill(actor, no_restart=True)
    self._actors = {}
    if self._started_here:
      ray.shutdown()
