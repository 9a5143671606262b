"""The decoder's keys and values as a value, and attention over them.

A cache has a row per sequence. Rows are filled from the left, each to its own length; what lies
past a row's length means nothing and is masked. Writing gives a new cache (in place where the
caller donates the old one).

Keys have their tokens last: the product with a few queries then runs along memory, several times
faster on CPUs than over rows of keys.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from models.qwen_vl.presets import TextConfig
from models.qwen_vl.text import Mix


class Cache(NamedTuple):
  """Keys and values, one array per layer."""

  k: tuple[Float[Array, "rows kv_heads head_dim length"], ...]
  v: tuple[Float[Array, "rows kv_heads length head_dim"], ...]

  @property
  def length(self) -> int:
    """Tokens that a row can hold."""
    return self.v[0].shape[2]


class Keys(NamedTuple):
  """A set of keys and values, and which query may attend to which key."""

  k: Float[Array, "batch kv_heads head_dim keys"]
  v: Float[Array, "batch kv_heads keys head_dim"]
  attended: Bool[Array, "batch queries keys"]


def empty_cache(config: TextConfig, rows: int, length: int, dtype: Any = jnp.float32) -> Cache:
  """A cache of zeros."""
  heads, dim = config.num_kv_heads, config.head_dim

  def layers(*shape: int) -> tuple[Array, ...]:
    return tuple(jnp.zeros((rows, heads, *shape), dtype) for _ in range(config.num_layers))

  return Cache(layers(dim, length), layers(length, dim))


def cache_bytes(config: TextConfig, rows: int, length: int, itemsize: int = 4) -> int:
  """Memory of a cache."""
  per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * itemsize
  return rows * length * per_token


def attend(
  q: Float[Array, "batch kv_heads groups queries head_dim"], parts: Sequence[Keys]
) -> Float[Array, "batch kv_heads groups queries head_dim"]:
  """`softmax(q kᵀ / √head_dim) v` over the union of the parts; scores and softmax in float32.

  Every query must attend to something. A key that it may not attend to has a weight of exactly
  zero, whatever is stored there, as long as it is finite.
  """
  scale = q.shape[-1] ** -0.5
  scores = []
  for part in parts:
    s = jnp.einsum("bhgtd,bhds->bhgts", q, part.k, preferred_element_type=jnp.float32) * scale
    scores.append(jnp.where(part.attended[:, None, None], s, -jnp.inf))
  peak = scores[0].max(axis=-1, keepdims=True)
  for s in scores[1:]:
    peak = jnp.maximum(peak, s.max(axis=-1, keepdims=True))
  peak = jax.lax.stop_gradient(peak)
  total = jnp.zeros_like(peak)
  mixed = jnp.zeros(q.shape, jnp.float32)
  for s, part in zip(scores, parts, strict=True):
    weights = jnp.exp(s - peak)
    total = total + weights.sum(axis=-1, keepdims=True)
    mixed = mixed + jnp.einsum(
      "bhgts,bhsd->bhgtd",
      weights.astype(q.dtype),
      part.v,
      preferred_element_type=jnp.float32,
    )
  return (mixed / total).astype(q.dtype)


def causal_mix(attended: Bool[Array, "batch tokens"] | None = None) -> Mix:
  """Attention of a whole sequence to itself, for training and scoring.

  Args:
    attended: which tokens are real. Padding must stand at the end, where causality hides it, or be
      named here; a padded query still attends to itself.
  """

  def mix(layer: int, q: Array, k: Array, v: Array) -> Array:
    del layer
    tokens = k.shape[2]
    mask = jnp.tril(jnp.ones((tokens, tokens), bool))[None]
    if attended is not None:
      mask = (mask & attended[:, None]) | jnp.eye(tokens, dtype=bool)[None]
    attended_by = jnp.broadcast_to(mask, (k.shape[0], tokens, tokens))
    return attend(q, [Keys(k.swapaxes(2, 3), v, attended_by)])

  return mix


class Extend:
  """Attention of a chunk to its row's past and to itself; collects the extended cache.

  Args:
    cache: the past.
    start: `[batch]` tokens that each row already holds; row, chunk and padding must fit into the
      cache's length.
    rows: which rows of the cache the batch stands for.
  """

  def __init__(self, cache: Cache, start: Int[Array, " batch"], rows: Int[Array, " batch"]):
    self._k, self._v = list(cache.k), list(cache.v)
    self._start, self._rows = start, rows

  @property
  def cache(self) -> Cache:
    """The cache with the chunk in it."""
    return Cache(tuple(self._k), tuple(self._v))

  def __call__(self, layer: int, q: Array, k: Array, v: Array) -> Array:
    """The `mix` of a layer."""
    self._k[layer] = write(self._k[layer], k.swapaxes(2, 3), self._rows, self._start, 3)
    self._v[layer] = write(self._v[layer], v, self._rows, self._start, 2)
    length = self._v[layer].shape[2]
    queries = self._start[:, None] + jnp.arange(k.shape[2], dtype=jnp.int32)[None]
    attended = jnp.arange(length, dtype=jnp.int32)[None, None] <= queries[:, :, None]
    past = [jnp.take(store[layer], self._rows, axis=0) for store in (self._k, self._v)]
    return attend(q, [Keys(past[0], past[1], attended)])


def write(
  store: Float[Array, "rows kv_heads a b"],
  new: Float[Array, "batch kv_heads c d"],
  rows: Int[Array, " batch"],
  start: Int[Array, " batch"],
  axis: int,
) -> Float[Array, "rows kv_heads a b"]:
  """Puts `new` into the named rows, each from its own start along the axis of tokens."""
  zero = jnp.zeros((), jnp.int32)
  for index in range(new.shape[0]):
    at = [rows[index], zero, zero, zero]
    at[axis] = start[index]
    store = jax.lax.dynamic_update_slice(store, new[index : index + 1].astype(store.dtype), at)
  return store


def merge(
  cache: Cache, new: Cache, rows: Int[Array, " batch"], start: Int[Array, " batch"]
) -> Cache:
  """The cache with another one's rows written into it, each from its own start."""
  k = [write(old, n, rows, start, 3) for old, n in zip(cache.k, new.k, strict=True)]
  v = [write(old, n, rows, start, 2) for old, n in zip(cache.v, new.v, strict=True)]
  return Cache(tuple(k), tuple(v))


def fit(cache: Cache, rows: Int[Array, " kept"], count: int, length: int) -> Cache:
  """A cache of `count` rows and another length: row i is the old row `rows[i]`, the rest zero."""

  def one(store: Array, axis: int) -> Array:
    kept = jnp.take(store, rows, axis=0)
    kept = jax.lax.slice_in_dim(kept, 0, min(length, kept.shape[axis]), axis=axis)
    pad = [(0, 0)] * 4
    pad[0], pad[axis] = (0, count - kept.shape[0]), (0, length - kept.shape[axis])
    return jnp.pad(kept, pad)

  return Cache(tuple(one(x, 3) for x in cache.k), tuple(one(x, 2) for x in cache.v))
