"""The Wan2.1 video autoencoder (causal in time) in Flax NNX, for any width.

A latent frame stands for one pixel frame at the start of a video and for four after that. Public
arrays are [batch, frames, channels, height, width]; inside, channels come last.

Source: Wan2.1 `WanVAE` and diffusers `AutoencoderKLWan`, to which the parity tests hold it.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from models.wan.vae_layers import (
  CausalConv,
  ChannelNorm,
  Downsample,
  FrameAttention,
  History,
  ResidualBlock,
  Upsample,
  Video,
)

PIXEL_CHANNELS = 3

DecoderCache = tuple[Video, ...]
"""The last two input frames of every causal convolution of the decoder, in order of execution."""


@dataclasses.dataclass(frozen=True)
class VAEConfig:
  """Sizes of the autoencoder.

  Attributes:
    name: what messages call it.
    base_dim: channels at full resolution.
    z_dim: latent channels.
    dim_mult: channels of each level as multiples of `base_dim`; each level but the last halves the
      image on the way down.
    num_res_blocks: residual blocks per encoder level.
    decoder_extra_res_blocks: how many more a decoder level has (Wan2.1: one).
    temporal_downsample: per halving of the image, whether time is halved too.
    latents_mean, latents_std: statistics by which latents are normalised, `z_dim` numbers each;
      empty for mean 0 and standard deviation 1.
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
    if self.conv_impl not in ("auto", "conv3d", "taps2d"):
      raise ValueError(f"conv_impl is {self.conv_impl!r}; it must be auto, conv3d or taps2d.")

  @property
  def spatial_factor(self) -> int:
    """Pixels per latent cell along height and width."""
    return 2 ** len(self.temporal_downsample)

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
# fmt: on

