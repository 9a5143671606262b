"""Timestep sinusoid, rotary tables, schedules and presets against published numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.layers.rope import apply_rope, axis_pairs, rope_tables
from models.wan.presets import PRESETS, DiTConfig, SamplerConfig, preset
from models.wan.schedule import denoising_schedule, flow_match_table, shift_sigma
from models.wan.time_embedding import timestep_sinusoid


def test_sinusoid_matches_the_published_values():
  cos, sin = np.split(np.asarray(timestep_sinusoid(jnp.float32([937.5]), 256))[0], 2)
  np.testing.assert_allclose(
    cos[[0, 1, 2, 3, 127]],
    [0.262302132, 0.580487289, 0.257223384, 0.075909072, 0.994929565],
    atol=2e-7,
  )
  np.testing.assert_allclose(
    sin[[0, 1, 2, 3, 127]],
    [0.964985799, -0.814269309, 0.966351970, 0.997114744, 0.100574153],
    atol=2e-7,
  )


@given(st.floats(0, 1000, width=32))
def test_sinusoid_is_as_good_as_float64(t):
  exact = np.float64(t) * 10_000.0 ** (-np.arange(64) / 64)
  ours = np.asarray(jax.jit(timestep_sinusoid, static_argnums=1)(jnp.float32(t), 128))
  np.testing.assert_allclose(ours, np.concatenate([np.cos(exact), np.sin(exact)]), atol=4e-7)


def test_rotary_axes_share_a_head_as_wan_does():
  assert axis_pairs(128) == (22, 21, 21)
  assert axis_pairs(32) == (6, 5, 5)
  with pytest.raises(ValueError, match="head_dim is 4"):
    axis_pairs(4)


def test_rotary_angles_restart_on_every_axis():
  cos, sin = rope_tables(jnp.arange(2, dtype=jnp.int32), 2, 2, 128, 10_000.0)
  angle = np.arctan2(np.asarray(sin)[:, 1::2], np.asarray(cos)[:, ::2])
  frame_1, row_1, column_1 = angle[4], angle[2], angle[1]
  np.testing.assert_allclose(
    frame_1[[0, 1, 2, 3, 21]], [1, 0.657933225, 0.432876128, 0.284803587, 0.000151991], rtol=1e-5
  )
  for at, axis in ((row_1, slice(22, 43)), (column_1, slice(43, 64))):
    expected = [1, 0.644946677, 0.415956216, 0.268269580, 0.000155052]
    np.testing.assert_allclose(at[axis][[0, 1, 2, 3, 20]], expected, rtol=1e-5)
  assert not frame_1[22:].any()


def test_rotation_acts_on_neighbouring_pairs():
  x = np.random.default_rng(0).normal(size=(1, 3, 2, 12)).astype(np.float32)
  cos, sin = rope_tables(jnp.array([5, 9, 700], jnp.int32), 1, 1, 12, 100.0)
  pairs = x[..., ::2] + 1j * x[..., 1::2]
  turn = np.asarray(cos)[:, ::2] + 1j * np.asarray(sin)[:, 1::2]
  want = pairs * turn[None, :, None]
  got = np.asarray(apply_rope(jnp.asarray(x), cos, sin))
  np.testing.assert_allclose(got[..., ::2], want.real, atol=1e-6)
  np.testing.assert_allclose(got[..., 1::2], want.imag, atol=1e-6)


def test_positions_past_the_table_are_refused_or_not_a_number():
  with pytest.raises(ValueError, match="frames is 1025"):
    rope_tables(jnp.zeros(1, jnp.int32), 1025, 1, 12, 100.0)
  cos, _ = rope_tables(jnp.array([1023, 1024], jnp.int32), 1, 1, 12, 100.0)
  assert np.isfinite(np.asarray(cos[0])).all()
  assert np.isnan(np.asarray(cos[1, :4])).all()


@pytest.mark.parametrize(
  ("shift", "timesteps"),
  [(5.0, [1000, 937.5, 833.33331, 625]), (8.0, [1000, 960, 888.8889, 727.2728])],
)
def test_warped_steps_match_the_published_ones(shift, timesteps):
  t, sigma = denoising_schedule(SamplerConfig(timestep_shift=shift))
  assert t.dtype == sigma.dtype == np.float32
  np.testing.assert_allclose(t, timesteps, atol=1e-4)
  np.testing.assert_allclose(sigma, t / 1000, rtol=1e-6)


def test_unwarped_steps_take_the_nearest_level_of_the_grid():
  t, sigma = denoising_schedule(SamplerConfig(warp_steps=False))
  np.testing.assert_array_equal(t, [1000, 750, 500, 250])
  grid = flow_match_table(5.0)[1]
  for step, level in zip(t, sigma, strict=True):
    assert abs(level * 1000 - step) == pytest.approx(np.abs(grid * 1000 - step).min(), abs=1e-4)


def test_the_grid_ends_where_the_published_one_does():
  for shift, last in ((5.0, 0.00498008), (8.0, 0.00794439)):
    timesteps, sigmas = flow_match_table(shift)
    assert len(sigmas) == 1000
    assert sigmas[0] == 1.0
    np.testing.assert_allclose(sigmas[-1], last, atol=5e-9)
    np.testing.assert_allclose(timesteps, 1000 * sigmas)


def test_a_shift_must_be_positive():
  with pytest.raises(ValueError, match="timestep_shift is 0"):
    shift_sigma(np.ones(1), 0.0)


def test_presets_have_the_published_sizes():
  dit, sampler = preset("longlive-1.3b")
  assert (dit.dim, dit.ffn_dim, dit.num_heads, dit.num_layers) == (1536, 8960, 12, 30)
  assert dit.head_dim == 128
  assert sampler.tokens_per_frame(dit) == 1560
  assert (sampler.window_frames, sampler.sink_frames, sampler.cache_frames) == (12, 3, 12)
  assert preset("wan2.1-14b")[0].head_dim == 128
  assert preset("self-forcing")[1].cache_frames == 21


def test_an_unknown_preset_is_refused_with_the_known_ones():
  with pytest.raises(ValueError, match=r"preset is 'wan3'; use one of .*digits.*self-forcing"):
    preset("wan3")
  assert "digits" in PRESETS


@pytest.mark.parametrize(
  ("field", "values"),
  [
    ("num_heads", {"num_heads": 5}),
    ("in_dim", {"in_dim": 3}),
    ("remat", {"remat": "some"}),
    ("precision", {"precision": "int8"}),
    ("patch_size", {"patch_size": (2, 2, 2)}),
    ("scan_unroll", {"scan_unroll": 0}),
    ("num_layers", {"num_layers": 0}),
  ],
)
def test_model_sizes_that_cannot_be_are_refused_by_name(field, values):
  sizes = {"name": "x", "dim": 12, "ffn_dim": 24, "num_heads": 2, "num_layers": 1}
  with pytest.raises(ValueError, match=f"^{field} is"):
    DiTConfig(**(sizes | values))


@pytest.mark.parametrize(
  ("field", "values"),
  [
    ("cache_rule", {"cache_rule": "ring"}),
    ("frames_per_chunk", {"frames_per_chunk": 0}),
    ("cache_frames", {"cache_frames": 2}),
    ("cache_frames", {"window_frames": 12, "cache_frames": 9}),
    ("window_frames", {"window_frames": 2}),
    ("sink_frames", {"window_frames": 6, "sink_frames": 4}),
    ("sink_frames", {"sink_frames": 22}),
    ("denoising_steps", {"denoising_steps": (250, 500)}),
    ("denoising_steps", {"denoising_steps": (1000, 0)}),
    ("denoising_steps", {"denoising_steps": ()}),
  ],
)
def test_sampler_settings_that_cannot_work_are_refused_by_name(field, values):
  with pytest.raises(ValueError, match=f"^{field} is"):
    SamplerConfig(**values)


def test_a_latent_that_the_patch_does_not_divide_is_refused():
  with pytest.raises(ValueError, match="latent size is 7x8"):
    preset("digits")[0].tokens_per_frame(7, 8)
