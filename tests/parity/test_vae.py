"""The VAE against diffusers' `AutoencoderKLWan`; official key names carry random weights."""

import re

import jax
import numpy as np
import pytest
from flax import nnx

from models.checkpoints.wan import load_vae
from models.wan.vae import WanVAE
from models.wan.vae_config import VAEConfig
from models.wan.vae_keys import vae_keys
from models.weights import fill, parameters, to_ours

torch = pytest.importorskip("torch", reason="needs the extra `parity`")
diffusers = pytest.importorskip("diffusers", reason="needs the extra `parity`")

pytestmark = pytest.mark.parity

TOLERANCE = 1e-4

IN_BLOCKS = {
  "norm1.gamma": "residual.0.gamma",
  "conv1.weight": "residual.2.weight",
  "conv1.bias": "residual.2.bias",
  "norm2.gamma": "residual.3.gamma",
  "conv2.weight": "residual.6.weight",
  "conv2.bias": "residual.6.bias",
  "conv_shortcut.weight": "shortcut.weight",
  "conv_shortcut.bias": "shortcut.bias",
}


def official_name(name: str, decoder_blocks: int) -> str:
  """The name in Wan's own file of a tensor in diffusers' model."""
  if match := re.fullmatch(r"(quant|post_quant)_conv\.(weight|bias)", name):
    return f"{ {'quant': 'conv1', 'post_quant': 'conv2'}[match[1]] }.{match[2]}"
  coder, rest = name.split(".", 1)
  rest = re.sub(r"^conv_in\.", "conv1.", rest)
  rest = re.sub(r"^norm_out\.", "head.0.", rest)
  rest = re.sub(r"^conv_out\.", "head.2.", rest)
  rest = re.sub(r"^mid_block\.attentions\.0\.", "middle.1.", rest)
  rest = re.sub(r"^mid_block\.resnets\.([01])\.", lambda m: f"middle.{2 * int(m[1])}.", rest)
  rest = re.sub(r"^down_blocks\.", "downsamples.", rest)
  per_level = decoder_blocks + 1
  rest = re.sub(
    r"^up_blocks\.(\d+)\.resnets\.(\d+)\.",
    lambda m: f"upsamples.{per_level * int(m[1]) + int(m[2])}.",
    rest,
  )
  rest = re.sub(
    r"^up_blocks\.(\d+)\.upsamplers\.0\.",
    lambda m: f"upsamples.{per_level * int(m[1]) + decoder_blocks}.",
    rest,
  )
  for theirs, official in IN_BLOCKS.items():
    if re.fullmatch(rf"(middle|downsamples|upsamples)\.\d+\.{re.escape(theirs)}", rest):
      rest = rest.removesuffix(theirs) + official
  return f"{coder}.{rest}"


def pair(base_dim: int, dim_mult: tuple[int, ...], blocks: int, z_dim: int, conv_impl: str):
  """diffusers' model and ours with the same weights."""
  torch.manual_seed(base_dim)
  theirs = diffusers.AutoencoderKLWan(
    base_dim=base_dim, z_dim=z_dim, dim_mult=list(dim_mult), num_res_blocks=blocks
  ).eval()
  with torch.no_grad():  # norm scales of one and the like would hide mistakes
    for parameter in theirs.parameters():
      parameter.add_(0.05 * torch.randn_like(parameter))
  config = VAEConfig(
    name="tiny",
    base_dim=base_dim,
    dim_mult=dim_mult,
    num_res_blocks=blocks,
    z_dim=z_dim,
    conv_impl=conv_impl,
  )
  ours = nnx.eval_shape(lambda: WanVAE(config, rngs=nnx.Rngs(0)))
  tensors = [(official_name(n, blocks + 1), t.numpy()) for n, t in theirs.state_dict().items()]
  fill(ours, to_ours("diffusers", tensors, vae_keys(config), parameters(ours)))
  return theirs, ours


