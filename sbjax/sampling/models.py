"""Loads what sampling needs of a world: video model, prompts to conditioning, streaming decoder."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from models.layers.lora import LoRAConfig, lora_shapes
from models.wan.cache import KVCache, begin_shot, pin_shot
from models.wan.presets import SamplerConfig
from models.wan.schedule import denoising_schedule
from models.wan.unipc import unipc_sample, unipc_tables
from sbjax.algorithms import transitions
from sbjax.policy import TextConditioning, WanPolicy
from sbjax.randomness import Purpose, draw_key
from sbjax.rollout import make_rollout
from sbjax.runtime.recipe import TEMPORAL_STRIDE
from sbjax.runtime.roles import load_models, place, worker_mesh
from sbjax.sampling.chunks import Generator
from sbjax.separation.buffers import unflatten
from sbjax.separation.channels import Point, Transition
from sbjax.separation.policy import Params
from sbjax.settings import Settings
from sbjax.sizes import model_sizes
from sbjax.trajectory import Schedule
from sbjax.worlds.decoding import DecodeChunk, stream_decoder
from sbjax.worlds.models import WorldModels

GenerateFn = Callable[..., tuple[Array, KVCache]]
"""(adapter, frozen, cache, conditioning, chunk, start_frame, seed) -> (clean latents, cache)."""


@dataclasses.dataclass(frozen=True, eq=False)
class VideoModels:
  """Everything that makes videos.

  Attributes:
    generator: the video model.
    chunks: of a video.
    decode: the streaming decoder.
  """

  generator: Generator
  chunks: int
  decode: DecodeChunk


def video_size(settings: Settings) -> tuple[SamplerConfig, int]:
  """The configured model's sampler, with a cache for the whole video, and the video's chunks.

  Raises:
    ValueError: as `model_sizes`.
  """
  _, sampler = model_sizes(settings)
  frames = (settings.model.frames - 1) // TEMPORAL_STRIDE + 1
  if sampler.window_frames is None:
    sampler = dataclasses.replace(sampler, cache_frames=max(sampler.cache_frames, frames))
  return sampler, frames // sampler.frames_per_chunk


def load(
  settings: Settings,
  prompts: Sequence[str],
  adapter: Float[np.ndarray, " parameters"] | None,
) -> VideoModels:
  """Loads the configured world's models.

  Args:
    settings: the model and, of the runtime, this process' devices.
    prompts: embedded first, where the text encoder does not stay on the device; it comes back for
      any other.
    adapter: flat LoRA weights; None for the model without one.

  Raises:
    ValueError: weights that cannot be used, or an adapter of another size.
  """
  return build(settings, *video_size(settings), load_models(settings, prompts), adapter)


def build(
  settings: Settings,
  sampler: SamplerConfig,
  chunks: int,
  world: WorldModels,
  adapter: Float[np.ndarray, " parameters"] | None,
) -> VideoModels:
  """Binds networks and adapter to the functions that sampling calls; compiles nothing yet.

  Args:
    settings: LoRA, transition and, of the runtime, this process' devices.
    sampler: chunk, window, cache and denoising steps.
    chunks: of a video.
    world: the networks.
    adapter: as in `load`.

  Raises:
    ValueError: an adapter of another size.
  """
  mesh = worker_mesh(settings)
  if mesh is not None:
    world.dit.mesh = mesh
  graphdef, frozen = nnx.split(world.dit)
  frozen = place(frozen, mesh)
  lora = LoRAConfig(settings.lora.rank, settings.lora.alpha, settings.lora.targets)
  policy = WanPolicy(graphdef, world.dit.cfg, sampler, lora.scale)
  tree: Params = {}
  if adapter is not None:
    like = {
      target: {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in pair.items()}
      for target, pair in lora_shapes(lora, world.dit.cfg).items()
    }
    tree = place(unflatten(adapter, like), mesh)
  channels = jnp.asarray(world.conditioning_channels, jnp.float32)
  tokens = sampler.frames_per_chunk * sampler.tokens_per_frame(world.dit.cfg)
  few_step = sampler.unipc_steps is None
  run = few_step_generate(settings, policy) if few_step else unipc_generate(policy)
  empty = jax.jit(policy.init_cache)
  condition = jax.jit(policy.condition)
  write = jax.jit(policy.write_cache)

  def generate(
    cache: KVCache,
    conditioning: TextConditioning,
    chunk: int,
    start_frame: int,
    seed: int,
    cut: bool,
  ) -> tuple[Array, KVCache]:
    scenes = cache.shots is not None
    cache = begin_shot(cache, jnp.asarray(cut)) if scenes else cache
    clean, after = run(
      tree,
      frozen,
      cache,
      conditioning,
      jnp.asarray(chunk, jnp.int32),
      jnp.asarray(start_frame, jnp.int32),
      jnp.asarray(seed, jnp.uint32),
    )
    return clean, pin_shot(after, tokens, jnp.asarray(cut)) if scenes else after

  generator = Generator(
    sampler=sampler,
    # Put where the generator leaves its caches: to XLA it would be another program otherwise.
    init_cache=empty
    if mesh is not None
    else lambda: jax.device_put(empty(), jax.local_devices()[0]),
    condition=lambda prompt: condition(frozen, jnp.asarray(world.embed([prompt])[0]), channels),
    generate=generate,
    write=lambda latents, cache, start_frame, conditioning: write(
      tree, frozen, latents, conditioning, cache, start_frame
    ),
  )
  return VideoModels(generator, chunks, stream_decoder(world.vae))


def few_step_generate(settings: Settings, policy: WanPolicy) -> GenerateFn:
  """The few-step sampler that models were distilled for, with the run's transition.

  It is the rollout's own function and noise: a seed gives the video that evaluation and training
  see.
  """
  rollout = settings.rollout
  functions = make_rollout(
    policy,
    transitions.from_settings(
      rollout.transition, rollout.noise_level, settings.algorithm.dim_reduce
    ),
    Schedule(*denoising_schedule(policy.sampler)),
    _no_score,
    _chunk_shape(policy.sampler),
  )

  def generate(*arguments: Any) -> tuple[Array, KVCache]:
    states, _, _, after = functions.generate_chunk(*arguments, arguments[-1])
    return states[-1], after

  return generate


def unipc_generate(policy: WanPolicy) -> GenerateFn:
  """UniPC from the initial noise, then the clean pass; every chunk has a solver of its own."""
  sampler = policy.sampler
  assert sampler.unipc_steps is not None
  tables = unipc_tables(sampler.unipc_steps, sampler.timestep_shift)
  shape = _chunk_shape(sampler)

  @jax.jit
  def generate(adapter, frozen, cache, conditioning, chunk, start_frame, seed):
    def velocity(x, step):
      timestep = jnp.asarray(tables.timesteps)[step]
      return policy.velocity(adapter, frozen, x, timestep, conditioning, cache, start_frame)

    noise = jax.random.normal(draw_key(seed, chunk, 0, Purpose.INITIAL), shape, jnp.float32)
    clean = unipc_sample(tables, velocity, noise)
    return clean, policy.write_cache(adapter, frozen, clean, conditioning, cache, start_frame)

  return generate


def _chunk_shape(sampler: SamplerConfig) -> tuple[int, int, int, int]:
  return (
    sampler.frames_per_chunk,
    sampler.latent_channels,
    sampler.latent_height,
    sampler.latent_width,
  )


def _no_score(point: Point, velocity: Array, transition: Transition) -> Array:
  """Nobody reads a log-probability here."""
  del point, velocity, transition
  return jnp.zeros((), jnp.float32)
