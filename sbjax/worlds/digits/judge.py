"""The judge of the digits world: a small video network that reads digit, colour and motion.

It looks at every frame with a convolutional network, reduces each to features and to a few
keypoints (the centres of mass of learned maps, in pixels), and looks over time at both. Its cost,
tens of milliseconds a video on one core, is a real share of a training step, as that of a learned
reward model is.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, UInt8

from sbjax.worlds.digits import data, prompts

KEYPOINTS = 8
# Shifts (rows, columns) in pixels under which a video is read, each a reading of its own. What a
# policy could gain from one reading's blind spots averages out over the first six; more make a
# slower judge, for studies of scheduling.
VIEWS = ((0, 0), (2, 0), (-2, 0), (0, 2), (0, -2), (1, 1))
VIEWS += ((-1, -1), (1, -1), (-1, 1), (2, 2), (-2, -2), (2, -2), (-2, 2), (1, 0), (-1, 0), (0, 1))
DEFAULT_VIEWS = 6
# Motion is read while a real video cannot have met a wall yet; later frames may move back.
MOTION_FRAMES = data.FRAMES
HEADS = {
  "digit": len(prompts.DIGITS),
  "colour": len(prompts.COLOURS),
  "direction": len(prompts.DIRECTIONS),
  "speed": len(prompts.SPEEDS),
}


@dataclasses.dataclass(frozen=True)
class JudgeConfig:
  """Widths of the frame network's four levels and of the features over time."""

  widths: tuple[int, int, int, int] = (16, 32, 64, 128)
  features: int = 128


class _ConvNorm(nnx.Module):
  """3x3 convolution, layer norm over channels, GELU; a residual where nothing changes size."""

  def __init__(self, width_in: int, width_out: int, stride: int, *, rngs: nnx.Rngs):
    init = nnx.initializers.he_normal()
    self.kernel = nnx.Param(init(rngs.params(), (3, 3, width_in, width_out), jnp.float32))
    self.scale = nnx.Param(jnp.ones((width_out,), jnp.float32))
    self.bias = nnx.Param(jnp.zeros((width_out,), jnp.float32))
    self.stride = stride

  def __call__(self, x: Float[Array, "n h w c"]) -> Float[Array, "n h2 w2 d"]:
    y = jax.lax.conv_general_dilated(
      x,
      self.kernel[...],
      (self.stride, self.stride),
      ((1, 1), (1, 1)),
      dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    y = y - y.mean(-1, keepdims=True)
    y = y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-3)
    y = y * self.scale[...][None, None, None] + self.bias[...][None, None, None]
    y = jax.nn.gelu(y)
    return y + x if x.shape == y.shape else y


class _Linear(nnx.Module):
  """x W + b on the last axis of [batch, time, width]."""

  def __init__(self, width_in: int, width_out: int, *, rngs: nnx.Rngs):
    init = nnx.initializers.lecun_normal()
    self.kernel = nnx.Param(init(rngs.params(), (width_in, width_out), jnp.float32))
    self.bias = nnx.Param(jnp.zeros((width_out,), jnp.float32))

  def __call__(self, x: Float[Array, "batch time c"]) -> Float[Array, "batch time d"]:
    return x @ self.kernel[...] + self.bias[...][None, None]


class Judge(nnx.Module):
  """Frames in [0, 1] to logits per head; `temperature` (one per head) calibrates them."""

  def __init__(self, config: JudgeConfig, *, rngs: nnx.Rngs):
    self.config = config
    a, b, c, d = config.widths
    self.convs = nnx.List(
      [
        _ConvNorm(3, a, 2, rngs=rngs),
        _ConvNorm(a, a, 1, rngs=rngs),
        _ConvNorm(a, b, 2, rngs=rngs),
        _ConvNorm(b, b, 1, rngs=rngs),
        _ConvNorm(b, c, 2, rngs=rngs),
        _ConvNorm(c, c, 1, rngs=rngs),
        _ConvNorm(c, d, 1, rngs=rngs),
      ]
    )
    self.maps = _Linear(b, KEYPOINTS, rngs=rngs)
    self.read = _Linear(2 * d, config.features, rngs=rngs)
    self.digit = _Linear(config.features, HEADS["digit"], rngs=rngs)
    self.tint = _Linear(a, 24, rngs=rngs)
    self.colour = _Linear(24, HEADS["colour"], rngs=rngs)
    self.steps = _Linear(3 * 2 * KEYPOINTS, 48, rngs=rngs)
    self.direction = _Linear(48, HEADS["direction"], rngs=rngs)
    self.speed = _Linear(48, HEADS["speed"], rngs=rngs)
    self.temperature = nnx.Param(jnp.ones((len(HEADS),), jnp.float32))

  def __call__(
    self, frames: Float[Array, "batch time 64 64 3"]
  ) -> dict[str, Float[Array, "batch classes"]]:
    """Logits of each head, averaged over all frames (motion: over the first 33).

    Averages of logits, not sums: the frames show one drawing and are no independent evidence, and a
    video whose colour or shape drifts away loses in proportion to how long it is wrong.
    """
    batch, time = frames.shape[:2]
    x = frames.reshape(batch * time, *frames.shape[2:]) * 2.0 - 1.0
    levels = []
    for conv in self.convs:
      x = conv(x)
      levels.append(x)
    ink = jax.nn.relu(jnp.max(frames.reshape(levels[0].shape[0], *frames.shape[2:]), -1) - 0.15)
    ink = ink.reshape(-1, 32, 2, 32, 2).mean((2, 4))
    ink = ink / (ink.sum((1, 2), keepdims=True) + 1e-3)
    tint = jnp.einsum("nhw,nhwc->nc", ink, levels[1]).reshape(batch, time, -1)
    pooled = jnp.concatenate([x.mean((1, 2)), x.max((1, 2))], axis=-1).reshape(batch, time, -1)
    digit = self.digit(jax.nn.gelu(self.read(pooled)))
    colour = self.colour(jax.nn.gelu(self.tint(tint)))
    points = self._keypoints(levels[3]).reshape(batch, time, -1)[:, :MOTION_FRAMES]
    steps = jnp.concatenate([points[:, k:][:, : points.shape[1] - 4] for k in (4, 3, 1)], -1)
    steps = steps - jnp.concatenate([points[:, :-4]] * 3, axis=-1)
    motion = jax.nn.gelu(self.steps(steps))
    logits = {
      "digit": digit.mean(1),
      "colour": colour.mean(1),
      "direction": self.direction(motion).mean(1),
      "speed": self.speed(motion).mean(1),
    }
    scale = 1.0 / self.temperature[...]
    return {name: logits[name] * scale[i] for i, name in enumerate(HEADS)}

  def _keypoints(self, x: Float[Array, "n h w c"]) -> Float[Array, "n two_keypoints"]:
    """Expected (row, column) in pixels under a softmax over positions, per learned map."""
    images, height, width, channels = x.shape
    maps = self.maps(x.reshape(images, height * width, channels))
    shares = jax.nn.softmax(maps * 4.0, axis=1)
    rows = jnp.repeat(jnp.arange(height, dtype=jnp.float32), width)
    columns = jnp.tile(jnp.arange(width, dtype=jnp.float32), height)
    grid = jnp.stack([rows, columns], axis=-1) * (data.CANVAS_PX / height)
    return jnp.einsum("npk,pa->nka", shares, grid).reshape(images, -1)


