"""Flow-matching schedules: σ on a shifted grid and the timesteps that few-step samplers pick from
it.

Everything is a host table, worked out in float64 and given as float32. The network sees the
timestep, a transition uses σ; the two are proportional here but need not be.
"""

import numpy as np
from jaxtyping import Float

from models.wan.presets import SamplerConfig

TRAIN_STEPS = 1000


def shift_sigma(sigma: Float[np.ndarray, "..."], shift: float) -> Float[np.ndarray, "..."]:
  """`shift·σ / (1 + (shift − 1)·σ)`, which keeps 0 and 1 and moves the rest towards noise for shift
  > 1.

  Raises:
    ValueError: when `shift` is not positive.
  """
  if not shift > 0:
    raise ValueError(f"timestep_shift is {shift}; it must be above 0.")
  return shift * sigma / (1.0 + (shift - 1.0) * sigma)


def flow_match_table(
  shift: float,
) -> tuple[Float[np.ndarray, "1000"], Float[np.ndarray, "1000"]]:
  """The training grid of Self-Forcing: falling timesteps 1000·σ and σ = shifted(1, 0.999, …).

  Both float64.
  """
  # The originals start from a float32 grid; the shift of that grid differs from this one below
  # 1e-7.
  sigmas = shift_sigma(1.0 - np.arange(TRAIN_STEPS, dtype=np.float64) / TRAIN_STEPS, shift)
  return TRAIN_STEPS * sigmas, sigmas


def denoising_schedule(
  sampler: SamplerConfig,
) -> tuple[Float[np.ndarray, " steps"], Float[np.ndarray, " steps"]]:
  """Timesteps (what the network sees) and σ (what the transition uses) of a few-step sampler,
  float32.

  With `warp_steps` the listed steps index the shifted grid (750 → 937.5 at shift 5); fractions are
  kept. Without it the listed steps are the timesteps themselves and σ is that of the nearest entry
  of the grid, as Self-Forcing looks it up.

  Raises:
    ValueError: for a sampler that runs UniPC.
  """
  if sampler.unipc_steps is not None:
    raise ValueError(
      f"unipc_steps is {sampler.unipc_steps}; UniPC draws no noise between steps, so it has no "
      "log-probability and only makes videos; to train, use a sampler without it, such as that of "
      "'longlive-2.0-5b-renoise'."
    )
  timesteps, sigmas = flow_match_table(sampler.timestep_shift)
  steps = np.asarray(sampler.denoising_steps)
  if sampler.warp_steps:
    index = TRAIN_STEPS - steps
    return timesteps[index].astype(np.float32), sigmas[index].astype(np.float32)
  index = np.argmin(np.abs(timesteps[None] - steps[:, None]), axis=1)
  return steps.astype(np.float32), sigmas[index].astype(np.float32)
