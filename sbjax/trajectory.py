"""Records of a rollout: the sampler's steps, and what one candidate leaves for its replays.

Plain numpy, so that they travel between workers.
"""

import dataclasses

import numpy as np
from jaxtyping import Float


@dataclasses.dataclass(frozen=True)
class Schedule:
  """The denoising steps of the sampler.

  Attributes:
    timesteps: what the network sees, falling, [K].
    sigmas: noise levels, falling, [K]; after the last step the latents are clean.
  """

  timesteps: Float[np.ndarray, " steps"]
  sigmas: Float[np.ndarray, " steps"]

  @property
  def steps(self) -> int:
    """K, network evaluations of a chunk."""
    return len(self.sigmas)

  @property
  def stochastic(self) -> int:
    """Steps that draw noise and so have a log-probability; the last step is deterministic."""
    return self.steps - 1


@dataclasses.dataclass(frozen=True)
class Trajectory:
  """One candidate's record, plain numpy, as it travels between workers.

  Attributes:
    x: latent states, chunk c's inputs of step k at [c, k], its clean latents at [c, K].
    old_scores: the score at every stochastic step's point under the rollout's adapter, [C, K−1].
    prompt_embeds: the prompt, before the network's text layers.
    seed: names the stream of step noise.
    seed_initial: names the stream of initial noise; differs from `seed` where it is shared.
    version: the adapter that made it.
    anchor: what the rollout's policy predicted at forward-process points, [C, K−1, ...], where an
      objective needs it; empty otherwise, since a mean can be had again from the states.
  """

  x: Float[np.ndarray, "chunks states frames channels height width"]
  old_scores: Float[np.ndarray, "chunks steps"]
  prompt_embeds: Float[np.ndarray, "text_len text_dim"]
  seed: int
  seed_initial: int
  version: str
  anchor: Float[np.ndarray, "..."]

  @property
  def latents(self) -> Float[np.ndarray, "frames channels height width"]:
    """The finished video's latents."""
    clean = self.x[:, -1]
    return clean.reshape(-1, *clean.shape[2:])
