"""GSPO: one clipped ratio per candidate, the geometric mean of its steps' ratios."""

import dataclasses
from typing import Any, Literal

from sbjax.algorithms.objectives.clipped import Clipped


@dataclasses.dataclass(frozen=True, kw_only=True)
class GSPO(Clipped):
  """The clipped surrogate with rho = exp(mean over a candidate's steps of its log-ratios).

  Source: GSPO's sequence-level ratio, with denoising steps in the place of tokens. The unit is the
  candidate, so the replay sums scores and gradients over steps and keeps one of each.

  Attributes:
    steps: trained denoising steps per candidate, over which the mean is taken.
  """

  steps: int
  clip_low: float = 1e-4
  clip_high: float = 1e-4

  def __post_init__(self) -> None:
    """Raises ValueError for a number of steps that cannot work."""
    super().__post_init__()
    if self.steps < 1:
      raise ValueError(f"steps is {self.steps}; use the number of trained denoising steps.")

  @property
  def name(self) -> str:
    """How a config names the objective."""
    return "gspo"

  @property
  def unit(self) -> Literal["step", "candidate"]:
    """The candidate carries the ratio."""
    return "candidate"

  def log_ratio(self, difference: Any) -> Any:
    """Gives the mean over steps from the sum."""
    return difference / self.steps

  def slope(self) -> float:
    """Gives 1 / steps."""
    return 1.0 / self.steps
