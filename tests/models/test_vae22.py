"""Wan2.2's autoencoder: recorded values, streams, its own pieces, its published sizes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.wan.diffusers_keys import vae_diffusers_keys
from models.wan.vae import WanVAE
from models.wan.vae_config import VAEConfig, vae_preset
from models.wan.vae_keys import vae_keys
from models.wan.vae_levels import average_down, fold_pixels, repeat_up, unfold_pixels
from models.weights import parameters
from tests.models.wan22_files import GOLDEN, RESIDUAL, pixels_and_latents, random_vae

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def vae() -> WanVAE:
  return random_vae(RESIDUAL)


def test_encoding_gives_the_recorded_moments(vae):
  golden = np.load(GOLDEN)
  mu, logvar = jax.jit(WanVAE.encode)(vae, pixels_and_latents()[0])
  assert golden["mu"].std() > 0.05
  np.testing.assert_allclose(mu, golden["mu"], rtol=0, atol=TOLERANCE)
  np.testing.assert_allclose(logvar, golden["logvar"], rtol=0, atol=TOLERANCE)


def test_a_streamed_decoding_gives_the_recorded_pixels(vae):
  golden, latents = np.load(GOLDEN)["pixels"], pixels_and_latents()[1]
  start = jax.jit(lambda m, z, c: m.decode_first(z, c, normalised=False))
  resume = jax.jit(lambda m, z, c: m.decode_next(z, c, normalised=False))
  first, cache = start(vae, latents[:, :2], vae.init_decoder_cache(1, 2, 3))
  rest, _ = resume(vae, latents[:, 2:], cache)
  assert first.shape[1] == 3
  streamed = np.concatenate([first, rest], axis=1)
  np.testing.assert_allclose(streamed, golden, rtol=0, atol=TOLERANCE)


def test_averages_and_repeats_follow_channel_time_row_column():
  # One cell of 2 × 2 × 2 positions whose value names channel, time, row and column.
  channel, time, row, column = np.meshgrid(*[np.arange(2.0)] * 4, indexing="ij")
  values = 1000 * channel + 100 * time + 10 * row + column
  x = jnp.asarray(values.transpose(1, 2, 3, 0)[None], jnp.float32)
  wide = average_down(x, 16, 2, 2)
  np.testing.assert_array_equal(wide.ravel(), values.ravel())
  np.testing.assert_array_equal(average_down(x, 4, 2, 2).ravel(), values.reshape(4, 4).mean(1))
  np.testing.assert_array_equal(repeat_up(wide, 2, 2, 2, starts=False), x)
  np.testing.assert_array_equal(repeat_up(wide, 2, 2, 2, starts=True), x[:, 1:])
  # Fewer channels than a cell has positions are repeated: neighbours share a value.
  spread = repeat_up(jnp.asarray([3.0, 7.0]).reshape(1, 1, 1, 1, 2), 1, 1, 2, starts=False)
  np.testing.assert_array_equal(spread[0, 0, :, :, 0], [[3.0, 3.0], [7.0, 7.0]])


def test_the_first_frame_is_averaged_with_zeros_before_it():
  x = jnp.arange(1.0, 4.0).reshape(1, 3, 1, 1, 1)
  np.testing.assert_array_equal(average_down(x, 1, 2, 1).ravel(), [0.5, 2.5])
  np.testing.assert_array_equal(average_down(x, 1, 1, 1), x)


def test_pixels_fold_with_the_column_before_the_row_and_unfold():
  x = jnp.arange(24.0).reshape(1, 1, 2, 4, 3)  # row, column, colour
  folded = fold_pixels(x, 2)
  assert folded.shape == (1, 1, 1, 2, 12)
  np.testing.assert_array_equal(folded[0, 0, 0, 0, :4], [0, 12, 3, 15])  # (0,0) (1,0) (0,1) (1,1)
  np.testing.assert_array_equal(unfold_pixels(folded, 2), x)


def test_published_sizes():
  config = vae_preset("wan2.2")
  shapes = parameters(nnx.eval_shape(lambda: WanVAE(config, rngs=nnx.Rngs(0))))
  keys = vae_keys(config)
  assert {key.path for key in keys} == set(shapes)
  assert len({key.official for key in keys}) == len(keys) == 196
  assert sum(int(np.prod(array.shape)) for array in shapes.values()) == 704_688_668
  assert (config.spatial_factor, config.temporal_factor) == (16, 4)
  official = {key.official for key in keys}
  assert "encoder.downsamples.2.downsamples.0.shortcut.weight" in official
  assert "decoder.upsamples.1.upsamples.3.time_conv.weight" in official
  diffusers = {key.official for key in vae_diffusers_keys(config)}
  assert "encoder.down_blocks.2.resnets.0.conv_shortcut.weight" in diffusers
  assert "decoder.up_blocks.1.upsampler.time_conv.weight" in diffusers


def test_sizes_that_no_square_of_pixels_divides_are_refused(vae):
  with pytest.raises(ValueError, match=r"height 12; tiny 2\.2 takes multiples of 8"):
    vae.encode(jnp.zeros((1, 1, 3, 12, 16)))
  with pytest.raises(ValueError, match="patch_px is 0"):
    VAEConfig("bad", patch_px=0)
