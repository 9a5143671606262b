"""Models from published checkpoints, placed on devices as they are read."""

import os
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from models.checkpoints.families import DIT, UMT5, VAE, Config, Family
from models.checkpoints.identify import choose_part, kind_of, layout_of
from models.checkpoints.load import Progress, load_arrays
from models.checkpoints.opening import open_checkpoint
from models.checkpoints.stored import Checkpoint
from models.wan.dit import CausalWanDiT
from models.wan.presets import DiTConfig
from models.wan.sharding import parameter_shardings
from models.wan.umt5 import UMT5Config, UMT5Encoder
from models.wan.vae import VAEConfig, WanVAE
from models.weights import fill, parameters

Path = str | os.PathLike[str]


def load_dit(
  path: Path,
  config: DiTConfig,
  *,
  part: str | None = None,
  param_dtype: Any = jnp.float32,
  mesh: Mesh | None = None,
  progress: Progress | None = None,
) -> CausalWanDiT:
  """A Wan transformer from official, diffusers, Self-Forcing or LongLive weights.

  Args:
    path: safetensors file, folder of shards or torch file.
    config: its sizes.
    part: which state dictionary of a torch file, such as "generator_ema"; needed where several are
      transformers.
    param_dtype: type to load into.
    mesh: axes `fsdp` and `seq`; each device is given its share straight from the file.
    progress: called with bytes read and bytes in all.

  Raises:
    ValueError: when the file cannot be used, with the reason.
  """
  model = _load(path, DIT, config, part, param_dtype, mesh, progress)
  assert isinstance(model, CausalWanDiT)
  model.mesh = mesh
  return model


def load_vae(
  path: Path,
  config: VAEConfig,
  *,
  param_dtype: Any = jnp.float32,
  mesh: Mesh | None = None,
  progress: Progress | None = None,
) -> WanVAE:
  """A Wan VAE from official or diffusers weights; arguments and errors as `load_dit`."""
  model = _load(path, VAE, config, None, param_dtype, mesh, progress)
  assert isinstance(model, WanVAE)
  return model


def load_umt5(
  path: Path,
  config: UMT5Config,
  *,
  param_dtype: Any = jnp.float32,
  mesh: Mesh | None = None,
  progress: Progress | None = None,
) -> UMT5Encoder:
  """A UMT5 encoder from official or Hugging Face weights; arguments and errors as `load_dit`."""
  model = _load(path, UMT5, config, None, param_dtype, mesh, progress)
  assert isinstance(model, UMT5Encoder)
  return model


def part_of(checkpoint: Checkpoint, family: Family, part: str | None) -> str:
  """The part of a checkpoint that holds a model of that family.

  Raises:
    ValueError: as `choose_part`, and when the part is another kind of model.
  """
  kinds = {name: kind_of(tensors) for name, tensors in checkpoint.parts.items()}
  fitting = [name for name, found in kinds.items() if found and found[0] is family]
  chosen = choose_part(checkpoint, part, family.name, fitting)
  found = kinds[chosen]
  if found is not None and found[0] is not family:
    raise ValueError(f"{checkpoint.path} holds a {found[0].name}, and a {family.name} is needed.")
  if found is None:
    names = list(checkpoint.parts[chosen])
    shown = ", ".join(names[:3]) + (" …" if len(names) > 3 else "")
    raise ValueError(
      f"{checkpoint.path} holds tensors of no known model ({shown}); a {family.name} is needed."
    )
  return chosen


def _load(
  path: Path,
  family: Family,
  config: Config,
  part: str | None,
  param_dtype: Any,
  mesh: Mesh | None,
  progress: Progress | None,
) -> nnx.Module:
  checkpoint = open_checkpoint(path)
  tensors = checkpoint.parts[part_of(checkpoint, family, part)]
  layout = layout_of(tensors, family, config)
  model = family.abstract(config, param_dtype)
  like = parameters(model)
  shardings = None
  if mesh is not None:
    shardings = parameter_shardings(like, mesh)
  arrays = load_arrays(
    checkpoint.path,
    tensors,
    layout.table(config),
    like,
    aliases=layout.aliases,
    shardings=shardings,
    progress=progress,
  )
  fill(model, arrays)
  return model
