"""Channels: the scalars of one chunk at one denoising step whose gradients a replay takes.

A replay evaluates the network once at a *point* and derives every channel that the objective asks
for from that one evaluation. The first channel of an objective is its *score*. Channels carry
gradient; statistics are computed by the same functions but never differentiated. No reward
appears here (StageBreaker §4.2: reward-separable policy training).
"""

import dataclasses
import types
from collections.abc import Callable, Mapping
from typing import Literal, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


class Transition(Protocol):
  """How a denoising step explores, and what its log-probability is.

  Attributes:
    dim_reduce: whether a log-probability is the mean or the sum over the latent's dimensions.
  """

  @property
  def dim_reduce(self) -> Literal["mean", "sum"]:
    """Says how a log-probability treats the latent's dimensions."""
    ...

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

  def noise_scale(self, sigma: Float[Array, ""], sigma_next: Float[Array, ""]) -> Float[Array, ""]:
    """Gives the noise per square root of step length, where the step has one; else the std."""
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
    anchor: what the rollout's policy predicted here: its mean, or for forward-process objectives
      its velocity. Same shape as `x`.
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


def _reduced(values: Float[Array, "*latent"], transition: Transition) -> Float[Array, ""]:
  """Reduces over the latent's dimensions as the transition's own log-probability does."""
  return jnp.sum(values) if transition.dim_reduce == "sum" else jnp.mean(values)


def _mean_std(
  point: Point, velocity: Float[Array, "*latent"], transition: Transition
) -> tuple[Float[Array, "*latent"], Float[Array, ""]]:
  return transition.step(point.x, velocity, point.sigma, point.sigma_next)


def _distance(
  point: Point,
  velocity: Float[Array, "*latent"],
  transition: Transition,
  other: Float[Array, "*latent"],
) -> Float[Array, ""]:
  """KL between two Gaussian steps of equal std, of which `other` is the second mean."""
  mean, std = _mean_std(point, velocity, transition)
  return _reduced((mean - other) ** 2, transition) / (2.0 * std**2)


def log_prob(
  point: Point, velocity: Float[Array, "*latent"], transition: Transition
) -> Float[Array, ""]:
  """Log-probability of the stored next state (StageBreaker §4.2; DanceGRPO's policy)."""
  mean, std = _mean_std(point, velocity, transition)
  return transition.log_prob(point.target, mean, std)


def guard_score(
  point: Point, velocity: Float[Array, "*latent"], transition: Transition
) -> Float[Array, ""]:
  """GRPO-Guard's regulated score: (log-prob + drift) x std.

  The drift of the mean lowers the expected log-ratio by exactly the KL, so adding the KL centres
  the log-ratio at zero, and the std makes its spread the same at every step. Gradient flows through
  both terms. Under the rollout's own adapter the drift is zero.
  """
  mean, std = _mean_std(point, velocity, transition)
  drift = _reduced((mean - point.anchor) ** 2, transition) / (2.0 * std**2)
  return (transition.log_prob(point.target, mean, std) + drift) * std


def kl_exact(
  point: Point, velocity: Float[Array, "*latent"], transition: Transition
) -> Float[Array, ""]:
  """KL of the step to the reference's step; `point.reference` is the reference's mean."""
  return _distance(point, velocity, transition, point.reference)


def kl_flow_grpo(
  point: Point, velocity: Float[Array, "*latent"], transition: Transition
) -> Float[Array, ""]:
  """Flow-GRPO's KL, which leaves the step length out of the std: smaller than the exact one."""
  mean, _ = _mean_std(point, velocity, transition)
  scale = transition.noise_scale(point.sigma, point.sigma_next)
  return _reduced((mean - point.reference) ** 2, transition) / (2.0 * scale**2)


def drift(
  point: Point, velocity: Float[Array, "*latent"], transition: Transition
) -> Float[Array, ""]:
  """KL of the step to the rollout's step (Flow-DPPO's mask); `point.anchor` is the old mean."""
  return _distance(point, velocity, transition, point.anchor)


def drift_unscaled(
  point: Point, velocity: Float[Array, "*latent"], transition: Transition
) -> Float[Array, ""]:
  """Half the squared distance to the rollout's mean, the std left out (Flow-DPPO's option)."""
  mean, _ = _mean_std(point, velocity, transition)
  return _reduced((mean - point.anchor) ** 2, transition) / 2.0


def step_length(
  point: Point, velocity: Float[Array, "*latent"], transition: Transition
) -> Float[Array, ""]:
  """How far the step lowers the noise level; a statistic, the same for every velocity."""
  del velocity, transition
  return point.sigma - point.sigma_next


def count(
  point: Point, velocity: Float[Array, "*latent"], transition: Transition
) -> Float[Array, ""]:
  """One per point: turns another statistic's sum over chunks back into a mean."""
  del velocity, transition
  return jnp.ones_like(point.sigma)


def flow_matching(
  point: Point, velocity: Float[Array, "*latent"], transition: Transition
) -> Float[Array, ""]:
  """FPO's surrogate log-probability: minus half the flow-matching error of the clean prediction.

  `point.target` is the candidate's own clean latents and `point.x` the same noised anew, so the
  score asks how well the policy would restore what it made (Flow Matching Policy Gradients).
  """
  error = point.x - point.sigma * velocity - point.target
  return -0.5 * _reduced(error**2, transition)


