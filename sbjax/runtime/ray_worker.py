"""The worker's side of Ray: the actor, what it makes in its process, and where that process is."""

import dataclasses
import os
import socket
from collections.abc import Callable
from typing import Any

import ray

from sbjax.runtime import placement
from sbjax.runtime.executor import WorkerSpec, load_models


@dataclasses.dataclass(frozen=True)
class Process:
  """Where a worker runs.

  Attributes:
    host: the machine's name.
    node: Ray's id of its node; several nodes may share a machine.
    pid: its process there.
    device: its cores or accelerators, for messages.
  """

  host: str
  node: str
  pid: int
  device: str

  def __str__(self) -> str:
    return f"node {self.host}/{self.node[:8]}, {self.device}, pid {self.pid}"


def real_worker(spec: WorkerSpec) -> Any:
  """Makes a worker that computes; the first import of JAX in its process."""
  from sbjax.compilation import cache_dir, use_cache
  from sbjax.runtime.worker import Worker

  use_cache(cache_dir())
  return Worker(spec.name, lambda: load_models(spec))


class RayWorker:
  """The actor: sets its process up before JAX is imported, then runs operations."""

  def __init__(self, spec: WorkerSpec, slot: int, cores_per_worker: int, make: Callable):
    os.makedirs(os.path.dirname(spec.log_file), exist_ok=True)
    log = os.open(spec.log_file, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    gpus = ray.get_gpu_ids()
    cores = ()
    if not gpus and cores_per_worker:
      # JAX sizes its thread pool by this thread's affinity when it starts; one core per worker
      # keeps workers out of each other's way and sums in one order for every number of workers.
      cores = placement.pinned(slot, cores_per_worker, sorted(os.sched_getaffinity(0)))
      os.sched_setaffinity(0, cores)
    names = [f"core {c}" for c in cores] or [f"GPU {g}" for g in gpus] or ["all cores"]
    node = ray.get_runtime_context().get_node_id()
    self._process = Process(socket.gethostname(), node, os.getpid(), ", ".join(names))
    self._worker = make(spec)

  def process(self) -> Process:
    """Says where it runs."""
    return self._process

  def call(self, op: str, args: dict[str, Any], *inputs: Any):
    """Runs one operation; Ray splits the tuple into separate objects."""
    scalars, *heavy = self._worker.call(op, args, *inputs)
    return (scalars, *heavy) if heavy else scalars
