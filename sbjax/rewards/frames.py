"""Which frames of a video a judge sees, and how they travel."""

import base64

import imageio.v3 as iio
import numpy as np
from jaxtyping import UInt8

JPEG_QUALITY = 95


def evenly_spaced(frames: int, wanted: int) -> list[int]:
  """Gives the indices of evenly spaced frames, the first and the last among them.

  Source: UnifiedReward-Flex's frame choice, whose positions are truncated to whole numbers.

  Args:
    frames: frames of the video, at least 1.
    wanted: how many to take; all of a video that has fewer.

  Returns:
    Increasing indices; one frame is the first one.
  """
  # With the reference's rounding errors: a position just below 15 is frame 14 there.
  return np.linspace(0, frames - 1, min(wanted, frames)).astype(int).tolist()


def jpeg_base64(frame: UInt8[np.ndarray, "height width 3"]) -> str:
  """Encodes one frame as a JPEG file (quality 95) in base64."""
  data = iio.imwrite("<bytes>", frame, extension=".jpg", quality=JPEG_QUALITY)
  return base64.b64encode(data).decode("ascii")
