"""Latents to the bytes of a video; piece by piece, the decoder's causal cache goes to the next."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, UInt8

from models.wan.vae import DecoderCache, WanVAE

DecodeChunk = Callable[[Array, DecoderCache | None], tuple[np.ndarray, DecoderCache]]
"""(latents of a chunk, cache after the one before it or None) -> (uint8 frames, cache)."""


def stream_decoder(vae: WanVAE) -> DecodeChunk:
  """Builds the streaming decoder of one video at a time.

  Frames are what decoding all latents at once gives, but for the rounding of another program: a
  byte next to a rounding border may differ by one.

  Args:
    vae: the autoencoder.

  Returns:
    A function of normalised latents `[frames, channels, h, w]`. It starts a video where the cache
    is None: `4·frames − 3` pixel frames (of Wan's temporal factor 4), and `4·frames` after that. A
    cache is used up by the call.
  """
  graphdef, state = nnx.split(vae)

  @jax.jit
  def first(state, latents):
    model = nnx.merge(graphdef, state)
    cache = model.init_decoder_cache(1, *latents.shape[-2:])
    pixels, cache = model.decode_first(latents[None], cache)
    return to_bytes(pixels[0]), cache

  # The old cache is of no more use: its memory goes to the new one.
  @functools.partial(jax.jit, donate_argnums=2)
  def following(state, latents, cache: DecoderCache):
    pixels, cache = nnx.merge(graphdef, state).decode_next(latents[None], cache)
    return to_bytes(pixels[0]), cache

  def decode(latents: Array, cache: DecoderCache | None) -> tuple[np.ndarray, DecoderCache]:
    frames, after = first(state, latents) if cache is None else following(state, latents, cache)
    return np.asarray(frames), after

  return decode


def to_bytes(
  pixels: Float[Array, "frames 3 height width"],
) -> UInt8[Array, "frames height width 3"]:
  """Pixels in [-1, 1] as bytes, truncated as in Wan's video files: judges see what a file shows."""
  scaled = 255.0 * jnp.clip(0.5 * pixels + 0.5, 0.0, 1.0)
  return scaled.astype(jnp.uint8).transpose(0, 2, 3, 1)


def frame_decoder(
  vae: WanVAE,
) -> Callable[
  [Float[np.ndarray, "frames channels h w"]], UInt8[np.ndarray, "pixel_frames height width 3"]
]:
  """Builds the decoder of a whole video, one latent frame at a time, so that memory is that of four
  pixel frames however long the video is.

  Args:
    vae: the autoencoder.
  """
  decode = stream_decoder(vae)

  def whole(latents: np.ndarray) -> np.ndarray:
    pieces, cache = [], None
    for index in range(len(latents)):
      piece, cache = decode(jnp.asarray(latents[index : index + 1]), cache)
      pieces.append(piece)
    return np.concatenate(pieces)

  return whole
