"""Wan2.2's autoencoder and sampler against diffusers', which also gave the recorded values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.wan.diffusers_keys import vae_diffusers_keys
from models.wan.unipc import unipc_start, unipc_step, unipc_tables
from models.wan.vae import WanVAE
from models.weights import parameters, to_official
from tests.models.wan22_files import (
  GOLDEN,
  RESIDUAL,
  SHIFT,
  UNIPC_STEPS,
  initial_noise,
  pixels_and_latents,
  random_vae,
  velocity,
)

torch = pytest.importorskip("torch", reason="needs the extra `parity`")
diffusers = pytest.importorskip("diffusers", reason="needs the extra `parity`")

pytestmark = pytest.mark.parity

TOLERANCE = 1e-4


def their_vae(ours: WanVAE):
  """diffusers' model with our weights; it refuses any name or shape that is not its own."""
  config = ours.config
  theirs = diffusers.AutoencoderKLWan(
    base_dim=config.base_dim,
    decoder_base_dim=config.decoder_base_dim,
    z_dim=config.z_dim,
    dim_mult=list(config.dim_mult),
    num_res_blocks=config.num_res_blocks,
    temperal_downsample=list(config.temporal_downsample),
    is_residual=config.residual,
    in_channels=config.pixel_channels,
    out_channels=config.pixel_channels,
    patch_size=config.patch_px,
    scale_factor_spatial=config.spatial_factor,
    scale_factor_temporal=config.temporal_factor,
  ).eval()
  named = to_official(parameters(ours), vae_diffusers_keys(config))
  theirs.load_state_dict({name: torch.tensor(np.array(value)) for name, value in named})
  return theirs


def their_values() -> dict[str, np.ndarray]:
  """Everything that is recorded, from diffusers."""
  pixels, latents = pixels_and_latents()
  theirs = their_vae(random_vae(RESIDUAL))
  with torch.no_grad():
    posterior = theirs.encode(torch.tensor(pixels).transpose(1, 2)).latent_dist
    decoded = theirs.decode(torch.tensor(latents).transpose(1, 2)).sample
  values = {
    "mu": posterior.mean.transpose(1, 2).numpy(),
    "logvar": posterior.logvar.transpose(1, 2).numpy(),
    "pixels": decoded.transpose(1, 2).numpy(),
  }
  return values | {f"unipc/{steps}": their_path(steps) for steps in UNIPC_STEPS}


def their_scheduler(steps: int):
  scheduler = diffusers.UniPCMultistepScheduler(
    prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=SHIFT
  )
  assert scheduler.config.solver_order == 2
  assert scheduler.config.solver_type == "bh2"
  assert scheduler.config.predict_x0
  # diffusers' own grid starts at 1 and ends at 0.001; Wan's starts at 0.999 and ends at 0.
  grid = np.linspace(0.999, 0.0, steps + 1)[:-1]
  scheduler.set_timesteps(steps, sigmas=grid)
  return scheduler


def their_path(steps: int) -> np.ndarray:
  """Latents after each step under the tests' flow."""
  scheduler = their_scheduler(steps)
  x, states = torch.tensor(initial_noise()), []
  for k, timestep in enumerate(scheduler.timesteps):
    v = velocity(x.numpy(), float(scheduler.sigmas[k]))
    x = scheduler.step(torch.tensor(v), timestep, x).prev_sample
    states.append(x.numpy())
  return np.stack(states)


def test_recorded_values_are_diffusers():
  recorded = np.load(GOLDEN)
  values = their_values()
  assert set(recorded.files) == set(values)
  for name, value in values.items():
    np.testing.assert_allclose(recorded[name], value, rtol=0, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 50])
def test_unipc_steps_are_diffusers(steps):
  tables, scheduler = unipc_tables(steps, SHIFT), their_scheduler(steps)
  np.testing.assert_array_equal(tables.timesteps, scheduler.timesteps.numpy())
  np.testing.assert_allclose(tables.sigmas, scheduler.sigmas.numpy(), rtol=0, atol=1e-6)
  step = jax.jit(lambda state, v, k: unipc_step(tables, state, v, k))
  state, wanted = unipc_start(jnp.asarray(initial_noise())), their_path(steps)
  for k in range(steps):
    v = velocity(np.asarray(state.x), float(tables.sigmas[k]))
    state = step(state, jnp.asarray(v, jnp.float32), jnp.int32(k))
    np.testing.assert_allclose(state.x, wanted[k], rtol=0, atol=TOLERANCE)
