"""Channels: the scalars of one chunk at one denoising step whose gradients a replay takes.

A replay evaluates the network once at a *point* and derives every channel that the objective asks
for from that one evaluation. The first channel of an objective is its *score*. Channels carry
gradient; statistics are computed by the same functions but never differentiated. No reward
appears here (StageBreaker §4.2: reward-separable policy training).
"""

import dataclasses
from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


class Transition(Protocol):
  """How a denoising step explores, and what its log-probability is."""

  def step(
    self,
    x: Float[Array, "*latent"],
    velocity: Float[Array, "*latent"],
    sigma: Float[Array, ""],
    sigma_next: Float[Array, ""],
  ) -> tuple[Float[Array, "*latent"], Float[Array, ""]]:
    """Gives the mean of the next state and the standard deviation that is injected."""
    ...

  def log_prob(
    self, x_next: Float[Array, "*latent"], mean: Float[Array, "*latent"], std: Float[Array, ""]
  ) -> Float[Array, ""]:
    """Gives the log-probability of `x_next` without the constant that cancels in a ratio."""
    ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Point:
  """Where a replay evaluates the network: one chunk at one denoising step, one candidate.

  Attributes:
    x: network input, the noisy latents [frames, channels, height, width].
    timestep: the timestep that the network sees (not always proportional to sigma), scalar.
    sigma: noise level of `x`, scalar.
    sigma_next: noise level after the step, scalar.
    target: the next state of the stored trajectory; the clean latents for forward-process
      objectives. Same shape as `x`.
    anchor: what the rollout's policy predicted here: its mean, or for forward-process objectives its
      velocity. Same shape as `x`.
    reference: the same under the initial adapter; zeros where no channel reads it.
  """

  x: Float[Array, "*steps frames channels height width"]
  timestep: Float[Array, "*steps"]
  sigma: Float[Array, "*steps"]
  sigma_next: Float[Array, "*steps"]
  target: Float[Array, "*steps frames channels height width"]
  anchor: Float[Array, "*steps frames channels height width"]
  reference: Float[Array, "*steps frames channels height width"]


ChannelFn = Callable[[Point, Float[Array, "*latent"], Transition], Float[Array, ""]]
"""(point, velocity predicted at it, transition) -> scalar, differentiable in the velocity."""
