"""The video autoencoder: streams, causality, lengths, key table, gradients."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from models.wan.vae import WanVAE
from models.wan.vae_config import VAEConfig, vae_preset
from models.wan.vae_keys import vae_keys
from models.wan.vae_layers import ChannelNorm, Conv, FrameAttention, History, causal_conv
from models.weights import fill, load_safetensors, parameters, save_safetensors

TINY = VAEConfig(
  name="tiny",
  base_dim=4,
  z_dim=4,
  dim_mult=(1, 2, 3),
  temporal_downsample=(True, True),
  num_res_blocks=1,
  decoder_extra_res_blocks=0,
  latents_mean=(0.1, -0.2, 0.3, 0.0),
  latents_std=(0.5, 1.0, 1.5, 2.0),
)

SHALLOW = dataclasses.replace(TINY, dim_mult=(1, 2), temporal_downsample=(True,))


def build(config: VAEConfig = TINY, seed: int = 0) -> WanVAE:
  """A model in which no weight is zero or one, as fresh biases, scales and projections are.

  Drawn with numpy: initialising the usual way compiles a program per shape.
  """
  vae = nnx.eval_shape(lambda: WanVAE(config, rngs=nnx.Rngs(0)))
  random = np.random.default_rng(seed)

  def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
    noise = random.normal(size=shape).astype(np.float32)
    if name.endswith("kernel"):
      return noise * np.float32(np.prod(shape[:-1]) ** -0.5)
    return np.float32(0.1) * noise + np.float32(name.endswith("gamma"))

  fill(vae, {name: draw(name, array.shape) for name, array in parameters(vae).items()})
  return vae


@pytest.fixture(scope="module")
def vae() -> WanVAE:
  return build()


@pytest.fixture(scope="module")
def latents() -> jax.Array:
  return jax.random.normal(jax.random.key(7), (2, 7, 4, 3, 4))


decode = jax.jit(WanVAE.decode, static_argnames=("normalised", "clip"))
decode_first = jax.jit(lambda vae, z, cache: vae.decode_first(z, cache, clip=False))
decode_next = jax.jit(lambda vae, z, cache: vae.decode_next(z, cache, clip=False))
encode = jax.jit(lambda vae, x: vae.encode(x)[0])


def decode_raw(vae: WanVAE, latents: jax.Array) -> jax.Array:
  return decode(vae, latents, clip=False)


@pytest.mark.parametrize("chunks", [(1, 1, 1, 1, 1, 1, 1), (1, 3, 3), (3, 3, 1)])
def test_streamed_decode_equals_decode_at_once(vae, latents, chunks):
  cache = vae.init_decoder_cache(2, 3, 4)
  shapes = [slot.shape for slot in cache]
  frames, start = [], 0
  for k in chunks:
    step = decode_next if start else decode_first
    pixels, cache = step(vae, latents[:, start : start + k], cache)
    assert pixels.shape[1] == (4 * k if start else 4 * k - 3)
    assert [slot.shape for slot in cache] == shapes
    frames.append(pixels)
    start += k
  np.testing.assert_allclose(
    jnp.concatenate(frames, axis=1), decode_raw(vae, latents), rtol=0, atol=1e-5
  )


def test_decoder_cache_has_the_slots_of_the_published_model():
  module = nnx.eval_shape(lambda: WanVAE(vae_preset("wan2.1"), rngs=nnx.Rngs(0)))
  cache = jax.eval_shape(lambda m: m.init_decoder_cache(1, 2, 2), module)
  slots = [(slot.shape[-1], slot.shape[2] // 2) for slot in cache]
  assert all(slot.shape[:2] == (1, 2) for slot in cache)
  assert slots == [
    (16, 1),
    *[(384, 1)] * 11,  # middle, first level, its time convolution
    (192, 2),
    *[(384, 2)] * 6,
    *[(192, 4)] * 6,
    *[(96, 8)] * 7,
  ]


def test_a_later_latent_does_not_change_earlier_pixels(vae, latents):
  changed = decode_raw(vae, latents.at[:, 4].add(1.0))
  difference = jnp.abs(changed - decode_raw(vae, latents)).max(axis=(0, 2, 3, 4))
  np.testing.assert_array_equal(difference[:13], 0)  # latent frame 4 begins at pixel frame 13
  assert (difference[13:17] > 1e-4).all()


def test_a_later_pixel_frame_does_not_change_earlier_latents(vae):
  pixels = jax.random.uniform(jax.random.key(1), (1, 13, 3, 8, 12), minval=-1)
  difference = jnp.abs(encode(vae, pixels.at[:, 5].add(0.5)) - encode(vae, pixels))
  per_frame = difference.max(axis=(0, 2, 3, 4))
  np.testing.assert_array_equal(per_frame[:2], 0)  # pixel frames 5..8 make latent frame 2
  assert per_frame[2] > 1e-4


def test_encoding_a_prefix_gives_the_prefix_of_the_latents(vae):
  pixels = jax.random.uniform(jax.random.key(2), (1, 13, 3, 8, 12), minval=-1)
  whole = encode(vae, pixels)
  assert whole.shape == (1, 4, 4, 2, 3)
  for frames in (1, 9):
    prefix = encode(vae, pixels[:, :frames])
    np.testing.assert_allclose(prefix, whole[:, : prefix.shape[1]], rtol=0, atol=1e-5)


@given(st.integers(1, 200))
@settings(deadline=None)
def test_only_lengths_of_whole_latents_are_taken(frames):
  if frames % 4 == 1:
    assert TINY.pixel_frames(TINY.latent_frames(frames)) == frames
  else:
    with pytest.raises(ValueError, match=f"pixels has {frames} frames; tiny takes 4k\\+1 frames"):
      TINY.latent_frames(frames)


@pytest.mark.parametrize(
  ("shape", "message"),
  [
    ((1, 8, 3, 16, 16), "such as 5 or 9"),
    ((1, 0, 3, 16, 16), "such as 1 or 5"),
    ((1, 5, 3, 18, 16), "height 18; tiny takes multiples of 4"),
    ((1, 5, 3, 16, 10), "width 10; tiny takes multiples of 4"),
  ],
)
def test_encode_refuses_sizes_that_would_lose_pixels(vae, shape, message):
  with pytest.raises(ValueError, match=message):
    vae.encode(jnp.zeros(shape))


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"temporal_downsample": (True,)}, "temporal_downsample has 1 entries"),
    ({"latents_mean": (0.0,)}, "latents_mean has 1 numbers"),
    ({"latents_std": (1.0, 0.0, 1.0, 1.0)}, "above 0"),
    ({"conv_impl": "im2col"}, "'im2col'"),
  ],
)
def test_config_refuses_fields_that_do_not_fit(fields, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(TINY, **fields)


def test_unknown_preset_lists_the_known():
  with pytest.raises(ValueError, match=r"'wan3'.*digits, wan2\.1, wan2\.2"):
    vae_preset("wan3")


def test_normalisation_is_undone(vae):
  mu = jax.random.normal(jax.random.key(3), (1, 2, 4, 2, 2))
  z = vae.normalise(mu)
  np.testing.assert_allclose(z[0, 1, 2], (mu[0, 1, 2] - 0.3) / 1.5, rtol=1e-6)
  np.testing.assert_allclose(vae.denormalise(z), mu, rtol=0, atol=1e-6)


def test_pixels_are_limited_unless_told_otherwise(vae, latents):
  loud = 20 * latents
  limited, free = decode(vae, loud), decode_raw(vae, loud)
  assert jnp.abs(free).max() > 1.0
  np.testing.assert_allclose(limited, jnp.clip(free, -1, 1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("kernel", [(3, 3, 3), (3, 1, 1), (1, 1, 1)])
def test_both_convolutions_over_time_agree(kernel, stride):
  x = jax.random.normal(jax.random.key(0), (2, 7, 5, 6, 4))
  w = jax.random.normal(jax.random.key(1), (*kernel, 4, 3))
  taps, conv3d = (causal_conv(x, w, impl, stride) for impl in ("taps2d", "conv3d"))
  assert taps.shape == conv3d.shape
  np.testing.assert_allclose(taps, conv3d, rtol=0, atol=1e-5)


def test_conv_impl_does_not_change_the_model(vae, latents):
  other = build(dataclasses.replace(TINY, conv_impl="conv3d"))
  np.testing.assert_allclose(
    decode_raw(other, latents), decode_raw(vae, latents), rtol=0, atol=1e-5
  )


def test_channel_norm_keeps_tiny_inputs_and_has_a_gradient_at_zero():
  norm = ChannelNorm(4)
  # A larger bound than 1e-12 would shrink this one.
  x = jnp.array([1e-8, -1e-8, 1e-8, 1e-8]).reshape(1, 1, 1, 1, 4)
  np.testing.assert_allclose(jnp.abs(norm(x)), 1.0, rtol=1e-5)
  grad = jax.grad(lambda x: norm(x).sum())(jnp.zeros((1, 1, 1, 1, 4)))
  assert jnp.isfinite(grad).all()


def test_history_passes_a_slot_on_when_no_frame_comes():
  slot = jnp.arange(2.0).reshape(1, 2, 1, 1, 1)
  history = History((slot,))
  assert history.extend(jnp.zeros((1, 0, 1, 1, 1))).shape[1] == 2
  np.testing.assert_array_equal(history.kept[0], slot)


def test_fresh_attention_is_the_identity_and_fresh_kernels_keep_the_scale():
  x = jax.random.normal(jax.random.key(4), (1, 2, 3, 3, 8))
  np.testing.assert_array_equal(FrameAttention(8, rngs=nnx.Rngs(0))(x, History(None)), x)
  kernel = Conv((3, 3, 3), 8, 8, rngs=nnx.Rngs(0)).kernel[...]
  assert 0.9 < kernel.std() * (27 * 8) ** 0.5 < 1.1


def test_gradients_reach_every_weight_and_are_finite():
  pixels = jax.random.uniform(jax.random.key(5), (1, 5, 3, 8, 8), minval=-1)
  graph, state = nnx.split(build(SHALLOW))

  def loss(state):
    model = nnx.merge(graph, state)
    mu, logvar = model.encode(pixels)
    decoded = model.decode(model.normalise(mu), clip=False)
    return jnp.mean((decoded - pixels) ** 2) + jnp.mean(logvar**2)

  for path, grad in nnx.to_flat_state(jax.jit(jax.grad(loss))(state)):
    assert jnp.isfinite(grad[...]).all(), path
    assert jnp.abs(grad[...]).max() > 0, path


def test_published_sizes():
  config = vae_preset("wan2.1")
  shapes = parameters(nnx.eval_shape(lambda: WanVAE(config, rngs=nnx.Rngs(0))))
  keys = vae_keys(config)
  assert {key.path for key in keys} == set(shapes)
  assert len({key.official for key in keys}) == len(keys) == 194
  assert sum(int(np.prod(array.shape)) for array in shapes.values()) == 126_892_531
  assert (config.spatial_factor, config.temporal_factor) == (8, 4)


@pytest.mark.parametrize("config", [TINY, vae_preset("digits")], ids=lambda c: c.name)
def test_weights_go_through_a_file_under_official_names(tmp_path, config):
  model = build(config)
  keys = vae_keys(config)
  save_safetensors(tmp_path / "vae.safetensors", model, keys)
  other = nnx.eval_shape(lambda: WanVAE(config, rngs=nnx.Rngs(0)))
  load_safetensors(tmp_path / "vae.safetensors", other, keys)
  for name, array in parameters(model).items():
    np.testing.assert_array_equal(array, parameters(other)[name], err_msg=name)


def test_half_precision_stays_near():
  latents = jax.random.normal(jax.random.key(8), (1, 3, 4, 4, 4))
  exact = build(SHALLOW)
  half = build(SHALLOW)
  half.dtype = jnp.bfloat16
  rounded = decode_raw(half, latents)
  assert rounded.dtype == jnp.float32
  difference = jnp.abs(rounded - decode_raw(exact, latents))
  assert 0 < difference.max() < 0.1
