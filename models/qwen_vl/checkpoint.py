"""Hugging Face checkpoints of Qwen2.5-VL and Qwen3-VL: key tables, loading, saving.

Both name layouts are read: the hub's, and the one that newer versions of transformers write.
"""

import dataclasses
import json
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from safetensors import SafetensorError, safe_open

from models.qwen_vl.model import QwenVL
from models.qwen_vl.presets import QwenVLConfig, from_json
from models.qwen_vl.sharding import parameter_shardings
from models.weights import TensorKey, Transform, clean_key, parameters, read_tensors, write_tensors


def keys(config: QwenVLConfig, *, nested: bool | None = None) -> tuple[TensorKey, ...]:
  """The key table of a model.

  Args:
    config: the sizes.
    nested: whether names are `model.visual.…` and `model.language_model.…` (Qwen3-VL's on the hub)
      or `visual.…` and `model.…` (Qwen2.5-VL's); the family's own by default.
  """
  nested = config.family == "qwen3" if nested is None else nested
  visual, text = ("model.visual", "model.language_model") if nested else ("visual", "model")
  return (*_visual_keys(config, visual), *_text_keys(config, text))


def load(
  path: str | os.PathLike,
  config: QwenVLConfig | None = None,
  *,
  dtype: Any = None,
  mesh: Mesh | None = None,
) -> QwenVL:
  """A model with the weights of a checkpoint.

  Args:
    path: a `.safetensors` file, or a folder with all of a model's files.
    config: the sizes; read from the folder's `config.json` by default.
    dtype: of the parameters; float32 by default.
    mesh: a mesh with the axes `fsdp` and `seq` to cut the parameters over; each is sent to its
      devices as soon as it is cut, so that no device ever holds the whole.

  Raises:
    ValueError: when the files are damaged or do not fit the sizes.
  """
  path = pathlib.Path(path)
  config = config or _read_config(path)
  kind = jnp.dtype(dtype or jnp.float32)
  model = nnx.eval_shape(lambda: QwenVL(config, rngs=nnx.Rngs(0), param_dtype=kind))
  names = _names(path)
  nested = any(name.startswith(("model.language_model.", "language_model.")) for name in names)
  table = [
    dataclasses.replace(key, official=clean_key(key.official))
    for key in keys(config, nested=nested)
  ]
  arrays = read_tensors(path, table, parameters(model))
  places = parameter_shardings(arrays, mesh) if mesh is not None else None
  variables = dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
  for at, variable in variables.items():
    name = ".".join(map(str, at))
    value = arrays.pop(name)
    placed = jnp.asarray(value) if places is None else jax.device_put(value, places[name])
    variable.set_value(placed)
  return model


def save(path: str | os.PathLike, model: QwenVL, *, dtype: Any = jnp.float32) -> None:
  """Writes one `.safetensors` file under the hub's names.

  Raises:
    ValueError: when a value is not finite in `dtype`.
  """
  write_tensors(path, parameters(model), keys(model.config), dtype)


def _read_config(path: pathlib.Path) -> QwenVLConfig:
  file = path / "config.json"
  if not file.is_file():
    raise ValueError(f"{path} has no config.json; name a checkpoint folder or give the sizes.")
  try:
    return from_json(path.name, json.loads(file.read_text()))
  except json.JSONDecodeError as error:
    raise ValueError(f"{file} cannot be read as JSON ({error}).") from error


def _names(path: pathlib.Path) -> list[str]:
  names: list[str] = []
  for file in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
    try:
      with safe_open(file, framework="numpy") as opened:
        names += opened.keys()
    except (SafetensorError, OSError) as error:
      raise ValueError(f"{file} cannot be read as a safetensors file ({error}).") from error
  return names


def _affine(official: str, path: str, bias: bool) -> list[TensorKey]:
  found = [TensorKey(f"{official}.weight", f"{path}.weight")]
  return [*found, TensorKey(f"{official}.bias", f"{path}.bias")] if bias else found


def _patch_transform(config: QwenVLConfig) -> Transform:
  """The file holds a convolution's kernel; over whole patches it is a linear map."""
  vision = config.vision
  side = (vision.in_channels, vision.temporal_patch, vision.patch_px, vision.patch_px)

  def flat(x: np.ndarray) -> np.ndarray:
    return x.reshape(x.shape[0], -1)

  def cubes(x: np.ndarray) -> np.ndarray:
    return x.reshape(x.shape[0], *side)

  return Transform(flat, cubes)


def _visual_keys(config: QwenVLConfig, root: str) -> list[TensorKey]:
  vision, new = config.vision, config.family == "qwen3"
  found = [
    TensorKey(f"{root}.patch_embed.proj.weight", "visual.patch.weight", _patch_transform(config))
  ]
  if new:
    found.append(TensorKey(f"{root}.patch_embed.proj.bias", "visual.patch.bias"))
    found.append(TensorKey(f"{root}.pos_embed.weight", "visual.table"))
    mlp = (("linear_fc1", "up"), ("linear_fc2", "down"))
    merger = (("norm", "norm"), ("linear_fc1", "fc1"), ("linear_fc2", "fc2"))
  else:
    mlp = (("gate_proj", "gate"), ("up_proj", "up"), ("down_proj", "down"))
    merger = (("ln_q", "norm"), ("mlp.0", "fc1"), ("mlp.2", "fc2"))
  for index in range(vision.depth):
    theirs, ours = f"{root}.blocks.{index}", f"visual.blocks.{index}"
    for norm in ("norm1", "norm2"):
      found += _affine(f"{theirs}.{norm}", f"{ours}.{norm}", new)
    for name in ("qkv", "proj"):
      found += _affine(f"{theirs}.attn.{name}", f"{ours}.attn.{name}", True)
    for name, mine in mlp:
      found += _affine(f"{theirs}.mlp.{name}", f"{ours}.mlp.{mine}", True)
  for name, mine in merger:
    found += _affine(f"{root}.merger.{name}", f"visual.merger.{mine}", new or mine != "norm")
  for level in range(len(vision.deepstack)):
    for name, mine in merger:
      theirs = f"{root}.deepstack_merger_list.{level}.{name}"
      found += _affine(theirs, f"visual.deep.{level}.{mine}", True)
  return found


def _text_keys(config: QwenVLConfig, root: str) -> list[TensorKey]:
  text = config.text
  found = [TensorKey(f"{root}.embed_tokens.weight", "text.embed")]
  for index in range(text.num_layers):
    theirs, ours = f"{root}.layers.{index}", f"text.layers.{index}"
    found += _affine(f"{theirs}.input_layernorm", f"{ours}.norm1", False)
    for name in "qkv":
      found += _affine(f"{theirs}.self_attn.{name}_proj", f"{ours}.{name}", text.qkv_bias)
    found += _affine(f"{theirs}.self_attn.o_proj", f"{ours}.o", False)
    if text.qk_norm:
      for name in ("q_norm", "k_norm"):
        found += _affine(f"{theirs}.self_attn.{name}", f"{ours}.{name}", False)
    found += _affine(f"{theirs}.post_attention_layernorm", f"{ours}.norm2", False)
    for name in ("gate", "up", "down"):
      found += _affine(f"{theirs}.mlp.{name}_proj", f"{ours}.{name}", False)
  found.append(TensorKey(f"{root}.norm.weight", "text.norm.weight"))
  if not text.tied:
    found.append(TensorKey("lm_head.weight", "text.head.weight"))
  return found
