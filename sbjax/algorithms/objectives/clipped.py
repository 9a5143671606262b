"""The clipped surrogate: DanceGRPO, Flow-GRPO and whatever else uses PPO's clip on one ratio."""

import dataclasses
import math
from typing import Any

from sbjax.algorithms.objectives.base import RatioObjective, inclusive_bounds, require_positive


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clipped(RatioObjective):
  """loss = -1/Z Σ min(rho A, clip(rho, 1 - low, 1 + high) A), both bounds inclusive.

  Source: StageBreaker §4.2, eqs. 2, 5 and 7; the dual clip bounds rho above where A < 0.

  Attributes:
    clip_low: how far rho may fall below 1 before a negative advantage stops pushing.
    clip_high: how far rho may rise above 1 before a positive advantage stops pushing. Useful values
      depend on the transition, `dim_reduce` and the number of latent dimensions.
    dual_clip: upper bound of rho for negative advantages, above 1 + clip_high; None for none.
  """

  clip_low: float = 1e-4
  clip_high: float = 1e-4
  dual_clip: float | None = None

  def __post_init__(self) -> None:
    """Raises ValueError for a clip range that cannot work."""
    super().__post_init__()
    require_positive("clip_high", self.clip_high)
    if not 0 < self.clip_low < 1:
      raise ValueError(f"clip_low is {self.clip_low}; use a number above 0 and below 1.")
    if self.dual_clip is not None and not self.dual_clip > 1 + self.clip_high:
      raise ValueError(
        f"dual_clip is {self.dual_clip}; use more than 1 + clip_high, {1 + self.clip_high}."
      )

  @property
  def name(self) -> str:
    """How a config names the objective."""
    return "clipped"

  def bounds(self, log_ratio: Any, statistics: Any, xp: Any) -> tuple[Any, Any]:
    """Gives {rho <= 1 + high} and {rho >= 1 - low}."""
    del statistics, xp
    return inclusive_bounds(log_ratio, self.clip_low, self.clip_high, self.dual_clip)

  def flat(self, log_ratio: Any, xp: Any) -> tuple[Any, Any]:
    """Gives the bound that was crossed."""
    clamp = math.inf if self.log_ratio_clamp is None else self.log_ratio_clamp
    rho = xp.exp(xp.clip(log_ratio, -clamp, clamp))
    high = xp.minimum(rho, 1.0 + self.clip_high)
    low = xp.maximum(rho, 1.0 - self.clip_low)
    return high, low if self.dual_clip is None else xp.minimum(low, self.dual_clip)