def probabilities(
  judge: Judge, frames: Float[Array, "batch time 64 64 3"]
) -> dict[str, Float[Array, "batch classes"]]:
  """Calibrated class probabilities of every head, frames in [0, 1]."""
  return {name: jax.nn.softmax(value, axis=-1) for name, value in judge(frames).items()}


@functools.partial(jax.jit, static_argnames="views")
def _tables(
  judge: Judge, videos: UInt8[Array, "batch time 64 64 3"], *, views: int
) -> dict[str, Array]:
  """Probabilities averaged over views: a verdict that hangs on single pixels is worth little."""
  frames = videos.astype(jnp.float32) / 255.0
  margin = max(abs(step) for view in VIEWS for step in view)
  edges = ((0, 0), (0, 0), (margin, margin), (margin, margin), (0, 0))
  padded = jnp.pad(frames, edges, mode="edge")

  def one(view: Array) -> dict[str, Array]:
    start = (0, 0, margin + view[0], margin + view[1], 0)
    return probabilities(judge, jax.lax.dynamic_slice(padded, start, frames.shape))

  tables = jax.lax.map(one, jnp.asarray(VIEWS[:views], jnp.int32))
  return {name: table.mean(axis=0) for name, table in tables.items()}


def tables(
  judge: Judge, videos: UInt8[np.ndarray, "batch time 64 64 3"], views: int = DEFAULT_VIEWS
) -> dict[str, Float[np.ndarray, "batch classes"]]:
  """Class probabilities of every head as the reward reads them, float64, keys as in HEADS.

  Args:
    judge: the trained judge.
    videos: bytes, any length of at least 5 frames.
    views: how many shifted readings are averaged, 1 to 16.

  Raises:
    ValueError: if the videos have another shape or dtype, or too few frames.
  """
  if videos.dtype != np.uint8 or videos.ndim != 5 or videos.shape[2:] != (64, 64, 3):
    raise ValueError(
      f"videos is {videos.dtype} {videos.shape}; the judge takes uint8 [batch, frames, 64, 64, 3]"
    )
  if videos.shape[1] < 5:
    raise ValueError(f"videos has {videos.shape[1]} frames; the judge needs at least 5")
  read = _tables(judge, jnp.asarray(videos), views=views)
  return {name: np.asarray(table, np.float64) for name, table in read.items()}


def judge_videos(
  judge: Judge,
  videos: UInt8[np.ndarray, "batch time 64 64 3"],
  asked: list[str] | tuple[str, ...],
  views: int = DEFAULT_VIEWS,
) -> dict[str, Float[np.ndarray, " batch"]]:
  """How probable the judge finds what each prompt asked for.

  Args:
    judge: the trained judge.
    videos: bytes, any length of at least 5 frames.
    asked: one prompt per video.
    views: how many shifted readings are averaged, 1 to 16.

  Returns:
    "digit", "colour" and "motion" (direction times speed), each float64 [batch] in [0, 1].

  Raises:
    ValueError: if the videos have another shape or dtype, or the counts differ.
  """
  if len(asked) != len(videos):
    raise ValueError(f"prompts has {len(asked)} entries for {len(videos)} videos")
  wanted = prompts.parse_all(asked)
  read = tables(judge, videos, views)
  rows = np.arange(len(videos))
  p = {name: read[name][rows, wanted[name]] for name in HEADS}
  return {"digit": p["digit"], "colour": p["colour"], "motion": p["direction"] * p["speed"]}
