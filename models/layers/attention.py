"""The one attention entry point: softmax over several key sets at once, heads before time.

A causal video model attends to the cached past and to the present chunk. Keeping these as separate
*parts* instead of one concatenated sequence costs nothing in the forward pass and spares the
backward pass the gradients of the past.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from models.layers.rounding import round_to


class KeySet(NamedTuple):
  """Keys and values that queries attend to.

  Attributes:
    k: `[batch, heads, keys, dim]` when all query groups share them, `[batch, heads, groups, keys,
      dim]` when each group has its own.
    v: as `k`.
    bias: `[keys]` float32, added to the scores (0 or -inf: a validity mask), or None where every
      key counts.
  """

  k: Float[Array, "..."]
  v: Float[Array, "..."]
  bias: Float[Array, " keys"] | None = None


def attention(
  q: Float[Array, "batch heads groups queries dim"], parts: tuple[KeySet, ...]
) -> Float[Array, "batch heads groups queries dim"]:
  """`softmax(q kᵀ / √dim) v` over the union of the parts; scores and softmax in float32.

  Heads come before time because XLA's CPU matrix products run about twice as fast on that layout.
  """
  scale = q.shape[-1] ** -0.5
  scores = [_scores(q, part) * scale for part in parts]
  scores = [
    s if part.bias is None else s + part.bias.astype(jnp.float32)[None, None, None, None]
    for s, part in zip(scores, parts, strict=True)
  ]
  peak = jnp.max(scores[0], axis=-1, keepdims=True)
  for s in scores[1:]:
    peak = jnp.maximum(peak, jnp.max(s, axis=-1, keepdims=True))
  peak = jax.lax.stop_gradient(peak)
  weights = [jnp.exp(s - peak) for s in scores]
  total = functools.reduce(jnp.add, [jnp.sum(w, axis=-1, keepdims=True) for w in weights])
  mixed = [_mix(round_to(w, q.dtype), part) for w, part in zip(weights, parts, strict=True)]
  return round_to(functools.reduce(jnp.add, mixed) / total, q.dtype)


def _scores(q: Array, part: KeySet) -> Array:
  spec = "bhgtd,bhsd->bhgts" if part.k.ndim == 4 else "bhgtd,bhgsd->bhgts"
  return jnp.einsum(spec, q, part.k.astype(q.dtype), preferred_element_type=jnp.float32)


def _mix(weights: Array, part: KeySet) -> Array:
  spec = "bhgts,bhsd->bhgtd" if part.v.ndim == 4 else "bhgts,bhgsd->bhgtd"
  return jnp.einsum(spec, weights, part.v.astype(weights.dtype), preferred_element_type=jnp.float32)


def head_major(
  x: Float[Array, "batch time heads dim"],
) -> Float[Array, "batch heads time dim"]:
  """Puts heads before time."""
  return x.transpose(0, 2, 1, 3)


def merge_heads(
  x: Float[Array, "batch heads time dim"],
) -> Float[Array, "batch time heads*dim"]:
  """Puts time back before heads and joins the heads."""
  return x.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], -1)
