"""The causal transformer: cached and cache-free forwards, gradients, adapters, refusals."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.layers.lora import LoRAConfig, init_lora, merge_lora
from models.wan.cache import init_cache
from models.wan.dit import CausalWanDiT
from models.wan.presets import DiTConfig, SamplerConfig
from sbjax.verification.causal import replay_rollout
from sbjax.verification.recording import read_recording

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
SHARED = pathlib.Path(__file__).parents[3] / "shared" / "golden"
CFG = DiTConfig("tiny", 32, 48, 2, 2, in_dim=5, out_dim=3, text_dim=6, text_len=4, freq_dim=8)
SAMPLER = SamplerConfig(
  frames_per_chunk=2, cache_frames=6, latent_channels=3, latent_height=4, latent_width=6
)
FRAMES = 6


@pytest.fixture(scope="module")
def model() -> CausalWanDiT:
  made = nnx.jit(lambda: CausalWanDiT(CFG, rngs=nnx.Rngs(0)))()
  # A head of zeros (the initial one) would make every test of the output pass.
  made.head.kernel[...] = jax.random.normal(jax.random.key(1), made.head.kernel.shape) * 0.2
  return made


# One compiled function per method for the whole file: eager calls would compile every operation.
@functools.partial(jax.jit, static_argnames=("graphdef", "frames_per_chunk", "lora_scale"))
def _teacher_forcing(graphdef, state, *args, frames_per_chunk=2, lora=None, lora_scale=1.0):
  return nnx.merge(graphdef, state).teacher_forcing(
    *args, frames_per_chunk, lora=lora, lora_scale=lora_scale
  )


@functools.partial(jax.jit, static_argnames=("graphdef", "lora_scale"))
def _forward(graphdef, state, *args, lora=None, lora_scale=1.0):
  return nnx.merge(graphdef, state)(*args, lora=lora, lora_scale=lora_scale)


@functools.partial(jax.jit, static_argnames=("graphdef", "lora_scale"))
def _write(graphdef, state, *args, lora=None, lora_scale=1.0):
  return nnx.merge(graphdef, state).write_cache(*args, lora=lora, lora_scale=lora_scale)


def _same_parameters(model, **change):
  cfg = dataclasses.replace(CFG, **change)
  other = nnx.eval_shape(lambda: CausalWanDiT(cfg, rngs=nnx.Rngs(0)))
  nnx.update(other, nnx.state(model))
  return other


def _normal(seed: int, *shape: int) -> jax.Array:
  return jax.random.normal(jax.random.key(seed), shape, jnp.float32)


@pytest.fixture(scope="module")
def clip(model):
  """Latents, two noisy copies, their timesteps and the text context of two videos."""
  clean = _normal(2, 2, FRAMES, 5, 4, 6)
  noisy = _normal(3, 2, 2, FRAMES, 5, 4, 6)
  per_chunk = jax.random.uniform(jax.random.key(4), (2, 2, FRAMES // 2), jnp.float32, 0, 1000)
  return clean, noisy, jnp.repeat(per_chunk, 2, axis=2), model.embed_text(_normal(5, 2, 4, 6))


def _rollout(model, clean, noisy, timestep, context, **kwargs):
  """Flow of every chunk through the cache, one chunk after the other, start frames traced."""
  graphdef, state = nnx.split(model)
  cache = init_cache(model.cfg, SAMPLER, clean.shape[0])
  flows = []
  for start in range(0, clean.shape[1], 2):
    span = slice(start, start + 2)
    args = (noisy[:, span], timestep[:, span], context, cache, jnp.int32(start))
    flows.append(_forward(graphdef, state, *args, **kwargs)[0])
    cache = _write(graphdef, state, clean[:, span], context, cache, jnp.int32(start), **kwargs)
  return jnp.concatenate(flows, axis=1), cache


@pytest.mark.parametrize(
  "path",
  [GOLDEN / "causal_wan_window_sink.npz", SHARED / "causal_wan_global.npz"],
  ids=lambda p: p.stem,
)
def test_recorded_rollouts_of_the_original_are_reproduced(path):
  if not path.exists():
    pytest.skip(f"{path} is not there")
  checks = replay_rollout(read_recording(path))
  assert {"flow", "x0", "latents", "cache/k", "grad/x"} <= {c.quantity for c in checks}
  for check in checks:
    assert check.difference <= check.tolerance / 10, check


def test_cached_rollout_equals_teacher_forcing(model, clip):
  clean, noisy, timestep, context = clip
  whole = _teacher_forcing(*nnx.split(model), clean, noisy, timestep, context)
  assert whole.shape == (2, 2, FRAMES, 3, 4, 6)
  for copy in range(2):
    flow, _ = _rollout(model, clean, noisy[:, copy], timestep[:, copy], context)
    np.testing.assert_allclose(whole[:, copy], flow, atol=1e-5)


def test_teacher_forcing_of_one_chunk_needs_no_past(model, clip):
  clean, noisy, timestep, context = clip
  one = _teacher_forcing(
    *nnx.split(model), clean[:, :2], noisy[:, :, :2], timestep[:, :, :2], context
  )
  whole = _teacher_forcing(*nnx.split(model), clean, noisy, timestep, context)
  np.testing.assert_allclose(one, whole[:, :, :2], atol=1e-5)


def test_no_chunk_sees_the_future(model, clip):
  clean, noisy, timestep, context = clip
  base = _teacher_forcing(*nnx.split(model), clean, noisy, timestep, context)
  later = clean.at[:, 2:].add(1.0), noisy.at[:, :, 4:].add(1.0)
  moved = _teacher_forcing(*nnx.split(model), *later, timestep, context)
  np.testing.assert_allclose(moved[:, :, :4], base[:, :, :4], atol=1e-5)
  assert jnp.abs(moved[:, :, 4:] - base[:, :, 4:]).max() > 1e-3


def test_the_clean_chunk_under_way_is_not_seen(model, clip):
  clean, noisy, timestep, context = clip
  base = _teacher_forcing(*nnx.split(model), clean, noisy, timestep, context)
  moved = _teacher_forcing(*nnx.split(model), clean.at[:, 4:].add(1.0), noisy, timestep, context)
  np.testing.assert_array_equal(moved, base)


def test_the_clean_pass_is_the_forward_at_timestep_zero(model, clip):
  clean, _, _, context = clip
  cache = init_cache(CFG, SAMPLER, 2)
  start = jnp.int32(0)
  _, by_forward = _forward(
    *nnx.split(model), clean[:, :2], jnp.zeros((2, 2)), context, cache, start
  )
  by_write = _write(*nnx.split(model), clean[:, :2], context, cache, start)
  for a, b in zip(jax.tree.leaves(by_forward), jax.tree.leaves(by_write), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-6)


def test_the_clean_pass_does_not_run_what_the_cache_does_not_need(model, clip):
  clean, _, _, context = clip
  cache = init_cache(CFG, SAMPLER, 2)
  graphdef, state = nnx.split(_same_parameters(model, scan_unroll=2))

  def flops(function) -> float:
    return jax.jit(function).lower(state).cost_analysis()["flops"]

  args = (clean[:, :2], jnp.zeros((2, 2)), context, cache, 0)
  full = flops(lambda s: nnx.merge(graphdef, s)(*args))
  clean_pass = flops(lambda s: nnx.merge(graphdef, s).write_cache(clean[:, :2], context, cache, 0))
  assert clean_pass < 0.85 * full


@pytest.mark.parametrize("change", [{"scan_unroll": 2}, {"remat": "block"}, {"remat": "dots"}])
def test_unrolling_and_rematerialisation_change_no_number(model, clip, change):
  _, noisy, timestep, context = clip
  other = _same_parameters(model, **change)

  def loss(module, x):
    flow, _ = module(x, timestep[:, 0, :2], context, init_cache(CFG, SAMPLER, 2), jnp.int32(0))
    return jnp.sum(flow**2)

  gradients = [
    jax.jit(jax.value_and_grad(lambda x, m=m: loss(m, x)))(noisy[:, 0, :2]) for m in (model, other)
  ]
  for a, b in zip(*gradients, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_bfloat16_matrix_products_stay_near_float32(model, clip):
  clean, noisy, timestep, context = clip
  mixed = _same_parameters(model, precision="mixed")
  base = _teacher_forcing(*nnx.split(model), clean, noisy, timestep, context)
  near = _teacher_forcing(*nnx.split(mixed), clean, noisy, timestep, context)
  assert near.dtype == jnp.float32
  assert 1e-6 < jnp.abs(near - base).max() < 0.05 * jnp.abs(base).max()


# --- adapters


LORA = LoRAConfig(rank=2, alpha=3.0)


def _moved(lora):
  keys = jax.random.split(jax.random.key(7), len(lora))
  return {
    target: {"a": pair["a"], "b": 0.3 * jax.random.normal(key, pair["b"].shape)}
    for key, (target, pair) in zip(keys, lora.items(), strict=True)
  }


def test_a_fresh_adapter_changes_nothing(model, clip):
  lora = init_lora(LORA, CFG, jax.random.key(0))
  base, _ = _rollout(model, clip[0], clip[1][:, 0], clip[2][:, 0], clip[3])
  with_it, _ = _rollout(
    model, clip[0], clip[1][:, 0], clip[2][:, 0], clip[3], lora=lora, lora_scale=LORA.scale
  )
  np.testing.assert_allclose(with_it, base, atol=1e-6)


def test_merged_and_unmerged_adapters_agree(model, clip):
  clean, noisy, timestep, context = clip
  lora = _moved(init_lora(LORA, CFG, jax.random.key(0)))
  unmerged = _teacher_forcing(
    *nnx.split(model), clean, noisy, timestep, context, lora=lora, lora_scale=LORA.scale
  )
  graphdef, state = nnx.split(model)
  merged = nnx.merge(graphdef, merge_lora(state, lora, LORA.scale))
  flow = _teacher_forcing(*nnx.split(merged), clean, noisy, timestep, context)
  base = _teacher_forcing(*nnx.split(model), clean, noisy, timestep, context)
  assert jnp.abs(flow - base).max() > 1e-2
  np.testing.assert_allclose(flow, unmerged, atol=1e-5)


def test_every_target_adapts_every_layer_and_the_rest_gets_no_gradient(model, clip):
  clean, noisy, timestep, context = clip
  lora = _moved(init_lora(LORA, CFG, jax.random.key(0)))
  graphdef, state = nnx.split(model)

  def loss(lora):
    cache = nnx.merge(graphdef, state).write_cache(clean[:, :2], context, empty, 0)
    cache = jax.tree.map(jax.lax.stop_gradient, cache)
    flow, _ = nnx.merge(graphdef, state)(
      noisy[:, 0, 2:4], timestep[:, 0, 2:4], context, cache, 2, lora=lora, lora_scale=0.5
    )
    return jnp.sum(flow**2)

  empty = init_cache(CFG, SAMPLER, 2)
  gradient = jax.jit(jax.grad(loss))(lora)
  assert jax.tree.structure(gradient) == jax.tree.structure(lora)
  for target, pair in gradient.items():
    for letter in "ab":
      for layer in range(CFG.num_layers):
        assert jnp.abs(pair[letter][layer]).max() > 0, (target, letter, layer)


def test_an_adapter_on_few_targets_has_only_those():
  lora = init_lora(LoRAConfig(4, 4.0, ("*_attn.[qv]",)), CFG, jax.random.key(0))
  assert list(lora) == ["self_attn.q", "self_attn.v", "cross_attn.q", "cross_attn.v"]
  assert lora["self_attn.q"]["a"].shape == (2, 32, 4)
  assert not lora["self_attn.q"]["b"].any()
  assert jnp.abs(lora["self_attn.q"]["a"]).max() <= 32**-0.5


def test_targets_that_match_nothing_are_refused():
  with pytest.raises(ValueError, match=r"targets has 'to_q', which matches nothing"):
    LoRAConfig(4, 4.0, ("self_attn.q", "to_q"))
  with pytest.raises(ValueError, match="rank is 0"):
    LoRAConfig(0)
  with pytest.raises(ValueError, match="targets is empty"):
    LoRAConfig(4, 4.0, ())


# --- refusals


def test_inputs_that_do_not_fit_are_refused_in_one_sentence(model, clip):
  clean, _, _, context = clip
  cache, t = init_cache(CFG, SAMPLER, 2), jnp.zeros((2, 2))
  chunk = clean[:, :2]
  cases = [
    ((chunk[:, :, :3], t, context, cache, 0), "x has 3 channels"),
    ((chunk[:, :, :, :2], t, context, cache, 0), "cache has 6 tokens per frame"),
    ((chunk[:1], t[:1], context[:1], cache, 0), "x has batch 1, cache 2"),
    ((chunk, t, context, cache, 5), "start_frame is 5; a chunk of 2 frames there overflows"),
    ((chunk, t, context, cache, 1023), "frames is 1025"),
  ]
  for args, message in cases:
    with pytest.raises(ValueError, match=message):
      model(*args)
  with pytest.raises(ValueError, match=r"prompt_embeds is \(4, 5\) per video"):
    model.embed_text(jnp.zeros((2, 4, 5)))
  with pytest.raises(ValueError, match="frames_per_chunk is 4; it must divide"):
    model.teacher_forcing(clean, clean[:, None], jnp.zeros((2, 1, FRAMES)), context, 4)


def test_a_traced_start_past_a_global_cache_gives_no_number(model, clip):
  clean, _, _, context = clip
  args = (clean[:, :2], jnp.zeros((2, 2)), context, init_cache(CFG, SAMPLER, 2))
  for start, number in ((4, True), (5, False)):
    flow, _ = _forward(*nnx.split(model), *args, jnp.int32(start))
    assert bool(jnp.isfinite(flow).all()) is number
