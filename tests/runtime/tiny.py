"""A tiny real model behind the real runtime: random Wan DiT, a linear decoder, a pixel judge."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from configs import quickstart
from models.wan.dit import CausalWanDiT
from models.wan.presets import DiTConfig, SamplerConfig
from sbjax import config as config_lib
from sbjax.rewards.protocol import PointwiseReward, Verdict
from sbjax.runtime.recipe import make_recipe
from sbjax.runtime.roles import assemble

DIT = DiTConfig("tiny", 32, 64, 2, 2, in_dim=4, out_dim=4, text_dim=8, text_len=4, scan_unroll=2)
SAMPLER = SamplerConfig(
  frames_per_chunk=1,
  cache_frames=3,
  latent_channels=4,
  latent_height=4,
  latent_width=4,
  max_frames=3,
)
COMPONENTS = ("bright", "warm")


def settings(**overrides):
  """Quickstart settings cut down to the tiny model; dotted names override fields."""
  c = quickstart.get_config()
  c.model.frames = 9
  c.lora.rank = 2
  c.rollout.prompts_per_step = 2
  c.rollout.group_size = 3
  c.reward.components = COMPONENTS
  c.reward.weights = (1.0, 0.5)
  c.runtime.executor = "inline"
  c.runtime.plan = "fixed"  # searched plans follow measured times; tests want one placement
  c.optim.learning_rate = 1e-2
  for name, value in overrides.items():
    node = c
    *path, leaf = name.split("__")
    for part in path:
      node = node[part]
    node[leaf] = value
  return config_lib.convert(c)


def recipe_of(run):
  return make_recipe(run, DIT, SAMPLER)


def reward_of(run):
  del run
  return PointwiseReward(COMPONENTS)


class PixelJudge:
  """Brightness and warmth of the frames: cheap, deterministic, different for every video."""

  def judge(self, jobs, videos):
    verdicts = []
    for job in jobs:
      video = np.asarray(videos[job.candidates[0]], np.float64)
      warm = video[..., 0].mean() - video[..., 2].mean()
      verdicts.append(Verdict({"bright": video.mean() / 255.0, "warm": warm / 255.0}))
    return verdicts


def build_roles(run, judges=True, judge=None):
  dit = CausalWanDiT(DIT, rngs=nnx.Rngs(0))
  # The head starts at zero; a model that predicts nothing would hide every error.
  head = 0.3 * jax.random.normal(jax.random.key(7), (DIT.dim, 4 * 4))
  dit.head.kernel[...] = head.astype(jnp.float32)
  mixing = np.random.default_rng(3).normal(size=(4, 3)).astype(np.float32)

  def embed(prompts):
    rows = [np.random.default_rng(len(p)).normal(size=(4, 8)) for p in prompts]
    return np.stack(rows).astype(np.float32)

  def decode(latents):
    pixels = np.einsum("fchw,cd->fhwd", np.asarray(latents), mixing)
    return np.clip(127.5 + 40.0 * pixels, 0, 255).astype(np.uint8)

  return assemble(
    recipe_of(run),
    dit,
    np.zeros((0, 4, 4), np.float32),
    embed=embed,
    decode=decode,
    judge=(judge or PixelJudge()) if judges else None,
    heldout=lambda videos, prompts: {"p": np.full(len(prompts), 0.5)},
    parameters={},
    pixel_stride=1,
  )
