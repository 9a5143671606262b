"""The few-step sampler of the world, used to measure the base model.

Each chunk starts from noise. At every step the network's flow gives an estimate of the clean chunk,
which is noised again to the next, lower level (Self-Forcing's sampler). A clean pass then writes
the chunk into the key-value cache.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from models.wan.cache import init_cache
from models.wan.dit import CausalWanDiT
from models.wan.presets import SamplerConfig
from models.wan.schedule import denoising_schedule


def conditioning_channels(height: int, width: int) -> Float[Array, "2 height width"]:
  """Row and column of each latent cell, from -1 to 1.

  The transformer's rotary embedding tells relative positions only: at full noise it could not know
  where on the canvas a token lies. These two constant channels, concatenated after the latents, do.
  """
  rows = jnp.linspace(-1.0, 1.0, height, dtype=jnp.float32)
  columns = jnp.linspace(-1.0, 1.0, width, dtype=jnp.float32)
  return jnp.stack(jnp.meshgrid(rows, columns, indexing="ij"))


def with_conditioning(
  latents: Float[Array, "*batch channels height width"],
) -> Float[Array, "*batch in_dim height width"]:
  """The latents with the two coordinate channels behind their own."""
  planes = conditioning_channels(*latents.shape[-2:]).astype(latents.dtype)
  planes = jnp.broadcast_to(
    planes.reshape((1,) * (latents.ndim - 3) + planes.shape),
    (*latents.shape[:-3], *planes.shape),
  )
  return jnp.concatenate([latents, planes], axis=-3)


def sample_latents(
  dit: CausalWanDiT,
  sampler: SamplerConfig,
  prompt_embeds: Float[Array, "batch text_len text_dim"],
  key: Array,
  frames: int | None = None,
) -> Float[Array, "batch frames channels height width"]:
  """Samples whole videos chunk by chunk; trace it under jit.

  Args:
    dit: the transformer.
    sampler: chunk size, steps and latent shape.
    prompt_embeds: the text encoder's output.
    key: all noise comes from it.
    frames: latent frames, `sampler.max_frames` by default; a multiple of the chunk.

  Raises:
    ValueError: if frames is no whole number of chunks.
  """
  frames = frames or sampler.max_frames
  if frames % sampler.frames_per_chunk:
    raise ValueError(
      f"frames is {frames}; it must be a multiple of frames_per_chunk {sampler.frames_per_chunk}"
    )
  timesteps, sigmas = denoising_schedule(sampler)
  batch = prompt_embeds.shape[0]
  context = dit.embed_text(prompt_embeds)
  cache = init_cache(dit.cfg, sampler, batch)
  shape = (
    batch,
    sampler.frames_per_chunk,
    sampler.latent_channels,
    sampler.latent_height,
    sampler.latent_width,
  )
  count = frames // sampler.frames_per_chunk

  # Loops of XLA rather than of Python: the network is compiled once, not once a step and chunk.
  def add_chunk(cache, chunk):
    start = chunk * sampler.frames_per_chunk
    chunk_key = jax.random.fold_in(key, chunk)

    def denoise(clean, step):
      index, timestep, sigma = step
      noise = jax.random.normal(jax.random.fold_in(chunk_key, index), shape, jnp.float32)
      x = (1.0 - sigma) * clean + sigma * noise
      times = jnp.full(shape[:2], timestep, jnp.float32)
      flow, _ = dit(with_conditioning(x), times, context, cache, start)
      return x - sigma * flow, None

    steps = (jnp.arange(len(sigmas), dtype=jnp.int32), jnp.asarray(timesteps), jnp.asarray(sigmas))
    clean, _ = jax.lax.scan(denoise, jnp.zeros(shape, jnp.float32), steps)
    return dit.write_cache(with_conditioning(clean), context, cache, start), clean

  _, chunks = jax.lax.scan(add_chunk, cache, jnp.arange(count, dtype=jnp.int32))
  return jnp.moveaxis(chunks, 0, 1).reshape(batch, frames, *shape[2:])


def pixels_to_uint8(
  pixels: Float[Array, "batch frames 3 height width"] | np.ndarray,
) -> np.ndarray:
  """Decoded pixels in [-1, 1] as bytes [batch, frames, height, width, 3]."""
  last = np.moveaxis(np.asarray(pixels, np.float32), 2, -1)
  return np.round(np.clip(last * 0.5 + 0.5, 0, 1) * 255).astype(np.uint8)
