"""HPS v2's image pre-processing: the longest side to the model's, black bars, normalisation.

The resizing works on real numbers and may leave 0 to 1; the bars are added before normalisation, so
they are black and not grey. A square image has none.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)


def fitted_size(height: int, width: int, side: int) -> tuple[int, int]:
  """Rows and columns of the image inside the square."""
  scale = side / max(height, width)
  return max(1, round(height * scale)), max(1, round(width * scale))


@functools.partial(jax.jit, static_argnames=("side",))
def preprocess(
  images: UInt8[Array, "batch height width 3"], *, side: int = 224
) -> Float[Array, "batch 3 side side"]:
  """Normalised squares of RGB images."""
  x = images.astype(jnp.float32).transpose(0, 3, 1, 2) / 255.0
  rows, columns = fitted_size(x.shape[2], x.shape[3], side)
  shape = (*x.shape[:2], rows, columns)
  x = jax.image.resize(x, shape, "cubic", antialias=True)
  top, left = (side - rows) // 2, (side - columns) // 2
  bars = ((0, 0), (0, 0), (top, side - rows - top), (left, side - columns - left))
  mean, std = (np.asarray(c, np.float32)[None, :, None, None] for c in (MEAN, STD))
  return (jnp.pad(x, bars) - mean) / std
