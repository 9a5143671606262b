"""The text encoder: buckets, masks, shapes, key table."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from models.wan.umt5 import (
  UMT5Encoder,
  encode_tokens,
  mask_rows,
  relative_buckets,
  rms_norm,
  umt5_preset,
)
from models.wan.umt5_keys import UMT5_KEYS
from models.weights import load_safetensors, parameters, save_safetensors

encode = jax.jit(encode_tokens)
call = jax.jit(UMT5Encoder.__call__)


@pytest.fixture(scope="module")
def encoder() -> UMT5Encoder:
  return UMT5Encoder(umt5_preset("digits"), rngs=nnx.Rngs(0))


def batch(lengths: list[int], tokens: int = 12) -> tuple[jax.Array, jax.Array]:
  ids = jax.random.randint(jax.random.key(1), (len(lengths), tokens), 0, 64, jnp.int32)
  mask = jnp.arange(tokens)[None] < jnp.array(lengths)[:, None]
  return ids, mask.astype(jnp.int32)


@pytest.mark.parametrize(
  ("relative", "bucket"),
  [(-200, 15), (-16, 10), (-8, 8), (0, 0), (1, 17), (8, 24), (64, 30), (128, 31)],
)
def test_bucket_of_a_distance(relative, bucket):
  query = 200 if relative < 0 else 0
  assert relative_buckets(201, 32, 128)[query, query + relative] == bucket


@given(st.integers(2, 80), st.sampled_from([8, 16, 32]), st.integers(20, 200))
def test_buckets_grow_with_distance_and_tell_before_from_after(tokens, buckets, max_distance):
  table = relative_buckets(tokens, buckets, max_distance)
  before, after = table[-1, ::-1], table[0]
  assert (np.diff(before) >= 0).all() and (np.diff(after[1:]) >= 0).all()
  assert before.max() < buckets // 2 <= after[1:].min() and after.max() < buckets
  np.testing.assert_array_equal(before[1:] + buckets // 2, after[1:])


def test_what_stands_in_the_padding_does_not_matter(encoder):
  ids, mask = batch([5, 12])
  other = ids.at[0, 5:].set(3)
  np.testing.assert_array_equal(encode(encoder, ids, mask), encode(encoder, other, mask))


def test_padding_does_not_change_a_prompt(encoder):
  ids, mask = batch([5])
  short = encode(encoder, ids[:, :5], mask[:, :5])
  np.testing.assert_allclose(encode(encoder, ids, mask)[:, :5], short, rtol=0, atol=1e-5)


def test_rows_past_the_prompt_are_zero(encoder):
  ids, mask = batch([0, 5, 12])
  raw, rows = call(encoder, ids, mask), encode(encoder, ids, mask)
  np.testing.assert_array_equal(rows[0], 0)
  np.testing.assert_array_equal(rows[1, 5:], 0)
  assert jnp.abs(raw[1, 5:]).min(axis=-1).max() > 0  # so there was something to zero
  np.testing.assert_array_equal(rows[1, :5], raw[1, :5])
  np.testing.assert_array_equal(rows[2], raw[2])


def test_rows_are_counted_by_the_length_of_the_mask():
  # Wan cuts at the number of real tokens, wherever they stand.
  rows = mask_rows(jnp.ones((1, 4, 2)), jnp.array([[0, 1, 0, 1]]))
  np.testing.assert_array_equal(rows[0, :, 0], [1, 1, 0, 0])


def test_word_order_matters(encoder):
  ids, mask = batch([12])
  swapped = ids.at[0, :2].set(ids[0, 1::-1])
  assert ids[0, 0] != ids[0, 1]
  assert jnp.abs(encode(encoder, ids, mask) - encode(encoder, swapped, mask))[0, 5].max() > 1e-4


def test_unrolling_does_not_change_the_result(encoder):
  rolled = UMT5Encoder(dataclasses.replace(encoder.config, scan_unroll=1), rngs=nnx.Rngs(0))
  ids, mask = batch([7])
  np.testing.assert_allclose(
    encode(rolled, ids, mask), encode(encoder, ids, mask), rtol=0, atol=1e-5
  )


def test_half_precision_stays_near(encoder):
  half = UMT5Encoder(encoder.config, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16)
  ids, mask = batch([7])
  result = encode(half, ids, mask)
  assert result.dtype == jnp.bfloat16
  difference = jnp.abs(result.astype(jnp.float32) - encode(encoder, ids, mask)).max()
  assert difference < 0.15


def test_rms_norm_does_not_subtract_the_mean():
  x = jnp.array([[3.0, 4.0]])
  np.testing.assert_allclose(
    rms_norm(x, jnp.array([1.0, 2.0]), 0.0), x * jnp.array([[1.0, 2.0]]) / 12.5**0.5, rtol=1e-6
  )


def test_gradients_reach_every_weight_and_are_finite(encoder):
  ids, mask = batch([5, 12])
  graph, state = nnx.split(encoder)
  target = jax.random.normal(jax.random.key(2), (2, 12, 64))

  def loss(state):
    return jnp.mean((encode_tokens(nnx.merge(graph, state), ids, mask) - target) ** 2)

  for path, grad in nnx.to_flat_state(jax.jit(jax.grad(loss))(state)):
    assert jnp.isfinite(grad[...]).all(), path
    assert jnp.abs(grad[...]).max() > 0, path


def test_mask_of_another_shape_is_refused(encoder):
  ids, mask = batch([5])
  with pytest.raises(ValueError, match=r"mask has shape \(1, 11\)"):
    encoder(ids, mask[:, 1:])


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"num_heads": 3}, "dim_attn is 64"),
    ({"num_buckets": 30}, "num_buckets is 30"),
    ({"max_distance": 8}, "max_distance is 8"),
  ],
)
def test_config_refuses_fields_that_do_not_fit(fields, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(umt5_preset("digits"), **fields)


def test_unknown_preset_lists_the_known():
  with pytest.raises(ValueError, match=r"'t5'.*digits, umt5-xxl"):
    umt5_preset("t5")


def test_published_sizes():
  config = umt5_preset("umt5-xxl")
  shapes = parameters(nnx.eval_shape(lambda: UMT5Encoder(config, rngs=nnx.Rngs(0))))
  assert sum(int(np.prod(array.shape)) for array in shapes.values()) == 5_680_910_336
  assert {key.path for key in UMT5_KEYS} == set(shapes)
  per_layer = sum("{layer}" in key.official for key in UMT5_KEYS)
  assert 24 * per_layer + len(UMT5_KEYS) - per_layer == 242


def test_weights_go_through_a_file_under_official_names(tmp_path, encoder):
  save_safetensors(tmp_path / "text.safetensors", encoder, UMT5_KEYS)
  other = UMT5Encoder(encoder.config, rngs=nnx.Rngs(9))
  load_safetensors(tmp_path / "text.safetensors", other, UMT5_KEYS)
  ids, mask = batch([5])
  np.testing.assert_array_equal(encode(other, ids, mask), encode(encoder, ids, mask))
