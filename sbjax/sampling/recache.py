"""A prompt switch: the key-value cache computed again from the clean latents under another prompt.

Keys and values of past frames depend on the prompt under which they were encoded, so a model that
only gets a new prompt goes on showing the old one. LongLive (arXiv 2509.22622) encodes the frames
of the window again. It does so in one pass in which all of them see each other, which is what its
weights were trained with; its cache rule asks for that. Under Self-Forcing's rule every chunk is
written again in order and sees only what is before it, as when it was first written; a model that
was never trained for the switch meets nothing new that way.

While the sink has not left the window it is encoded again too; later it stays under its old prompt,
as in LongLive's released settings.
"""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from models.wan.cache import KVCache
from models.wan.presets import SamplerConfig

WriteFn = Callable[[Float[Array, "frames channels height width"], KVCache, Int[Array, ""]], KVCache]
"""(clean latents, cache, first frame) -> the cache with them, under the new prompt."""


def first_frame(sampler: SamplerConfig, start_frame: int) -> int:
  """The first latent frame that a switch before `start_frame` encodes again.

  It is 0 until frames have left the window; after that as many whole chunks are encoded again as
  the window holds beside the sink.
  """
  window = sampler.window_frames
  if window is None or start_frame <= window:
    return 0
  chunk = sampler.frames_per_chunk
  return start_frame - (window - sampler.sink_frames) // chunk * chunk


def recache(
  write: WriteFn,
  cache: KVCache,
  latents: Float[Array, "past channels height width"],
  start_frame: int,
  sampler: SamplerConfig,
) -> KVCache:
  """Gives the cache as the new prompt's.

  Args:
    write: the clean pass under the new prompt.
    cache: the cache before the chunk at `start_frame`, under the old prompt.
    latents: the last clean latents before `start_frame`, from `first_frame` on or longer.
    start_frame: where the next chunk starts, a whole number of chunks above 0.
    sampler: window, sink, chunk and cache rule.

  Raises:
    ValueError: fewer latents than the window needs.
  """
  first = first_frame(sampler, start_frame)
  count = start_frame - first
  if latents.shape[0] < count:
    raise ValueError(
      f"latents holds {latents.shape[0]} frames; the cache at frame {start_frame} needs the last "
      f"{count}."
    )
  latents = latents[latents.shape[0] - count :]
  cache = _emptied(cache, first)
  step = count if sampler.cache_rule == "longlive" else sampler.frames_per_chunk
  for offset in range(0, count, step):
    start = jnp.asarray(first + offset, jnp.int32)
    cache = write(latents[offset : offset + step], cache, start)
  return cache


def _emptied(cache: KVCache, first: int) -> KVCache:
  """The cache as if nothing but the sink had been written before frame `first`, or nothing at all
  where that is 0. What lies behind `local_end` is never attended.
  """
  return dataclasses.replace(
    cache,
    local_end=jnp.asarray(cache.sink_tokens if first else 0, jnp.int32),
    global_end=jnp.asarray(first * cache.tokens_per_frame, jnp.int32),
  )