PRESETS = {
  "wan2.1": VAEConfig(
    name="wan2.1", latents_mean=WAN21_LATENTS_MEAN, latents_std=WAN21_LATENTS_STD
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


class Encoder(nnx.Module):
  """Pixels to the two moments of each latent, before the last 1x1x1 convolution."""

  def __init__(self, config: VAEConfig, *, rngs: nnx.Rngs, param_dtype: jnp.dtype):
    options: dict[str, Any] = dict(impl=config.conv_impl, rngs=rngs, param_dtype=param_dtype)
    widths = [config.base_dim * m for m in (1, *config.dim_mult)]
    self.conv1 = CausalConv((3, 3, 3), PIXEL_CHANNELS, widths[0], **options)
    layers: list[nnx.Module] = []
    for level, (width_in, width) in enumerate(itertools.pairwise(widths)):
      for block in range(config.num_res_blocks):
        layers.append(ResidualBlock(width if block else width_in, width, **options))
      if level < len(config.temporal_downsample):
        layers.append(Downsample(width, temporal=config.temporal_downsample[level], **options))
    self.downsamples = nnx.List(layers)
    self.middle = _middle(widths[-1], **options)
    self.head_norm = ChannelNorm(widths[-1], param_dtype=param_dtype)
    self.head_conv = CausalConv((3, 3, 3), widths[-1], 2 * config.z_dim, **options)

  def __call__(self, x: Video, history: History) -> Video:
    """A whole video of 4k+1 frames to k+1 frames of moments, 2 `z_dim` channels."""
    x = self.conv1(x, history)
    for layer in (*self.downsamples, *self.middle):
      x = layer(x, history)
    return self.head_conv(jax.nn.silu(self.head_norm(x)), history)


class Decoder(nnx.Module):
  """Latents to pixels."""

  def __init__(self, config: VAEConfig, *, rngs: nnx.Rngs, param_dtype: jnp.dtype):
    options: dict[str, Any] = dict(impl=config.conv_impl, rngs=rngs, param_dtype=param_dtype)
    widths = [config.base_dim * m for m in (config.dim_mult[-1], *reversed(config.dim_mult))]
    temporal_upsample = tuple(reversed(config.temporal_downsample))
    self.conv1 = CausalConv((3, 3, 3), config.z_dim, widths[0], **options)
    self.middle = _middle(widths[0], **options)
    layers: list[nnx.Module] = []
    for level, (width_in, width) in enumerate(itertools.pairwise(widths)):
      if level:
        width_in //= 2  # the upsampling before this level halved the channels
      for block in range(config.num_res_blocks + config.decoder_extra_res_blocks):
        layers.append(ResidualBlock(width if block else width_in, width, **options))
      if level < len(temporal_upsample):
        layers.append(Upsample(width, temporal=temporal_upsample[level], **options))
    self.upsamples = nnx.List(layers)
    self.head_norm = ChannelNorm(widths[-1], param_dtype=param_dtype)
    self.head_conv = CausalConv((3, 3, 3), widths[-1], PIXEL_CHANNELS, **options)

  def __call__(self, x: Video, history: History, *, starts: bool) -> Video:
    """k latent frames to 4k pixel frames, or 4k-3 if the first of them `starts` a video."""
    x = self.conv1(x, history)
    for layer in (*self.middle, *self.upsamples):
      x = layer(x, history, starts=starts) if isinstance(layer, Upsample) else layer(x, history)
    return self.head_conv(jax.nn.silu(self.head_norm(x)), history)


def _middle(width: int, *, impl: str, rngs: nnx.Rngs, param_dtype: jnp.dtype) -> nnx.List:
  return nnx.List(
    [
      ResidualBlock(width, width, impl=impl, rngs=rngs, param_dtype=param_dtype),
      FrameAttention(width, rngs=rngs, param_dtype=param_dtype),
      ResidualBlock(width, width, impl=impl, rngs=rngs, param_dtype=param_dtype),
    ]
  )


class WanVAE(nnx.Module):
  """Encoder and decoder. Calls are pure: state that a stream needs goes in and comes out.

  Args:
    config: the sizes.
    rngs: the stream `params` initialises the weights.
    dtype: of the computation; results and normalisation are float32 always.
    param_dtype: of the weights.
  """

  def __init__(
    self,
    config: VAEConfig,
    *,
    rngs: nnx.Rngs,
    dtype: jnp.dtype = jnp.float32,
    param_dtype: jnp.dtype = jnp.float32,
  ):
    options: dict[str, Any] = dict(rngs=rngs, param_dtype=param_dtype)
    z = config.z_dim
    self.config = config
    self.dtype = dtype
    self.encoder = Encoder(config, **options)
    self.conv1 = CausalConv((1, 1, 1), 2 * z, 2 * z, impl=config.conv_impl, **options)
    self.conv2 = CausalConv((1, 1, 1), z, z, impl=config.conv_impl, **options)
    self.decoder = Decoder(config, **options)

  def encode(
    self, pixels: Float[Array, "batch frames 3 height width"]
  ) -> tuple[Float[Array, "batch latents z h w"], Float[Array, "batch latents z h w"]]:
    """Mean and log-variance of the posterior, not normalised, of a whole video in [-1, 1].

    Raises:
      ValueError: frames not 4k+1, or a height or width that the VAE does not divide.
    """
    self.config.latent_frames(pixels.shape[1])
    for side, size in zip(("height", "width"), pixels.shape[3:], strict=True):
      if size % self.config.spatial_factor:
        raise ValueError(
          f"pixels has {side} {size}; {self.config.name} takes multiples of "
          f"{self.config.spatial_factor}."
        )
    history = History(None)
    x = self.encoder(_channels_last(pixels).astype(self.dtype), history)
    moments = _channels_first(self.conv1(x, history)).astype(jnp.float32)
    mu, logvar = jnp.split(moments, 2, axis=2)
    return mu, logvar

  def encode_latents(
    self, pixels: Float[Array, "batch frames 3 height width"]
  ) -> Float[Array, "batch latents z h w"]:
    """The posterior mean, normalised: what the video model works on. Errors as in `encode`."""
    return self.normalise(self.encode(pixels)[0])

  def normalise(
    self, mu: Float[Array, "batch latents z h w"]
  ) -> Float[Array, "batch latents z h w"]:
    """(mu - mean) / std per latent channel."""
    return (mu - self._statistic("latents_mean")) / self._statistic("latents_std")

  def denormalise(
    self, z: Float[Array, "batch latents z h w"]
  ) -> Float[Array, "batch latents z h w"]:
    """The inverse of `normalise`."""
    return z * self._statistic("latents_std") + self._statistic("latents_mean")

  def decode(
    self,
    latents: Float[Array, "batch latents z h w"],
    *,
    normalised: bool = True,
    clip: bool = True,
  ) -> Float[Array, "batch frames 3 height width"]:
    """Decodes a whole video at once; k+1 latent frames give 4k+1 pixel frames.

    Args:
      latents: normalised as `encode_latents` gives them, or raw with `normalised=False`.
      normalised: see above.
      clip: limit the pixels to [-1, 1]. Training switches it off: outside the range a limited
        pixel has no gradient.
    """
    return self._decode(latents, None, starts=True, normalised=normalised, clip=clip)[0]

  def init_decoder_cache(self, batch: int, h: int, w: int) -> DecoderCache:
    """The cache at the start of a stream: zeros, for latents of h by w cells."""
    latents = jax.ShapeDtypeStruct((batch, 1, self.config.z_dim, h, w), jnp.float32)
    # The shapes are those that a pass leaves behind: no second table that could disagree.
    shapes = jax.eval_shape(lambda z: self._decode(z, None, starts=True)[1], latents)
    return tuple(jnp.zeros(s.shape, s.dtype) for s in shapes)

  def decode_first(
    self,
    latents: Float[Array, "batch latents z h w"],
    cache: DecoderCache,
    *,
    normalised: bool = True,
    clip: bool = True,
  ) -> tuple[Float[Array, "batch frames 3 height width"], DecoderCache]:
    """Starts a stream: k latent frames give 4k-3 pixel frames (one gives one).

    `cache` is what `init_decoder_cache` gave; the one returned goes into `decode_next`.
    """
    return self._decode(latents, cache, starts=True, normalised=normalised, clip=clip)

  def decode_next(
    self,
    latents: Float[Array, "batch latents z h w"],
    cache: DecoderCache,
    *,
    normalised: bool = True,
    clip: bool = True,
  ) -> tuple[Float[Array, "batch frames 3 height width"], DecoderCache]:
    """Continues a stream: k latent frames give 4k pixel frames, the same as `decode` of it all."""
    return self._decode(latents, cache, starts=False, normalised=normalised, clip=clip)

  def _decode(
    self,
    latents: Array,
    cache: Sequence[Video] | None,
    *,
    starts: bool,
    normalised: bool = True,
    clip: bool = True,
  ) -> tuple[Array, DecoderCache]:
    latents = latents.astype(jnp.float32)
    if normalised:
      latents = self.denormalise(latents)
    history = History(cache)
    x = self.conv2(_channels_last(latents).astype(self.dtype), history)
    pixels = _channels_first(self.decoder(x, history, starts=starts)).astype(jnp.float32)
    if clip:
      pixels = jnp.clip(pixels, -1.0, 1.0)
    return pixels, tuple(history.kept)

  def _statistic(self, field: str) -> Array:
    values = getattr(self.config, field) or (float(field == "latents_std"),) * self.config.z_dim
    return jnp.asarray(values, jnp.float32)[None, None, :, None, None]


def _channels_last(x: Array) -> Array:
  return x.transpose(0, 1, 3, 4, 2)


def _channels_first(x: Array) -> Array:
  return x.transpose(0, 1, 4, 2, 3)
