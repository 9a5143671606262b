"""What Wan2.2's video autoencoder has beside Wan2.1's layers: levels that carry their input past
themselves by averaging or repeating it, and pixels folded into channels.

Arrays are channels last: [batch, time, height, width, channels]. None of it has weights.

Source: Wan2.2 `WanVAE_` and diffusers `AutoencoderKLWan` with `is_residual`.
"""

from collections.abc import Iterable

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from models.wan.vae_layers import History, Upsample, Video


class ResidualDown(nnx.Module):
  """Layers of an encoder level, to whose result an average of the level's input is added.

  Args:
    layers: the level's residual blocks and its downsampling.
    width: channels that the level gives.
    factors: by how much it shortens time and each side of the image.
  """

  def __init__(self, layers: Iterable[nnx.Module], width: int, factors: tuple[int, int]):
    self.layers = nnx.List(layers)
    self.width = width
    self.factors = factors

  def __call__(self, x: Video, history: History) -> Video:
    """A whole video, [batch, time, height, width, in], to what the level gives."""
    shortcut = average_down(x, self.width, *self.factors)
    for layer in self.layers:
      x = layer(x, history)
    return x + shortcut


class ResidualUp(nnx.Module):
  """Layers of a decoder level, to whose result the repeated input of the level is added.

  Args:
    layers: the level's residual blocks and its upsampling.
    width: channels that the level gives.
    factors: by how much it lengthens time and each side of the image; None for the last level,
      which does neither and has no shortcut.
  """

  def __init__(self, layers: Iterable[nnx.Module], width: int, factors: tuple[int, int] | None):
    self.layers = nnx.List(layers)
    self.width = width
    self.factors = factors

  def __call__(self, x: Video, history: History, *, starts: bool) -> Video:
    """`starts`: the first frame of `x` is the video's first, which is not repeated in time."""
    before = x
    for layer in self.layers:
      x = layer(x, history, starts=starts) if isinstance(layer, Upsample) else layer(x, history)
    if self.factors is None:
      return x
    return x + repeat_up(before, self.width, *self.factors, starts=starts)


def average_down(
  x: Float[Array, "batch time height width in"], width: int, time: int, side: int
) -> Float[Array, "batch time2 height2 width2 out"]:
  """Averages cells of `time` × `side` × `side` positions and neighbouring channels.

  Each cell becomes channels, the input's channel slowest, then time, row, column; equal groups of
  neighbours are averaged into `width` channels. Zeros before the first frame complete its cell.
  `time` and `side` 1 with as many channels as before change nothing.
  """
  batch, frames, rows, columns, channels = x.shape
  x = jnp.pad(x, ((0, 0), (-frames % time, 0), (0, 0), (0, 0), (0, 0)))
  cells = (-(-frames // time), rows // side, columns // side)
  x = x.reshape(batch, cells[0], time, cells[1], side, cells[2], side, channels)
  x = x.transpose(0, 1, 3, 5, 7, 2, 4, 6)
  return x.reshape(batch, *cells, width, channels * time * side * side // width).mean(axis=-1)


def repeat_up(
  x: Float[Array, "batch time height width in"], width: int, time: int, side: int, *, starts: bool
) -> Float[Array, "batch time2 height2 width2 out"]:
  """Spreads channels over cells of `time` × `side` × `side` positions, repeating them as needed.

  The inverse order of `average_down`. With `starts`, of the first frame's cell only the last frame
  is kept.
  """
  batch, frames, rows, columns, channels = x.shape
  cell = time * side * side
  x = jnp.repeat(x, width * cell // channels, axis=-1)
  x = x.reshape(batch, frames, rows, columns, width, time, side, side)
  x = x.transpose(0, 1, 5, 2, 6, 3, 7, 4)
  x = x.reshape(batch, frames * time, rows * side, columns * side, width)
  return x[:, time - 1 :] if starts else x


def fold_pixels(
  x: Float[Array, "batch time height width in"], side: int
) -> Float[Array, "batch time height2 width2 out"]:
  """Squares of `side` pixels into channels: colour slowest, then column, then row in the square."""
  batch, frames, rows, columns, channels = x.shape
  x = x.reshape(batch, frames, rows // side, side, columns // side, side, channels)
  x = x.transpose(0, 1, 2, 4, 6, 5, 3)
  return x.reshape(batch, frames, rows // side, columns // side, channels * side * side)


def unfold_pixels(
  x: Float[Array, "batch time height width in"], side: int
) -> Float[Array, "batch time height2 width2 out"]:
  """The inverse of `fold_pixels`."""
  batch, frames, rows, columns, channels = x.shape
  x = x.reshape(batch, frames, rows, columns, channels // side**2, side, side)
  x = x.transpose(0, 1, 2, 6, 3, 5, 4)
  return x.reshape(batch, frames, rows * side, columns * side, channels // side**2)
