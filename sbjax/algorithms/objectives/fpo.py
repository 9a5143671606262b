"""FPO: the clipped surrogate on a flow-matching ratio, at clean latents noised anew."""

import dataclasses
from typing import Literal

from sbjax.algorithms.objectives.clipped import Clipped


@dataclasses.dataclass(frozen=True, kw_only=True)
class FPO(Clipped):
  """The clipped surrogate whose ratio is exp(flow-matching error, old minus new).

  Source: Flow Matching Policy Gradients (FPO). The score needs no stochastic sampler and compares
  with the finished video instead of with the noise that a step happened to draw: most of a latent's
  dimensions are background that every candidate shares, and these cancel. A candidate's noise level
  carries the ratio, as a denoising step does for DanceGRPO.
  """

  @property
  def name(self) -> str:
    """How a config names the objective."""
    return "fpo"

  @property
  def score(self) -> str:
    """Minus half the flow-matching error."""
    return "flow_matching"

  @property
  def points(self) -> Literal["trajectory", "forward"]:
    """Clean latents noised anew."""
    return "forward"