@pytest.mark.parametrize(
  ("base_dim", "dim_mult", "blocks", "z_dim", "conv_impl"),
  [
    (8, (1, 2, 4, 4), 2, 16, "taps2d"),
    (4, (1, 3, 6, 6), 1, 8, "taps2d"),
    (4, (1, 2, 4, 4), 1, 16, "conv3d"),
  ],
)
def test_encode_and_decode_match_diffusers(base_dim, dim_mult, blocks, z_dim, conv_impl):
  theirs, ours = pair(base_dim, dim_mult, blocks, z_dim, conv_impl)
  random = np.random.default_rng(base_dim)
  pixels = random.uniform(-1, 1, (2, 9, 3, 24, 32)).astype(np.float32)
  latents = random.normal(size=(2, 3, z_dim, 3, 4)).astype(np.float32)
  with torch.no_grad():
    posterior = theirs.encode(torch.tensor(pixels).transpose(1, 2)).latent_dist
    wanted_pixels = theirs.decode(torch.tensor(latents).transpose(1, 2)).sample.transpose(1, 2)

  mu, logvar = jax.jit(WanVAE.encode)(ours, pixels)
  decoded = jax.jit(lambda m, z: m.decode(z, normalised=False))(ours, latents)

  np.testing.assert_allclose(mu, posterior.mean.transpose(1, 2).numpy(), atol=TOLERANCE)
  np.testing.assert_allclose(logvar, posterior.logvar.transpose(1, 2).numpy(), atol=TOLERANCE)
  np.testing.assert_allclose(decoded, wanted_pixels.numpy(), atol=TOLERANCE)
  assert 0.1 < wanted_pixels.std() < 0.9  # neither black nor clipped throughout


@pytest.fixture(scope="module")
def residual(tmp_path_factory):
  """diffusers' model of Wan2.2's kind, and ours read from its folder."""
  config = VAEConfig(
    name="tiny 2.2",
    base_dim=4,
    decoder_base_dim=6,
    z_dim=6,
    num_res_blocks=2,
    residual=True,
    patch_px=2,
  )
  torch.manual_seed(22)
  theirs = diffusers.AutoencoderKLWan(
    base_dim=config.base_dim,
    decoder_base_dim=config.decoder_base_dim,
    z_dim=config.z_dim,
    latents_mean=[0.0] * config.z_dim,
    latents_std=[1.0] * config.z_dim,
    is_residual=True,
    in_channels=config.pixel_channels,
    out_channels=config.pixel_channels,
    patch_size=config.patch_px,
    scale_factor_spatial=config.spatial_factor,
  ).eval()
  with torch.no_grad():
    for parameter in theirs.parameters():
      parameter.add_(0.05 * torch.randn_like(parameter))
  folder = tmp_path_factory.mktemp("vae22")
  theirs.save_pretrained(folder)
  return theirs, load_vae(folder, config)


def test_residual_encode_matches_diffusers(residual):
  theirs, ours = residual
  pixels = np.random.default_rng(1).uniform(-1, 1, (2, 9, 3, 32, 48)).astype(np.float32)
  with torch.no_grad():
    posterior = theirs.encode(torch.tensor(pixels).transpose(1, 2)).latent_dist
  mu, logvar = jax.jit(WanVAE.encode)(ours, pixels)
  assert posterior.mean.std() > 0.05
  np.testing.assert_allclose(mu, posterior.mean.transpose(1, 2).numpy(), atol=TOLERANCE)
  np.testing.assert_allclose(logvar, posterior.logvar.transpose(1, 2).numpy(), atol=TOLERANCE)


def test_residual_decode_whole_and_streamed_match_diffusers(residual):
  theirs, ours = residual
  latents = np.random.default_rng(2).normal(size=(2, 4, 6, 2, 3)).astype(np.float32)
  with torch.no_grad():
    wanted = theirs.decode(torch.tensor(latents).transpose(1, 2)).sample.transpose(1, 2).numpy()
  assert wanted.shape == (2, 13, 3, 32, 48)
  assert 0.1 < wanted.std() < 0.9
  whole = jax.jit(lambda m, z: m.decode(z, normalised=False))(ours, latents)
  np.testing.assert_allclose(whole, wanted, atol=TOLERANCE)
  first, cache = jax.jit(lambda m, z, c: m.decode_first(z, c, normalised=False))(
    ours, latents[:, :1], ours.init_decoder_cache(2, 2, 3)
  )
  rest, _ = jax.jit(lambda m, z, c: m.decode_next(z, c, normalised=False))(
    ours, latents[:, 1:], cache
  )
  streamed = np.concatenate([first, rest], axis=1)
  np.testing.assert_allclose(streamed, wanted, atol=TOLERANCE)
