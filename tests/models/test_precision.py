"""Precision policies: how far from float32, what rounds, and that a replay meets its rollout."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.layers.rounding import matmul_f32, round_to
from models.wan.cache import init_cache
from models.wan.dit import CausalWanDiT
from models.wan.precision import policy
from sbjax.rollout import generate, replay_inputs
from sbjax.separation import replay
from tests.runtime import tiny

POLICIES = ("fp32", "sf_bf16", "mixed")
# Relative distance of a chunk's flow from float32's, root of mean squares: about what is measured,
# doubled. Below the lower bound nothing would have been rounded.
DISTANCE = {"mixed": (5e-4, 1e-2), "sf_bf16": (2e-3, 3e-2)}


@pytest.fixture(scope="module")
def flows():
  """Flow and adapter gradient of one chunk under every policy, same weights."""
  dit = CausalWanDiT(tiny.DIT, rngs=nnx.Rngs(0))
  dit.head.kernel[...] = 0.3 * jax.random.normal(jax.random.key(7), dit.head.kernel.shape)
  x = jax.random.normal(jax.random.key(1), (1, 1, 4, 4, 4))
  text = jax.random.normal(jax.random.key(2), (1, 4, 8))
  lora = {
    name: {
      "a": 0.3 * jax.random.normal(jax.random.key(3), (2, 32, 2)),
      "b": 0.3 * jax.random.normal(jax.random.key(4), (2, 2, 32)),
    }
    for name in ("self_attn.q", "cross_attn.v")
  }
  graphdef, state = nnx.split(dit)
  found = {}
  for name in POLICIES:

    @jax.jit
    def run(lora, state, x, text, name=name):
      model = nnx.merge(graphdef, state)
      model.cfg = dataclasses.replace(tiny.DIT, precision=name)
      cache = init_cache(model.cfg, tiny.SAMPLER, 1)
      times = jnp.full((1, 1), 937.5)
      out, after = model(x, times, model.embed_text(text), cache, 0, lora=lora)
      return jnp.mean(jnp.square(out.astype(jnp.float32))), (out, after.k)

    (_, (flow, keys)), gradient = jax.value_and_grad(run, has_aux=True)(lora, state, x, text)
    found[name] = flow, keys, gradient
  return found


def distance(a, b):
  a, b = (np.asarray(v, np.float64) for v in (a, b))
  return float(np.sqrt(np.mean((a - b) ** 2) / np.mean(b**2)))


@pytest.mark.parametrize("name", DISTANCE)
def test_a_policy_stays_as_close_to_float32_as_it_should_and_no_closer(flows, name):
  low, high = DISTANCE[name]
  assert low < distance(flows[name][0], flows["fp32"][0]) < high
  for ours, exact in zip(
    jax.tree.leaves(flows[name][2]), jax.tree.leaves(flows["fp32"][2]), strict=True
  ):
    assert ours.dtype == jnp.float32  # the adapter's own type, whatever the network computes in
    assert distance(ours, exact) < 4 * high


def test_types_are_those_of_the_policy(flows):
  for name in POLICIES:
    flow, keys, _ = flows[name]
    assert flow.dtype == policy(name).stream
    assert keys.dtype == policy(name).compute


def test_rounding_survives_the_compiler():
  x = jax.random.normal(jax.random.key(0), (1000,))
  rounded = jax.jit(lambda v: round_to(v, jnp.bfloat16).astype(jnp.float32) * 3.0)(x)
  exact = np.asarray(x.astype(jnp.bfloat16)).astype(np.float32) * np.float32(3.0)
  np.testing.assert_array_equal(rounded, exact)


def test_a_product_in_bfloat16_has_the_gradient_of_its_rounded_factors():
  x = jax.random.normal(jax.random.key(0), (2, 5, 8)).astype(jnp.bfloat16)
  w = jax.random.normal(jax.random.key(1), (8, 3)).astype(jnp.bfloat16)
  g = jax.random.normal(jax.random.key(2), (2, 5, 3))
  y, pull = jax.vjp(matmul_f32, x, w)
  wide = [np.asarray(v, np.float64) for v in (x, w, g.astype(jnp.bfloat16))]
  np.testing.assert_allclose(y, wide[0] @ wide[1], rtol=1e-5, atol=1e-6)
  dx, dw = pull(g)
  assert dx.dtype == dw.dtype == jnp.bfloat16
  np.testing.assert_allclose(np.asarray(dx, np.float64), wide[2] @ wide[1].T, rtol=0.01, atol=0.02)
  rows = np.einsum("bti,bto->io", wide[0], wide[2])
  np.testing.assert_allclose(np.asarray(dw, np.float64), rows, rtol=0.01, atol=0.02)


@pytest.mark.parametrize("name", DISTANCE)
def test_a_replay_meets_its_rollout(name, monkeypatch):
  monkeypatch.setattr(tiny, "DIT", dataclasses.replace(tiny.DIT, precision=name, remat="block"))
  roles = tiny.build_roles(tiny.settings())
  recipe = roles.recipe
  embeds = roles.embed(["a prompt"])[0]
  conditioning = roles.condition(roles.frozen, jnp.asarray(embeds))
  frames = recipe.geometry.frames_per_chunk
  trajectory = generate(
    roles.rollout,
    roles.initial,
    roles.frozen,
    conditioning,
    embeds,
    chunks=recipe.geometry.chunks,
    frames_per_chunk=frames,
    seed=3,
    seed_initial=3,
    version="v0",
  )
  trained = tuple(range(recipe.trained))
  inputs = replay_inputs(roles.rollout, trajectory, conditioning, trained, frames)
  scores, _ = replay.replay(
    roles.replay, roles.initial, roles.frozen, inputs, recipe.blocks, recipe.reduce_weights
  )
  again = np.stack([np.asarray(scores[c].channels)[:, 0] for c in sorted(scores)])
  np.testing.assert_allclose(again, trajectory.old_scores, rtol=0, atol=5e-7)
