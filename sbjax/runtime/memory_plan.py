"""From settings to what a run's workers need in memory, and the refusal of what does not fit."""

import dataclasses
import json
import pathlib
from collections.abc import Iterable, Sequence

from models.clip import folder
from models.clip import presets as clip
from models.qwen_vl import presets as judges
from models.wan import vae_config
from models.wan.presets import PRESETS
from sbjax.dataflow import memory_table as table
from sbjax.dataflow.memory_formula import ChunkSizes
from sbjax.dataflow.memory_models import DecodeSizes, ImageJudgeSizes, JudgeSizes
from sbjax.dataflow.plan import WorkerSlot
from sbjax.dataflow.schemes import Scheme
from sbjax.dataflow.schemes import scheme as scheme_of
from sbjax.rewards import catalogue
from sbjax.runtime.early import known_weights
from sbjax.runtime.recipe import Recipe, make_recipe
from sbjax.settings import Settings
from sbjax.sizes import model_sizes
from sbjax.world_table import DIGITS

GIB = 2**30
_GB = 10**9
_BYTES = {"float32": 4, "bfloat16": 2}
_PUBLISHED_JUDGES = {"vr_thinker": "qwen2.5-vl-7b", "unified_reward_flex": "qwen3-vl-8b"}


def planned_recipe(settings: Settings) -> Recipe:
  """The recipe of settings whose files need not be there: a preset's sizes are known without.

  Raises:
    ValueError: a custom model's files are missing, or a setting cannot be.
  """
  model = settings.model
  if model.name == DIGITS or model.name not in PRESETS or model.checkpoint:
    return make_recipe(settings, *model_sizes(settings))
  dit, sampler = PRESETS[model.name]
  factor = _vae(settings, dit.out_dim).spatial_factor
  sampler = dataclasses.replace(
    sampler,
    latent_height=model.height_px // factor or sampler.latent_height,
    latent_width=model.width_px // factor or sampler.latent_width,
  )
  dit = dataclasses.replace(dit, precision=model.precision, remat=model.remat)
  return make_recipe(settings, dit, sampler)


def run_sizes(
  recipe: Recipe, *, on_cpu: bool = False, judge: str = "", judge_bytes: int = 0
) -> table.RunSizes:
  """What the tasks of a run are sized by.

  Args:
    recipe: the run's recipe.
    on_cpu: whether the workers compute on CPUs.
    judge: preset of a judge whose checkpoint is not named; empty: the published one's.
    judge_bytes: of one of its weights; 0: as configured.

  Raises:
    ValueError: an unknown judge, or a checkpoint of it that cannot be read.
  """
  settings, geometry, dit = recipe.settings, recipe.geometry, recipe.dit
  half = _BYTES[settings.model.weights_dtype]
  latent_frames = geometry.chunks * geometry.frames_per_chunk
  frames_per_call = latent_frames if settings.model.name == DIGITS else 1
  vae = _vae(settings, dit.out_dim)
  per_frame = geometry.tokens_per_chunk // geometry.frames_per_chunk
  shape = geometry.chunk_shape
  chunk = ChunkSizes(
    dit=dit,
    tokens=geometry.tokens_per_chunk,
    slots=recipe.sampler.cache_frames * per_frame,
    rank=recipe.lora.rank,
    targets=recipe.lora.resolved,
    weight_bytes=half,
    steps=recipe.trained,
    channels=len(recipe.objective.channels),
    latent_bytes=4 * shape[0] * shape[1] * shape[2] * shape[3],
    states=recipe.schedule.steps + 1,
    widens=on_cpu,
  )
  decode = DecodeSizes(
    vae=vae,
    height=geometry.height,
    width=geometry.width,
    frames=frames_per_call,
    starts=frames_per_call > 1,
    value_bytes=half,
    taps=on_cpu,
    streamed=frames_per_call == 1,
  )
  fsdp, seq = settings.runtime.mesh
  stride = vae.spatial_factor
  pixels = (geometry.height * stride, geometry.width * stride)
  return table.RunSizes(
    chunk=chunk,
    chunks=geometry.chunks,
    decode=decode,
    latent_frames=latent_frames,
    judge=_judge(settings, pixels, judge, judge_bytes),
    units=recipe.units,
    buffers=recipe.objective.buffers(recipe.units),
    blocks=len(recipe.blocks),
    known_weights=known_weights(recipe, recipe.objective_of(0)) is not None,
    updates=recipe.updates,
    minibatch=settings.candidates // settings.algorithm.minibatches,
    reference=recipe.needs_reference,
    fsdp=fsdp,
    seq=seq,
    host_is_device=on_cpu,
    images=_images(settings),
  )


