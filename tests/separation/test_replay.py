"""Merged replay, two-pass replay and full autograd on a real tiny model, in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sbjax.algorithms.objectives import gradient
from sbjax.rollout import generate, replay_inputs
from sbjax.runtime.early import unit_scalars
from sbjax.separation import buffers, replay
from sbjax.separation.objective import Batch
from tests.runtime import tiny

# One channel and two buffers; two channels and three buffers; one buffer, coupled over the group.
OBJECTIVES = {
  "dance_grpo": {"algorithm__clip_low": 1e-3, "algorithm__clip_high": 1e-3},
  "flow_grpo": {
    "algorithm__clip_low": 1e-3,
    "algorithm__clip_high": 1e-3,
    "algorithm__kl_coef": 0.01,
  },
  "kvpo": {"algorithm__clip_low": 0.2, "algorithm__clip_high": 0.2, "algorithm__kl_coef": 1.0},
}


def moved(tree, scale=0.03):
  """An adapter that has been trained a little, so that ratios differ from 1."""
  leaves, structure = jax.tree.flatten(tree)
  keys = jax.random.split(jax.random.key(5), len(leaves))
  return jax.tree.unflatten(
    structure,
    [a + scale * jax.random.normal(k, a.shape) for a, k in zip(leaves, keys, strict=True)],
  )


@pytest.fixture(scope="module", params=OBJECTIVES)
def case(request):
  run = tiny.settings(algorithm__name=request.param, **OBJECTIVES[request.param])
  roles = tiny.build_roles(run)
  return request.param, roles


def inputs_of(roles, adapter, count=4):
  recipe = roles.recipe
  out = []
  for c in range(count):
    embeds = roles.embed([f"prompt {'x' * (c // 2)}"])[0]
    conditioning = roles.condition(roles.frozen, jnp.asarray(embeds))
    trajectory = generate(
      roles.rollout,
      adapter,
      roles.frozen,
      conditioning,
      embeds,
      chunks=recipe.geometry.chunks,
      frames_per_chunk=recipe.geometry.frames_per_chunk,
      seed=10 + c,
      seed_initial=10 + c,
      version="v0",
    )
    trained = tuple(range(recipe.trained))
    shape = (recipe.geometry.chunks, recipe.trained, *recipe.geometry.chunk_shape)
    reference = 0.1 * np.random.default_rng(c).normal(size=shape).astype(np.float32)
    inputs = replay_inputs(
      roles.rollout,
      trajectory,
      conditioning,
      trained,
      recipe.geometry.frames_per_chunk,
      reference,
    )
    out.append((trajectory, inputs))
  return out


def batch_of(recipe, scalars, trajectories, advantages):
  units = [
    unit_scalars(recipe, s, t.old_scores) for s, t in zip(scalars, trajectories, strict=True)
  ]
  channels, old, statistics = (np.stack(column) for column in zip(*units, strict=True))
  return Batch(
    channels=channels,
    old=old,
    statistics=statistics,
    advantages=np.asarray(advantages)[:, None],
    valid=np.ones(len(units), bool),
    group=np.arange(len(units)) // 2,
    normaliser=float(len(units) * recipe.trained),
  )


def stacked(scores):
  return {
    "channels": np.stack([np.asarray(scores[c].channels) for c in sorted(scores)]),
    "statistics": np.stack([np.asarray(scores[c].statistics) for c in sorted(scores)]),
  }


def test_merged_equals_two_pass_equals_autograd(case):
  _, roles = case
  recipe, objective = roles.recipe, roles.recipe.objective
  sets = inputs_of(roles, roles.initial)
  trajectories = [t for t, _ in sets]
  adapter = moved(roles.initial)
  advantages = np.array([1.0, -1.0, 0.7, -0.7])

  # Merged: one visit, unit gradients, early weights, late coefficients.
  scalars, kept = [], []
  for trajectory, inputs in sets:
    scores, units = replay.replay(
      roles.replay, adapter, roles.frozen, inputs, recipe.blocks, recipe.reduce_weights
    )
    scalars.append(stacked(scores))
    early = objective.early(*unit_scalars(recipe, scalars[-1], trajectory.old_scores))
    kept.append([buffers.fold(u, early) for u in units])
  batch = batch_of(recipe, scalars, trajectories, advantages)
  late = objective.late(batch)
  total = np.zeros(recipe.adapter_parameters)
  for row, blocks in zip(late, kept, strict=True):
    assert buffers.accumulate(total, [(b, row) for b in blocks]) == 0
  merged = buffers.merge([total])

  # Two-pass: scores first, then a second replay with known weights.
  again = [
    stacked(replay.score(roles.replay, adapter, roles.frozen, inputs, range(3)))
    for _, inputs in sets
  ]
  for one, two in zip(scalars, again, strict=True):
    np.testing.assert_allclose(one["channels"], two["channels"], rtol=0, atol=1e-6)
  total = np.zeros(recipe.adapter_parameters)
  for i, (trajectory, inputs) in enumerate(sets):
    early = objective.early(*unit_scalars(recipe, scalars[i], trajectory.old_scores))
    weights = np.einsum("buj,b,cuk->ckj", early, late[i], recipe.reduce_weights)
    _, folded = replay.replay_folded(
      roles.replay, adapter, roles.frozen, inputs, recipe.blocks, weights
    )
    for part in folded:
      buffers.accumulate(total, [(buffers.flatten(part)[None], np.ones(1))])
  two_pass = buffers.merge([total])

  # Autograd of the loss itself through the model, caches constant.
  caches = [context(roles, adapter, inputs) for _, inputs in sets]

  # The loss's own derivative, by autodiff in float64, not the objective's compressed form.
  coefficients = jnp.asarray(gradient(objective.loss, batch), jnp.float32)

  def loss(a):
    rows = []
    for (_, inputs), cached in zip(sets, caches, strict=True):
      chunks = [
        roles.replay.score_chunk(
          a,
          roles.frozen,
          cache,
          inputs.points[c],
          inputs.conditioning,
          jnp.asarray(c, jnp.int32),
        ).channels
        for c, cache in enumerate(cached)
      ]
      weights = jnp.asarray(recipe.reduce_weights, jnp.float32)
      rows.append(jnp.einsum("cuk,ckj->uj", weights, jnp.stack(chunks)))
    channels = jnp.stack(rows)
    return jnp.sum(coefficients * channels)

  autograd = buffers.flatten(jax.grad(loss)(adapter))
  scale = np.linalg.norm(autograd)
  assert scale > 0
  assert np.linalg.norm(merged - autograd) <= 1e-5 * scale
  assert np.linalg.norm(two_pass - autograd) <= 1e-5 * scale
  assert np.linalg.norm(merged - two_pass) <= 1e-5 * scale


def context(roles, adapter, inputs):
  cache, caches = roles.replay.init_cache(), []
  for c in range(len(inputs.points)):
    caches.append(cache)
    cache = roles.replay.write_cache(
      adapter, roles.frozen, cache, inputs.clean[c], inputs.conditioning, jnp.asarray(c, jnp.int32)
    )
  return caches


def test_the_rollout_and_the_replay_agree_before_the_first_update(case):
  name, roles = case
  for trajectory, inputs in inputs_of(roles, roles.initial):
    scores = stacked(replay.score(roles.replay, roles.initial, roles.frozen, inputs, range(3)))
    difference = np.abs(scores["channels"][..., 0] - trajectory.old_scores)
    assert difference.max() <= 5e-7, name
    after = stacked(
      replay.score(roles.replay, moved(roles.initial), roles.frozen, inputs, range(3))
    )
    assert (
      np.abs(after["channels"][..., 0] - trajectory.old_scores).max() > 1e-6
    )  # an order above the bound


def test_a_split_replay_gives_the_same_bits_as_a_whole_one(case):
  _, roles = case
  recipe = roles.recipe
  (_, inputs), adapter = inputs_of(roles, roles.initial, 1)[0], moved(roles.initial)
  run = (roles.replay, adapter, roles.frozen, inputs)
  whole_scores, whole = replay.replay(*run, recipe.blocks, recipe.reduce_weights)
  for index, block in enumerate(recipe.blocks):
    scores, part = replay.replay(*run, [block], recipe.reduce_weights)
    for chunk in block:
      np.testing.assert_array_equal(scores[chunk].channels, whole_scores[chunk].channels)
    for a, b in zip(jax.tree.leaves(part[0]), jax.tree.leaves(whole[index]), strict=True):
      np.testing.assert_array_equal(a, b)


def test_chunk_blocks_are_runs_that_cover_every_chunk():
  assert replay.chunk_blocks(7, 2) == ((0, 1, 2, 3), (4, 5, 6))
  assert replay.chunk_blocks(1, 2) == ((0,),)


def test_a_zero_coefficient_drops_a_gradient_that_is_not_finite():
  units = {"a": jnp.array([[[jnp.nan, 1.0]], [[2.0, 3.0]]])}
  folded = buffers.fold(units, np.array([[[0.0], [2.0]]]))
  np.testing.assert_array_equal(folded, [[4.0, 6.0]])
  total = np.zeros(2)
  parts = [(np.array([[np.inf, 1.0]], np.float32), np.array([0.0]))]
  assert buffers.accumulate(total, parts) == 0
  parts = [(np.array([[np.inf, 1.0]], np.float32), np.array([1.0]))]
  assert buffers.accumulate(total, parts) == 1
  np.testing.assert_array_equal(total, 0.0)


def test_a_sum_does_not_depend_on_who_holds_which_candidate():
  rng = np.random.default_rng(0)
  rows = [(rng.normal(size=(2, 500)).astype(np.float32), rng.normal(size=2)) for _ in range(24)]
  together, apart = np.zeros(500), [np.zeros(500) for _ in range(5)]
  buffers.accumulate(together, rows)
  for i, row in enumerate(rows):
    buffers.accumulate(apart[(7 * i) % 5], [row])
  np.testing.assert_array_equal(buffers.merge([together]), buffers.merge(apart))
