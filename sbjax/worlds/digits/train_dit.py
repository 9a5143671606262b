"""Trains the causal transformer and the text encoder together by flow matching.

Teacher forcing: every chunk is denoised given the clean chunks before it, at a noise level of its
own. The noise levels of the few-step sampler get most of the weight, because only those are used.
There is no guidance, no text dropout and no distillation: with four steps the plain model is
already level with a twenty-step solver. Its errors are what reinforcement learning is to repair.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int
from optax.contrib import MuonDimensionNumbers

from models.wan.dit import CausalWanDiT
from models.wan.presets import DiTConfig, SamplerConfig
from models.wan.schedule import denoising_schedule
from models.wan.umt5 import UMT5Config, UMT5Encoder, mask_rows
from models.wan.vae import WanVAE
from sbjax.worlds.digits import data, optim, training
from sbjax.worlds.digits.sample import with_conditioning
from sbjax.worlds.digits.tokenizer import WordTokenizer

CONTEXT_NOISE = 0.03
SAMPLER_SHARE = 0.6


@dataclasses.dataclass(frozen=True)
class Schedule:
  """How long and how fast.

  Muon's learning rate follows one cosine over `horizon` steps, of which `steps` are run. Their
  number is the dial for the base model's share of right digits: measured on unseen prompts, 0.40 at
  400 steps, 0.60 at 600, 0.69 at 700 and 0.73 at 900. Stopping before the end leaves errors for
  reinforcement learning to repair.
  """

  steps: int = 700
  horizon: int = 900
  videos: int = 12
  copies: int = 2
  learning_rate: float = 1e-2
  vector_share: float = 0.2
  keep_every: int = 100


@dataclasses.dataclass(frozen=True)
class Latents:
  """Encoded training videos, normalised, and their prompts' tokens."""

  latents: Float[np.ndarray, "videos frames channels height width"]
  ids: Int[np.ndarray, "videos text_len"]
  mask: np.ndarray


