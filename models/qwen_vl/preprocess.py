"""Images and videos to patches: frame choice, sizes, resizing, normalisation.

Resizing is Pillow's bicubic filter on 8-bit values, which is what the models were trained with and
what serving systems use; other bicubic filters differ from it by several levels at hard edges.

Source: Qwen2.5-VL's and Qwen3-VL's processors as Hugging Face runs them.
"""

import dataclasses
import functools
import hashlib

import numpy as np
from jaxtyping import Float, Int, UInt8
from PIL import Image

from models.qwen_vl.positions import Grid, Visual
from models.qwen_vl.presets import Family, VisionConfig

# Mean and standard deviation of each colour, of values from 0 to 1.
COLOURS: dict[Family, tuple[tuple[float, ...], tuple[float, ...]]] = {
  "qwen2.5": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
  "qwen3": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
}
LARGEST_ASPECT = 200


@dataclasses.dataclass(frozen=True)
class Limits:
  """How many pixels a visual may have; smaller and larger ones are resized.

  Attributes:
    min_px, max_px: pixels of an image or of a video's frame; of all frames together for a Qwen3
      video.
  """

  min_px: int
  max_px: int

  def __post_init__(self):
    """Refuses an empty range."""
    if not 0 < self.min_px <= self.max_px:
      raise ValueError(f"min_px is {self.min_px}; it must be 1 to max_px ({self.max_px}).")


IMAGE_LIMITS: dict[Family, Limits] = {
  "qwen2.5": Limits(56 * 56, 12_845_056),
  "qwen3": Limits(65_536, 16_777_216),
}
VIDEO_LIMITS: dict[Family, Limits] = {
  "qwen2.5": Limits(128 * 28 * 28, 768 * 28 * 28),
  "qwen3": Limits(4_096, 25_165_824),
}


@dataclasses.dataclass(frozen=True, eq=False)
class Encoded:
  """A visual, ready for the tower.

  Attributes:
    patches: flat normalised patches of each slice in merge-block order.
    visual: its grid and kind.
    times_s: time in the middle of each slice; videos only.
  """

  patches: Float[np.ndarray, "slices patches width"]
  visual: Visual
  times_s: tuple[float, ...] = ()

  @functools.cached_property
  def digest(self) -> bytes:
    """Names what the tower sees: equal patches on equal grids have equal digests."""
    found = hashlib.blake2b(np.ascontiguousarray(self.patches).data, digest_size=16)
    found.update(repr(self.visual).encode())
    return found.digest()


