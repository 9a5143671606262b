"""UniPC: its grid, its order, exact cases, and values recorded from diffusers' scheduler."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.wan.unipc import UniPCTables, unipc_sample, unipc_start, unipc_step, unipc_tables
from sbjax.algorithms.transitions import transition
from tests.models.wan22_files import GOLDEN, SHIFT, UNIPC_STEPS, initial_noise


def _field(tables: UniPCTables):
  sigmas = jnp.asarray(tables.sigmas)
  return lambda x, k: jnp.sin(1.3 * x + sigmas[k]) + 0.5 * x * sigmas[k] ** 2


@pytest.mark.parametrize("steps", UNIPC_STEPS)
def test_samples_are_the_recorded_ones(steps):
  golden = np.load(GOLDEN)[f"unipc/{steps}"]
  tables = unipc_tables(steps, SHIFT)
  field, state, states = _field(tables), unipc_start(jnp.asarray(initial_noise())), []
  for k in range(steps):
    state = unipc_step(tables, state, field(state.x, k), jnp.int32(k))
    states.append(state.x)
  np.testing.assert_allclose(jnp.stack(states), golden, rtol=0, atol=2e-6)
  sample = unipc_sample(tables, field, jnp.asarray(initial_noise()))
  np.testing.assert_allclose(sample, golden[-1], rtol=0, atol=2e-6)


@pytest.mark.parametrize(
  ("steps", "sigmas", "timesteps"),
  [
    (2, [0.9997998, 0.8330554, 0.0], [999, 833]),
    (4, [0.9997998, 0.9372655, 0.8330554, 0.6246874, 0.0], [999, 937, 833, 624]),
  ],
)
def test_the_grid_is_wan_s(steps, sigmas, timesteps):
  tables = unipc_tables(steps, SHIFT)
  np.testing.assert_allclose(tables.sigmas, sigmas, rtol=0, atol=2e-7)
  np.testing.assert_array_equal(tables.timesteps, timesteps)
  assert tables.steps == steps


@given(st.integers(1, 60), st.floats(0.5, 12.0))
def test_a_network_that_knows_the_answer_gives_it(steps, shift):
  """Where every clean prediction is the same, the path is a straight line, and steps stay on it."""
  tables = unipc_tables(steps, shift)
  answer, noise = 0.7, -1.3
  x = (1 - float(tables.sigmas[0])) * answer + float(tables.sigmas[0]) * noise
  corrected, last, before = x, 1e6, 1e6  # what is not there yet must not count
  for k in range(steps):
    a = tables.correct[k].astype(np.float64)
    corrected = a[0] * corrected + a[1] * answer + a[2] * last + a[3] * before
    assert corrected == pytest.approx(x, abs=1e-5)
    b = tables.predict[k].astype(np.float64)
    x = b[0] * corrected + b[1] * answer + b[2] * last
    last, before = answer, last
    sigma = float(tables.sigmas[k + 1])
    assert x == pytest.approx((1 - sigma) * answer + sigma * noise, abs=1e-5)
  assert x == pytest.approx(answer, abs=1e-6)


def test_error_falls_as_the_square_of_the_step():
  """Gaussian data has a flow in closed form: x keeps its quantile while its spread changes."""
  mean, spread = 0.4, 1.2
  noise = jnp.asarray([-1.5, -0.2, 0.9])

  def error(steps: int) -> float:
    tables = unipc_tables(steps, 1.0)
    sigmas = jnp.asarray(tables.sigmas)
    at = float(sigmas[0])

    def field(x, k):
      s = sigmas[k]
      variance = (1 - s) ** 2 * spread**2 + s**2
      surplus = (x - (1 - s) * mean) / variance
      return s * surplus - (mean + (1 - s) * spread**2 * surplus)

    final = unipc_sample(tables, field, noise)
    start = (noise - (1 - at) * mean) / np.hypot((1 - at) * spread, at)
    return float(jnp.abs(final - (mean + spread * start)).max())

  errors = [error(steps) for steps in (16, 32, 64)]
  assert errors[0] / errors[1] > 3.5  # 2 would be first order
  assert errors[1] / errors[2] > 3.5


def test_impossible_grids_and_training_are_refused():
  with pytest.raises(ValueError, match="unipc_steps is 0"):
    unipc_tables(0, SHIFT)
  with pytest.raises(ValueError, match="timestep_shift is 0"):
    unipc_tables(4, 0.0)
  with pytest.raises(ValueError, match="transition is 'unipc', a sampler without noise"):
    transition("unipc")


def test_a_step_is_traced_once_for_all_steps():
  tables, traces = unipc_tables(3, SHIFT), []

  @jax.jit
  def step(state, k):
    traces.append(k)
    return unipc_step(tables, state, jnp.zeros(2), k)

  state = unipc_start(jnp.ones(2))
  for k in range(3):
    state = step(state, jnp.int32(k))
  np.testing.assert_allclose(state.x, 1.0, rtol=1e-6)  # no velocity: clean already
  assert len(traces) == 1
