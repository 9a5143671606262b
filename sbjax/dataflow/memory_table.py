"""What each kind of worker needs, part by part, and the largest adapter and mini-batch that fit.

A worker holds models, adapters and a judge's cache all the time, and runs one task at a time: it
needs what it holds and the largest of what its tasks add. Folded gradients lie in host memory.
"""

import dataclasses
from collections.abc import Callable, Mapping

from sbjax.dataflow import memory_formula as formula
from sbjax.dataflow import memory_models as models
from sbjax.dataflow.memory import Memory
from sbjax.dataflow.schemes import Scheme

VERSIONS = 3
"""Adapter versions that a worker holds: the initial, the rollout's and the trained one."""

_FLOAT = 4
# The optimizer step: gradient, adapter, average, two moments; all but the first again; their terms.
_UPDATE_COPIES = 5 + 4 + 2


@dataclasses.dataclass(frozen=True)
class RunSizes:
  """A run's tasks as a worker sees them.

  Attributes:
    chunk: a chunk of the video model's work.
    chunks: of a video.
    decode: a call of the decoder.
    latent_frames: of a video.
    judge: the judge that runs on the workers' devices; None where there is none.
    units: scalars of a candidate that carry a ratio.
    buffers: folded gradients of a candidate and block.
    blocks: folding blocks of a trajectory.
    known_weights: whether the first update folds as it goes, without unit gradients.
    updates: mini-batches and epochs of a step; the first folds as it goes where it can.
    minibatch: candidates of a mini-batch.
    reference: whether the initial adapter's predictions are needed.
    fsdp: devices of a worker over which weights are cut.
    seq: devices over which tokens are.
    host_is_device: whether device memory is the host's, as on CPUs.
    images: judges of single frames.
  """

  chunk: formula.ChunkSizes
  chunks: int
  decode: models.DecodeSizes
  latent_frames: int
  judge: models.JudgeSizes | None
  units: int
  buffers: int
  blocks: int
  known_weights: bool
  updates: int
  minibatch: int
  reference: bool
  fsdp: int
  seq: int
  host_is_device: bool
  images: tuple[models.ImageJudgeSizes, ...] = ()


@dataclasses.dataclass(frozen=True)
class WorkerBytes:
  """One kind of worker.

  Attributes:
    group: actor, reward or both.
    held: part -> bytes that it holds all the time, per device.
    tasks: task -> part -> bytes that it adds while it runs, per device.
    host: folded gradients of one candidate, in host memory.
  """

  group: str
  held: Mapping[str, int]
  tasks: Mapping[str, Mapping[str, int]]
  host: int

  @property
  def held_bytes(self) -> int:
    """Everything that it holds all the time."""
    return sum(self.held.values())

  @property
  def largest_task(self) -> str:
    """The task that adds most."""
    return max(self.tasks, key=lambda task: sum(self.tasks[task].values()))

  @property
  def total_bytes(self) -> int:
    """What a device must have."""
    return self.held_bytes + sum(self.tasks[self.largest_task].values())


Working = Mapping[str, int]
"""Task -> bytes that the compiler reports for its work; tasks that are missing are estimated."""


def worker_bytes(
  run: RunSizes, scheme: Scheme, group: str, working: Working | None = None
) -> WorkerBytes:
  """What a worker of a group needs.

  Args:
    run: sizes of the run.
    scheme: says which tasks the group may be given.
    group: actor, reward or both.
    working: what the compiler reports.
  """
  kinds = {kind for kind, groups in scheme.bindings.items() if group in groups or group == "both"}
  if not scheme.forward_first:
    kinds -= {"forward", "backward"}
  else:
    kinds -= {"replay"}
  if not run.reference:
    kinds -= {"reference"}
  chunk = run.chunk
  adapter = _adapter(run)
  held = {
    "video model": formula.parameters(chunk.dit) * chunk.weight_bytes // run.fsdp,
    f"adapters, {VERSIONS} versions": VERSIONS * adapter,
    "video decoder": models.vae_parameters(run.decode.vae) * run.decode.value_bytes,
  }
  if "judge" in kinds:
    held |= _judges(run)
  makers: dict[str, Callable[[], Mapping[str, int]]] = {
    "generate": lambda: _generate(run, working),
    "decode": lambda: _decode(run, working),
    "reference": lambda: _scores(run, working, "reference"),
    "forward": lambda: _scores(run, working, "forward"),
    "replay": lambda: _replay(run, working),
    "backward": lambda: _folded(run, working),
    "judge": lambda: _judge(run),
  }
  tasks = {kind: make() for kind, make in makers.items() if kind in kinds}
  if group in ("actor", "both"):
    # On the host between updates; on the device while one runs.
    tasks["update"] = {"optimizer, gradient, average": _UPDATE_COPIES * adapter * run.fsdp}
  folded = run.buffers * run.blocks * adapter * run.fsdp
  return WorkerBytes(group, held, tasks, folded)


def _adapter(run: RunSizes) -> int:
  return formula.adapter_bytes(run.chunk) // run.fsdp


def _cache(run: RunSizes) -> int:
  return formula.cache_bytes(run.chunk) // run.seq


def _latents(run: RunSizes) -> int:
  """A whole trajectory: every chunk's states, and the rollout's means."""
  return run.chunks * 2 * run.chunk.states * run.chunk.latent_bytes


