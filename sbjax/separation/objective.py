"""What an objective is, and the form in which its gradient separates from the rewards.

`∇L = Σ c[n,u,j] q[n,u,j]` over candidates n, their units u and channels j, with
`c = ∂L/∂channels`. An objective may factor `c[n,u,j] = Σ_b early[n,b,u,j] · late[n,b]`: `early` is
known when the candidate's replay ends and folds the gradients into B buffers, `late` comes with the
rewards (StageBreaker §4.2, eq. 7, generalised).
"""

import dataclasses
from collections.abc import Mapping
from typing import Literal, Protocol

import numpy as np
from jaxtyping import Array, Float

from sbjax.separation.channels import ChannelFn

AnyArray = Array | np.ndarray
"""On the driver these scalars are numpy; autodiff of a loss traces them."""


@dataclasses.dataclass(frozen=True)
class Batch:
  """The scalars of one mini-batch, everything an objective's loss may look at, in float64.

  Attributes:
    channels: [candidates, units, channels], under the adapter that is being trained.
    old: the same under the rollout's adapter (only channels whose old value exists; else equal).
    statistics: [candidates, units, statistics], reward-free, without gradient.
    advantages: [candidates, rewards]; one column unless several rewards keep losses of their own.
    valid: [candidates], False for a candidate whose reward failed: it contributes nothing.
    group: [candidates], integer id of the prompt's group.
    normaliser: Z, candidates of the mini-batch x units that are summed over.
  """

  channels: Float[AnyArray, "candidates units channels"]
  old: Float[AnyArray, "candidates units channels"]
  statistics: Float[AnyArray, "candidates units statistics"]
  advantages: Float[AnyArray, "candidates rewards"]
  valid: np.ndarray
  group: np.ndarray
  normaliser: float


class Objective(Protocol):
  """A loss over the scalars of a mini-batch and, where it has one, its compressed form.

  Attributes:
    name: how a config names it.
    channels: names of the channels whose gradients are taken, the score first.
    statistics: names of the channels that are computed without gradient.
    unit: what carries one ratio: a candidate's denoising step, or the whole candidate.
    points: where the network is evaluated: at the stored trajectory's states, or at clean latents
      noised anew (`forward`).
    functions: what computes each of `channels` and `statistics`, with this objective's settings.
    buffers: B, how many folded gradients a candidate keeps until its reward is known.
  """

  @property
  def name(self) -> str:
    """See the class."""
    ...

  @property
  def channels(self) -> tuple[str, ...]:
    """See the class."""
    ...

  @property
  def statistics(self) -> tuple[str, ...]:
    """See the class."""
    ...

  @property
  def functions(self) -> Mapping[str, ChannelFn]:
    """See the class."""
    ...

  @property
  def unit(self) -> Literal["step", "candidate"]:
    """See the class."""
    ...

  @property
  def points(self) -> Literal["trajectory", "forward"]:
    """See the class."""
    ...

  def buffers(self, units: int) -> int:
    """See the class."""
    ...

  def loss(self, batch: Batch) -> Float[Array, ""]:
    """The loss itself; `jax.grad` of it over `batch.channels` is the truth for `early` x `late`."""
    ...

  def early(
    self,
    channels: Float[Array, "units channels"],
    old: Float[Array, "units channels"],
    statistics: Float[Array, "units statistics"],
  ) -> Float[np.ndarray, "buffers units channels"]:
    """Reward-free weights of one candidate, known as soon as its replay ends."""
    ...

  def late(self, batch: Batch) -> Float[np.ndarray, "candidates buffers"]:
    """Coefficients of the folded buffers, −1/Z included, zero for invalid candidates."""
    ...
