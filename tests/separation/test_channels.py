"""Channels: what each scalar is, that old values agree, and where gradients must not flow."""

import dataclasses
import json
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sbjax.algorithms.transitions import CPS, SDE, DanceSDE, Renoise
from sbjax.separation.channels import CHANNELS, NFTLoss, NFTPart, Point, X0Score

GOLDEN = json.loads((pathlib.Path(__file__).parents[1] / "golden/transitions.json").read_text())
SHAPE = (2, 1, 2, 2)
FLOW = [Renoise(), DanceSDE(), SDE(), CPS()]


def _point(transition, seed=0, sigma=0.8, sigma_next=0.6):
  rng = np.random.default_rng(seed)
  x, v, z, r = (jnp.asarray(rng.normal(size=SHAPE), jnp.float32) for _ in range(4))
  now, after = jnp.float32(sigma), jnp.float32(sigma_next)
  mean, std = transition.step(x, v, now, after)
  reference, _ = transition.step(x, v + 0.1 * r, now, after)
  return Point(x, now, now, after, mean + std * z, mean, reference), v, r


def _golden_point(case):
  given, want = GOLDEN["inputs"], GOLDEN[case]
  x, v, dv = (
    jnp.asarray(np.reshape(given[k], given["shape"]), jnp.float32) for k in ("x", "v", "dv")
  )
  made = {"sde": SDE, "cps": CPS, "dance_sde": DanceSDE}[want["kind"]]
  transition = made(noise_level=want["noise_level"])
  now, after = jnp.float32(want["sigma"]), jnp.float32(want["sigma_next"])
  mean, std = transition.step(x, v, now, after)
  z = jnp.asarray(np.reshape(given["z"], given["shape"]), jnp.float32)
  # Reference and rollout are the same policy here: the golden drift is between v and v + dv.
  return Point(x, now, now, after, mean + std * z, mean, mean), v, v + dv, transition, want


@pytest.mark.parametrize(
  "case", [k for k, c in GOLDEN.items() if isinstance(c, dict) and "kl_exact" in c]
)
def test_kls_match_the_reference(case):
  point, _, moved, transition, want = _golden_point(case)
  near = {"rtol": 1e-4, "atol": 1e-11}
  np.testing.assert_allclose(
    CHANNELS["kl_exact"](point, moved, transition), want["kl_exact"], **near
  )
  np.testing.assert_allclose(
    CHANNELS["kl_flow_grpo"](point, moved, transition), want["kl_flowgrpo"], **near
  )
  np.testing.assert_allclose(CHANNELS["drift"](point, moved, transition), want["kl_exact"], **near)
  np.testing.assert_allclose(
    CHANNELS["drift_unscaled"](point, moved, transition), want["mean_sq_drift"] / 2, **near
  )


def test_guard_matches_the_reference():
  point, v, moved, transition, _ = _golden_point("flowgrpo_sde_T10_s3_n.7_k4")
  want = GOLDEN["guard_k4"]
  guard = CHANNELS["guard_score"]
  ratio = jnp.exp(guard(point, moved, transition) - guard(point, v, transition))
  np.testing.assert_allclose(ratio, want["ratio"], atol=1e-6)
  np.testing.assert_allclose(
    CHANNELS["step_length"](point, v, transition), want["loss_div"], rtol=1e-5
  )
  np.testing.assert_allclose(CHANNELS["drift"](point, moved, transition), want["bias"], rtol=1e-4)
  assert CHANNELS["count"](point, v, transition) == 1.0


def test_guard_lets_gradient_through_its_correction():
  point, v, r = _point(SDE())
  guarded = jax.grad(lambda u: CHANNELS["guard_score"](point, u, SDE()))(v + r)
  plain = jax.grad(lambda u: CHANNELS["log_prob"](point, u, SDE()))(v + r)
  correction = jax.grad(lambda u: CHANNELS["drift"](point, u, SDE()))(v + r)
  _, std = SDE().step(point.x, v, point.sigma, point.sigma_next)
  np.testing.assert_allclose(guarded, std * (plain + correction), rtol=1e-5, atol=1e-7)
  assert float(jnp.abs(correction).max()) > 1e-3


@pytest.mark.parametrize("transition", FLOW, ids=lambda t: type(t).__name__)
def test_the_old_policy_has_no_drift_and_its_reference_distance_is_positive(transition):
  point, v, _ = _point(transition)
  assert CHANNELS["drift"](point, v, transition) == 0.0
  assert float(CHANNELS["kl_exact"](point, v, transition)) > 0.0
  mean, std = transition.step(point.x, v, point.sigma, point.sigma_next)
  np.testing.assert_array_equal(
    CHANNELS["log_prob"](point, v, transition), transition.log_prob(point.target, mean, std)
  )


@pytest.mark.parametrize("transition", FLOW, ids=lambda t: type(t).__name__)
def test_a_sum_over_dimensions_scales_score_and_kl_alike(transition):
  summed = dataclasses.replace(transition, dim_reduce="sum")
  point, v, r = _point(transition)
  for name in ("log_prob", "kl_exact", "kl_flow_grpo", "drift"):
    ratio = CHANNELS[name](point, v + r, summed) / CHANNELS[name](point, v + r, transition)
    np.testing.assert_allclose(ratio, math.prod(SHAPE), rtol=1e-5)


