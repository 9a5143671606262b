"""Published Wan weights as a worker needs them, and what their text encoder takes."""

from collections.abc import Callable, Sequence

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from models.wan.presets import DiTConfig, SamplerConfig
from sbjax.settings import SettingsModel
from sbjax.worlds.decoding import frame_decoder
from sbjax.worlds.models import WorldModels
from sbjax.worlds.wan.sizes import NAMES, check, tokenizer_of, wan_sizes
from sbjax.worlds.wan.world import load_world

__all__ = ["NAMES", "acceptance", "check", "load_models", "sizes"]


def sizes(model: SettingsModel) -> tuple[DiTConfig, SamplerConfig]:
  """Sizes of the transformer and its sampler; errors as `wan_sizes`."""
  found = wan_sizes(model)
  return found.dit, found.sampler


def acceptance(model: SettingsModel, overflow: str) -> Callable[[str], None]:
  """Gives the check that a prompt must pass: the text encoder takes its length.

  Args:
    model: the config's section.
    overflow: "refuse" or "truncate" what is too long.
  """
  tokenizer = tokenizer_of(model)
  return tokenizer.accept if overflow == "refuse" else lambda prompt: None


def load_models(
  model: SettingsModel,
  prompts: Callable[[], Sequence[str]],
  overflow: str,
  mesh: Mesh | None,
  timeout_s: float,
) -> WorldModels:
  """Embeds the run's prompts, then loads transformer and decoder; see `load_world`.

  Args:
    model: the config's section.
    prompts: gives the run's prompts.
    overflow: is settled: prompts that are not to be cut were refused before.
    mesh: the worker's devices, where there is more than one.
    timeout_s: how long another process may take that embeds prompts into the same folder.
  """
  del overflow
  world = load_world(model, prompts(), mesh=mesh, timeout_s=timeout_s)
  sampler = world.sampler
  return WorldModels(
    dit=world.dit,
    conditioning_channels=np.zeros((0, sampler.latent_height, sampler.latent_width), np.float32),
    vae=world.vae,
    embed=world.embeddings,
    decode=frame_decoder(world.vae),
    heldout=None,
    judging=None,
    parameters={"decoder": sum(int(p.size) for p in jax.tree.leaves(nnx.state(world.vae)))},
    pixel_stride=world.sizes.vae.spatial_factor,
  )