def _vae(settings: Settings, channels: int) -> vae_config.VAEConfig:
  if settings.model.name not in PRESETS and settings.model.vae:
    from sbjax.worlds.wan.sizes import wan_sizes  # imports JAX

    found = wan_sizes(settings.model).vae
    assert isinstance(found, vae_config.VAEConfig)
    return found
  if settings.model.name == DIGITS:
    return vae_config.PRESETS[DIGITS]
  published = [c for name, c in vae_config.PRESETS.items() if name != DIGITS]
  return next(config for config in published if config.z_dim == channels)


def _judge(
  settings: Settings, pixels: tuple[int, int], preset: str, value_bytes: int
) -> JudgeSizes | None:
  reward = settings.reward
  talking = [name for name in reward.judges if catalogue.KINDS[name].conversation]
  if not talking or (reward.judge.endpoints and not preset):
    return None
  if reward.judge.checkpoint and not preset:
    model = _read_judge(catalogue.checkpoint_folder(reward.judge.checkpoint))
  else:
    model = judges.preset(preset or _PUBLISHED_JUDGES.get(talking[0], "qwen2.5-vl-7b"))
  return JudgeSizes(
    model=model,
    slots=reward.judge.slots,
    context_tokens=reward.judge.context_tokens,
    height_px=pixels[0],
    width_px=pixels[1],
    value_bytes=value_bytes or _BYTES[reward.judge.weights_dtype],
  )


def _images(settings: Settings) -> tuple[ImageJudgeSizes, ...]:
  """The judges of single frames; one whose folder is not named is the published ViT-H/14."""
  image = settings.reward.image
  fields = [catalogue.KINDS[name].checkpoint for name in settings.reward.judges]
  paths = [getattr(image, field) for field in fields if field]
  return tuple(
    ImageJudgeSizes(folder.config_of(path) if path else clip.preset("vit-h-14"), image.frames)
    for path in paths
  )


def _read_judge(path: pathlib.Path) -> judges.QwenVLConfig:
  try:
    with open(path / "config.json", encoding="utf-8") as file:
      return judges.from_json(path.name, json.load(file))
  except (OSError, ValueError) as error:
    raise ValueError(
      f"reward.judge.checkpoint is {str(path)!r}, whose config.json cannot be read ({error}); "
      "name a folder in the Hugging Face layout"
    ) from error


def groups_of(scheme: Scheme, reward_workers: int) -> tuple[str, ...]:
  """Groups of workers that a run has."""
  return ("actor", "reward") if scheme.separate_groups and reward_workers else ("both",)


def device_bytes(device_memory_gb: float) -> int:
  """A setting in GB (10^9 bytes) as bytes; 0 stays 0, for not known."""
  return int(device_memory_gb * _GB)


def check_settings(recipe: Recipe) -> None:
  """Checks a run against `runtime.device_memory_gb`, before anything starts; 0 checks nothing.

  Raises:
    ValueError: it does not fit; see `check`.
  """
  runtime = recipe.settings.runtime
  limit = device_bytes(runtime.device_memory_gb)
  if limit:
    groups = groups_of(scheme_of(recipe.settings.scheme), runtime.reward_workers)
    sizes = run_sizes(recipe, on_cpu=not runtime.gpus_per_worker)
    check(recipe, sizes, [(group, limit) for group in groups])