def encode_videos(
  vae: WanVAE, images: data.DigitImages, tokenizer: WordTokenizer, count: int, seed: int
) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
  """Draws and encodes `count` videos; also the latents' mean and standard deviation per channel.

  Returns raw (not normalised) latents with token ids and masks, then mean and std, [channels] each.
  """
  ink, labels = images.half("generator")
  rng = np.random.default_rng([seed, 51])
  encode = jax.jit(lambda pixels: vae.encode(pixels)[0])
  parts, texts = [], []
  progress = training.Progress("encode", count // 8, 25)
  for number in range(count // 8):
    scenes = data.random_scenes(rng, 8, labels)
    videos = data.draw_scenes(scenes, ink)
    parts.append(np.asarray(encode(jnp.asarray(np.moveaxis(videos, -1, 2) * 2 - 1))))
    texts.extend(scenes.prompts())
    progress.update(number, 0.0)
  latents = np.concatenate(parts)
  ids, mask = tokenizer(texts)
  axes = (0, 1, 3, 4)
  mean = latents.mean(axes, dtype=np.float64).astype(np.float32)
  std = latents.std(axes, dtype=np.float64).astype(np.float32)
  return {"latents": latents, "ids": ids, "mask": mask}, mean, std


def draw_sigmas(
  key: Array, shape: tuple[int, ...], sampler: SamplerConfig
) -> Float[Array, "*shape"]:
  """Noise levels: most often one of the sampler's, otherwise uniform under the same shift."""
  choose, pick, uniform = jax.random.split(key, 3)
  levels = jnp.asarray(denoising_schedule(sampler)[1])
  listed = levels[jax.random.randint(pick, shape, 0, len(levels))]
  flat = jax.random.uniform(uniform, shape, jnp.float32, 1e-3, 1.0)
  shifted = sampler.timestep_shift * flat / (1.0 + (sampler.timestep_shift - 1.0) * flat)
  return jnp.where(jax.random.uniform(choose, shape) < SAMPLER_SHARE, listed, shifted)


def loss(
  dit: CausalWanDiT,
  text: UMT5Encoder,
  sampler: SamplerConfig,
  latents: Float[Array, "batch frames channels height width"],
  ids: Int[Array, "batch text_len"],
  mask: Array,
  key: Array,
  copies: int,
) -> Float[Array, ""]:
  """Mean squared error of the flow (noise - clean) over all noisy chunks."""
  batch, frames = latents.shape[:2]
  noise_key, context_key, sigma_key = jax.random.split(key, 3)
  chunks = frames // sampler.frames_per_chunk
  sigma = draw_sigmas(sigma_key, (batch, copies, chunks), sampler)
  sigma = jnp.repeat(sigma, sampler.frames_per_chunk, axis=2)
  clean = latents[:, None]
  noise = jax.random.normal(noise_key, (batch, copies, *latents.shape[1:]), jnp.float32)
  level = sigma[..., None, None, None]
  noisy = (1.0 - level) * clean + level * noise
  past = latents + CONTEXT_NOISE * jax.random.normal(context_key, latents.shape, jnp.float32)
  context = dit.embed_text(mask_rows(text(ids, mask), mask))
  flow = dit.teacher_forcing(
    with_conditioning(past),
    with_conditioning(noisy),
    1000.0 * sigma,
    context,
    sampler.frames_per_chunk,
  )
  return jnp.mean((flow - (noise - clean)) ** 2)


def _numbers(path: str, leaf: jax.Array) -> MuonDimensionNumbers | None:
  # Stacked block kernels [layers, in, out]; modulation tables have three axes too but are no maps.
  if "'blocks'" in path and "'kernel'" in path and leaf.ndim == 3:
    return MuonDimensionNumbers(1, 2)
  return None


def train(
  dit_config: DiTConfig,
  text_config: UMT5Config,
  sampler: SamplerConfig,
  videos: Latents,
  workdir: str,
  seed: int,
  schedule: Schedule,
  after: Callable[[int, CausalWanDiT, UMT5Encoder], None] | None = None,
) -> tuple[CausalWanDiT, UMT5Encoder]:
  """One run of flow matching; `dit_<step>.npz` is kept every `keep_every` steps.

  The last step is kept too.
  A run that was broken off continues from the newest kept step, with fresh optimiser moments.
  `after(step, dit, text)` is called on every kept step.
  """
  dit_graph, dit_state = nnx.split(CausalWanDiT(dit_config, rngs=nnx.Rngs(seed)))
  text_graph, text_state = nnx.split(UMT5Encoder(text_config, rngs=nnx.Rngs(seed + 1)))
  params = {"dit": optim.plain(dit_state), "text": optim.plain(text_state)}
  dit_of, text_of = optim.merger(dit_graph, dit_state), optim.merger(text_graph, text_state)
  kept = [
    number
    for number in range(schedule.keep_every, schedule.steps + 1, schedule.keep_every)
    if os.path.exists(os.path.join(workdir, f"dit_{number}.npz"))
  ]
  start = max(kept, default=0)
  if start:
    params = training.load_tree(os.path.join(workdir, f"dit_{start}.npz"), params)
    print(f"dit: continues from step {start}", flush=True)
  rate = optim.cosine(schedule.learning_rate, max(schedule.horizon, schedule.steps), 30)
  optimiser = optim.muon_for(
    _numbers,
    lambda step: rate(step + start),
    lambda step: schedule.vector_share * rate(step + start),
  )
  moments = optimiser.init(params)

  @jax.jit
  def step(params, moments, latents, ids, mask, key):
    def objective(p):
      return loss(
        dit_of(p["dit"]), text_of(p["text"]), sampler, latents, ids, mask, key, schedule.copies
      )

    value, gradient = jax.value_and_grad(objective)(params)
    updates, moments = optimiser.update(gradient, moments, params)
    return optax.apply_updates(params, updates), moments, value

  rng = np.random.default_rng([seed, 61, start])
  progress = training.Progress("dit", schedule.steps - start)
  for number in range(start, schedule.steps):
    rows = rng.integers(0, len(videos.latents), schedule.videos)
    key = jax.random.key(int(rng.integers(2**31)))
    params, moments, value = step(
      params, moments, videos.latents[rows], videos.ids[rows], videos.mask[rows], key
    )
    progress.update(number - start, float(value))
    if (number + 1) % schedule.keep_every == 0 or number + 1 == schedule.steps:
      training.save_tree(os.path.join(workdir, f"dit_{number + 1}.npz"), params)
      if after is not None:
        after(number + 1, dit_of(params["dit"]), text_of(params["text"]))
  return dit_of(params["dit"]), text_of(params["text"])
