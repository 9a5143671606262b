"""Wan's video autoencoders (causal in time) in Flax NNX, for any width: Wan2.1's and Wan2.2's.

A latent frame stands for one pixel frame at the start of a video and for four after that. Public
arrays are [batch, frames, channels, height, width]; inside, channels come last.

Source: `WanVAE` of Wan2.1 and Wan2.2, and diffusers' `AutoencoderKLWan`, to which the parity tests
hold it.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from models.wan.vae_config import VAEConfig
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
from models.wan.vae_levels import ResidualDown, ResidualUp, fold_pixels, unfold_pixels

DecoderCache = tuple[Video, ...]
"""The last two input frames of every causal convolution of the decoder, in order of execution."""


class Encoder(nnx.Module):
  """Pixels to the two moments of each latent, before the last 1x1x1 convolution."""

  def __init__(self, config: VAEConfig, *, rngs: nnx.Rngs, param_dtype: jnp.dtype):
    options: dict[str, Any] = dict(impl=config.conv_impl, rngs=rngs, param_dtype=param_dtype)
    levels = config.encoder_levels
    self.conv1 = CausalConv((3, 3, 3), config.pixel_channels, levels[0][0], **options)
    layers: list[nnx.Module] = []
    for level, (width_in, width) in enumerate(levels):
      inside: list[nnx.Module] = []
      for block in range(config.num_res_blocks):
        inside.append(ResidualBlock(width if block else width_in, width, **options))
      halves = level < len(config.temporal_downsample)
      temporal = halves and config.temporal_downsample[level]
      if halves:
        inside.append(Downsample(width, temporal=temporal, **options))
      if config.residual:
        layers.append(ResidualDown(inside, width, (1 + temporal, 1 + halves)))
      else:
        layers += inside
    self.downsamples = nnx.List(layers)
    self.middle = _middle(levels[-1][1], **options)
    self.head_norm = ChannelNorm(levels[-1][1], param_dtype=param_dtype)
    self.head_conv = CausalConv((3, 3, 3), levels[-1][1], 2 * config.z_dim, **options)

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
    levels = config.decoder_levels
    temporal_upsample = tuple(reversed(config.temporal_downsample))
    self.conv1 = CausalConv((3, 3, 3), config.z_dim, levels[0][0], **options)
    self.middle = _middle(levels[0][0], **options)
    layers: list[nnx.Module] = []
    for level, (width_in, width) in enumerate(levels):
      inside: list[nnx.Module] = []
      for block in range(config.num_res_blocks + config.decoder_extra_res_blocks):
        inside.append(ResidualBlock(width if block else width_in, width, **options))
      doubles = level < len(temporal_upsample)
      temporal = doubles and temporal_upsample[level]
      if doubles:
        width_out = width if config.residual else width // 2
        inside.append(Upsample(width, width_out, temporal=temporal, **options))
      if config.residual:
        layers.append(ResidualUp(inside, width, (1 + temporal, 2) if doubles else None))
      else:
        layers += inside
    self.upsamples = nnx.List(layers)
    self.head_norm = ChannelNorm(levels[-1][1], param_dtype=param_dtype)
    self.head_conv = CausalConv((3, 3, 3), levels[-1][1], config.pixel_channels, **options)

  def __call__(self, x: Video, history: History, *, starts: bool) -> Video:
    """k latent frames to 4k pixel frames, or 4k-3 if the first of them `starts` a video."""
    x = self.conv1(x, history)
    for layer in (*self.middle, *self.upsamples):
      over_time = isinstance(layer, (Upsample, ResidualUp))
      x = layer(x, history, starts=starts) if over_time else layer(x, history)
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
    folded = fold_pixels(_channels_last(pixels).astype(self.dtype), self.config.patch_px)
    x = self.encoder(folded, history)
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
    unfolded = unfold_pixels(self.decoder(x, history, starts=starts), self.config.patch_px)
    pixels = _channels_first(unfolded).astype(jnp.float32)
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
