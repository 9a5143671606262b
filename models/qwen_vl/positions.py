"""Where things are: patches in a slice, windows, the position table, and tokens in a sequence.

All of it depends on sizes only and is worked out on the host. A *slice* is one temporal patch of an
image or video; patches of different slices never attend to each other. Patches of a slice stand in
*merge-block order*: blocks of `merge` × `merge` patches in raster order, and raster order inside.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from models.qwen_vl.presets import QwenVLConfig, TextConfig, VisionConfig


class Grid(NamedTuple):
  """Patches of a visual: slices, rows and columns, before merging."""

  slices: int
  height: int
  width: int

  def tokens(self, merge: int) -> int:
    """Tokens that the visual takes in a sequence."""
    return self.slices * (self.height // merge) * (self.width // merge)


class Windows(NamedTuple):
  """Attention windows of a slice.

  Attributes:
    members: `[windows, size]` patch of each place, in raster order; 0 where the place is empty.
    filled: `[windows, size]` whether there is one.
    place: `[patches]` flat place of each patch: the inverse.
  """

  members: Int[np.ndarray, "windows size"]
  filled: np.ndarray
  place: Int[np.ndarray, " patches"]


def merge_order(
  values: Int[np.ndarray, "height width"] | Float[np.ndarray, "height width"], merge: int
) -> np.ndarray:
  """Flattens a grid of patches into merge-block order."""
  height, width = values.shape
  blocks = values.reshape(height // merge, merge, width // merge, merge)
  return blocks.transpose(0, 2, 1, 3).reshape(-1)


@functools.lru_cache(maxsize=64)
def patch_angles(
  config: VisionConfig, height: int, width: int
) -> Float[np.ndarray, "patches head_dim/2"]:
  """Rotary angles of each patch: a quarter of the head follows the row, a quarter the column."""
  quarter = config.head_dim // 4
  frequencies = config.rope_theta ** (-np.arange(quarter, dtype=np.float64) / quarter)
  rows, columns = np.indices((height, width))
  at = [merge_order(axis, config.merge)[:, None] * frequencies for axis in (rows, columns)]
  return np.concatenate(at, axis=1).astype(np.float32)


@functools.lru_cache(maxsize=64)
def windows(config: VisionConfig, height: int, width: int) -> Windows:
  """The windows of a slice of `height` × `width` patches; those at the edges are partly empty."""
  side = config.window_px // config.patch_px
  rows, columns = np.indices((height, width))
  across = -(-width // side)
  window = merge_order(rows // side * across + columns // side, config.merge)
  count = int(window.max()) + 1
  members = np.zeros((count, side * side), np.int32)
  filled = np.zeros((count, side * side), bool)
  place = np.zeros(window.shape, np.int32)
  for index in range(count):
    inside = np.flatnonzero(window == index)
    members[index, : inside.size] = inside
    filled[index, : inside.size] = True
    place[inside] = index * side * side + np.arange(inside.size)
  return Windows(members, filled, place)


@functools.lru_cache(maxsize=64)
def table_corners(
  config: VisionConfig, height: int, width: int
) -> tuple[Int[np.ndarray, "4 patches"], Float[np.ndarray, "4 patches"]]:
  """Rows of the learned position table and their weights: bilinear, with the corners aligned."""
  side = config.table_side

  def axis(count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    at = np.linspace(0, side - 1, count, dtype=np.float32)
    low = at.astype(np.int32)
    return low, np.minimum(low + 1, side - 1), at - low.astype(np.float32)

  (top, bottom, down), (left, right, along) = axis(height), axis(width)
  corners, weights = [], []
  for row, row_weight in ((top, 1 - down), (bottom, down)):
    for column, column_weight in ((left, 1 - along), (right, along)):
      corners.append(merge_order(row[:, None] * side + column[None], config.merge))
      weights.append(merge_order(row_weight[:, None] * column_weight[None], config.merge))
  return np.stack(corners), np.stack(weights).astype(np.float32)


@functools.lru_cache(maxsize=64)
def rotary_axes(
  config: TextConfig,
) -> tuple[Int[np.ndarray, " head_dim/2"], Float[np.ndarray, " head_dim/2"]]:
  """Which position (0 time, 1 row, 2 column) each rotary frequency follows, and the frequencies.

  Qwen2.5 gives each axis a run of frequencies; Qwen3 lets row and column take every third one.
  """
  half = config.head_dim // 2
  frequencies = config.rope_theta ** (-np.arange(half, dtype=np.float64) / half)
  if not config.interleaved:
    axes = np.repeat(np.arange(3), config.mrope_section)
  else:
    axes = np.zeros(half, np.int64)
    for axis in (1, 2):
      axes[axis : 3 * config.mrope_section[axis] : 3] = axis
  return axes.astype(np.int32), frequencies.astype(np.float32)


class Placed(NamedTuple):
  """A sequence with its places.

  Attributes:
    positions: `[3, tokens]` time, row and column of each token.
    next_position: what text after the last token has on all three axes.
    visual_rows: `[tokens]` row of the concatenated visual features that replaces the token, -1 for
      text.
  """

  positions: Int[np.ndarray, "3 tokens"]
  next_position: int
  visual_rows: Int[np.ndarray, " tokens"]


class Visual(NamedTuple):
  """Size and kind of a visual in a sequence.

  Attributes:
    grid: its patches.
    video: whether its placeholders are those of a video.
    seconds_per_slice: time between slices; Qwen2.5 videos only.
  """

  grid: Grid
  video: bool = False
  seconds_per_slice: float = 1.0


def place(
  config: QwenVLConfig, ids: Int[np.ndarray, " tokens"], visuals: Sequence[Visual]
) -> Placed:
  """Positions of a sequence in which visuals stand as runs of placeholders.

  Text counts up on all axes at once. The tokens of a visual share a start and spread from it by
  slice, row and column. A Qwen3 video stands one slice a run, each at time 0 of its run.

  Args:
    config: the model.
    ids: the tokens.
    visuals: in the order in which their placeholders come.

  Raises:
    ValueError: when placeholders and visuals do not fit each other.
  """
  merge = config.vision.merge
  pieces = _pieces(config, visuals)
  positions = np.zeros((3, len(ids)), np.int32)
  rows = np.full(len(ids), -1, np.int32)
  is_visual = (ids == config.image_token) | (ids == config.video_token)
  at, counter, row = 0, 0, 0
  while at < len(ids):
    if not is_visual[at]:
      rest = np.flatnonzero(is_visual[at:])
      length = int(rest[0]) if rest.size else len(ids) - at
      positions[:, at : at + length] = counter + np.arange(length)
      at, counter = at + length, counter + length
      continue
    piece = next(pieces, None)
    if piece is None:
      raise ValueError(f"the prompt has placeholders at token {at} but no visual is left for them.")
    grid, token, interval = piece
    length = grid.tokens(merge)
    if not (ids[at : at + length] == token).all() or at + length > len(ids):
      raise ValueError(
        f"the visual at token {at} needs {length} placeholders of id {token} in a row; give as "
        "many as its grid has tokens."
      )
    time, height, width = np.indices((grid.slices, grid.height // merge, grid.width // merge))
    spread = np.stack([np.floor(time * interval).astype(np.int32), height, width]).reshape(3, -1)
    positions[:, at : at + length] = counter + spread
    rows[at : at + length] = row + np.arange(length)
    largest = int(spread.max()) + 1
    sides = max(grid.height, grid.width) // merge
    counter += largest if config.after_visual == "largest" else sides
    at, row = at + length, row + length
  if next(pieces, None) is not None:
    raise ValueError(f"{len(visuals)} visuals are given; the prompt has too few placeholders.")
  return Placed(positions, counter, rows)


def _pieces(config: QwenVLConfig, visuals: Sequence[Visual]):
  """Runs of placeholders: grid, placeholder id, time positions per slice."""
  for visual in visuals:
    grid = visual.grid
    if not visual.video:
      yield grid, config.image_token, 0.0
    elif config.family == "qwen3":
      for _ in range(grid.slices):
        yield Grid(1, grid.height, grid.width), config.video_token, 0.0
    else:
      interval = config.tokens_per_second * visual.seconds_per_slice
      yield grid, config.video_token, interval
