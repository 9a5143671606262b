"""How a denoising step explores, and what the log-probability of the step is.

A flow model at noise level sigma sees x = (1 - sigma) x0 + sigma noise and predicts the velocity
v = noise - x0, so x0 = x - sigma v. Every transition here is a Gaussian step x' = mean + std z, and
`step` is the one function that gives mean and std to rollout and replay alike, so that the two
cannot drift apart. Mean and std are computed in the dtype of the arguments; pass float32 or wider,
also where the network runs in a narrower type.
"""

import abc
import dataclasses
import inspect
import math
import types
from collections.abc import Mapping
from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from sbjax.separation.channels import Transition

DimReduce = Literal["mean", "sum"]


def clean_prediction(
  x: Float[Array, "*latent"], velocity: Float[Array, "*latent"], sigma: Float[Array, ""]
) -> Float[Array, "*latent"]:
  """Gives the clean latents that a velocity implies: x - sigma v."""
  return x - sigma * velocity


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gaussian(abc.ABC):
  """What all transitions share: the log-probability of a Gaussian step.

  Attributes:
    dim_reduce: mean (what the reference implementations report) or sum over the latent's
      dimensions. With the mean, log-ratios are tiny and clip ranges are of the order 1e-4.
  """

  dim_reduce: DimReduce = "mean"

  def __post_init__(self) -> None:
    """Raises ValueError for a reduction that does not exist."""
    if self.dim_reduce not in ("mean", "sum"):
      raise ValueError(f"dim_reduce is {self.dim_reduce!r}; use 'mean' or 'sum'.")

  @abc.abstractmethod
  def step(
    self,
    x: Float[Array, "*latent"],
    velocity: Float[Array, "*latent"],
    sigma: Float[Array, ""],
    sigma_next: Float[Array, ""],
  ) -> tuple[Float[Array, "*latent"], Float[Array, ""]]:
    """Gives the mean of the next state and the injected standard deviation."""

  def noise_scale(self, sigma: Float[Array, ""], sigma_next: Float[Array, ""]) -> Float[Array, ""]:
    """Gives the std that Flow-GRPO's KL divides by: the injected one unless overridden."""
    zero = jnp.zeros_like(sigma)
    return self.step(zero, zero, sigma, sigma_next)[1]

  def _reduce(self, values: Float[Array, "*latent"]) -> Float[Array, ""]:
    return jnp.sum(values) if self.dim_reduce == "sum" else jnp.mean(values)

  def log_prob(
    self, x_next: Float[Array, "*latent"], mean: Float[Array, "*latent"], std: Float[Array, ""]
  ) -> Float[Array, ""]:
    """Gives the log-probability of `x_next` without the constant that cancels in a ratio.

    It is left out because a float32 difference of two log-probabilities is small beside it.
    """
    return self._reduce(-((x_next - mean) ** 2) / (2.0 * std**2))

  def log_prob_full(
    self, x_next: Float[Array, "*latent"], mean: Float[Array, "*latent"], std: Float[Array, ""]
  ) -> Float[Array, ""]:
    """Gives the Gaussian log-density with its constants, reduced as `dim_reduce` says."""
    constant = jnp.log(std) + 0.5 * math.log(2.0 * math.pi)
    return self._reduce(-((x_next - mean) ** 2) / (2.0 * std**2) - constant)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Renoise(Gaussian):
  """Self-Forcing's few-step sampler: predict the clean latents, noise them to the next level.

  The last step (sigma_next = 0) is deterministic and has no log-probability.
  """

  def step(
    self,
    x: Float[Array, "*latent"],
    velocity: Float[Array, "*latent"],
    sigma: Float[Array, ""],
    sigma_next: Float[Array, ""],
  ) -> tuple[Float[Array, "*latent"], Float[Array, ""]]:
    """Gives (1 - sigma_next) x0 and sigma_next."""
    return (1.0 - sigma_next) * clean_prediction(x, velocity, sigma), sigma_next


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Noisy(Gaussian):
  """A transition whose exploration has a strength.

  Attributes:
    noise_level: strength of the injected noise, dimensionless, positive.
  """

  noise_level: float

  def __post_init__(self) -> None:
    """Raises ValueError for a noise level that injects no noise."""
    super().__post_init__()
    if not self.noise_level > 0 or not math.isfinite(self.noise_level):
      raise ValueError(
        f"noise_level is {self.noise_level}; use a positive number, or the steps have no "
        "log-probability."
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DanceSDE(_Noisy):
  """DanceGRPO's SDE step for flow models: Euler-Maruyama with noise of constant strength."""

  noise_level: float = 0.3

  def step(
    self,
    x: Float[Array, "*latent"],
    velocity: Float[Array, "*latent"],
    sigma: Float[Array, ""],
    sigma_next: Float[Array, ""],
  ) -> tuple[Float[Array, "*latent"], Float[Array, ""]]:
    """Gives the ODE's mean corrected by the score, and noise_level sqrt(sigma - sigma_next)."""
    length = sigma_next - sigma
    score = -(x - (1.0 - sigma) * clean_prediction(x, velocity, sigma)) / sigma**2
    mean = x + length * velocity - (0.5 * self.noise_level**2) * length * score
    return mean, self.noise_level * jnp.sqrt(-length)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SDE(_Noisy):
  """Flow-GRPO's SDE step, whose noise grows as sqrt(sigma / (1 - sigma)).

  Attributes:
    sigma_1: what stands for sigma in 1 - sigma where sigma is 1: the schedule's second entry. None
      takes the level that the step goes to, which is the same wherever the schedule starts at 1.
  """

  noise_level: float = 0.7
  sigma_1: float | None = None

  def noise_scale(self, sigma: Float[Array, ""], sigma_next: Float[Array, ""]) -> Float[Array, ""]:
    """Gives the noise per square root of step length."""
    first = sigma_next if self.sigma_1 is None else jnp.full_like(sigma, self.sigma_1)
    return self.noise_level * jnp.sqrt(sigma / (1.0 - jnp.where(sigma >= 1.0, first, sigma)))

  def step(
    self,
    x: Float[Array, "*latent"],
    velocity: Float[Array, "*latent"],
    sigma: Float[Array, ""],
    sigma_next: Float[Array, ""],
  ) -> tuple[Float[Array, "*latent"], Float[Array, ""]]:
    """Gives Flow-GRPO's mean and the noise scale times sqrt(sigma - sigma_next)."""
    length = sigma_next - sigma
    scale = self.noise_scale(sigma, sigma_next)
    share = scale**2 / (2.0 * sigma)
    mean = x * (1.0 + share * length) + velocity * ((1.0 + share * (1.0 - sigma)) * length)
    return mean, scale * jnp.sqrt(-length)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CPS(_Noisy):
  """Coefficient-preserving sampling: the next state has the right share of signal and noise.

  At noise level 1 it is `Renoise`, except that the log-probability leaves out 1 / (2 std^2), as
  Flow-GRPO's does, so its log-ratios are 2 std^2 times as large and want another clip range.
  """

  noise_level: float = 0.8

  def __post_init__(self) -> None:
    """Raises ValueError for a noise level that leaves more noise than the next level has."""
    super().__post_init__()
    if self.noise_level > 1:
      raise ValueError(
        f"noise_level is {self.noise_level}; use at most 1, where cps replaces all of the noise."
      )

  def step(
    self,
    x: Float[Array, "*latent"],
    velocity: Float[Array, "*latent"],
    sigma: Float[Array, ""],
    sigma_next: Float[Array, ""],
  ) -> tuple[Float[Array, "*latent"], Float[Array, ""]]:
    """Gives the clean prediction with the kept part of the predicted noise, and the new noise."""
    angle = self.noise_level * math.pi / 2.0
    x0 = clean_prediction(x, velocity, sigma)
    noise = x + (1.0 - sigma) * velocity
    return x0 * (1.0 - sigma_next) + noise * (sigma_next * math.cos(angle)), (
      sigma_next * math.sin(angle)
    )

  def log_prob(
    self, x_next: Float[Array, "*latent"], mean: Float[Array, "*latent"], std: Float[Array, ""]
  ) -> Float[Array, ""]:
    """Gives minus the squared distance to the mean, as Flow-GRPO's CPS does."""
    del std
    return self._reduce(-((x_next - mean) ** 2))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DDIM(_Noisy):
  """DDIM with noise (DanceGRPO's Stable Diffusion recipe): the network predicts the noise.

  The noise-level arguments of `step` are cumulative alphas here, which grow towards 1 as the sample
  gets clean, and `velocity` is the predicted noise.

  Attributes:
    noise_level: DDIM's eta.
  """

  noise_level: float = 1.0

  def step(
    self,
    x: Float[Array, "*latent"],
    velocity: Float[Array, "*latent"],
    sigma: Float[Array, ""],
    sigma_next: Float[Array, ""],
  ) -> tuple[Float[Array, "*latent"], Float[Array, ""]]:
    """Gives DDIM's mean and std from the predicted noise and two cumulative alphas."""
    now, after = sigma, sigma_next
    std = self.noise_level * jnp.sqrt((1.0 - after) / (1.0 - now) * (1.0 - now / after))
    x0 = (x - jnp.sqrt(1.0 - now) * velocity) / jnp.sqrt(now)
    return jnp.sqrt(after) * x0 + jnp.sqrt(1.0 - after - std**2) * velocity, std


TRANSITIONS: Mapping[str, type[Gaussian]] = types.MappingProxyType(
  {"renoise": Renoise, "dance_sde": DanceSDE, "sde": SDE, "cps": CPS, "ddim": DDIM}
)


def transition(name: str, **settings: Any) -> Transition:
  """Makes a transition by the name that a config uses.

  Raises:
    ValueError: for an unknown name or setting, or a value that the transition cannot work with.
  """
  if name == "unipc":
    raise ValueError(
      "transition is 'unipc', a sampler without noise between steps and so without a "
      f"log-probability to train on; use one of {', '.join(sorted(TRANSITIONS))}."
    )
  if name not in TRANSITIONS:
    raise ValueError(f"transition is {name!r}; use one of {', '.join(sorted(TRANSITIONS))}.")
  known = set(inspect.signature(TRANSITIONS[name]).parameters)
  for setting in settings:
    if setting not in known:
      raise ValueError(
        f"transition {name!r} has no setting {setting!r}; it takes {', '.join(sorted(known))}."
      )
  return TRANSITIONS[name](**settings)


def from_settings(name: str, noise_level: float, dim_reduce: DimReduce) -> Transition:
  """Makes the transition that a run's settings ask for; `renoise` has no noise level.

  Raises:
    ValueError: as `transition` does.
  """
  if name == "renoise":
    return transition(name, dim_reduce=dim_reduce)
  return transition(name, noise_level=noise_level, dim_reduce=dim_reduce)
