"""Image pre-processing of HPS v2 and of CLIP.

HPS v2 brings the longest side to the model's and adds black bars. Its resizing works on real
numbers and may leave 0 to 1; the bars are added before normalisation, so they are black and not
grey.
CLIP brings the shortest side to the model's, in 8 bits by Pillow, and cuts the middle out. A square
image has neither bars nor cuts.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8
from PIL import Image

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
  return _normalised(jnp.pad(x, bars))


def cropped(
  images: UInt8[np.ndarray, "batch height width 3"], *, side: int = 224
) -> Float[Array, "batch 3 side side"]:
  """Normalised middles of RGB images.

  Source: CLIP's own pre-processing, as transformers' `CLIPImageProcessor` does it.
  """
  height, width = images.shape[1:3]
  scale = side / min(height, width)
  # The longer side is cut off to a whole number, as there.
  rows, columns = (side if n == min(height, width) else int(n * scale) for n in (height, width))
  resized = [
    np.asarray(Image.fromarray(image).resize((columns, rows), Image.Resampling.BICUBIC))
    for image in images
  ]
  top, left = (rows - side) // 2, (columns - side) // 2
  middle = np.stack(resized)[:, top : top + side, left : left + side]
  return _normalised(jnp.asarray(middle.transpose(0, 3, 1, 2).astype(np.float32) / 255.0))


def _normalised(x: Array) -> Array:
  mean, std = (np.asarray(c, np.float32)[None, :, None, None] for c in (MEAN, STD))
  return (x - mean) / std