def test_nft_losses_mirror_each_other_about_the_old_policy():
  transition = Renoise()
  point, v, r = _point(transition)
  point = dataclasses.replace(point, anchor=v, target=0.5 * r)
  plus, minus = NFTLoss(1, 0.3), NFTLoss(-1, 0.3)
  np.testing.assert_allclose(plus(point, v + r, transition), minus(point, v - r, transition))
  error = np.asarray(point.x - point.sigma * (v + 0.3 * r) - 0.5 * r)
  want = np.mean(error**2) / np.mean(np.abs(error))
  np.testing.assert_allclose(plus(point, v + r, transition), want, rtol=1e-5)
  # The divisor is detached: the gradient is that of the numerator alone.
  slope = jax.grad(lambda u: plus(point, u, transition))(v + r)
  alone = -2 * error * 0.8 * 0.3 / error.size / np.mean(np.abs(error))
  np.testing.assert_allclose(slope, alone, rtol=1e-4, atol=1e-6)
  exact = NFTLoss(1, 0.3, adaptive_weight_min=100.0)
  np.testing.assert_allclose(exact(point, v + r, transition), np.mean(error**2) / 100, rtol=1e-5)


def test_nft_parts_add_up_to_the_losses_and_only_the_contrast_moves_the_old_policy():
  transition = Renoise()
  point, v, r = _point(transition)
  point = dataclasses.replace(point, anchor=v, target=0.5 * r)
  mean, contrast = NFTPart("mean", 0.3), NFTPart("contrast", 0.3)
  at = (point, v + r, transition)
  np.testing.assert_allclose(mean(*at) + contrast(*at), NFTLoss(1, 0.3)(*at), rtol=1e-6)
  np.testing.assert_allclose(mean(*at) - contrast(*at), NFTLoss(-1, 0.3)(*at), rtol=1e-6)
  still, moving, whole = (
    jax.grad(lambda u, fn=fn: fn(point, u, transition))(v)
    for fn in (mean, contrast, NFTLoss(1, 0.3))
  )
  assert (np.asarray(still) == 0).all()
  np.testing.assert_allclose(moving, whole, rtol=1e-6)
  assert np.abs(whole).max() > 1e-3


@pytest.mark.parametrize("transition", FLOW, ids=lambda t: type(t).__name__)
def test_the_x0_score_sees_clean_predictions_under_every_transition(transition):
  point, v, r = _point(transition)
  moved = v + 0.2 * r
  error = np.asarray(point.sigma * (moved - v))
  got = X0Score()(point, moved, transition)
  np.testing.assert_allclose(got, -0.5 * np.mean(error**2), rtol=1e-3)
  floorless = X0Score(sigma_floor=0.0)(point, moved, transition)
  np.testing.assert_allclose(floorless, got / 0.8**2, rtol=1e-4)
  reference = X0Score(reference=True)(point, moved, transition)
  error = np.asarray(point.sigma * 0.1 * r)
  np.testing.assert_allclose(reference, -0.5 * np.mean(error**2), rtol=1e-3)


def test_the_x0_score_counts_the_deterministic_last_step():
  point, v, r = _point(Renoise(), sigma=0.6, sigma_next=0.0)
  error = np.asarray(0.6 * 0.2 * r)
  got = X0Score()(point, v + 0.2 * r, Renoise())
  np.testing.assert_allclose(got, -0.5 * np.mean(error**2), rtol=1e-4)


def test_the_x0_score_carries_gradient_only_where_it_should():
  point, v, r = _point(Renoise())
  for floor, flows in ((0.7, True), (0.8, True), (0.9, False)):
    score = X0Score(grad_sigma_min=float(np.float32(floor)))
    value, slope = jax.value_and_grad(lambda u, s=score: s(point, u, Renoise()))(v + r)
    assert bool(jnp.any(slope != 0)) is flows
    assert float(value) < 0


def test_the_velocity_distance_is_a_mean_square():
  point, v, r = _point(Renoise())
  point = dataclasses.replace(point, reference=v)
  got = CHANNELS["reference_mse"](point, v + r, Renoise())
  np.testing.assert_allclose(got, np.mean(np.asarray(r) ** 2), rtol=1e-5)


def test_every_channel_is_a_finite_scalar_of_the_points_dtype():
  with jax.enable_x64(True):
    for dtype in (jnp.float32, jnp.float64):
      point, v, _ = _point(SDE())
      point = jax.tree.map(lambda a, d=dtype: a.astype(d), point)
      for name, fn in CHANNELS.items():
        value, slope = jax.value_and_grad(fn, argnums=1)(point, v.astype(dtype), SDE())
        assert value.shape == () and value.dtype == dtype, name
        assert bool(jnp.isfinite(value)) and bool(jnp.isfinite(slope).all()), name
