"""Flow-DPPO: the surrogate cut where the policy has moved too far, measured by a KL, not by rho."""

import dataclasses
from typing import Any

from sbjax.algorithms.objectives.base import RatioObjective, require_positive


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlowDPPO(RatioObjective):
  """loss = -1/Z Σ rho A over the units whose drift is small or whose step leads back.

  A unit counts unless its KL to the rollout's step has reached the threshold and its advantage
  pushes it further away (rho > 1 with A > 0, rho < 1 with A < 0). Advantages are not clipped by
  default.

  Attributes:
    kl_mask_threshold: the KL at which a unit stops, as the chunks reduce it.
    scaled: whether the squared drift is divided by the variance, as a KL is.
  """

  adv_clip: float | None = None
  kl_mask_threshold: float = 1e-5
  scaled: bool = True

  def __post_init__(self) -> None:
    """Raises ValueError for a threshold that cannot work."""
    super().__post_init__()
    require_positive("kl_mask_threshold", self.kl_mask_threshold)

  @property
  def name(self) -> str:
    """How a config names the objective."""
    return "dppo"

  @property
  def statistics(self) -> tuple[str, ...]:
    """The drift from the rollout's mean."""
    return ("drift",) if self.scaled else ("drift_unscaled",)

  def bounds(self, log_ratio: Any, statistics: Any, xp: Any) -> tuple[Any, Any]:
    """Gives {drift < threshold or rho <= 1} and {drift < threshold or rho >= 1}."""
    del xp
    near = statistics[..., 0] < self.kl_mask_threshold
    return near | (log_ratio <= 0.0), near | (log_ratio >= 0.0)

  def flat(self, log_ratio: Any, xp: Any) -> tuple[Any, Any]:
    """Gives zero: a unit that is cut leaves the loss."""
    return xp.zeros_like(log_ratio), xp.zeros_like(log_ratio)
