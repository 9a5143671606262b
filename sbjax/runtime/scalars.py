"""The driver's arithmetic: rewards to advantages, advantages to coefficients, all in float64."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from sbjax.algorithms.advantages import advantages, from_settings
from sbjax.rewards.protocol import CandidateReward
from sbjax.runtime.early import unit_scalars
from sbjax.runtime.recipe import Recipe
from sbjax.separation.objective import Batch


@dataclasses.dataclass(frozen=True)
class UpdateScalars:
  """What one update applies to its buffers.

  Attributes:
    batch: the mini-batch's scalars.
    late: candidate -> coefficients of its buffers.
    backward_weights: candidate -> [chunks, steps, channels] for the two-pass baseline; else empty.
    skip: True where too many rewards failed for an update.
    failed: how many candidates of the mini-batch have no reward.
    metrics: ratio and clip statistics, advantages.
  """

  batch: Batch
  late: Mapping[int, np.ndarray]
  backward_weights: Mapping[int, np.ndarray]
  skip: bool
  failed: int
  metrics: Mapping[str, float]


def update_scalars(
  recipe: Recipe,
  *,
  update: int,
  members: Sequence[int],
  two_pass: bool,
  groups: Mapping[int, int],
  rewards: Mapping[int, CandidateReward],
  scalars: Mapping[int, Mapping[str, np.ndarray]],
  old_scores: Mapping[int, np.ndarray],
) -> UpdateScalars:
  """Works out an update's coefficients.

  Args:
    recipe: the run's recipe.
    update: index of the update within the step.
    members: its candidates.
    two_pass: True where the coefficients are applied in a second replay, not to buffers.
    groups: candidate -> group, for every candidate of the step.
    rewards: candidate -> reward, for every candidate of the advantages' scope.
    scalars: candidate -> raw channels and statistics of its replay.
    old_scores: candidate -> the rollout's scores of its trained steps.
  """
  objective = recipe.objective_of(update)
  units = [unit_scalars(recipe, scalars[c], old_scores[c]) for c in members]
  channels, old, statistics = (np.stack(column) for column in zip(*units, strict=True))
  finite = np.isfinite(channels).all(axis=(1, 2))
  values, trained = _advantages(recipe, groups, rewards)
  place = {c: i for i, c in enumerate(sorted(rewards))}
  rows = [place[c] for c in members]
  failed = sum(rewards[c].components is None for c in members)
  batch = Batch(
    channels=channels,
    old=old,
    statistics=statistics,
    advantages=values[rows],
    valid=trained[rows] & finite,
    group=np.array([groups[c] for c in members]),
    normaliser=_normaliser(recipe, len(members)),
  )
  late = objective.late(batch)
  late_of = {c: late[i] for i, c in enumerate(members)}
  weights: dict[int, np.ndarray] = {}
  if two_pass:
    for i, c in enumerate(members):
      early = objective.early(channels[i], old[i], statistics[i])
      per_unit = np.einsum("buj,b->uj", np.where(late[i][:, None, None] == 0, 0.0, early), late[i])
      weights[c] = np.einsum("uj,cuk->ckj", per_unit, recipe.reduce_weights)
    late_of = {c: np.ones(1) for c in members}
  metrics = dict(objective.metrics(batch))
  usable = batch.advantages[batch.valid]
  if usable.size:
    metrics["critic/advantages/mean"] = float(usable.mean())
    metrics["critic/advantages/max"] = float(usable.max())
    metrics["critic/advantages/min"] = float(usable.min())
  return UpdateScalars(
    batch,
    late_of,
    weights,
    skip=failed > recipe.settings.reward.max_failed_frac * len(members),
    failed=failed,
    metrics=metrics,
  )


def _normaliser(recipe: Recipe, members: int) -> float:
  """Z: candidates that train × trained steps, known before any reward."""
  rollout = recipe.settings.rollout
  share = rollout.best_of / rollout.group_size if rollout.best_of else 1.0
  return members * share * recipe.trained


def _advantages(
  recipe: Recipe, groups: Mapping[int, int], rewards: Mapping[int, CandidateReward]
) -> tuple[np.ndarray, np.ndarray]:
  """Advantages and the trained mask of every candidate that has been judged, in index order."""
  order = sorted(rewards)
  names = recipe.settings.reward.components
  table = np.full((len(order), len(names)), np.nan)
  for row, c in enumerate(order):
    components = rewards[c].components
    if components is not None:
      table[row] = [components.get(name, np.nan) for name in names]
  valid = np.array([rewards[c].components is not None for c in order], bool)
  outcome = advantages(
    table,
    valid,
    np.array([groups[c] for c in order]),
    from_settings(recipe.settings),
    # A component that its reward left out is absent from the whole group.
    left_out=valid[:, None] & np.isnan(table),
  )
  return outcome.values, outcome.trained


def weighted_reward(recipe: Recipe, reward: CandidateReward) -> float | None:
  """The weighted sum of the components that a candidate has, None where it has none."""
  if reward.components is None:
    return None
  names, weights = recipe.settings.reward.components, recipe.settings.reward.weights
  values = reward.components
  return float(sum(w * values[n] for n, w in zip(names, weights, strict=True) if n in values))
