"""From rewards to advantages: numpy float64 throughout, and exact ties give exactly zero.

Float32 is not enough here: the mean of equal rewards can be off by one unit in the last place, and
divided by an epsilon of 1e-8 that becomes a common advantage of order one.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float, Int

from sbjax.settings import Settings

Baseline = Literal["group_mean", "anchor"]
Std = Literal["group_unbiased", "group_population", "global_unbiased", "global_population", "none"]
Combine = Literal["adv_sum", "raw_sum", "separate_loss", "gdpo"]

_STDS = ("group_unbiased", "group_population", "global_unbiased", "global_population", "none")
_COMBINES = ("adv_sum", "raw_sum", "separate_loss", "gdpo")
_GDPO_EPS = 1e-8


@dataclasses.dataclass(frozen=True)
class AdvantageConfig:
  """How rewards become advantages.

  Attributes:
    baseline: what is subtracted: the group's mean reward, or the reward of the group's anchor.
    std: what is divided by: the standard deviation of the group or of all rewards that are passed
      in, with n - 1 (unbiased) or n (population) in the divisor; or nothing.
    eps: added to the standard deviation, in units of the reward.
    clip: advantages are clipped to ± this at the end; None leaves them.
    tie_tol: a group whose largest and smallest reward differ by no more gets advantage 0.
    combine: several rewards: weighted sum of their advantages; advantage of their weighted sum; one
      column each (the objective weighs the losses); or the first, standardised over all candidates
      again (GDPO).
    weights: one weight per reward.
    best_of: train on the n/2 best and n/2 worst candidates of a group, chosen after the advantages
      of the whole group are known; 0 trains on all.
    std_repeats: every reward counts this often in an unbiased deviation, as in verl, which repeats
      rewards over denoising steps first; 1 elsewhere.
  """

  baseline: Baseline = "group_mean"
  std: Std = "group_unbiased"
  eps: float = 1e-8
  clip: float | None = 5.0
  tie_tol: float = 0.0
  combine: Combine = "adv_sum"
  weights: tuple[float, ...] = (1.0,)
  best_of: int = 0
  std_repeats: int = 1

  def __post_init__(self) -> None:
    """Raises ValueError for a setting that cannot work."""
    if self.baseline not in ("group_mean", "anchor"):
      raise ValueError(f"baseline is {self.baseline!r}; use 'group_mean' or 'anchor'.")
    if self.std not in _STDS:
      raise ValueError(f"std is {self.std!r}; use one of {', '.join(_STDS)}.")
    if self.combine not in _COMBINES:
      raise ValueError(f"combine is {self.combine!r}; use one of {', '.join(_COMBINES)}.")
    if not self.eps > 0:
      raise ValueError(f"eps is {self.eps}; use a positive number.")
    if self.clip is not None and not self.clip > 0:
      raise ValueError(f"clip is {self.clip}; use a positive number, or None for no clipping.")
    if not self.tie_tol >= 0:
      raise ValueError(f"tie_tol is {self.tie_tol}; use 0 or a positive number.")
    if self.best_of < 0 or self.best_of == 1:
      raise ValueError(f"best_of is {self.best_of}; use at least 2, or 0 to train on all.")
    if not self.weights or not all(math.isfinite(w) for w in self.weights):
      raise ValueError(f"weights is {self.weights}; use one finite number per reward.")
    if self.std_repeats < 1:
      raise ValueError(f"std_repeats is {self.std_repeats}; use at least 1.")


@dataclasses.dataclass(frozen=True)
class Advantages:
  """Advantages of some candidates.

  Attributes:
    values: [candidates, columns], finite; 0 where not usable. One column unless every reward keeps
      a loss of its own.
    usable: [candidates], False where the reward failed or its group was dropped.
    trained: [candidates], usable and chosen by best-of-N: what an objective calls valid.
  """

  values: Float[np.ndarray, "candidates columns"]
  usable: Bool[np.ndarray, " candidates"]
  trained: Bool[np.ndarray, " candidates"]


def usable_candidates(
  valid: Bool[np.ndarray, " candidates"], group: Int[np.ndarray, " candidates"]
) -> Bool[np.ndarray, " candidates"]:
  """Leaves out candidates whose reward failed, and groups with fewer than two that have one."""
  counts = {int(g): int(np.sum(valid & (group == g))) for g in np.unique(group)}
  return valid & np.array([counts[int(g)] >= 2 for g in group], bool)


def _deviation(values: np.ndarray, unbiased: bool, repeats: int) -> float:
  """Standard deviation, two-pass, with every value counted `repeats` times."""
  squares = float(np.sum((values - values.mean()) ** 2)) * repeats
  divisor = values.size * repeats - (1 if unbiased else 0)
  return math.sqrt(squares / divisor) if divisor > 0 else 0.0


def _normalised(
  rewards: np.ndarray,
  usable: np.ndarray,
  group: np.ndarray,
  anchors: np.ndarray | None,
  config: AdvantageConfig,
) -> np.ndarray:
  """Advantages of one reward [candidates]; `anchors` is aligned with the candidates."""
  out = np.zeros(rewards.shape[0])
  groups = [np.flatnonzero(usable & (group == g)) for g in np.unique(group[usable])]
  samples = []
  for members in groups:
    extra = [] if anchors is None else [anchors[members[0]]]
    samples.append(np.concatenate([rewards[members], extra]))
  unbiased = config.std.endswith("unbiased")
  shared = 0.0
  if config.std.startswith("global") and samples:
    shared = _deviation(np.concatenate(samples), unbiased, config.std_repeats)
  for members, sample in zip(groups, samples, strict=True):
    if sample.max() - sample.min() <= config.tie_tol:
      continue
    baseline = sample[-1] if anchors is not None else sample.mean()
    scale = 1.0
    if config.std.startswith("global"):
      scale = shared + config.eps
    elif config.std != "none":
      scale = _deviation(sample, unbiased, config.std_repeats) + config.eps
    out[members] = (rewards[members] - baseline) / scale
  return out


def advantages(
  rewards: Float[np.ndarray, "candidates rewards"],
  valid: Bool[np.ndarray, " candidates"],
  group: Int[np.ndarray, " candidates"],
  config: AdvantageConfig,
  anchors: Float[np.ndarray, "candidates rewards"] | None = None,
  left_out: Bool[np.ndarray, "candidates rewards"] | None = None,
) -> Advantages:
  """Gives the advantages of all candidates that a scope (group, mini-batch or step) comprises.

  Sources: StageBreaker §4.2, eq. 1 and DanceGRPO (group mean, unbiased deviation); Flow-GRPO and
  verl-omni (global deviation); KVPO (anchor); Pref-GRPO (GDPO).

  Args:
    rewards: one row per candidate; a failed candidate's row is ignored, whatever it holds.
    valid: which candidates have a reward.
    group: id of each candidate's prompt group.
    config: what to do.
    anchors: with baseline `anchor`, the reward of the anchor of each candidate's group, NaN where
      it failed, which drops the group.
    left_out: rewards that do not count for a group, True for all of its candidates alike: they
      add nothing to its sums and enter no mean or deviation. None: all count.

  Returns:
    Advantages. A failed candidate is left out of every mean and deviation.

  Raises:
    ValueError: for shapes that do not fit, a missing anchor, or a reward that is valid but not
      finite.
  """
  rewards = np.asarray(rewards, np.float64)
  valid, group = np.asarray(valid, bool), np.asarray(group)
  if rewards.ndim != 2 or rewards.shape[1] != len(config.weights):
    raise ValueError(
      f"weights has {len(config.weights)} entries for rewards of shape {rewards.shape}; give one "
      "weight per reward column."
    )
  if (config.baseline == "anchor") != (anchors is not None):
    raise ValueError(
      f"baseline is {config.baseline!r}, anchors are {'missing' if anchors is None else 'given'}; "
      "anchors belong to baseline 'anchor' and to no other."
    )
  out = np.zeros(rewards.shape, bool) if left_out is None else np.asarray(left_out, bool)
  if out.shape != rewards.shape:
    raise ValueError(f"left_out has shape {out.shape}; it must be that of rewards {rewards.shape}.")
  rewards = np.where(out, 0.0, rewards)
  if not np.isfinite(rewards[valid]).all():
    raise ValueError("rewards holds a non-finite value of a valid candidate; mark it as failed.")
  if anchors is not None:
    anchors = np.asarray(anchors, np.float64)
    anchors = np.where(out, 0.0, anchors)
    valid = valid & np.isfinite(anchors).all(axis=1)
  usable = usable_candidates(valid, group)
  rewards = np.where(usable[:, None], rewards, 0.0)
  weights = np.asarray(config.weights, np.float64)

  if config.combine == "raw_sum":
    total = None if anchors is None else anchors @ weights
    values = _normalised(rewards @ weights, usable, group, total, config)[:, None]
  else:
    columns = []
    for m in range(rewards.shape[1]):
      column = None if anchors is None else anchors[:, m]
      columns.append(_normalised(rewards[:, m], usable & ~out[:, m], group, column, config))
    values = np.stack(columns, axis=1)
  totals = values[:, 0] if config.combine == "raw_sum" else values @ weights
  if config.combine in ("adv_sum", "gdpo"):
    values = totals[:, None]
  if config.combine == "gdpo":
    values = _standardised(values[:, 0], usable, group)[:, None]
    totals = values[:, 0]
  trained = usable & best_of(totals, usable, group, config.best_of)
  if config.clip is not None:
    values = np.clip(values, -config.clip, config.clip)
  return Advantages(values, usable, trained)


def _standardised(values: np.ndarray, usable: np.ndarray, group: np.ndarray) -> np.ndarray:
  """Mean 0 and deviation 1 over all usable candidates; tied groups stay at 0."""
  if not usable.any():
    return values
  some = values[usable]
  scaled = (values - some.mean()) / (_deviation(some, True, 1) + _GDPO_EPS)
  tied = np.array([not values[usable & (group == g)].any() for g in group])
  return np.where(usable & ~tied, scaled, 0.0)


def best_of(
  values: Float[np.ndarray, " candidates"],
  usable: Bool[np.ndarray, " candidates"],
  group: Int[np.ndarray, " candidates"],
  count: int,
) -> Bool[np.ndarray, " candidates"]:
  """Chooses each group's best and worst candidates (DanceGRPO's HunyuanVideo recipe).

  Args:
    values: what candidates are ranked by; ties keep the order of the candidates.
    usable: which candidates can be chosen.
    group: id of each candidate's prompt group.
    count: how many to keep of a group, the odd one from the top; 0 keeps all.

  Returns:
    True for the chosen ones.
  """
  if count == 0:
    return usable.copy()
  chosen = np.zeros_like(usable)
  for g in np.unique(group):
    members = np.flatnonzero(usable & (group == g))
    ranked = members[np.argsort(values[members], kind="stable")]
    if ranked.size > count:
      ranked = np.concatenate([ranked[: count // 2], ranked[ranked.size - (count - count // 2) :]])
    chosen[ranked] = True
  return chosen


def fuse_signals(
  signals: Float[np.ndarray, "candidates signals"],
  usable: Bool[np.ndarray, " candidates"],
  group: Int[np.ndarray, " candidates"],
  weights: Sequence[float],
  clip: float | None = 2.5,
) -> Float[np.ndarray, " candidates"]:
  """Adds a group's advantages from several signals at a common scale (KVPO's local and global one).

  Args:
    signals: one advantage column per signal.
    usable: which candidates count.
    group: id of each candidate's prompt group.
    weights: one weight per signal.
    clip: bound of the result.

  Returns:
    Σ weight x signal / population deviation of the signal in the group; a signal whose deviation is
    1e-8 or less is added as it is.
  """
  out = np.zeros(signals.shape[0])
  for g in np.unique(group):
    members = np.flatnonzero(usable & (group == g))
    for column, weight in enumerate(weights):
      signal = signals[members, column]
      spread = _deviation(signal, False, 1) if signal.size else 0.0
      out[members] += weight * (signal / spread if spread > 1e-8 else signal)
  return out if clip is None else np.clip(out, -clip, clip)


def safe_factors(
  rewards: Float[np.ndarray, "candidates signals"],
  anchors: Float[np.ndarray, "candidates signals"],
  usable: Bool[np.ndarray, " candidates"],
  group: Int[np.ndarray, " candidates"],
  unsafe: float = 0.5,
) -> Float[np.ndarray, " candidates"]:
  """Gives KVPO's safe factor: 1 for a group in which some branch beats the anchor, else `unsafe`.

  Args:
    rewards: raw rewards per signal.
    anchors: the anchor's, aligned with the candidates.
    usable: which candidates count.
    group: id of each candidate's prompt group.
    unsafe: the factor of a group that does not improve on its anchor.
  """
  beats = usable & (rewards > anchors).any(axis=1)
  return np.array([1.0 if beats[group == g].any() else unsafe for g in group])


def from_settings(settings: Settings) -> AdvantageConfig:
  """Gives the configuration that a run's settings ask for."""
  chosen = settings.advantage
  return AdvantageConfig(
    baseline=chosen.baseline,
    std=chosen.std,
    eps=chosen.eps,
    clip=chosen.clip,
    combine=chosen.combine,
    weights=tuple(settings.reward.weights),
    best_of=settings.rollout.best_of,
  )
