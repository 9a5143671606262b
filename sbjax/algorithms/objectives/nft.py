"""DiffusionNFT: a forward-process loss that is linear in a reward-derived probability."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from sbjax.algorithms.objectives.base import require_positive
from sbjax.separation.channels import CHANNELS, ChannelFn, NFTPart
from sbjax.separation.objective import Batch

AdvMode = Literal["all", "positive_only", "negative_only", "one_only", "binary"]
_MODES = ("all", "positive_only", "negative_only", "one_only", "binary")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiffusionNFT:
  """loss = 1/Z Σ (a / beta) [r L+ + (1 - r) L-] + ref_kl_coef mean (v - v_ref)^2.

  With r = clip(A, ±a) / (2a) + 1/2. The bracket is (L+ + L-) / 2 + (2r - 1) (L+ - L-) / 2, and
  these two halves are the channels: L+ and L- themselves have opposite gradients at the old policy,
  which float32 could not take apart again. It is linear in the channels, so the early weights are 1
  and the late ones 1 and 2r - 1: exactly two buffers. The reference's term needs no third: its late
  coefficient is the mean's, so that buffer carries it.

  Attributes:
    adv_clip: a, which also scales the loss.
    adv_mode: which advantages count: all, only one sign, only whether positive, or only the sign.
    mix_beta: how far the implicit policies lie from the old one.
    adaptive_weight_min: lower bound of the self-normalising divisor.
    ref_kl_coef: coefficient of the distance to the reference; 0 takes no such channel.
  """

  adv_clip: float = 5.0
  adv_mode: AdvMode = "all"
  mix_beta: float = 0.5
  adaptive_weight_min: float = 1e-5
  ref_kl_coef: float = 0.0

  def __post_init__(self) -> None:
    """Raises ValueError for a setting that cannot work."""
    require_positive("adv_clip", self.adv_clip)
    require_positive("mix_beta", self.mix_beta)
    require_positive("adaptive_weight_min", self.adaptive_weight_min)
    if self.adv_mode not in _MODES:
      raise ValueError(f"adv_mode is {self.adv_mode!r}; use one of {', '.join(_MODES)}.")
    if not 0 <= self.ref_kl_coef < math.inf:
      raise ValueError(f"ref_kl_coef is {self.ref_kl_coef}; use a finite number, 0 or more.")

  @property
  def name(self) -> str:
    """How a config names the objective."""
    return "nft"

  @property
  def channels(self) -> tuple[str, ...]:
    """Mean and contrast of L+ and L-, and the distance to the reference where it counts."""
    return ("nft_mean", "nft_contrast") + (("reference_mse",) if self.ref_kl_coef else ())

  @property
  def statistics(self) -> tuple[str, ...]:
    """None."""
    return ()

  @property
  def functions(self) -> Mapping[str, ChannelFn]:
    """What computes the channels, with this objective's beta and divisor bound."""
    made: dict[str, ChannelFn] = {
      "nft_mean": NFTPart("mean", self.mix_beta, self.adaptive_weight_min),
      "nft_contrast": NFTPart("contrast", self.mix_beta, self.adaptive_weight_min),
    }
    if self.ref_kl_coef:
      made["reference_mse"] = CHANNELS["reference_mse"]
    return made

  @property
  def unit(self) -> Literal["step", "candidate"]:
    """A candidate's noise level."""
    return "step"

  @property
  def points(self) -> Literal["trajectory", "forward"]:
    """The network is evaluated at clean latents noised anew."""
    return "forward"

  def buffers(self, units: int) -> int:
    """Gives B: one for the mean of L+ and L-, one for their contrast."""
    del units
    return 2

  def probability(self, batch: Batch, xp: Any) -> Any:
    """Gives r [candidates], the positive loss's weight in [0, 1]; 1/2 for invalid candidates.

    Raises:
      ValueError: if there is more than one reward column.
    """
    advantages = xp.asarray(batch.advantages)
    if advantages.shape[-1] != 1:
      raise ValueError(f"nft takes one advantage per candidate, not {advantages.shape[-1]}.")
    clipped = xp.where(np.asarray(batch.valid, bool), advantages[:, 0], 0.0)
    clipped = xp.clip(clipped, -self.adv_clip, self.adv_clip)
    if self.adv_mode == "positive_only":
      clipped = xp.maximum(clipped, 0.0)
    elif self.adv_mode == "negative_only":
      clipped = xp.minimum(clipped, 0.0)
    elif self.adv_mode == "one_only":
      clipped = xp.where(clipped > 0, xp.ones_like(clipped), xp.zeros_like(clipped))
    elif self.adv_mode == "binary":
      clipped = xp.sign(clipped)
    return xp.clip(clipped / (2.0 * self.adv_clip) + 0.5, 0.0, 1.0)

  def loss(self, batch: Batch) -> Float[Array, ""]:
    """Gives the scalar loss of a mini-batch."""
    valid = jnp.asarray(batch.valid, bool)[:, None, None]
    channels = jnp.where(valid, jnp.asarray(batch.channels), 0.0)
    r = self.probability(batch, jnp)[:, None]
    mixed = channels[..., 0] + (2.0 * r - 1.0) * channels[..., 1]
    total = self.adv_clip / self.mix_beta * jnp.sum(mixed)
    if self.ref_kl_coef:
      total = total + self.ref_kl_coef * jnp.sum(channels[..., 2])
    return total / batch.normaliser

  def early(
    self, channels: Any, old: Any, statistics: Any
  ) -> Float[np.ndarray, "buffers units channels"]:
    """Gives 1 for mean and contrast in their own buffers; the first carries the reference."""
    del old, statistics
    early = np.zeros((2, *np.shape(channels)))
    early[0, :, 0] = early[1, :, 1] = 1.0
    if self.ref_kl_coef:
      early[0, :, 2] = self.ref_kl_coef * self.mix_beta / self.adv_clip  # late brings a / beta
    return early

  def late(self, batch: Batch) -> Float[np.ndarray, "candidates buffers"]:
    """Gives a / beta and (a / beta) (2r - 1), over Z; 0 for invalid candidates."""
    r, valid = self.probability(batch, np), np.asarray(batch.valid, bool)
    scale = self.adv_clip / self.mix_beta
    columns = np.stack([np.full_like(r, scale), scale * (2.0 * r - 1.0)], axis=1)
    return np.where(valid[:, None], columns, 0.0) / batch.normaliser

  def metrics(self, batch: Batch) -> dict[str, float]:
    """Gives the mean losses and the mean weight of the positive one over the valid candidates."""
    valid = np.asarray(batch.valid, bool)
    if not valid.any():
      return {}
    channels = np.asarray(batch.channels, np.float64)[valid]
    metrics = {
      "actor/positive_loss": float((channels[..., 0] + channels[..., 1]).mean()),
      "actor/negative_loss": float((channels[..., 0] - channels[..., 1]).mean()),
      "actor/reward_prob_mean": float(self.probability(batch, np)[valid].mean()),
    }
    if self.ref_kl_coef:
      metrics["actor/kl_loss"] = float(channels[..., 2].mean())
    return metrics
