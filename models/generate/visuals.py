"""Visual features: each picture is encoded once, however many prompts show it."""

import collections
import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from models.layers.dense import Tree
from models.qwen_vl.preprocess import Encoded
from models.qwen_vl.presets import VisionConfig
from models.qwen_vl.vision import Features, encode_slices

SLICES = (1, 2, 4, 8, 16)  # slices that are encoded together


class HostFeatures(NamedTuple):
  """Features of one visual, on the host.

  Attributes:
    tokens: what replaces its placeholders.
    deep: deepstack levels.
  """

  tokens: Float[np.ndarray, "tokens dim"]
  deep: Float[np.ndarray, "levels tokens dim"]

  @property
  def size_bytes(self) -> int:
    """Memory."""
    return self.tokens.nbytes + self.deep.nbytes


class VisualEncoder:
  """Encodes visuals and remembers the ones used last, up to a size.

  Args:
    p: the tower's parameters.
    config: its sizes.
    limit_bytes: features to remember.
    one_by_one: whether slices are encoded alone, so that their last bits do not depend on others.
  """

  def __init__(self, p: Tree, config: VisionConfig, limit_bytes: int, *, one_by_one: bool = False):
    self._p, self._config, self._limit_bytes = p, config, limit_bytes
    self._sizes = SLICES[:1] if one_by_one else SLICES
    self._known: collections.OrderedDict[bytes, HostFeatures] = collections.OrderedDict()
    self._size_bytes = 0
    self.encoded_slices = 0

  def features(self, visuals: Iterable[Encoded]) -> dict[bytes, HostFeatures]:
    """Features by digest; slices of one size are encoded together."""
    wanted = {visual.digest: visual for visual in visuals}
    found = {}
    for digest in wanted:
      if digest in self._known:
        self._known.move_to_end(digest)
        found[digest] = self._known[digest]
    groups = collections.defaultdict(list)
    for digest, visual in wanted.items():
      if digest not in found:
        groups[visual.visual.grid[1:]].append(visual)
    for (height, width), group in groups.items():
      patches = np.concatenate([visual.patches for visual in group])
      tokens, deep = self._encode(patches, height, width)
      at = 0
      for visual in group:
        end = at + visual.visual.grid.slices
        flat = tokens[at:end].reshape(-1, tokens.shape[-1])
        made = HostFeatures(flat, deep[:, at:end].reshape(len(deep), *flat.shape))
        found[visual.digest] = made
        self._remember(visual.digest, made)
        at = end
    return found

  def _encode(self, patches: np.ndarray, height: int, width: int) -> tuple[Any, Any]:
    tokens, deep, at = [], [], 0
    while at < len(patches):
      left = len(patches) - at
      size = next((s for s in self._sizes if s >= left), self._sizes[-1])
      some = patches[at : at + size]
      self.encoded_slices += len(some)
      padded = np.concatenate([some, np.repeat(some[-1:], size - len(some), axis=0)])
      made = _encode(self._p, self._config, jnp.asarray(padded), height, width)
      tokens.append(np.asarray(made.tokens)[: len(some)])
      deep.append(np.asarray(made.deep)[:, : len(some)])
      at += size
    return np.concatenate(tokens), np.concatenate(deep, axis=1)

  def _remember(self, digest: bytes, made: HostFeatures) -> None:
    if made.size_bytes > self._limit_bytes:
      return
    self._known[digest] = made
    self._size_bytes += made.size_bytes
    while self._size_bytes > self._limit_bytes:
      _, oldest = self._known.popitem(last=False)
      self._size_bytes -= oldest.size_bytes


@functools.partial(jax.jit, static_argnames=("config", "height", "width"))
def _encode(p: Tree, config: VisionConfig, patches: Any, height: int, width: int) -> Features:
  return encode_slices(p, config, patches, height, width)
