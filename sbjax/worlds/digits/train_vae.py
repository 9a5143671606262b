"""Trains the world's autoencoder in three legs, from many short clips to few whole videos.

A causal autoencoder trained on 9 frames only does not hold for 33: its temporal receptive field is
longer than the clip, so the zero padding is always in view. Long clips only are too slow to learn
shapes from. Hence the curriculum: short square crops with many digits, then all 33 frames in strips
along the motion, then whole canvases, with encoder and decoder trained together throughout.
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
from jaxtyping import Array, Float

from models.wan.vae import VAEConfig, WanVAE
from sbjax.worlds.digits import data, optim, prompts, training

KL_WEIGHT = 2e-4
ABSOLUTE_WEIGHT = 0.3
INK_WEIGHT = 4.0


@dataclasses.dataclass(frozen=True)
class Leg:
  """One part of the curriculum: clips of one shape, one cosine of the learning rate."""

  name: str
  batch: int
  frames: int
  crop: str  # "square" 32x32, "strip" 32x64 along the motion, "canvas" 64x64
  steps: int
  learning_rate: float
  end_learning_rate: float


LEGS = (
  Leg("short", 8, 9, "square", 1000, 1.2e-2, 2e-3),
  Leg("long", 2, 33, "strip", 450, 8e-3, 5e-4),
  Leg("whole", 1, 33, "canvas", 120, 3e-3, 0.0),
)


def clips(
  rng: np.random.Generator, leg: Leg, ink: np.ndarray, labels: np.ndarray
) -> Float[np.ndarray, "batch frames 3 height width"]:
  """Random training clips in [-1, 1], at multiples of 8 px so that latent cells line up."""
  scenes = data.random_scenes(rng, leg.batch, labels)
  if leg.crop == "strip":
    # One compiled shape for both axes: vertical motion is cut from the transposed video.
    scenes = dataclasses.replace(scenes, direction=scenes.direction % 2)
    scenes = data.scenes_for(
      rng,
      {f: getattr(scenes, f) for f in ("digit", "colour", "direction", "speed")},
      labels,
    )
  first = 0 if leg.frames == data.FRAMES else int(rng.integers(0, data.FRAMES - leg.frames + 1))
  centres = data.path_centres(scenes.start, scenes.velocity, first + leg.frames)[:, first:]
  colours = prompts.PALETTE[scenes.colour]
  if leg.crop == "square":
    # A quarter of the clips may lose a part of the digit, so that edges and emptiness are seen too.
    loose = rng.uniform(size=(leg.batch, 1)) < 0.25
    middle = centres.mean(1)
    shift = rng.integers(-4, 5, (leg.batch, 2)) + loose * rng.integers(-8, 9, (leg.batch, 2))
    corner = np.rint(middle + shift).astype(np.int64) - 16
    centres = centres - corner[:, None].astype(np.float32) + 16
    videos = data.draw(ink[scenes.image], colours, centres)[:, :, 16:48, 16:48]
  elif leg.crop == "strip":
    videos = data.draw(ink[scenes.image], colours, centres)
    row = int(rng.choice([16, 16, 16, 8, 24]))
    videos = videos[:, :, row : row + 32]
    if rng.uniform() < 0.5:
      videos = videos.swapaxes(2, 3)
  elif leg.crop == "canvas":
    videos = data.draw(ink[scenes.image], colours, centres)
  else:
    raise ValueError(f"crop is {leg.crop!r}; it must be 'square', 'strip' or 'canvas'")
  return np.ascontiguousarray(np.moveaxis(videos, -1, 2) * 2 - 1, np.float32)


def loss(
  model: WanVAE, pixels: Float[Array, "batch frames 3 height width"], key: Array
) -> Float[Array, ""]:
  """Squared error (ink counts more, the first frame too), absolute error and a weak KL term."""
  mean, log_variance = model.encode(pixels)
  log_variance = jnp.clip(log_variance, -12.0, 6.0)
  noise = jax.random.normal(key, mean.shape, mean.dtype)
  latents = mean + jnp.exp(0.5 * log_variance) * noise
  decoded = model.decode(latents, normalised=False, clip=False)
  is_ink = jnp.max(pixels, axis=2, keepdims=True) > 2 * data.BACKGROUND - 1 + 0.05
  weight = jnp.where(is_ink, INK_WEIGHT, 1.0).at[:, 0].add(1.0)
  error = decoded - pixels
  squared = jnp.mean(weight * error**2)
  kl = 0.5 * jnp.mean(mean**2 + jnp.exp(log_variance) - 1.0 - log_variance)
  return squared + ABSOLUTE_WEIGHT * jnp.mean(jnp.abs(error)) + KL_WEIGHT * kl


def train(
  config: VAEConfig,
  images: data.DigitImages,
  workdir: str,
  seed: int,
  legs: tuple[Leg, ...] = LEGS,
  after_leg: Callable[[str, WanVAE], None] | None = None,
) -> WanVAE:
  """Runs the legs that `workdir` does not hold yet and returns the trained autoencoder.

  Each leg leaves `vae_<name>.npz`; `after_leg(name, model)` may measure it.
  """
  ink, labels = images.half("generator")
  graphdef, state = nnx.split(WanVAE(config, rngs=nnx.Rngs(seed)))
  params = optim.plain(state)
  with_params = optim.merger(graphdef, state)
  for index, leg in enumerate(legs):
    path = os.path.join(workdir, f"vae_{leg.name}.npz")
    if os.path.exists(path):
      params = training.load_tree(path, params)
      print(f"vae {leg.name}: found {path}", flush=True)
      continue
    schedule = optim.cosine(leg.learning_rate, leg.steps, 20, leg.end_learning_rate)
    optimiser = optim.muon_for(optim.conv_numbers, schedule, lambda step, s=schedule: 0.2 * s(step))
    moments = optimiser.init(params)

    @jax.jit
    def step(params, moments, pixels, key, optimiser=optimiser):
      value, gradient = jax.value_and_grad(lambda p: loss(with_params(p), pixels, key))(params)
      updates, moments = optimiser.update(gradient, moments, params)
      return optax.apply_updates(params, updates), moments, value

    rng = np.random.default_rng([seed, 31, index])
    progress = training.Progress(f"vae {leg.name}", leg.steps)
    for number in range(leg.steps):
      key = jax.random.key(int(rng.integers(2**31)))
      params, moments, value = step(params, moments, jnp.asarray(clips(rng, leg, ink, labels)), key)
      progress.update(number, float(value))
      if (number + 1) % 100 == 0:
        training.save_tree(path + ".running.npz", params)
    training.save_tree(path, params)
    if after_leg is not None:
      after_leg(leg.name, with_params(params))
  return with_params(params)
