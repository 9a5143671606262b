"""The models whose checkpoints are known: for each its layouts, its sizes and how it is built."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models.wan import umt5, vae_config
from models.wan.diffusers_keys import DIT_DIFFUSERS_KEYS, vae_diffusers_keys
from models.wan.dit import CausalWanDiT
from models.wan.presets import PRESETS
from models.wan.umt5_keys import UMT5_HF_ALIASES, UMT5_HF_KEYS, UMT5_KEYS
from models.wan.vae import WanVAE
from models.wan.vae_keys import vae_keys
from models.wan.weights import DIT_KEYS
from models.weights import TensorKey, parameters

Config = Any
Table = tuple[TensorKey, ...]


@dataclasses.dataclass(frozen=True)
class Layout:
  """One way to name a model's tensors in a file.

  Attributes:
    name: what commands call it.
    table: from a configuration to the key table.
    aliases: names that stand for others, see `models.checkpoints.fit`.
  """

  name: str
  table: Callable[[Config], Table]
  aliases: Mapping[str, str]


@dataclasses.dataclass(frozen=True, eq=False)
class Family:
  """A kind of model.

  Attributes:
    name: what commands and messages call it.
    layouts: its layouts, the official one first.
    presets: its published sizes.
    build: makes the model from configuration, random streams and type of the parameters.
  """

  name: str
  layouts: tuple[Layout, ...]
  presets: Mapping[str, Config]
  build: Callable[[Config, nnx.Rngs, Any], nnx.Module]

  def layout(self, name: str) -> Layout:
    """The layout of that name.

    Raises:
      ValueError: for an unknown one.
    """
    for layout in self.layouts:
      if layout.name == name:
        return layout
    known = ", ".join(repr(layout.name) for layout in self.layouts)
    raise ValueError(f"layout is {name!r}; a {self.name} has {known}.")

  def abstract(self, config: Config, param_dtype: Any = jnp.float32) -> nnx.Module:
    """The model with shapes in place of parameters."""
    return nnx.eval_shape(lambda: self.build(config, nnx.Rngs(0), param_dtype))

  def like(self, config: Config, param_dtype: Any = jnp.float32) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and types of the parameters by path."""
    return _like(self, config, jnp.dtype(param_dtype))


@functools.cache
def _like(family: Family, config: Config, dtype: Any) -> dict[str, jax.ShapeDtypeStruct]:
  return parameters(family.abstract(config, dtype))


def _build_dit(config: Config, rngs: nnx.Rngs, param_dtype: Any) -> nnx.Module:
  return CausalWanDiT(config, rngs=rngs, param_dtype=param_dtype)


def _build_vae(config: Config, rngs: nnx.Rngs, param_dtype: Any) -> nnx.Module:
  return WanVAE(config, rngs=rngs, param_dtype=param_dtype)


def _build_umt5(config: Config, rngs: nnx.Rngs, param_dtype: Any) -> nnx.Module:
  return umt5.UMT5Encoder(config, rngs=rngs, param_dtype=param_dtype)


DIT = Family(
  "Wan transformer",
  (
    Layout("official", lambda config: DIT_KEYS, {}),
    Layout("diffusers", lambda config: DIT_DIFFUSERS_KEYS, {}),
  ),
  {name: dit for name, (dit, _) in PRESETS.items()},
  _build_dit,
)
VAE = Family(
  "Wan VAE",
  (Layout("official", vae_keys, {}), Layout("diffusers", vae_diffusers_keys, {})),
  vae_config.PRESETS,
  _build_vae,
)
UMT5 = Family(
  "UMT5 encoder",
  (
    Layout("official", lambda config: UMT5_KEYS, {}),
    Layout("huggingface", lambda config: UMT5_HF_KEYS, UMT5_HF_ALIASES),
  ),
  umt5.PRESETS,
  _build_umt5,
)
FAMILIES = (DIT, VAE, UMT5)