def _activations(run: RunSizes, working: Working | None, task: str, estimated: int) -> int:
  known = (working or {}).get(task)
  return estimated // run.seq if known is None else known


def _generate(run: RunSizes, working: Working | None) -> Mapping[str, int]:
  made = formula.generate_pass(run.chunk)
  return {
    "key-value caches": 2 * _cache(run),
    "activations": _activations(run, working, "generate", made.working),
    "trajectory": _latents(run) + made.other,
  }


def _scores(run: RunSizes, working: Working | None, task: str) -> Mapping[str, int]:
  made = formula.forward_pass(run.chunk)
  return {
    "key-value caches": 2 * _cache(run),  # between chunks the clean pass makes the next from one
    "activations": _activations(run, working, task, made.working),
    "trajectory": _latents(run) + made.other,
  }


def _replay(run: RunSizes, working: Working | None) -> Mapping[str, int]:
  """Merged replay: unit gradients of every block, and a chunk's steps on the way to them."""
  if run.known_weights and run.updates == 1:
    return _folded(run, working)
  made, adapter = formula.replay_pass(run.chunk), _adapter(run)
  units = run.units * run.chunk.channels * adapter
  steps = run.chunk.steps * run.chunk.channels * adapter
  return {
    "key-value caches": 2 * _cache(run),
    "activations": _activations(run, working, "replay", made.working),
    "gradients": (run.blocks + 1) * units + steps,
    "trajectory": _latents(run) + made.other - run.chunk.steps * run.chunk.channels * adapter,
  }


def _folded(run: RunSizes, working: Working | None) -> Mapping[str, int]:
  made, adapter = formula.folded_pass(run.chunk), _adapter(run)
  return {
    "key-value caches": 2 * _cache(run),
    "activations": _activations(run, working, "backward", made.working),
    "gradients": (run.blocks + 2) * adapter,
    "trajectory": _latents(run) + made.other,
  }


def _decode(run: RunSizes, working: Working | None) -> Mapping[str, int]:
  decode = run.decode
  cache = 2 * models.decoder_cache_bytes(decode) if decode.streamed else 0
  return {
    "frames before": cache,
    "activations": _activations(
      dataclasses.replace(run, seq=1), working, "decode", models.decode_working(decode)
    ),
    "video": _video(run),
  }


def _video(run: RunSizes) -> int:
  decode = run.decode
  return models.video_bytes(decode.vae, run.latent_frames, decode.height, decode.width)


def _judges(run: RunSizes) -> Mapping[str, int]:
  """What judges hold, on the workers that judge alone."""
  held = {}
  if run.judge is not None:
    shards = run.fsdp * run.seq
    weights = models.judge_parameters(run.judge.model) * run.judge.value_bytes
    held["judge"] = weights // shards
    held["judge's keys and values"] = models.judge_cache_bytes(run.judge) // shards
  if run.images:
    held["judges of frames"] = sum(map(models.image_judge_bytes, run.images))
  return held


def _judge(run: RunSizes) -> Mapping[str, int]:
  """Judges work one after another."""
  work = [models.image_judge_working(one) for one in run.images]
  if run.judge is not None:
    work.append(models.judge_working(run.judge) // (run.fsdp * run.seq))
  return ({"activations": max(work)} if work else {}) | {"video": 2 * _video(run)}


def largest_batch(worker: WorkerBytes, device_bytes: int, host_bytes: int, shared: bool) -> int:
  """Candidates of a mini-batch whose folded gradients a worker can keep; 0 where nothing fits.

  Args:
    worker: what it needs.
    device_bytes: memory of a device.
    host_bytes: host memory of a worker.
    shared: whether both are the same.
  """
  free = device_bytes - worker.total_bytes
  if free < 0:
    return 0
  return (min(free, host_bytes) if shared else host_bytes) // max(worker.host, 1)


def largest_rank(fits: Callable[[int], bool], most: int) -> int:
  """The largest rank from 1 to `most` that fits, 0 where none does; more never fits better."""
  low, high = 0, most
  while low < high:
    middle = (low + high + 1) // 2
    if fits(middle):
      low = middle
    else:
      high = middle - 1
  return low


def memory_of(run: RunSizes, scheme: Scheme, working: Working | None = None) -> Memory:
  """The same for the search of plans, which knows when each task runs.

  A task's activations hold everything that it adds; what a candidate keeps is beside it.
  """
  everything = worker_bytes(run, scheme, "both", working)
  adapter = _adapter(run)
  names = ("video model", f"adapters, {VERSIONS} versions")
  tasks = {
    task: sum(v for part, v in parts.items() if part not in ("video", "trajectory", "gradients"))
    for task, parts in everything.tasks.items()
  }
  units = run.units * run.chunk.channels * adapter
  return Memory(
    policy_bytes=sum(everything.held[name] for name in names),
    decoder_bytes=everything.held["video decoder"],
    judge_bytes=sum(_judges(run).values()),
    activations_bytes=tuple(
      (task, size + everything.tasks[task].get("gradients", 0)) for task, size in tasks.items()
    ),
    folded_bytes=everything.host if run.host_is_device else 0,
    unit_bytes=units,
    video_bytes=_video(run),
    latent_bytes=_latents(run),
  )
