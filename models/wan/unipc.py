"""UniPC: the multistep predictor-corrector that samples Wan2.2 and LongLive 2.0.

A flow model at noise level σ sees x = (1 − σ)·x0 + σ·noise and predicts v = noise − x0, hence the
clean latents m = x − σ·v. Each step first corrects its input, now that m at it is known, then
predicts the next one. Both are linear in latents and clean predictions, so all that the solver
knows is two small tables, worked out on the host in float64. Everything after the initial noise is
deterministic: a step has no log-probability.

Source: Zhao et al., "UniPC" (arXiv 2302.04867), order 2, its B₂(h) variant, for clean predictions.
With λ = ln((1 − σ)/σ), h = λᵢ − λᵢ₋₁ and B = expm1(−h).
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from models.wan.schedule import TRAIN_STEPS, shift_sigma

ORDER = 2


@dataclasses.dataclass(frozen=True)
class UniPCTables:
  """What the solver knows of a grid of N steps.

  Attributes:
    timesteps: what the network sees at each step; whole numbers, as float32.
    sigmas: noise levels, falling, the last of them 0; float32.
    correct: weights of the last corrected latents and of the clean predictions of this step, the
      last and the one before it; float32.
    predict: weights of the corrected latents and of the clean predictions of this step and the
      last; float32.
  """

  timesteps: Float[np.ndarray, " steps"]
  sigmas: Float[np.ndarray, " steps+1"]
  correct: Float[np.ndarray, "steps 4"]
  predict: Float[np.ndarray, "steps 3"]

  @property
  def steps(self) -> int:
    """N, network evaluations."""
    return len(self.timesteps)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class UniPCState:
  """What one step hands to the next, float32.

  Attributes:
    x: latents that the network sees next; after the last step, the clean ones.
    corrected: the last step's latents after their correction.
    clean: clean predictions of the last step and of the one before it.
  """

  x: Float[Array, "*latent"]
  corrected: Float[Array, "*latent"]
  clean: tuple[Float[Array, "*latent"], Float[Array, "*latent"]]


def unipc_tables(steps: int, shift: float) -> UniPCTables:
  """The tables for `steps` steps on Wan2.2's grid: σ from 0.999 to 0, evenly spaced, then shifted.

  The network sees 1000·σ without its fraction.

  Raises:
    ValueError: when `steps` is below 1 or `shift` is not positive.
  """
  if steps < 1:
    raise ValueError(f"unipc_steps is {steps}; it must be at least 1.")
  first = 1.0 - 1.0 / TRAIN_STEPS
  sigmas = np.append(shift_sigma(np.linspace(first, 0.0, steps + 1)[:-1], shift), 0.0)
  with np.errstate(divide="ignore"):  # clean latents lie at λ = ∞
    half_snr = np.log1p(-sigmas) - np.log(sigmas)
  # The order of a prediction: no more than there are clean predictions, and 1 for the last step.
  orders = [min(ORDER, steps - i, i + 1) for i in range(steps)]
  correct = [(1.0, 0.0, 0.0, 0.0)]
  correct += [_correction(sigmas, half_snr, i, orders[i - 1]) for i in range(1, steps)]
  predict = [_prediction(sigmas, half_snr, i, orders[i]) for i in range(steps)]
  return UniPCTables(
    timesteps=np.trunc(TRAIN_STEPS * sigmas[:-1]).astype(np.float32),
    sigmas=sigmas.astype(np.float32),
    correct=np.asarray(correct, np.float32),
    predict=np.asarray(predict, np.float32),
  )


def unipc_start(noise: Float[Array, "*latent"]) -> UniPCState:
  """The state before the first step."""
  zero = jnp.zeros_like(noise)
  return UniPCState(noise, noise, (zero, zero))


def unipc_step(
  tables: UniPCTables,
  state: UniPCState,
  velocity: Float[Array, "*latent"],
  step: Int[Array, ""],
) -> UniPCState:
  """The state after step `step`, which may be traced; `velocity` is the network's at `state.x`."""
  correct, predict = (jnp.asarray(table)[step] for table in (tables.correct, tables.predict))
  clean = state.x - jnp.asarray(tables.sigmas)[step] * velocity
  last, before = state.clean
  corrected = correct[0] * state.corrected + correct[1] * clean
  corrected = corrected + correct[2] * last + correct[3] * before
  following = predict[0] * corrected + predict[1] * clean + predict[2] * last
  return UniPCState(following, corrected, (clean, last))


def unipc_sample(
  tables: UniPCTables,
  velocity: Callable[[Float[Array, "*latent"], Int[Array, ""]], Float[Array, "*latent"]],
  noise: Float[Array, "*latent"],
) -> Float[Array, "*latent"]:
  """Clean latents from noise; `velocity` is the network as a function of latents and step."""

  def body(state: UniPCState, step: Array) -> tuple[UniPCState, None]:
    return unipc_step(tables, state, velocity(state.x, step), step), None

  steps = jnp.arange(tables.steps, dtype=jnp.int32)
  return jax.lax.scan(body, unipc_start(noise), steps)[0].x


def _correction(
  sigmas: np.ndarray, half_snr: np.ndarray, i: int, order: int
) -> tuple[float, float, float, float]:
  """The corrector's row at step i, of the order of the prediction that gave its input."""
  h = half_snr[i] - half_snr[i - 1]
  growth = np.expm1(-h)
  scale = -(1.0 - sigmas[i]) * growth
  now, past = 0.5, 0.0
  if order == ORDER:
    ratio = (half_snr[i - 2] - half_snr[i - 1]) / h
    # Weights under which the two differences of clean predictions integrate 1 and h exactly.
    first = (growth / -h - 1.0) / growth
    second = 2.0 * ((growth / -h - 1.0) / -h - 0.5) / growth
    rho = (first - second) / (1.0 - ratio)
    now, past = first - rho, rho / ratio
  return (
    float(sigmas[i] / sigmas[i - 1]),
    float(scale * now),
    float(scale * (1.0 - now - past)),
    float(scale * past),
  )


def _prediction(
  sigmas: np.ndarray, half_snr: np.ndarray, i: int, order: int
) -> tuple[float, float, float]:
  """The predictor's row at step i."""
  scale = -(1.0 - sigmas[i + 1]) * np.expm1(half_snr[i] - half_snr[i + 1])
  past = 0.0
  if order == ORDER:
    h = half_snr[i + 1] - half_snr[i]
    past = 0.5 * h / (half_snr[i - 1] - half_snr[i])
  return float(sigmas[i + 1] / sigmas[i]), float(scale * (1.0 - past)), float(scale * past)
