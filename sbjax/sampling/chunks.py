"""A video's clean latents as an iterator of chunks, whose prompt may change between two of them."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from models.wan.cache import KVCache
from models.wan.presets import SamplerConfig
from sbjax.sampling.recache import first_frame, recache
from sbjax.sampling.script import Director

SCENE_CUT = "The scene transitions. "
"""How a prompt begins that starts a new scene, in LongLive 2.0's training data."""


@dataclasses.dataclass(frozen=True)
class Chunk:
  """A finished chunk.

  Attributes:
    index: from 0.
    start_frame: its first latent frame.
    latents: clean and normalised, on the device.
    prompt: what it was asked to show.
  """

  index: int
  start_frame: int
  latents: Float[Array, "frames channels height width"]
  prompt: str


@dataclasses.dataclass(frozen=True, eq=False)
class Generator:
  """The video model as the iterator needs it; adapter and weights are bound.

  Attributes:
    sampler: chunk, window and cache.
    init_cache: () -> empty cache.
    condition: prompt -> conditioning.
    generate: (cache, conditioning, chunk, start_frame, seed, cut) -> (clean latents, cache with
      them); `cut`: whether a scene begins, which matters to the multi-shot cache rule only.
    write: (clean latents, cache, start_frame, conditioning) -> cache with them.
  """

  sampler: SamplerConfig
  init_cache: Callable[[], KVCache]
  condition: Callable[[str], Any]
  generate: Callable[..., tuple[Array, KVCache]]
  write: Callable[..., KVCache]


def generate_chunks(
  generator: Generator, director: Director, *, chunks: int, seed: int
) -> Iterator[Chunk]:
  """Generates a video chunk by chunk; the next chunk begins when the consumer asks for it.

  Where the prompt switches, the cache is computed again (`sbjax.sampling.recache`). Not under the
  multi-shot rule of LongLive 2.0: there every chunk has a prompt of its own, and one that starts
  with `SCENE_CUT` begins a scene, to which the cache answers.

  Args:
    generator: the video model.
    director: says before each chunk what it shows; ends the video early with None.
    chunks: most chunks.
    seed: stream of all noise, below 2**32.

  Yields:
    Each chunk as soon as its latents are there.
  """
  per_chunk = generator.sampler.frames_per_chunk
  cache = generator.init_cache()
  conditioning = None
  past: list[Array] = []
  for index in range(chunks):
    start = index * per_chunk
    cue = director(start)
    if cue is None:
      return
    if conditioning is None or cue.switched:
      conditioning = generator.condition(cue.prompt)
      if past and generator.sampler.cache_rule != "multi_shot":

        def write(latents: Array, cache: KVCache, frame: Array, new: Any = conditioning) -> KVCache:
          return generator.write(latents, cache, frame, new)

        cache = recache(write, cache, jnp.concatenate(past), start, generator.sampler)
    cut = cue.switched and cue.prompt.startswith(SCENE_CUT)
    latents, cache = generator.generate(cache, conditioning, index, start, seed, cut)
    latents.block_until_ready()
    past.append(latents)
    # What a switch at the next border could need; the rest would fill the device.
    past = past[first_frame(generator.sampler, start + per_chunk) // per_chunk - index - 1 :]
    yield Chunk(index, start, latents, cue.prompt)
