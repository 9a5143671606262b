"""What a candidate's scores say before any reward: its units' scalars and their early weights.

Driver and workers work them out alike, in float64.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from sbjax.separation.replay import units_of


def known_weights(recipe: Any, objective: Any) -> np.ndarray | None:
  """Weights [chunks, steps, channels] where one buffer needs no scores, else None."""
  if not getattr(objective, "on_policy", False) or objective.buffers(recipe.units) != 1:
    return None
  if objective.statistics:
    return None
  blank = np.zeros((recipe.units, len(objective.channels)))
  early = objective.early(blank, blank, np.zeros((recipe.units, 0)))
  return np.einsum("uj,cuk->ckj", early[0], recipe.reduce_weights)


def early_weights(
  recipe: Any, update: int, scalars: Mapping[str, Any], old_scores: np.ndarray
) -> np.ndarray:
  """The objective's early weights of one candidate from its raw scalars of every chunk.

  Args:
    recipe: the run's recipe.
    update: index of the update within the step.
    scalars: `channels` [chunks, steps, channels] and `statistics` of every chunk, in order.
    old_scores: the rollout's scores [chunks, trained steps].
  """
  channels, old, statistics = unit_scalars(recipe, scalars, old_scores)
  return recipe.objective_of(update).early(channels, old, statistics)


def unit_scalars(
  recipe: Any, scalars: Mapping[str, Any], old_scores: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Channels, old channels and statistics of a candidate's units, in float64.

  Differences are taken chunk by chunk before they are added up, so that the float32 scores lose
  nothing; only the score has an old value.
  """
  weights = recipe.reduce_weights
  now = np.asarray(scalars["channels"], np.float64)
  before = now.copy()
  before[..., 0] = np.asarray(old_scores, np.float64)
  return (
    units_of(now, weights),
    units_of(before, weights),
    units_of(np.asarray(scalars["statistics"], np.float64), weights),
  )
