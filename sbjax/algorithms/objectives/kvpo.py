"""KVPO: a clipped ratio of softmax policies over the branches of a group.

The policy of a branch is the softmax of the group's scores, so a branch's ratio depends on all
scores of its group. Nothing can be folded before the group is replayed, but each branch has one
scalar only: one buffer per branch, and the coefficients follow in closed form from the group's
scores.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from sbjax.algorithms.objectives.base import inclusive_bounds, require_positive
from sbjax.separation.channels import ChannelFn, X0Score
from sbjax.separation.objective import Batch


@dataclasses.dataclass(frozen=True)
class _Group:
  """What the loss and its closed-form gradient both need of one group; arrays are [candidates].

  They cover the whole mini-batch and are 0 outside the group, so that shapes, and with them
  compiled programs, do not change with the candidates that failed.
  """

  members: np.ndarray
  size: int
  advantage: Any
  safe: float
  log_pi: Any
  log_ref: Any
  log_ratio: Any
  inside: Any


def _log_softmax(
  scores: Float[Array, " candidates"], members: Bool[np.ndarray, " candidates"]
) -> Float[Array, " candidates"]:
  """Log-softmax over the members; 0 for the others, whose scores may be anything."""
  scores = jnp.where(members, scores, -jnp.inf)
  shifted = jnp.where(members, scores - jax.lax.stop_gradient(jnp.max(scores)), 0.0)
  total = jnp.sum(jnp.where(members, jnp.exp(shifted), 0.0))
  return jnp.where(members, shifted - jnp.log(total), 0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVPO:
  """loss = 1/Z Σ_groups m [-Σ min(rho A, clip(rho) A) + kl_coef G KL(pi, ref)].

  rho is the ratio of softmax policies over the G valid branches of a group, the unit is the
  branch, and with one group and Z = G this is KVPO's loss as published. The transition must be one
  whose stored mean gives back the clean prediction (every transition for flow models does).

  `Batch.advantages` has one column, or two: the second is the safe factor m of the branch's group.
  The statistic is the score under the initial adapter. Failed branches leave the softmax.

  Attributes:
    clip_low: how far rho may fall below 1 before a negative advantage stops pushing.
    clip_high: how far rho may rise above 1 before a positive advantage stops pushing.
    kl_coef: coefficient of the discrete KL to the initial policy; 0 needs no reference.
    adv_clip: advantages are clipped to ± this; None leaves them.
    log_ratio_clamp: beyond ± this a log-ratio carries no gradient.
    sigma_floor: the score's error is divided by max(sigma, sigma_floor).
    grad_sigma_min: steps below this noise level count in the score without gradient.
  """

  clip_low: float = 0.1
  clip_high: float = 0.2
  kl_coef: float = 10.0
  adv_clip: float | None = 2.5
  log_ratio_clamp: float = 20.0
  sigma_floor: float = 1.0
  grad_sigma_min: float = 0.0

  def __post_init__(self) -> None:
    """Raises ValueError for a setting that cannot work."""
    require_positive("clip_high", self.clip_high)
    require_positive("adv_clip", self.adv_clip)
    require_positive("log_ratio_clamp", self.log_ratio_clamp)
    if not 0 < self.clip_low < 1:
      raise ValueError(f"clip_low is {self.clip_low}; use a number above 0 and below 1.")
    if not 0 <= self.kl_coef < math.inf:
      raise ValueError(f"kl_coef is {self.kl_coef}; use a finite number that is not negative.")

  @property
  def name(self) -> str:
    """How a config names the objective."""
    return "kvpo"

  @property
  def channels(self) -> tuple[str, ...]:
    """The surrogate log-probability."""
    return ("x0_score",)

  @property
  def statistics(self) -> tuple[str, ...]:
    """The same score under the initial adapter."""
    return ("x0_score_reference",) if self.kl_coef else ()

  @property
  def functions(self) -> Mapping[str, ChannelFn]:
    """What computes the scores, with this objective's floor and gradient range."""
    score = X0Score(self.sigma_floor, self.grad_sigma_min)
    made: dict[str, ChannelFn] = {"x0_score": score}
    if self.kl_coef:
      made["x0_score_reference"] = dataclasses.replace(score, reference=True)
    return made

  @property
  def unit(self) -> Literal["step", "candidate"]:
    """The branch carries the ratio."""
    return "candidate"

  @property
  def points(self) -> Literal["trajectory", "forward"]:
    """The network is evaluated at the stored trajectory's states."""
    return "trajectory"

  def buffers(self, units: int) -> int:
    """Gives B: one per unit."""
    return units

  def _groups(self, batch: Batch) -> Iterator[_Group]:
    """Yields the groups' softmax policies.

    Raises:
      ValueError: for the wrong number of units or advantage columns, or a safe factor that differs
        within a group.
    """
    advantages = batch.advantages
    units, columns = batch.channels.shape[1], advantages.shape[-1]
    if columns not in (1, 2) or units != 1:
      raise ValueError(
        f"kvpo got {units} units and {columns} advantage columns; it "
        "takes one unit per branch and an advantage, beside it at most a safe factor."
      )
    valid = np.asarray(batch.valid, bool)
    score = jnp.asarray(batch.channels)[:, 0, 0]
    old = jnp.asarray(batch.old)[:, 0, 0]
    for group in np.unique(np.asarray(batch.group)[valid]):
      members = valid & (np.asarray(batch.group) == group)
      size = int(members.sum())
      safe = np.asarray(advantages)[members, 1] if columns == 2 else np.ones(size)
      if np.ptp(safe) > 0:
        raise ValueError(
          f"the safe factors of group {group} are {safe.tolist()}; give the group's branches one."
        )
      advantage = jnp.where(members, jnp.asarray(advantages)[:, 0], 0.0)
      if self.adv_clip is not None:
        advantage = jnp.clip(advantage, -self.adv_clip, self.adv_clip)
      log_pi = _log_softmax(score, members)
      log_ref = log_pi
      if self.kl_coef:
        log_ref = _log_softmax(jnp.asarray(batch.statistics)[:, 0, 0], members)
      log_ratio = log_pi - _log_softmax(old, members)
      plus, minus = inclusive_bounds(log_ratio, self.clip_low, self.clip_high, None)
      inside = jnp.where(advantage > 0, plus, minus) & (jnp.abs(log_ratio) <= self.log_ratio_clamp)
      yield _Group(members, size, advantage, float(safe[0]), log_pi, log_ref, log_ratio, inside)

  def _solved(self, batch: Batch) -> list[_Group]:
    """Gives the groups in numpy float64, by the loss's own functions: masks agree at the bounds."""
    with jax.enable_x64(True):
      return [
        dataclasses.replace(
          group,
          advantage=np.asarray(group.advantage),
          log_pi=np.asarray(group.log_pi),
          log_ref=np.asarray(group.log_ref),
          log_ratio=np.asarray(group.log_ratio),
          inside=np.asarray(group.inside),
        )
        for group in self._groups(batch)
      ]

  def loss(self, batch: Batch) -> Float[Array, ""]:
    """Gives the scalar loss of a mini-batch."""
    total = jnp.zeros((), jnp.asarray(batch.channels).dtype)
    for group in self._groups(batch):
      rho = jnp.exp(jnp.where(group.inside, group.log_ratio, 0.0))
      fixed = jax.lax.stop_gradient(group.log_ratio)
      fixed = jnp.exp(jnp.clip(fixed, -self.log_ratio_clamp, self.log_ratio_clamp))
      high = jnp.minimum(fixed, 1.0 + self.clip_high)
      low = jnp.maximum(fixed, 1.0 - self.clip_low)
      outside = jnp.where(group.advantage > 0, high, low)
      surrogate = group.advantage * jnp.where(group.inside, rho, outside)
      term = -jnp.sum(jnp.where(group.advantage == 0, 0.0, surrogate))
      if self.kl_coef:
        kl = jnp.sum(jnp.exp(group.log_pi) * (group.log_pi - group.log_ref))
        term = term + self.kl_coef * group.size * kl
      total = total + group.safe * term
    return total / batch.normaliser

  def early(
    self, channels: Any, old: Any, statistics: Any
  ) -> Float[np.ndarray, "buffers units channels"]:
    """Gives the identity: a branch's gradient keeps its own buffer."""
    del old, statistics
    units, width = np.shape(channels)
    return np.eye(units * width).reshape(units * width, units, width)

  def late(self, batch: Batch) -> Float[np.ndarray, "candidates buffers"]:
    """Gives the closed-form coefficients, with pi, rho and the masks of the group.

    With T = Σ_g A_g M_g rho_g, branch h gets
    m/Z [-(A_h M_h rho_h - pi_h T) + kl_coef G pi_h (ln pi_h - ln ref_h - KL)].
    """
    late = np.zeros((batch.channels.shape[0], 1))
    for group in self._solved(batch):
      pi = np.where(group.members, np.exp(group.log_pi), 0.0)
      rho = np.exp(np.where(group.inside, group.log_ratio, 0.0))
      pull = np.where(group.inside, rho, 0.0) * group.advantage
      coefficient = -(pull - pi * pull.sum())
      if self.kl_coef:
        gap = group.log_pi - group.log_ref
        divergence = float(np.sum(pi * gap))
        coefficient += self.kl_coef * group.size * pi * (gap - divergence)
      late[:, 0] += group.safe * coefficient
    return late / batch.normaliser

  def metrics(self, batch: Batch) -> dict[str, float]:
    """Gives ratio and clip statistics over the valid branches, and the mean KL of the groups."""
    groups = self._solved(batch)
    if not groups:
      return {}
    log_ratio = np.concatenate([g.log_ratio[g.members] for g in groups])
    advantage = np.concatenate([g.advantage[g.members] for g in groups])
    inside = np.concatenate([g.inside[g.members] for g in groups])
    rho = np.exp(np.clip(log_ratio, -self.log_ratio_clamp, self.log_ratio_clamp))
    metrics = {
      "actor/ratio_mean": float(rho.mean()),
      "actor/ratio_std": float(rho.std()),
      "actor/ppo_kl": float(-log_ratio.mean()),
      "actor/approx_kl": float(0.5 * np.mean(log_ratio**2)),
      "actor/pg_clipfrac": float(((advantage != 0) & ~inside).mean()),
      "actor/pg_clipfrac_higher": float((log_ratio > math.log1p(self.clip_high)).mean()),
      "actor/pg_clipfrac_lower": float((log_ratio < math.log1p(-self.clip_low)).mean()),
      "actor/safe_factor": float(np.mean([g.safe for g in groups])),
    }
    if self.kl_coef:
      kls = [float(np.sum(np.exp(g.log_pi) * (g.log_pi - g.log_ref))) for g in groups]
      metrics["actor/kl_loss"] = float(np.mean(kls))
    return metrics
