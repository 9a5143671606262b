"""Wan2.2's autoencoder and sampler against diffusers', which also gave the recorded values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.checkpoints.wan import load_dit
from models.wan.diffusers_keys import vae_diffusers_keys
from models.wan.presets import DiTConfig, SamplerConfig
from models.wan.unipc import unipc_start, unipc_step, unipc_tables
from models.wan.vae import WanVAE
from models.weights import parameters, to_official
from sbjax.policy import WanPolicy
from sbjax.randomness import Purpose, draw_key
from sbjax.sampling.models import unipc_generate
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
# The 5B model's layout and its sampler's rules, at a tiny size.
DIT = DiTConfig("tiny", 48, 96, 2, 2, in_dim=8, out_dim=8, text_dim=16, text_len=6, freq_dim=32)
SAMPLER = SamplerConfig(
  frames_per_chunk=2,
  window_frames=6,
  sink_frames=2,
  cache_frames=6,
  cache_rule="multi_shot",
  shot_offset_frames=8,
  unipc_steps=4,
  latent_channels=8,
  latent_height=4,
  latent_width=4,
  max_frames=6,
)


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


def test_chunks_of_unipc_are_diffusers_block_causal_forward(tmp_path):
  """LongLive 2.0's loop without a cut: each chunk from noise, the finished ones before it at t = 0.

  diffusers has no cache: its forward over all frames so far, each chunk seeing those before it, and
  its scheduler give what our cached chunks must be.
  """
  torch.manual_seed(5)
  theirs = diffusers.SkyReelsV2Transformer3DModel(
    num_attention_heads=DIT.num_heads,
    attention_head_dim=DIT.head_dim,
    in_channels=DIT.in_dim,
    out_channels=DIT.out_dim,
    text_dim=DIT.text_dim,
    freq_dim=DIT.freq_dim,
    ffn_dim=DIT.ffn_dim,
    num_layers=DIT.num_layers,
    cross_attn_norm=True,
    qk_norm="rms_norm_across_heads",
    num_frame_per_block=SAMPLER.frames_per_chunk,
  ).eval()
  with torch.no_grad():
    for parameter in theirs.parameters():
      parameter.add_(0.05 * torch.randn_like(parameter))
  theirs.save_pretrained(tmp_path)
  graphdef, frozen = nnx.split(load_dit(tmp_path, DIT))
  policy = WanPolicy(graphdef, DIT, SAMPLER, 1.0)
  text = np.random.default_rng(3).standard_normal((6, 16)).astype(np.float32)
  conditioning = policy.condition(frozen, jnp.asarray(text), jnp.zeros((0, 4, 4)))
  generate, cache, seed = unipc_generate(policy), policy.init_cache(), jnp.uint32(7)
  frames = SAMPLER.frames_per_chunk
  finished = torch.zeros((1, DIT.in_dim, 0, 4, 4))
  for chunk in range(3):
    start = jnp.int32(chunk * frames)
    ours, cache = generate({}, frozen, cache, conditioning, jnp.int32(chunk), start, seed)
    noise = jax.random.normal(
      draw_key(seed, jnp.int32(chunk), 0, Purpose.INITIAL), ours.shape, jnp.float32
    )
    x = torch.tensor(np.array(noise)).transpose(0, 1)[None]
    scheduler = their_scheduler(4)
    for timestep in scheduler.timesteps:
      times = torch.zeros((1, finished.shape[2] + frames))
      times[:, -frames:] = timestep
      with torch.no_grad():
        velocity = theirs(
          torch.cat([finished, x], dim=2),
          times,
          torch.tensor(text[None]),
          enable_diffusion_forcing=True,
          return_dict=False,
        )[0][:, :, -frames:]
      x = scheduler.step(velocity, timestep, x).prev_sample
    finished = torch.cat([finished, x], dim=2)
    assert x.std() > 0.3
    np.testing.assert_allclose(ours, x[0].transpose(0, 1).numpy(), rtol=0, atol=TOLERANCE)
