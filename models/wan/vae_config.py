"""Sizes and latent statistics of Wan's video autoencoders.

Source: Wan2.1 and Wan2.2 `WanVAE`; the statistics are those published with the weights.
"""

import dataclasses
import itertools


@dataclasses.dataclass(frozen=True)
class VAEConfig:
  """Sizes of the autoencoder.

  Attributes:
    name: what messages call it.
    base_dim: channels at full resolution.
    decoder_base_dim: the same for the decoder; None for the encoder's.
    z_dim: latent channels.
    dim_mult: channels of each level as multiples of `base_dim`; each level but the last halves the
      image on the way down.
    num_res_blocks: residual blocks per encoder level.
    decoder_extra_res_blocks: how many more a decoder level has (Wan2.1: one).
    temporal_downsample: per halving of the image, whether time is halved too.
    latents_mean, latents_std: statistics by which latents are normalised, `z_dim` numbers each;
      empty for mean 0 and standard deviation 1.
    residual: whether every level carries its input past its layers and resampling keeps the
      channels (Wan2.2), or neither (Wan2.1).
    patch_px: side of the squares of pixels that are folded into channels before the encoder
      (Wan2.2: 2).
    conv_impl: how convolutions over time run, "conv3d", "taps2d" or "auto" (by the backend); the
      numbers are the same.

  Raises:
    ValueError: a field that does not fit the others.
  """

  name: str
  base_dim: int = 96
  z_dim: int = 16
  dim_mult: tuple[int, ...] = (1, 2, 4, 4)
  num_res_blocks: int = 2
  decoder_extra_res_blocks: int = 1
  temporal_downsample: tuple[bool, ...] = (False, True, True)
  latents_mean: tuple[float, ...] = ()
  latents_std: tuple[float, ...] = ()
  residual: bool = False
  patch_px: int = 1
  decoder_base_dim: int | None = None
  conv_impl: str = "auto"

  def __post_init__(self):
    if len(self.temporal_downsample) != len(self.dim_mult) - 1:
      raise ValueError(
        f"temporal_downsample has {len(self.temporal_downsample)} entries; dim_mult of "
        f"{len(self.dim_mult)} levels needs {len(self.dim_mult) - 1}."
      )
    for field in ("latents_mean", "latents_std"):
      if len(getattr(self, field)) not in (0, self.z_dim):
        raise ValueError(
          f"{field} has {len(getattr(self, field))} numbers; it takes none or z_dim={self.z_dim}."
        )
    if any(std <= 0 for std in self.latents_std):
      raise ValueError(f"latents_std is {self.latents_std}; every entry must be above 0.")
    if self.patch_px < 1:
      raise ValueError(f"patch_px is {self.patch_px}; it must be at least 1.")
    if self.conv_impl not in ("auto", "conv3d", "taps2d"):
      raise ValueError(f"conv_impl is {self.conv_impl!r}; it must be auto, conv3d or taps2d.")

  @property
  def encoder_levels(self) -> tuple[tuple[int, int], ...]:
    """Channels that enter and leave each level of the encoder."""
    return tuple(itertools.pairwise(self.base_dim * m for m in (1, *self.dim_mult)))

  @property
  def decoder_levels(self) -> tuple[tuple[int, int], ...]:
    """Channels that enter each level of the decoder, and those of its blocks."""
    base = self.base_dim if self.decoder_base_dim is None else self.decoder_base_dim
    widths = [base * m for m in (self.dim_mult[-1], *reversed(self.dim_mult))]
    # Where resampling does not keep the channels, the one before a level has halved them.
    halved = 1 if self.residual else 2
    return tuple(
      (a // halved if i else a, b) for i, (a, b) in enumerate(itertools.pairwise(widths))
    )

  @property
  def pixel_channels(self) -> int:
    """Channels of what the encoder takes and the decoder gives."""
    return 3 * self.patch_px**2

  @property
  def spatial_factor(self) -> int:
    """Pixels per latent cell along height and width."""
    return self.patch_px * 2 ** len(self.temporal_downsample)

  @property
  def temporal_factor(self) -> int:
    """Pixel frames per latent frame, after the first."""
    return 2 ** sum(self.temporal_downsample)

  def pixel_frames(self, latent_frames: int) -> int:
    """How many pixel frames a video of `latent_frames` (at least 1) decodes to."""
    return self.temporal_factor * (latent_frames - 1) + 1

  def latent_frames(self, pixel_frames: int) -> int:
    """How many latent frames `pixel_frames` encode to.

    Raises:
      ValueError: a length that is not a multiple of `temporal_factor` plus one.
    """
    extra = (pixel_frames - 1) % self.temporal_factor
    if pixel_frames < 1 or extra:
      factor = self.temporal_factor
      lower = max(pixel_frames - extra, 1) if pixel_frames >= 1 else 1
      raise ValueError(
        f"pixels has {pixel_frames} frames; {self.name} takes {factor}k+1 frames, "
        f"such as {lower} or {lower + factor}."
      )
    return (pixel_frames - 1) // self.temporal_factor + 1


# fmt: off
WAN21_LATENTS_MEAN = (
  -0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508,
  0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921,
)
WAN21_LATENTS_STD = (
  2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743,
  3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160,
)
WAN22_LATENTS_MEAN = (
  -0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557,
  -0.1382, 0.0542, 0.2813, 0.0891, 0.1570, -0.0098, 0.0375, -0.1825,
  -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502,
  -0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230,
  -0.0313, -0.1649, 0.0117, 0.0723, -0.2839, -0.2083, -0.0520, 0.3748,
  0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667,
)
WAN22_LATENTS_STD = (
  0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013,
  0.8158, 1.0344, 0.5894, 1.0901, 0.6885, 0.6165, 0.8454, 0.4978,
  0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659,
  0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093,
  0.5709, 0.6065, 0.6415, 0.4944, 0.5726, 1.2042, 0.5458, 1.6887,
  0.3971, 1.0600, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744,
)
# fmt: on

PRESETS = {
  "wan2.1": VAEConfig(
    name="wan2.1", latents_mean=WAN21_LATENTS_MEAN, latents_std=WAN21_LATENTS_STD
  ),
  "wan2.2": VAEConfig(
    name="wan2.2",
    base_dim=160,
    decoder_base_dim=256,
    z_dim=48,
    latents_mean=WAN22_LATENTS_MEAN,
    latents_std=WAN22_LATENTS_STD,
    residual=True,
    patch_px=2,
  ),
  # The embedded world of digits: its latent statistics come with its weights.
  "digits": VAEConfig(
    name="digits",
    base_dim=8,
    z_dim=8,
    dim_mult=(1, 3, 6, 6),
    num_res_blocks=1,
    decoder_extra_res_blocks=0,
  ),
}


def vae_preset(name: str) -> VAEConfig:
  """The configuration of that name.

  Raises:
    ValueError: an unknown name.
  """
  if name not in PRESETS:
    raise ValueError(f"VAE preset {name!r} is unknown; known are {', '.join(sorted(PRESETS))}.")
  return PRESETS[name]
