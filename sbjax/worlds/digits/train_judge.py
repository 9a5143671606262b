"""Trains the judge on drawn videos of the reader half, spoiled in the ways generated ones are.

Half of the clips are reconstructions by the world's autoencoder. Blends of two drawings or of two
colours carry blended labels, and empty clips carry uniform ones: a half-right video then gets a
probability in between instead of a confident guess, which is what a reward needs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float
from optax.contrib import MuonDimensionNumbers

from models.wan.vae import WanVAE
from sbjax.worlds.digits import data, optim, prompts, training
from sbjax.worlds.digits.judge import HEADS, Judge, JudgeConfig

CLIP_FRAMES = 6
SMOOTHING = 0.02
CALIBRATION_VIDEOS = 64


@dataclasses.dataclass(frozen=True)
class Labelled:
  """Clips in [0, 1] and soft labels per head."""

  frames: Float[np.ndarray, "batch time 64 64 3"]
  labels: dict[str, Float[np.ndarray, "batch classes"]]


def blended_scenes(
  rng: np.random.Generator, batch: int, ink: np.ndarray, labels: np.ndarray, chosen: Sequence[int]
) -> Labelled:
  """The chosen frames of drawn videos; three in ten blend two drawings, one in five two colours."""
  scenes = data.random_scenes(rng, batch, labels)
  centres = data.path_centres(scenes.start, scenes.velocity, max(chosen) + 1)[:, list(chosen)]
  soft: dict[str, np.ndarray] = {
    name: np.eye(classes, dtype=np.float32)[getattr(scenes, name)]
    for name, classes in HEADS.items()
  }
  other = rng.integers(0, len(labels), batch)
  share = np.where(rng.uniform(size=batch) < 0.3, rng.uniform(0.5, 1, batch), 1.0)
  share = share.astype(np.float32)[:, None]
  drawing = share[..., None] * ink[scenes.image] + (1 - share[..., None]) * ink[other]
  soft["digit"] = share * soft["digit"] + (1 - share) * np.eye(10, dtype=np.float32)[labels[other]]
  tint = rng.integers(0, len(prompts.PALETTE), batch)
  share = np.where(rng.uniform(size=batch) < 0.2, rng.uniform(0.5, 1, batch), 1.0)
  share = share.astype(np.float32)[:, None]
  colours = share * prompts.PALETTE[scenes.colour] + (1 - share) * prompts.PALETTE[tint]
  soft["colour"] = (
    share * soft["colour"] + (1 - share) * np.eye(len(prompts.PALETTE), dtype=np.float32)[tint]
  )
  return Labelled(data.draw(drawing.astype(np.float32), colours, centres), soft)


def spoil(rng: np.random.Generator, clips: Labelled) -> Labelled:
  """Blur, gain, noise, and one empty clip in twenty, whose labels become uniform."""
  frames = clips.frames
  batch, time = frames.shape[:2]
  size = frames.shape[2:4]
  planes = np.moveaxis(frames, -1, 2).reshape(batch, -1, *size)
  share = rng.uniform(0, 1, (batch, 1, 1, 1)).astype(np.float32)
  blurred = planes
  for axis in (2, 3):
    blurred = (np.roll(blurred, 1, axis) + blurred + np.roll(blurred, -1, axis)) / 3
  mixed = (1 - share) * planes + share * blurred
  frames = np.moveaxis(mixed.reshape(batch, time, 3, *size), 2, -1)
  gain = rng.uniform(0.7, 1.05, (batch, 1, 1, 1, 1)).astype(np.float32)
  gain = np.where(rng.uniform(size=gain.shape) < 0.05, np.float32(0.06), gain)
  noise = rng.uniform(0, 0.05, (batch, 1, 1, 1, 1)).astype(np.float32)
  frames = gain * frames + noise * rng.standard_normal(frames.shape, np.float32)
  empty = gain[:, 0, 0, 0] < 0.1
  labels = {
    name: np.where(empty, np.float32(1 / HEADS[name]), table)
    for name, table in clips.labels.items()
  }
  return Labelled(np.clip(frames, 0, 1), labels)


def reconstructions(
  vae: WanVAE, rng: np.random.Generator, count: int, ink: np.ndarray, labels: np.ndarray
) -> Labelled:
  """Whole videos through the autoencoder, with latent noise of up to a fifth of their spread."""

  @jax.jit
  def through(pixels: Array, noise: Array) -> Array:
    mean = vae.encode(pixels)[0]
    spread = jnp.std(mean, axis=(0, 1, 3, 4), keepdims=True)
    return vae.decode(mean + noise * spread, normalised=False)

  clips = blended_scenes(rng, count, ink, labels, range(data.FRAMES))
  out = np.empty_like(clips.frames)
  for i in range(0, count, 4):
    pixels = np.moveaxis(clips.frames[i : i + 4], -1, 2) * 2 - 1
    shape = (len(pixels), 9, vae.config.z_dim, 8, 8)
    noise = rng.uniform(0, 0.2) * rng.standard_normal(shape, np.float32)
    decoded = through(jnp.asarray(pixels, jnp.float32), jnp.asarray(noise, jnp.float32))
    out[i : i + 4] = np.moveaxis(np.asarray(decoded), 2, -1) * 0.5 + 0.5
  return Labelled(out, clips.labels)


def _subset(clips: Labelled, rows: np.ndarray, frames: slice) -> Labelled:
  return Labelled(
    clips.frames[rows, frames], {name: table[rows] for name, table in clips.labels.items()}
  )


def loss(
  judge: Judge, frames: Float[Array, "batch time 64 64 3"], labels: dict[str, Array]
) -> Float[Array, ""]:
  """Cross-entropy of all heads against smoothed soft labels."""
  logits = judge(frames)
  total = jnp.zeros((), jnp.float32)
  for name, classes in HEADS.items():
    target = (1 - SMOOTHING) * labels[name] + SMOOTHING / classes
    total -= jnp.mean(jnp.sum(target * jax.nn.log_softmax(logits[name], -1), -1))
  return total


def _numbers(path: str, leaf: jax.Array) -> MuonDimensionNumbers | None:
  # The output layers read single classes: orthogonal updates would tie them together.
  heads = any(f"'{name}'" in path for name in HEADS)
  return None if heads else optim.conv_numbers(path, leaf)


def train(
  images: data.DigitImages,
  vae: WanVAE,
  seed: int,
  steps: int = 600,
  batch: int = 12,
  reconstructed: int = 160,
  config: JudgeConfig | None = None,
) -> Judge:
  """Trains on four fifths of the reader half and fits each head's temperature on the rest.

  `reconstructed` videos pass through the autoencoder once and serve half of every batch.
  """
  ink, labels = images.half("reader")
  rng = np.random.default_rng([seed, 41])
  order = rng.permutation(len(labels))
  fitted, kept = order[len(order) // 5 :], order[: len(order) // 5]
  pool = reconstructions(vae, rng, reconstructed, ink[fitted], labels[fitted])
  judge = Judge(config or JudgeConfig(), rngs=nnx.Rngs(seed))
  graphdef, state = nnx.split(judge)
  params = optim.plain(state)
  merge = optim.merger(graphdef, state)
  schedule = optim.cosine(1e-2, steps, 20)
  optimiser = optim.muon_for(_numbers, schedule, lambda step: 0.2 * schedule(step))
  moments = optimiser.init(params)

  @jax.jit
  def step(params, moments, frames, targets):
    value, gradient = jax.value_and_grad(lambda p: loss(merge(p), frames, targets))(params)
    gradient["temperature"] = jnp.zeros_like(gradient["temperature"])
    updates, moments = optimiser.update(gradient, moments, params)
    return optax.apply_updates(params, updates), moments, value

  progress = training.Progress("judge", steps)
  for number in range(steps):
    first = int(rng.integers(0, data.FRAMES - CLIP_FRAMES + 1))
    half = batch // 2
    chosen = range(first, first + CLIP_FRAMES)
    drawn = blended_scenes(rng, batch - half, ink[fitted], labels[fitted], chosen)
    rows = rng.integers(0, reconstructed, half)
    stored = _subset(pool, rows, slice(first, first + CLIP_FRAMES))
    mixed = Labelled(
      np.concatenate([drawn.frames, stored.frames]),
      {name: np.concatenate([drawn.labels[name], stored.labels[name]]) for name in HEADS},
    )
    mixed = spoil(rng, mixed)
    params, moments, value = step(params, moments, jnp.asarray(mixed.frames), mixed.labels)
    progress.update(number, float(value))
  params["temperature"] = jnp.asarray(
    _temperatures(merge(params), vae, rng, ink[kept], labels[kept]), jnp.float32
  )
  return merge(params)


def _temperatures(
  judge: Judge, vae: WanVAE, rng: np.random.Generator, ink: np.ndarray, labels: np.ndarray
) -> list[float]:
  """Per head, the temperature of least cross-entropy on reconstructed videos of unused drawings."""
  clips = spoil(rng, reconstructions(vae, rng, CALIBRATION_VIDEOS, ink, labels))
  forward = jax.jit(lambda frames: judge(frames))
  parts = [forward(jnp.asarray(clips.frames[i : i + 8])) for i in range(0, CALIBRATION_VIDEOS, 8)]
  best = []
  for name, classes in HEADS.items():
    logits = np.concatenate([np.asarray(part[name], np.float64) for part in parts])
    target = (1 - SMOOTHING) * clips.labels[name] + SMOOTHING / classes
    candidates = np.geomspace(0.3, 3.0, 40)
    losses = []
    for temperature in candidates:
      scaled = logits / temperature
      scaled = scaled - np.log(np.exp(scaled).sum(-1, keepdims=True))
      losses.append(-(target * scaled).sum(-1).mean())
    best.append(float(candidates[int(np.argmin(losses))]))
  return best
