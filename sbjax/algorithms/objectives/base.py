"""What objectives share: the sign-split ratio form, and the identity form that always works."""

import abc
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from sbjax.separation.channels import CHANNELS, ChannelFn
from sbjax.separation.objective import Batch


def gradient(loss: Callable[[Batch], Any], batch: Batch) -> np.ndarray:
  """Gives the float64 gradient of a loss over `batch.channels`, the truth for early x late."""
  with jax.enable_x64(True):
    channels = jnp.asarray(np.asarray(batch.channels, np.float64))

    def at(values: Float[Array, "candidates units channels"]) -> Float[Array, ""]:
      return loss(dataclasses.replace(batch, channels=values))

    return np.asarray(jax.grad(at)(channels), np.float64)


def value(loss: Callable[[Batch], Any], batch: Batch) -> float:
  """Gives the float64 value of a loss."""
  with jax.enable_x64(True):
    return float(loss(batch))


def score_difference(channels: Any, old: Any, valid: Any, xp: Any) -> Any:
  """Gives score minus old score [..., units], zero where `valid` says that nothing is known."""
  difference = channels[..., 0] - old[..., 0]
  return xp.where(valid[..., None], difference, xp.zeros_like(difference))


def require_positive(field: str, number: float | None) -> None:
  """Raises ValueError unless the number is None or finite and positive."""
  if number is not None and not (math.isfinite(number) and number > 0):
    raise ValueError(f"{field} is {number}; use a finite positive number, or None where allowed.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RatioObjective(abc.ABC):
  """A surrogate of one importance ratio per unit that separates by the advantage's sign.

  The loss is -1/Z Σ w_m A_m f(rho, sign A_m) with f equal to rho inside a reward-free set and
  constant outside it, one set for positive and one for negative advantages (StageBreaker §4.2,
  eq. 7): buffer 0 folds the units of the positive set, buffer 1 those of the negative set.
  Membership is decided in log space, by `sets` alone, for the loss and the compressed form both;
  the loss never differentiates through a clip, whose subgradient at a bound depends on the library.

  Attributes:
    adv_clip: advantages are clipped to ± this before use; None leaves them.
    log_ratio_clamp: beyond ± this a log-ratio is constant and carries no gradient; None never.
    reward_weights: one weight per column of `Batch.advantages`; none negative.
    kl_coef: coefficient of a differentiable, reward-free KL; 0 takes no KL channel.
    kl_channel: which KL.
    on_policy: the ratio is known to be 1 (the first mini-batch of a step): one buffer, weights that
      need no scores, so gradients may be folded while they are taken.
  """

  adv_clip: float | None = 5.0
  log_ratio_clamp: float | None = 20.0
  reward_weights: tuple[float, ...] = (1.0,)
  kl_coef: float = 0.0
  kl_channel: Literal["kl_exact", "kl_flow_grpo"] = "kl_exact"
  on_policy: bool = False

  def __post_init__(self) -> None:
    """Raises ValueError for a setting that cannot work."""
    require_positive("adv_clip", self.adv_clip)
    require_positive("log_ratio_clamp", self.log_ratio_clamp)
    if not self.reward_weights or not all(0 <= w < math.inf for w in self.reward_weights):
      raise ValueError(
        f"reward_weights is {self.reward_weights}; use one finite non-negative number per reward "
        "and negate the reward itself where less is better."
      )
    if not 0 <= self.kl_coef < math.inf:
      raise ValueError(f"kl_coef is {self.kl_coef}; use a finite number that is not negative.")
    if self.kl_channel not in ("kl_exact", "kl_flow_grpo"):
      raise ValueError(f"kl_channel is {self.kl_channel!r}; use 'kl_exact' or 'kl_flow_grpo'.")

  @property
  @abc.abstractmethod
  def name(self) -> str:
    """How a config names the objective."""

  @property
  def score(self) -> str:
    """Name of the channel that the ratio is made of."""
    return "log_prob"

  @property
  def channels(self) -> tuple[str, ...]:
    """The score, and the KL where there is one."""
    return (self.score, self.kl_channel) if self.kl_coef else (self.score,)

  @property
  def statistics(self) -> tuple[str, ...]:
    """Names of the reward-free statistics that the sets or weights read."""
    return ()

  @property
  def functions(self) -> Mapping[str, ChannelFn]:
    """What computes the channels and statistics."""
    return {name: CHANNELS[name] for name in (*self.channels, *self.statistics)}

  @property
  def unit(self) -> Literal["step", "candidate"]:
    """A candidate's denoising step carries the ratio."""
    return "step"

  @property
  def points(self) -> Literal["trajectory", "forward"]:
    """The network is evaluated at the stored trajectory's states."""
    return "trajectory"

  def buffers(self, units: int) -> int:
    """Gives B: one on policy, else one per sign; one more with a KL."""
    del units
    return (1 if self.on_policy else 2) + (1 if self.kl_coef else 0)

  @abc.abstractmethod
  def bounds(self, log_ratio: Any, statistics: Any, xp: Any) -> tuple[Any, Any]:
    """Gives the positive and the negative set [..., units] as booleans, both bounds inclusive."""

  @abc.abstractmethod
  def flat(self, log_ratio: Any, xp: Any) -> tuple[Any, Any]:
    """Gives the constants that stand for rho outside the positive and the negative set."""

  def log_ratio(self, difference: Any) -> Any:
    """Gives the log-ratio of a unit from its score difference."""
    return difference

  def slope(self) -> float:
    """Gives d log_ratio / d score."""
    return 1.0

  def unit_weights(self, statistics: Any, xp: Any) -> Any:
    """Gives reward-free weights [..., units] of the units' losses."""
    return xp.ones_like(statistics, shape=statistics.shape[:-1])

  def sets(self, log_ratio: Any, statistics: Any, xp: Any) -> tuple[Any, Any]:
    """Gives both sets, without the units whose log-ratio is clamped."""
    plus, minus = self.bounds(log_ratio, statistics, xp)
    if self.log_ratio_clamp is None:
      return plus, minus
    inside = xp.abs(log_ratio) <= self.log_ratio_clamp
    return plus & inside, minus & inside

  def clipped_advantages(self, batch: Batch, xp: Any) -> Any:
    """Gives advantages [candidates, rewards], clipped; zero for invalid candidates.

    Raises:
      ValueError: if the number of rewards is not that of `reward_weights`.
    """
    advantages = xp.asarray(batch.advantages)
    if advantages.shape[-1] != len(self.reward_weights):
      raise ValueError(
        f"reward_weights has {len(self.reward_weights)} entries for {advantages.shape[-1]} reward "
        "columns; give one weight per column."
      )
    advantages = xp.where(np.asarray(batch.valid, bool)[:, None], advantages, 0.0)
    if self.adv_clip is not None:
      advantages = xp.clip(advantages, -self.adv_clip, self.adv_clip)
    return advantages

  def loss(self, batch: Batch) -> Float[Array, ""]:
    """Gives the scalar loss of a mini-batch; differentiate it over `batch.channels`."""
    valid = jnp.asarray(batch.valid, bool)
    statistics = jnp.where(valid[:, None, None], jnp.asarray(batch.statistics), 1.0)
    channels, old = jnp.asarray(batch.channels), jnp.asarray(batch.old)
    difference = score_difference(channels, old, valid, jnp)
    log_ratio = self.log_ratio(difference)
    weights = self.unit_weights(statistics, jnp)
    advantages = self.clipped_advantages(batch, jnp)
    total = jnp.zeros((), log_ratio.dtype)
    for column, reward_weight in enumerate(self.reward_weights):
      advantage = advantages[:, column][:, None]
      if self.on_policy:
        surrogate = 1.0 + log_ratio  # rho to first order around 1, where it is known to be
      else:
        surrogate = self._surrogate(log_ratio, advantage, statistics)
      total = total - reward_weight * jnp.sum(
        jnp.where(advantage == 0.0, 0.0, advantage * surrogate * weights)
      )
    if self.kl_coef:
      total = total + self.kl_coef * jnp.sum(jnp.where(valid[:, None], channels[..., 1], 0.0))
    return total / batch.normaliser

  def _surrogate(self, log_ratio: Any, advantage: Any, statistics: Any) -> Any:
    plus, minus = self.sets(log_ratio, statistics, jnp)
    high, low = self.flat(jax.lax.stop_gradient(log_ratio), jnp)
    inside = jnp.where(advantage > 0.0, plus, minus)
    # The log-ratio is replaced before exp as well: where exp overflows, 0 * inf would be NaN.
    rho = jnp.exp(jnp.where(inside, log_ratio, 0.0))
    return jnp.where(inside, rho, jnp.where(advantage > 0.0, high, low))

  def early(
    self,
    channels: Float[Array, "units channels"],
    old: Float[Array, "units channels"],
    statistics: Float[Array, "units statistics"],
  ) -> Float[np.ndarray, "buffers units channels"]:
    """Gives rho on each set (1 on policy), and the KL's own row; no reward enters."""
    new_score = np.asarray(channels, np.float64)[..., 0]
    old_score = np.asarray(old, np.float64)[..., 0]
    seen = np.asarray(statistics, np.float64)
    units = new_score.shape[0]
    early = np.zeros((self.buffers(units), units, len(self.channels)))
    weights = self.unit_weights(seen, np) * self.slope()
    if self.on_policy:
      early[0, :, 0] = weights
    else:
      log_ratio = self.log_ratio(new_score - old_score)
      for row, members in enumerate(self.sets(log_ratio, seen, np)):
        early[row, :, 0] = np.where(members, np.exp(np.where(members, log_ratio, 0.0)), 0.0)
        early[row, :, 0] *= weights
    if self.kl_coef:
      early[-1, :, 1] = 1.0
    return early

  def late(self, batch: Batch) -> Float[np.ndarray, "candidates buffers"]:
    """Gives -1/Z of the advantages' positive and negative parts, and the KL's coefficient."""
    advantages = self.clipped_advantages(batch, np)
    weights = np.asarray(self.reward_weights, np.float64)
    if self.on_policy:
      columns = [-(advantages @ weights)]
    else:
      columns = [-(np.maximum(advantages, 0.0) @ weights), -(np.minimum(advantages, 0.0) @ weights)]
    if self.kl_coef:
      columns.append(np.where(np.asarray(batch.valid, bool), self.kl_coef, 0.0))
    return np.stack(columns, axis=1) / batch.normaliser

  def metrics(self, batch: Batch) -> dict[str, float]:
    """Gives ratio and clip statistics over the valid units, under verl's names where it has one.

    `pg_clipfrac` counts units whose gradient is cut given the advantage's sign; `_higher` and
    `_lower` count ratios outside a bound whatever the sign. `ppo_kl` is the mean of -log rho.
    """
    valid = np.asarray(batch.valid, bool)
    if not valid.any():
      return {}
    channels = np.asarray(batch.channels, np.float64)[valid]
    old = np.asarray(batch.old, np.float64)[valid]
    statistics = np.asarray(batch.statistics, np.float64)[valid]
    log_ratio = self.log_ratio(channels[..., 0] - old[..., 0])
    bound = 700.0 if self.log_ratio_clamp is None else self.log_ratio_clamp
    rho = np.exp(np.clip(log_ratio, -bound, bound))
    plus, minus = self.sets(log_ratio, statistics, np)
    advantage = (self.clipped_advantages(batch, np) @ np.asarray(self.reward_weights))[valid][
      :, None
    ]
    cut = ((advantage > 0) & ~plus) | ((advantage < 0) & ~minus)
    metrics = {
      "actor/ratio_mean": float(rho.mean()),
      "actor/ratio_std": float(rho.std()),
      "actor/ppo_kl": float(-log_ratio.mean()),
      "actor/approx_kl": float(0.5 * np.mean(log_ratio**2)),
      "actor/pg_clipfrac": float(cut.mean()),
      "actor/pg_clipfrac_higher": float((~plus & (log_ratio > 0)).mean()),
      "actor/pg_clipfrac_lower": float((~minus & (log_ratio < 0)).mean()),
    }
    if self.kl_coef:
      metrics["actor/kl_loss"] = float(channels[..., 1].mean())
    return metrics


@dataclasses.dataclass(frozen=True, kw_only=True)
class IdentityObjective:
  """Any loss over the scalars: a buffer per unit and channel, coefficients by autodiff.

  Attributes:
    name: how messages name the objective.
    loss_fn: `Batch` -> scalar; it must be differentiable in `batch.channels` and must itself leave
      out the candidates that `batch.valid` rules out.
    channels: names of the channels, the score first.
    statistics: names of the statistics.
    unit: what carries a score.
    points: where the network is evaluated.
    functions: what computes channels and statistics.
  """

  name: str
  loss_fn: Callable[[Batch], Any]
  channels: tuple[str, ...] = ("log_prob",)
  statistics: tuple[str, ...] = ()
  unit: Literal["step", "candidate"] = "step"
  points: Literal["trajectory", "forward"] = "trajectory"
  functions: Mapping[str, ChannelFn] = dataclasses.field(default_factory=lambda: dict(CHANNELS))

  def buffers(self, units: int) -> int:
    """Gives B: one per unit and channel."""
    return units * len(self.channels)

  def loss(self, batch: Batch) -> Float[Array, ""]:
    """Gives the wrapped loss."""
    return self.loss_fn(batch)

  def early(
    self,
    channels: Float[Array, "units channels"],
    old: Float[Array, "units channels"],
    statistics: Float[Array, "units statistics"],
  ) -> Float[np.ndarray, "buffers units channels"]:
    """Gives the identity: every gradient keeps a buffer of its own."""
    del old, statistics
    units, width = np.shape(channels)
    return np.eye(units * width).reshape(units * width, units, width)

  def late(self, batch: Batch) -> Float[np.ndarray, "candidates buffers"]:
    """Gives the loss's float64 gradient, zero for invalid candidates."""
    coefficients = gradient(self.loss_fn, batch)
    flat = coefficients.reshape(coefficients.shape[0], -1)
    return np.where(np.asarray(batch.valid, bool)[:, None], flat, 0.0)

  def metrics(self, batch: Batch) -> dict[str, float]:
    """Gives the loss's value."""
    return {"actor/pg_loss": value(self.loss_fn, batch)}


def inclusive_bounds(
  log_ratio: Any, clip_low: float, clip_high: float, dual_clip: float | None
) -> tuple[Bool[Array, "*units"], Bool[Array, "*units"]]:
  """Gives {rho <= 1 + high} and {1 - low <= rho (<= dual)} by comparing logarithms."""
  minus = log_ratio >= math.log1p(-clip_low)
  if dual_clip is not None:
    minus = minus & (log_ratio <= math.log(dual_clip))
  return log_ratio <= math.log1p(clip_high), minus
