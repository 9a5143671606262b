"""Transitions against values of the reference implementations, and their own contracts."""

import json
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sbjax.algorithms.transitions import CPS, Renoise, clean_prediction, from_settings, transition

GOLDEN = json.loads((pathlib.Path(__file__).parents[1] / "golden/transitions.json").read_text())
CASES = sorted(k for k, c in GOLDEN.items() if isinstance(c, dict) and "kind" in c)
SCALAR = jnp.float32


def _inputs():
  given = GOLDEN["inputs"]
  shape = given["shape"]
  return {k: np.asarray(given[k], np.float32).reshape(shape) for k in ("x", "v", "z", "dv")}


@pytest.mark.parametrize("case", CASES)
def test_steps_and_log_probabilities_match_the_references(case):
  want = GOLDEN[case]
  made = transition(want["kind"], noise_level=want["noise_level"])
  # Flow-GRPO's CPS reports the log-probability without its constants.
  log_prob = made.log_prob if want["kind"] == "cps" else made.log_prob_full
  given = _inputs()
  x, v, z = jnp.asarray(given["x"]), jnp.asarray(given["v"]), jnp.asarray(given["z"])
  moved = v + jnp.asarray(given["dv"])
  sigma = SCALAR(want.get("sigma", want.get("abar")))
  sigma_next = SCALAR(want.get("sigma_next", want.get("abar_prev")))

  mean, std = made.step(x, v, sigma, sigma_next)
  following = mean + std * z

  def score(velocity):
    return log_prob(following, *made.step(x, velocity, sigma, sigma_next))

  new, slope = jax.value_and_grad(score)(moved)
  near = {"rtol": 0, "atol": 1e-5}
  np.testing.assert_allclose(np.ravel(mean), want["mean"], **near)
  np.testing.assert_allclose(std, want.get("injected_std", want.get("std")), **near)
  np.testing.assert_allclose(np.ravel(following), want["xnext"], **near)
  np.testing.assert_allclose(score(v), want["logp_old"], **near)
  np.testing.assert_allclose(new, want["logp_new"], **near)
  np.testing.assert_allclose(jnp.exp(new - score(v)), want.get("ratio"), **near)
  np.testing.assert_allclose(
    np.ravel(slope), want.get("dlogpnew_dv", want.get("dlogpnew_de")), **near
  )
  if "std_dev_t" in want:
    np.testing.assert_allclose(made.noise_scale(sigma, sigma_next), want["std_dev_t"], rtol=1e-5)
  if "x0" in want:
    np.testing.assert_allclose(np.ravel(clean_prediction(x, v, sigma)), want["x0"], **near)
  if "dmean_dv" in want:
    ones = jnp.ones_like(v)
    _, push = jax.jvp(lambda u: made.step(x, u, sigma, sigma_next)[0], (v,), (ones,))
    np.testing.assert_allclose(push, np.full(v.shape, want["dmean_dv"]), **near)


def test_every_kind_of_the_golden_file_is_covered():
  assert {GOLDEN[case]["kind"] for case in CASES} == {"dance_sde", "sde", "cps", "ddim"}


@pytest.mark.parametrize("name", ["renoise", "dance_sde", "sde", "cps"])
@pytest.mark.parametrize("dim_reduce", ["mean", "sum"])
def test_log_prob_differs_from_the_full_density_by_a_constant_of_theta(name, dim_reduce):
  made = transition(name, dim_reduce=dim_reduce)
  given = _inputs()
  x, v, dv = (jnp.asarray(given[k]) for k in ("x", "v", "dv"))
  sigma, sigma_next = SCALAR(0.8), SCALAR(0.6)
  mean, std = made.step(x, v, sigma, sigma_next)
  other, _ = made.step(x, v + dv, sigma, sigma_next)
  following = mean + std * jnp.asarray(given["z"])
  scale = 2.0 * float(std) ** 2 if name == "cps" else 1.0
  short = (made.log_prob(following, other, std) - made.log_prob(following, mean, std)) / scale
  full = made.log_prob_full(following, other, std) - made.log_prob_full(following, mean, std)
  np.testing.assert_allclose(short, full, rtol=2e-3, atol=1e-6)
  per_dim = -math.log(float(std)) - 0.5 * math.log(2 * math.pi)
  count = v.size if dim_reduce == "sum" else 1
  np.testing.assert_allclose(made.log_prob_full(mean, mean, std), count * per_dim, rtol=1e-5)


def test_the_sum_over_dimensions_is_the_mean_times_their_number():
  x = jnp.linspace(-1.0, 1.0, 24).reshape(2, 3, 2, 2)
  mean, std = jnp.zeros_like(x), SCALAR(0.5)
  ratio = Renoise(dim_reduce="sum").log_prob(x, mean, std) / Renoise().log_prob(x, mean, std)
  np.testing.assert_allclose(ratio, 24.0, rtol=1e-6)


def test_cps_at_full_noise_is_renoise():
  given = _inputs()
  x, v = jnp.asarray(given["x"]), jnp.asarray(given["v"])
  args = (x, v, SCALAR(0.9), SCALAR(0.7))
  for got, want in zip(CPS(noise_level=1.0).step(*args), Renoise().step(*args), strict=True):
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)


def test_a_step_keeps_the_dtype_of_its_arguments():
  with jax.enable_x64(True):
    x = jnp.ones((2, 3), jnp.float64)
    for name in ("renoise", "dance_sde", "sde", "cps"):
      mean, std = transition(name).step(x, x, jnp.float64(0.8), jnp.float64(0.6))
      assert mean.dtype == std.dtype == jnp.float64


@pytest.mark.parametrize(
  ("name", "settings", "words"),
  [
    ("ode", {}, "transition is 'ode'"),
    ("renoise", {"noise_level": 1.0}, "no setting 'noise_level'"),
    ("dance_sde", {"noise_level": 0.0}, "noise_level is 0.0"),
    ("cps", {"noise_level": 1.5}, "noise_level is 1.5"),
    ("sde", {"dim_reduce": "max"}, "dim_reduce is 'max'"),
  ],
)
def test_settings_that_cannot_work_are_refused_in_one_sentence(name, settings, words):
  with pytest.raises(ValueError, match=words) as caught:
    transition(name, **settings)
  assert "\n" not in str(caught.value)


def test_settings_make_the_transition_that_they_name():
  assert from_settings("renoise", 1.0, "sum") == Renoise(dim_reduce="sum")
  assert from_settings("cps", 0.7, "mean") == CPS(noise_level=0.7)