def reference_mse(
  point: Point, velocity: Float[Array, "*latent"], transition: Transition
) -> Float[Array, ""]:
  """Mean squared distance to the reference's velocity (DiffusionNFT's KL term)."""
  del transition
  return jnp.mean((velocity - point.reference) ** 2)


@dataclasses.dataclass(frozen=True)
class NFTLoss:
  """DiffusionNFT's loss of the implicit positive or negative policy, at a forward-process point.

  The implicit velocity is v_old + sign * mix_beta * (v - v_old); its clean prediction is compared
  with the clean latents `point.target`, and the error is divided by its own detached mean size.
  `point.anchor` is the rollout policy's velocity at the same point.

  Attributes:
    sign: +1 for L+, -1 for L-.
    mix_beta: how far the implicit policies lie from the old one.
    adaptive_weight_min: lower bound of the divisor.
  """

  sign: Literal[1, -1]
  mix_beta: float = 0.5
  adaptive_weight_min: float = 1e-5

  def __call__(
    self, point: Point, velocity: Float[Array, "*latent"], transition: Transition
  ) -> Float[Array, ""]:
    """Gives the loss at one point; `transition` is not used."""
    del transition
    implicit = point.anchor + self.sign * self.mix_beta * (velocity - point.anchor)
    error = point.x - point.sigma * implicit - point.target
    size = jnp.maximum(jnp.mean(jnp.abs(error)), self.adaptive_weight_min)
    return jnp.mean(error**2) / jax.lax.stop_gradient(size)


@dataclasses.dataclass(frozen=True)
class NFTPart:
  """Half the sum or half the difference of DiffusionNFT's two losses, at a forward-process point.

  Under the rollout's own adapter the gradients of L+ and L- are exactly opposite: a gradient that
  is folded for each of them alone loses, in float32, what is left when they are weighed with r and
  1 - r. The sum's gradient vanishes there and the difference's does not, so these two keep it.

  Attributes:
    part: `mean` for (L+ + L-) / 2, `contrast` for (L+ - L-) / 2.
    mix_beta: how far the implicit policies lie from the old one.
    adaptive_weight_min: lower bound of the divisor.
  """

  part: Literal["mean", "contrast"]
  mix_beta: float = 0.5
  adaptive_weight_min: float = 1e-5

  def __call__(
    self, point: Point, velocity: Float[Array, "*latent"], transition: Transition
  ) -> Float[Array, ""]:
    """Gives the part at one point; `transition` is not used."""
    positive, negative = (
      NFTLoss(sign, self.mix_beta, self.adaptive_weight_min)(point, velocity, transition)
      for sign in (1, -1)
    )
    return 0.5 * (positive + negative if self.part == "mean" else positive - negative)


@dataclasses.dataclass(frozen=True)
class X0Score:
  """KVPO's surrogate log-probability: minus half the squared error of the clean prediction.

  The stored clean prediction is recovered from the stored mean: every transition's mean is affine
  in the velocity with one scalar slope, so a difference of means is a difference of clean
  predictions up to that slope.

  Attributes:
    sigma_floor: the error is divided by max(sigma, sigma_floor); 1 leaves the plain error.
    grad_sigma_min: points with a lower sigma count in the score but carry no gradient.
    reference: score the reference's mean instead of the prediction (a statistic).
  """

  sigma_floor: float = 1.0
  grad_sigma_min: float = 0.0
  reference: bool = False

  def __call__(
    self, point: Point, velocity: Float[Array, "*latent"], transition: Transition
  ) -> Float[Array, ""]:
    """Gives the score at one point; `point.anchor` is the rollout's mean there."""
    mean, _ = _mean_std(point, velocity, transition)
    mean = point.reference if self.reference else mean
    zero, one = jnp.zeros_like(point.sigma), jnp.ones_like(point.sigma)
    slope, _ = transition.step(zero, one, point.sigma, point.sigma_next)
    error = (point.anchor - mean) * (point.sigma / slope)
    score = -0.5 * jnp.mean(error**2) / jnp.maximum(point.sigma, self.sigma_floor) ** 2
    return jnp.where(point.sigma >= self.grad_sigma_min, score, jax.lax.stop_gradient(score))


CHANNELS: Mapping[str, ChannelFn] = types.MappingProxyType(
  {
    "log_prob": log_prob,
    "guard_score": guard_score,
    "kl_exact": kl_exact,
    "kl_flow_grpo": kl_flow_grpo,
    "drift": drift,
    "drift_unscaled": drift_unscaled,
    "step_length": step_length,
    "count": count,
    "flow_matching": flow_matching,
    "reference_mse": reference_mse,
    "nft_mean": NFTPart("mean"),
    "nft_contrast": NFTPart("contrast"),
    "x0_score": X0Score(),
    "x0_score_reference": X0Score(reference=True),
  }
)
"""Channels by name, with their default settings; an objective may bring its own (`functions`)."""