def smart_size(height: int, width: int, factor: int, limits: Limits) -> tuple[int, int]:
  """The size an image is resized to: multiples of `factor` within the limits, aspect nearly kept.

  Raises:
    ValueError: when one side is more than 200 times the other.
  """
  _check_aspect(height, width)
  # Python rounds halves to even, and so does the original. Zero, which it leaves, is no size.
  rows, columns = (max(factor, round(side / factor) * factor) for side in (height, width))
  if rows * columns > limits.max_px:
    beta = (height * width / limits.max_px) ** 0.5
    rows, columns = (max(factor, int(s / beta // factor) * factor) for s in (height, width))
  elif rows * columns < limits.min_px:
    beta = (limits.min_px / (height * width)) ** 0.5
    rows, columns = (int(-(-s * beta // factor)) * factor for s in (height, width))
  return rows, columns


def smart_video_size(
  frames: int, height: int, width: int, factor: int, limits: Limits, temporal: int = 2
) -> tuple[int, int]:
  """The size a Qwen3 video's frames are resized to: limits count the pixels of all frames.

  Raises:
    ValueError: when one side is more than 200 times the other.
  """
  if height < factor or width < factor:
    scale = max(factor / height, factor / width)
    height, width = int(height * scale), int(width * scale)
  _check_aspect(height, width)
  rows, columns = (round(side / factor) * factor for side in (height, width))
  rounded = -(-frames // temporal) * temporal
  if rounded * rows * columns > limits.max_px:
    beta = (frames * height * width / limits.max_px) ** 0.5
    rows, columns = (max(factor, int(s / beta // factor) * factor) for s in (height, width))
  elif rounded * rows * columns < limits.min_px:
    beta = (limits.min_px / (frames * height * width)) ** 0.5
    rows, columns = (int(-(-s * beta // factor)) * factor for s in (height, width))
  return rows, columns


def resize(
  frames: UInt8[np.ndarray, "frames height width 3"], height: int, width: int
) -> UInt8[np.ndarray, "frames rows columns 3"]:
  """Each frame resized with Pillow's bicubic filter."""
  if frames.shape[1:3] == (height, width):
    return frames
  size = (width, height)
  return np.stack(
    [np.asarray(Image.fromarray(f).resize(size, Image.Resampling.BICUBIC)) for f in frames]
  )


def to_patches(
  frames: UInt8[np.ndarray, "frames height width 3"], config: VisionConfig
) -> tuple[Float[np.ndarray, "slices patches width"], Grid]:
  """Cuts frames into normalised patches; sides must be multiples of the token's side.

  A last slice that lacks frames repeats the last one, so an image is seen twice.
  """
  short = -frames.shape[0] % config.temporal_patch
  if short:
    frames = np.concatenate([frames, np.repeat(frames[-1:], short, axis=0)])
  count, height, width, channels = frames.shape
  mean, std = (np.asarray(c, np.float32) * np.float32(255) for c in COLOURS[config.family])
  normal = (frames.astype(np.float32) - mean) / std
  t, p, m = config.temporal_patch, config.patch_px, config.merge
  grid = Grid(count // t, height // p, width // p)
  shape = (grid.slices, t, grid.height // m, m, p, grid.width // m, m, p, channels)
  cut = normal.reshape(shape).transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
  flat = cut.reshape(grid.slices, grid.height * grid.width, config.patch_width)
  return np.ascontiguousarray(flat), grid


def encode_image(
  image: UInt8[np.ndarray, "height width 3"], config: VisionConfig, limits: Limits | None = None
) -> Encoded:
  """Resizes an image and cuts it into patches.

  Args:
    image: RGB.
    config: the tower.
    limits: pixels; the family's own by default.

  Raises:
    ValueError: an image of another layout, or more than 200 times as long as wide.
  """
  _check_layout(image[None], "image")
  height, width = image.shape[:2]
  size = smart_size(height, width, config.factor_px, limits or IMAGE_LIMITS[config.family])
  patches, grid = to_patches(resize(image[None], size[0], size[1]), config)
  return Encoded(patches, Visual(grid))


def encode_video(
  frames: UInt8[np.ndarray, "frames height width 3"],
  config: VisionConfig,
  times_s: Float[np.ndarray, " frames"],
  limits: Limits | None = None,
) -> Encoded:
  """Resizes the frames of a video that were chosen for the model, and cuts them into patches.

  Args:
    frames: RGB.
    config: the tower.
    times_s: when each frame is shown.
    limits: pixels; the family's own by default.

  Raises:
    ValueError: frames of another layout, or another number of times.
  """
  _check_layout(frames, "frames")
  if len(times_s) != len(frames):
    raise ValueError(f"times_s has {len(times_s)} entries; there are {len(frames)} frames.")
  limits = limits or VIDEO_LIMITS[config.family]
  count, height, width = frames.shape[:3]
  if config.family == "qwen3":
    size = smart_video_size(count, height, width, config.factor_px, limits, config.temporal_patch)
  else:
    size = smart_size(height, width, config.factor_px, limits)
  patches, grid = to_patches(resize(frames, size[0], size[1]), config)
  step_s = float(times_s[-1] - times_s[0]) / (count - 1) if count > 1 else 0.5
  visual = Visual(grid, True, step_s * config.temporal_patch)
  return Encoded(patches, visual, slice_times(times_s, config.temporal_patch))


def slice_times(times_s: Float[np.ndarray, " frames"], temporal_patch: int) -> tuple[float, ...]:
  """The middle between the first and last frame of each slice; a short slice repeats its last."""
  short = -len(times_s) % temporal_patch
  padded = np.concatenate([times_s, np.repeat(times_s[-1:], short)])
  groups = padded.reshape(-1, temporal_patch)
  return tuple(float((g[0] + g[-1]) / 2) for g in groups)


def sample_frames(
  family: Family,
  count: int,
  fps: float,
  *,
  wanted_fps: float = 2.0,
  min_frames: int = 4,
  max_frames: int = 768,
) -> Int[np.ndarray, " chosen"]:
  """Which frames of a video the family's processor looks at.

  Qwen2.5 takes an even number, from the first on at equal steps; Qwen3 spreads from first to last.

  Raises:
    ValueError: when the video is shorter than two frames, or the rates are not positive.
  """
  if count < 2 or fps <= 0 or wanted_fps <= 0:
    raise ValueError(
      f"count is {count}, fps {fps:g} and wanted_fps {wanted_fps:g}; a video needs two frames and "
      "positive rates."
    )
  chosen = count / fps * wanted_fps
  if family == "qwen3":
    chosen = min(max(int(chosen), min_frames), max_frames, count)
    return np.round(np.linspace(0, count - 1, chosen)).astype(np.int64)
  chosen = int(min(max(chosen, min_frames), max_frames, count)) // 2 * 2
  return np.arange(0, count, count / chosen).astype(np.int64)[:chosen]


def _check_aspect(height: int, width: int) -> None:
  if max(height, width) > LARGEST_ASPECT * min(height, width):
    raise ValueError(
      f"the image is {height}x{width}; no side may be more than {LARGEST_ASPECT} times the other."
    )


def _check_layout(frames: np.ndarray, what: str) -> None:
  if frames.ndim != 4 or frames.shape[-1] != 3 or frames.dtype != np.uint8 or not frames.size:
    raise ValueError(
      f"{what} has shape {frames.shape} and type {frames.dtype}; use 8-bit RGB, colours last."
    )
