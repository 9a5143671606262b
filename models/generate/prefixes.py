"""Common beginnings: which tokens of a sequence another one has computed already.

Keys and values of a token depend on the tokens before it, on their positions, and on what visuals
show. A sequence is therefore compared by a key per token, which for a visual token names what the
tower saw, and by positions.
"""

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int, UInt64

from models.qwen_vl.cache import Cache
from models.qwen_vl.positions import Placed
from models.qwen_vl.preprocess import Encoded


@dataclasses.dataclass(frozen=True, eq=False)
class Track:
  """What a sequence is compared by.

  Attributes:
    keys: one number per token.
    positions: time, row and column of each.
  """

  keys: UInt64[np.ndarray, " tokens"]
  positions: Int[np.ndarray, "3 tokens"]

  def common(self, other: "Track") -> int:
    """Length of the common beginning."""
    length = min(len(self.keys), len(other.keys))
    same = self.keys[:length] == other.keys[:length]
    same &= (self.positions[:, :length] == other.positions[:, :length]).all(axis=0)
    return length if same.all() else int(np.argmin(same))

  def extended(self, tokens: Int[np.ndarray, " new"], position: int) -> "Track":
    """The sequence with text after it, the first of it at `position`."""
    places = np.broadcast_to(position + np.arange(len(tokens), dtype=np.int32), (3, len(tokens)))
    keys = np.concatenate([self.keys, np.asarray(tokens).astype(np.uint64)])
    return Track(keys, np.concatenate([self.positions, places], axis=1))

  def first(self, length: int) -> "Track":
    """The first tokens of it."""
    return Track(self.keys[:length], self.positions[:, :length])


def track(
  ids: Int[np.ndarray, " tokens"], placed: Placed, visuals: Sequence[Encoded], merge: int
) -> Track:
  """The track of a prompt; all tokens of a visual have its digest for a key."""
  keys = ids.astype(np.uint64)
  is_visual = placed.visual_rows >= 0
  if is_visual.any():
    named = [
      np.full(
        visual.visual.grid.tokens(merge),
        np.frombuffer(visual.digest[:8], np.uint64)[0] | np.uint64(1 << 63),
      )
      for visual in visuals
    ]
    keys[is_visual] = np.concatenate(named)[placed.visual_rows[is_visual]]
  return Track(keys, placed.positions)


@dataclasses.dataclass(frozen=True, eq=False)
class Kept:
  """Keys and values of a finished request, on the device.

  Attributes:
    track: the tokens that they are of.
    cache: one row, at least as long as the track.
    aligned: how many tokens of the beginning were computed in chunks from a multiple of the chunk.
  """

  track: Track
  cache: Cache
  aligned: int

  @property
  def size_bytes(self) -> int:
    """Memory of keys and values."""
    return sum(array.nbytes for half in self.cache for array in half)


class PrefixStore:
  """Keeps the keys and values that were used last, up to a size."""

  def __init__(self, limit_bytes: int):
    self._limit_bytes = limit_bytes
    self._kept: collections.OrderedDict[int, Kept] = collections.OrderedDict()
    self._size_bytes = 0

  def add(self, kept: Kept) -> None:
    """Adds one, and lets the longest unused go until the rest fits."""
    if kept.size_bytes > self._limit_bytes:
      return
    self._kept[id(kept)] = kept
    self._size_bytes += kept.size_bytes
    while self._size_bytes > self._limit_bytes:
      _, oldest = self._kept.popitem(last=False)
      self._size_bytes -= oldest.size_bytes

  def best(self, wanted: Track) -> tuple[int, Kept | None]:
    """The longest common beginning, and who has it."""
    found = max(self._kept.values(), key=lambda kept: kept.track.common(wanted), default=None)
    return (found.track.common(wanted), found) if found is not None else (0, None)

  def used(self, kept: Kept) -> None:
    """Marks as used just now; of no effect where it has gone."""
    if id(kept) in self._kept:
      self._kept.move_to_end(id(kept))
