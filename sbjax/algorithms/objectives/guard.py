"""GRPO-Guard: the clipped surrogate on a regulated score, each step weighted by its length."""

import dataclasses
from typing import Any

from sbjax.algorithms.objectives.clipped import Clipped


@dataclasses.dataclass(frozen=True, kw_only=True)
class Guard(Clipped):
  """The clipped surrogate with (log-prob + drift) x std as the score and weight 1 / step length.

  Source: GRPO-Guard's ratio normalisation as Flow-GRPO and verl-omni implement it. The weight is a
  statistic of the step (the sum of its lengths over chunks over the number of chunks), so it is
  known before any reward.
  """

  clip_low: float = 2e-6
  clip_high: float = 2e-6

  @property
  def name(self) -> str:
    """How a config names the objective."""
    return "guard"

  @property
  def score(self) -> str:
    """The regulated score."""
    return "guard_score"

  @property
  def statistics(self) -> tuple[str, ...]:
    """Step length and number of points, both as the chunks reduce them."""
    return ("step_length", "count")

  def unit_weights(self, statistics: Any, xp: Any) -> Any:
    """Gives 1 / step length."""
    del xp
    return statistics[..., 1] / statistics[..., 0]
