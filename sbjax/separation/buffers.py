"""Gradient buffers: folding units, applying late coefficients, merging.

A sum must not depend on who computed which part. So a candidate is folded in float32 in a fixed
order, multiplied by its coefficient in float32, and added to a float64 accumulator; accumulators
are merged in float64 and rounded once.
"""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float

from sbjax.separation.policy import Params

Buffers = Float[np.ndarray, "buffers parameters"]
"""The folded gradients of one candidate and one block, flat, float32."""


def flatten(tree: Params) -> Float[np.ndarray, " parameters"]:
  """Gives a tree of adapter leaves as one flat float32 buffer, leaves in key order."""
  flat, _ = ravel_pytree(tree)
  return np.asarray(flat, np.float32)


def unflatten(flat: Float[np.ndarray, " parameters"], like: Params) -> Params:
  """Gives the tree that `flatten` took apart.

  Raises:
    ValueError: if the buffer's length is not that of `like`.
  """
  leaves, structure = jax.tree.flatten(like)
  sizes = [int(np.prod(leaf.shape)) for leaf in leaves]
  if flat.shape != (sum(sizes),):
    raise ValueError(f"adapter of shape {flat.shape} does not fit {sum(sizes)} parameters")
  parts = np.split(np.asarray(flat, np.float32), np.cumsum(sizes)[:-1])
  return jax.tree.unflatten(
    structure, [jnp.asarray(p.reshape(leaf.shape)) for p, leaf in zip(parts, leaves, strict=True)]
  )


@jax.jit
def _fold(units: Params, early: Float[Array, "buffers units channels"]) -> Float[Array, "b p"]:
  buffers, n_units, n_channels = early.shape
  rows = []
  for b in range(buffers):
    total = None
    for u in range(n_units):
      for j in range(n_channels):
        weight = early[b, u, j]
        # Selection, not multiplication: a weight of zero must drop a non-finite gradient.
        part = jax.tree.map(
          lambda g, u=u, j=j, w=weight: jnp.where(w == 0, jnp.zeros_like(g[u, j]), w * g[u, j]),
          units,
        )
        total = part if total is None else jax.tree.map(jnp.add, total, part)
    rows.append(ravel_pytree(total)[0])
  return jnp.stack(rows)


def fold(units: Params, early: Float[np.ndarray, "buffers units channels"]) -> Buffers:
  """Folds a block's unit gradients into buffers with the early weights (StageBreaker eq. 7).

  Args:
    units: gradients with leading axes [units, channels].
    early: reward-free weights, from an objective.

  Returns:
    [buffers, parameters], float32.
  """
  return np.asarray(_fold(units, jnp.asarray(early, jnp.float32)))


def accumulate(
  total: Float[np.ndarray, " parameters"],
  parts: Iterable[tuple[Buffers, Float[np.ndarray, " buffers"]]],
) -> int:
  """Adds coefficient × buffer to a float64 accumulator, in place.

  Args:
    total: [parameters], float64.
    parts: folded buffers of a candidate's block with the candidate's late coefficients.

  Returns:
    How many buffers were left out because they were not finite although their coefficient was not
    zero; the caller must count them, for the sum lacks them.
  """
  dropped = 0
  for buffers, late in parts:
    for row, coefficient in zip(buffers, np.asarray(late, np.float32), strict=True):
      if coefficient == 0:
        continue
      product = coefficient * row
      if np.isfinite(product).all():
        total += product
      else:
        dropped += 1
  return dropped


def merge(
  sums: Iterable[Float[np.ndarray, " parameters"]],
) -> Float[np.ndarray, " parameters"]:
  """Merges the workers' float64 sums and rounds once to float32."""
  total: np.ndarray | None = None
  for part in sums:
    total = part.astype(np.float64) if total is None else total + part
  if total is None:
    raise ValueError("no sum to merge; a mini-batch needs at least one worker's sum")
  return total.astype(np.float32)