def check(recipe: Recipe, sizes: table.RunSizes, limits: Iterable[tuple[str, int]]) -> None:
  """Refuses a run whose workers do not fit their devices.

  Args:
    recipe: the run's recipe.
    sizes: of its tasks.
    limits: (group, bytes of a device); 0 bytes: not known, nothing is refused.

  Raises:
    ValueError: in one sentence, with what would fit.
  """
  scheme = scheme_of(recipe.settings.scheme)
  for group, limit in sorted(limits):
    if not limit:
      continue
    worker = table.worker_bytes(sizes, scheme, group)
    need = worker.total_bytes + (worker.host if sizes.host_is_device else 0)
    if need > limit:
      raise ValueError(
        f"a worker of group {group!r} needs about {_size(need)} on a device, most of it for "
        f"{_largest(worker)}, and the device has {_size(limit)}; "
        f"{_advice(recipe, sizes, scheme, group, limit)}"
      )


def _size(number: int) -> str:
  return f"{number / GIB:.1f} GiB" if number >= GIB else f"{number / 2**20:.1f} MiB"


def _largest(worker: table.WorkerBytes) -> str:
  """The parts that matter, in words."""
  task = worker.largest_task
  parts = dict(worker.held) | {f"{k} of {task}": v for k, v in worker.tasks[task].items()}
  order = sorted(parts, key=lambda name: -parts[name])[:2]
  return " and ".join(f"{name} ({_size(parts[name])})" for name in order)


def _advice(recipe: Recipe, sizes: table.RunSizes, scheme: Scheme, group: str, limit: int) -> str:
  """What would fit, tried one by one."""

  def fits(run: table.RunSizes) -> bool:
    return table.worker_bytes(run, scheme, group).total_bytes <= limit

  ways = []
  chunk, runtime = sizes.chunk, recipe.settings.runtime
  dit = dataclasses.replace(chunk.dit, remat="block")
  if chunk.dit.remat != "block" and fits(
    dataclasses.replace(sizes, chunk=dataclasses.replace(chunk, dit=dit))
  ):
    ways.append("model.remat='block'")
  rank = table.largest_rank(lambda r: fits(with_rank(sizes, r)), chunk.rank)
  if rank:
    ways.append(f"lora.rank={rank} or less")
  for factor in (2, 4, 8):
    cut = dataclasses.replace(sizes, fsdp=sizes.fsdp, seq=sizes.seq * factor)
    if fits(cut):
      mesh = (cut.fsdp, cut.seq)
      count = runtime.devices_per_worker * factor
      ways.append(f"runtime.devices_per_worker={count} with runtime.mesh={mesh}")
      break
  if sizes.judge is not None and fits(dataclasses.replace(sizes, judge=None)):
    narrow = dataclasses.replace(sizes.judge, value_bytes=2)
    if sizes.judge != narrow and fits(dataclasses.replace(sizes, judge=narrow)):
      ways.append("reward.judge.weights_dtype='bfloat16'")
    ways.append("a smaller judge, fewer reward.judge.slots, or servers in reward.judge.endpoints")
  if not ways:
    return "use shorter or smaller videos, or devices with more memory"
  return "use " + ", or ".join(ways)


def with_rank(sizes: table.RunSizes, rank: int) -> table.RunSizes:
  """The same run with another adapter."""
  return dataclasses.replace(sizes, chunk=dataclasses.replace(sizes.chunk, rank=rank))


def sized_slots(slots: Sequence[WorkerSlot], bytes_of: dict[str, int]) -> tuple[WorkerSlot, ...]:
  """Workers with the memory of their devices, by name; a worker that is not named has no limit."""
  return tuple(dataclasses.replace(s, memory_bytes=bytes_of.get(s.name, 0)) for s in slots)
