"""From settings to the scalar side of a run: objective, transition, schedule, geometry, shape.

Driver and workers build the same recipe from the same settings; nothing here holds weights.
"""

import dataclasses
import zlib
from typing import Any

import numpy as np
from jaxtyping import Float

from models.layers.lora import LoRAConfig, lora_shapes
from models.wan.presets import DiTConfig, SamplerConfig
from models.wan.schedule import denoising_schedule
from sbjax.algorithms import objectives, selection, transitions
from sbjax.dataflow.plan import StepShape
from sbjax.randomness import stream_seed
from sbjax.separation.channels import Transition
from sbjax.separation.replay import chunk_blocks, unit_weights
from sbjax.settings import Settings
from sbjax.trajectory import Schedule

TEMPORAL_STRIDE = 4


@dataclasses.dataclass(frozen=True)
class Geometry:
  """How a video is cut.

  Attributes:
    chunks: C.
    frames_per_chunk: latent frames of a chunk.
    channels: channels of a latent.
    height: rows of a latent frame.
    width: columns of a latent frame.
    tokens_per_chunk: what the network attends over in one pass.
  """

  chunks: int
  frames_per_chunk: int
  channels: int
  height: int
  width: int
  tokens_per_chunk: int

  @property
  def chunk_shape(self) -> tuple[int, int, int, int]:
    """(frames, channels, height, width) of a chunk."""
    return self.frames_per_chunk, self.channels, self.height, self.width


@dataclasses.dataclass(frozen=True)
class Recipe:
  """What the settings mean, without weights.

  Attributes:
    settings: the settings.
    dit: sizes of the network.
    sampler: chunk, window, cache and denoising steps.
    lora: the adapter.
    transition: how a denoising step explores.
    schedule: timesteps and noise levels.
    geometry: how a video is cut.
    objective: the loss; its on-policy form is `objective_of(0)` where it has one.
    blocks: fixed folding blocks of chunks.
    trained: how many stochastic steps a candidate trains on.
  """

  settings: Settings
  dit: DiTConfig
  sampler: SamplerConfig
  lora: LoRAConfig
  transition: Transition
  schedule: Schedule
  geometry: Geometry
  objective: Any
  blocks: tuple[tuple[int, ...], ...]
  trained: int

  @property
  def updates(self) -> int:
    """Updates of one RL step."""
    return self.settings.algorithm.minibatches * self.settings.algorithm.epochs

  @property
  def adapter_parameters(self) -> int:
    """Length of the adapter's flat buffer."""
    shapes = lora_shapes(self.lora, self.dit)
    return sum(int(np.prod(s)) for pair in shapes.values() for s in pair.values())

  @property
  def reduce_weights(self) -> Float[np.ndarray, "chunks units steps"]:
    """How (chunk, step) scalars add up to units."""
    return unit_weights(
      self.objective.unit,
      self.settings.algorithm.chunk_reduce,
      self.geometry.chunks,
      self.trained,
    )

  @property
  def units(self) -> int:
    """Units of one candidate."""
    return self.trained if self.objective.unit == "step" else 1

  def objective_of(self, update: int) -> Any:
    """The objective as update `update` of a step uses it.

    The first update trains at the rollout's own adapter, so its ratio is 1 and, where the
    objective knows that, one buffer is enough.
    """
    if update == 0 and hasattr(self.objective, "on_policy"):
      return dataclasses.replace(self.objective, on_policy=True)
    return self.objective

  def trained_steps(self, step: int, candidate: int, group: int) -> tuple[int, ...]:
    """The denoising steps that a candidate trains on, drawn before the rollout."""
    return selection.trained_steps(
      self.settings.algorithm.train_steps,
      self.schedule.stochastic,
      seed=self.settings.seed,
      step=step,
      candidate=candidate,
      group=group,
    )

  def candidate_seeds(self, step: int, candidate: int, group: int) -> tuple[int, int]:
    """Streams of the step noise and of the initial noise of one candidate."""
    own = stream_seed(self.settings.seed, step, candidate)
    shared = self.settings.rollout.same_noise
    if shared == "group":
      return own, stream_seed(self.settings.seed, step, group, 1)
    if shared == "step":
      return own, stream_seed(self.settings.seed, step, 0, 2)
    return own, own

  def anchor_seed(self, prompt: str) -> int:
    """The stream of the video that a prompt's candidates meet, the same in every step."""
    return stream_seed(self.settings.seed, zlib.crc32(prompt.encode()), 3)

  def shape(self, step: int, jobs: tuple[tuple[int, ...], ...]) -> StepShape:
    """The step graph's indices."""
    rollout, algorithm = self.settings.rollout, self.settings.algorithm
    size = rollout.group_size
    groups = tuple(tuple(range(g * size, (g + 1) * size)) for g in range(rollout.prompts_per_step))
    return StepShape(
      groups=groups,
      updates=selection.updates(
        groups,
        algorithm.minibatches,
        algorithm.epochs,
        algorithm.minibatch_order,
        seed=self.settings.seed,
        step=step,
      ),
      minibatches=algorithm.minibatches,
      block_chunks=tuple(len(block) for block in self.blocks),
      jobs=jobs,
      advantage_scope=self._advantage_scope,
      reference=self.needs_reference,
    )

  @property
  def _advantage_scope(self) -> str:
    """A deviation over all rewards needs all of them; everything else needs the group's."""
    advantage = self.settings.advantage
    everyone = advantage.std.startswith("global") or advantage.combine == "gdpo"
    return "step" if everyone else "group"

  @property
  def needs_reference(self) -> bool:
    """Whether a channel or statistic reads the initial adapter's predictions."""
    names = (*self.objective.channels, *self.objective.statistics)
    return any(name.startswith("kl_") or "reference" in name for name in names)


def make_recipe(settings: Settings, dit: DiTConfig, sampler: SamplerConfig) -> Recipe:
  """Builds the recipe of a run.

  Args:
    settings: checked settings.
    dit: sizes of the network.
    sampler: how it is rolled out.
  """
  timesteps, sigmas = denoising_schedule(sampler)
  schedule = Schedule(timesteps, sigmas)
  latent_frames = (settings.model.frames - 1) // TEMPORAL_STRIDE + 1
  geometry = Geometry(
    chunks=latent_frames // sampler.frames_per_chunk,
    frames_per_chunk=sampler.frames_per_chunk,
    channels=sampler.latent_channels,
    height=sampler.latent_height,
    width=sampler.latent_width,
    tokens_per_chunk=sampler.frames_per_chunk
    * dit.tokens_per_frame(sampler.latent_height, sampler.latent_width),
  )
  trained = len(
    selection.trained_steps(
      settings.algorithm.train_steps,
      schedule.stochastic,
      seed=settings.seed,
      step=0,
      candidate=0,
      group=0,
    )
  )
  rollout = settings.rollout
  return Recipe(
    settings=settings,
    dit=dit,
    sampler=dataclasses.replace(
      sampler,
      max_frames=latent_frames,
      cache_frames=max(sampler.cache_frames, latent_frames)
      if sampler.window_frames is None
      else sampler.cache_frames,
    ),
    lora=LoRAConfig(settings.lora.rank, settings.lora.alpha, settings.lora.targets),
    transition=transitions.from_settings(
      rollout.transition, rollout.noise_level, settings.algorithm.dim_reduce
    ),
    schedule=schedule,
    geometry=geometry,
    objective=objectives.from_settings(settings, trained),
    blocks=chunk_blocks(geometry.chunks, settings.runtime.chunk_blocks),
    trained=trained,
  )
