"""The optimiser of the world's networks: Muon for matrices, AdamW for vectors and tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax
from flax import nnx
from optax.contrib import MuonDimensionNumbers, muon


def cosine(peak: float, steps: int, warmup: int = 10, end: float = 0.0) -> optax.Schedule:
  """Linear warm-up from zero, then a cosine from `peak` to `end` over the remaining steps."""
  return optax.warmup_cosine_decay_schedule(0.0, peak, min(warmup, steps // 2), steps, end)


def muon_for(
  dimension_numbers: Callable[[str, jax.Array], MuonDimensionNumbers | None],
  learning_rate: optax.Schedule,
  vector_learning_rate: optax.Schedule,
  clip_norm: float = 1.0,
) -> optax.GradientTransformation:
  """Muon (Jordan et al. 2024) where `dimension_numbers(path, leaf)` names a matrix, else AdamW.

  Its updates are orthogonal matrices, so a learning rate of 0.01 changes a fresh weight by about
  one per cent a step whatever the size of its gradient.
  """

  def numbers(params):
    return jax.tree_util.tree_map_with_path(
      lambda path, leaf: dimension_numbers(jax.tree_util.keystr(path), leaf), params
    )

  return optax.chain(
    optax.clip_by_global_norm(clip_norm),
    muon(
      learning_rate,
      adam_b2=0.98,
      adam_learning_rate=vector_learning_rate,
      muon_weight_dimension_numbers=numbers,
    ),
  )


def conv_numbers(path: str, leaf: jax.Array) -> MuonDimensionNumbers | None:
  """Convolution kernels [..., in, out] as matrices (all but out) x out; vectors go to AdamW."""
  del path
  if leaf.ndim < 2:
    return None
  return MuonDimensionNumbers(tuple(range(leaf.ndim - 1)), leaf.ndim - 1)


def plain(state: nnx.State) -> dict:
  """An NNX parameter state as nested dictionaries of arrays, which optax walks without care."""
  return nnx.to_pure_dict(state)


def merger(graphdef: nnx.GraphDef, state: nnx.State) -> Callable[[dict], Any]:
  """A function from such a plain tree back to the module."""

  def merge(params: dict) -> Any:
    filled = jax.tree.map(lambda leaf: leaf, state)
    nnx.replace_by_pure_dict(filled, params)
    return nnx.merge(graphdef, filled)

  return merge
