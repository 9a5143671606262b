"""A tiny random video model with its autoencoder, for any window and cache rule."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.wan.dit import CausalWanDiT
from models.wan.presets import DiTConfig, SamplerConfig
from models.wan.vae import WanVAE
from models.wan.vae_config import VAEConfig
from sbjax.sampling import models as models_lib
from sbjax.worlds.models import WorldModels
from tests.runtime import tiny

DIT = DiTConfig("tiny", 32, 64, 2, 2, in_dim=4, out_dim=4, text_dim=8, text_len=4)
VAE = VAEConfig(
  "tiny",
  base_dim=4,
  z_dim=4,
  dim_mult=(1, 1),
  temporal_downsample=(True,),
  num_res_blocks=1,
  decoder_extra_res_blocks=0,
)
FRAMES = 7
OLD, NEW = "old", "a newer prompt"


def sampler(**kwargs) -> SamplerConfig:
  sizes = {"window_frames": 4, "cache_frames": 4, "frames_per_chunk": 1} | kwargs
  return SamplerConfig(
    latent_channels=4, latent_height=4, latent_width=4, max_frames=FRAMES, **sizes
  )


def dit() -> CausalWanDiT:
  return _random(lambda: CausalWanDiT(DIT, rngs=nnx.Rngs(0)), seed=0)


def vae() -> WanVAE:
  return _random(lambda: WanVAE(VAE, rngs=nnx.Rngs(0)), seed=1)


def embed(prompts):
  rows = [np.random.default_rng(len(p)).normal(size=(4, 8)) for p in prompts]
  return np.stack(rows).astype(np.float32)


def contexts(model: CausalWanDiT, prompts) -> jax.Array:
  """The prompts after the model's text layers."""
  return jax.jit(model.embed_text)(jnp.asarray(embed(prompts)))


def models(**kwargs) -> models_lib.VideoModels:
  settings = tiny.settings(model__frames=4 * FRAMES - 3)
  made = sampler(**kwargs)
  world = WorldModels(
    dit=dit(),
    conditioning_channels=np.zeros((0, 4, 4), np.float32),
    vae=vae(),
    embed=embed,
    decode=lambda latents: latents,
    heldout=None,
    judging=None,
    parameters={},
    pixel_stride=8,
  )
  return models_lib.build(settings, made, FRAMES // made.frames_per_chunk, world, None)


def latents(frames=FRAMES, seed=3):
  return jnp.asarray(np.random.default_rng(seed).normal(size=(frames, 4, 4, 4)), jnp.float32)


def _random(build: Any, seed: int) -> Any:
  """A module with random weights; drawn by NumPy, for JAX would compile every initialiser."""
  rng = np.random.default_rng(seed)
  graphdef, state = nnx.split(nnx.eval_shape(build))

  def draw(path: Any, leaf: Any) -> jax.Array:
    around = 1.0 if "scale" in str(path[-1]) or "scale" in str(path[-2]) else 0.0
    return jnp.asarray(around + 0.2 * rng.normal(size=leaf.shape), jnp.float32)

  return nnx.merge(graphdef, jax.tree_util.tree_map_with_path(draw, state))
