"""Models from published checkpoints, placed on devices as they are read."""

import os
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from models.checkpoints.families import DIT, UMT5, VAE, Config, Family, Layout
from models.checkpoints.identify import choose_part, kind_of, quantised
from models.checkpoints.load import Progress, load_arrays
from models.checkpoints.opening import open_checkpoint
from models.checkpoints.stored import Checkpoint, StateDict
from models.wan.dit import CausalWanDiT
from models.wan.presets import DiTConfig
from models.wan.sharding import parameter_shardings
from models.wan.umt5 import UMT5Config, UMT5Encoder
from models.wan.vae import VAEConfig, WanVAE
from models.weights import fill

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


def find_weights(
  checkpoint: Checkpoint, part: str | None, family: Family | None = None
) -> tuple[StateDict, Family, Layout]:
  """The tensors of a checkpoint that are a model's weights, what model, and how they are named.

  Args:
    checkpoint: where they are looked for.
    part: the state dictionary, or None for the only one that is meant.
    family: the model that is needed; None for any.

  Raises:
    ValueError: as `choose_part`, and when the part is another kind of model or the weights are
      quantised.
  """
  for tensors in checkpoint.parts.values():
    refused = quantised(tensors)
    if refused is not None:
      raise ValueError(f"{checkpoint.path} holds {refused}.")
  kinds = {name: kind_of(tensors) for name, tensors in checkpoint.parts.items()}
  fitting = [n for n, kind in kinds.items() if kind and family in (None, kind[0])]
  wanted = "known model" if family is None else family.name
  chosen = choose_part(checkpoint, part, wanted, fitting)
  kind, tensors = kinds[chosen], checkpoint.parts[chosen]
  if kind is None:
    shown = ", ".join(list(tensors)[:3]) + (" …" if len(tensors) > 3 else "")
    raise ValueError(
      f"{checkpoint.path} holds tensors of no known model ({shown}); a {wanted} is needed."
    )
  if family not in (None, kind[0]):
    raise ValueError(f"{checkpoint.path} holds a {kind[0].name}, and a {wanted} is needed.")
  return tensors, *kind


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
  tensors, _, layout = find_weights(checkpoint, part, family)
  dtype = jnp.dtype(param_dtype)
  like = family.like(config, dtype)
  shardings: Any = None if mesh is None else parameter_shardings(like, mesh)
  arrays = load_arrays(
    checkpoint.path,
    tensors,
    layout.table(config),
    like,
    aliases=layout.aliases,
    shardings=shardings,
    progress=progress,
  )
  model = family.abstract(config, dtype)
  fill(model, arrays)
  return model
