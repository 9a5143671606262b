"""CLIP checkpoints: open_clip's key names, which HPS v2.1 has too, and transformers'."""

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.checkpoints.opening import open_checkpoint
from models.clip.folder import config_of, weights_of
from models.clip.model import CLIP
from models.clip.presets import CLIPConfig
from models.weights import (
  TRANSPOSE,
  TensorKey,
  Transform,
  fill,
  load_safetensors,
  parameters,
  to_ours,
)


def keys(config: CLIPConfig) -> tuple[TensorKey, ...]:
  """The key table of a model."""
  side = config.patch_px

  def flat(x: np.ndarray) -> np.ndarray:
    return x.reshape(x.shape[0], -1)

  def squares(x: np.ndarray) -> np.ndarray:
    return x.reshape(x.shape[0], 3, side, side)

  found = [
    TensorKey("logit_scale", "logit_scale"),
    TensorKey("visual.conv1.weight", "visual.patch.weight", Transform(flat, squares)),
    TensorKey("visual.class_embedding", "visual.class_token"),
    TensorKey("visual.positional_embedding", "visual.table"),
    *_pair("visual.ln_pre", "visual.norm_in"),
    *_pair("visual.ln_post", "visual.norm_out"),
    TensorKey("visual.proj", "visual.project.weight", TRANSPOSE),
    TensorKey("token_embedding.weight", "text.embed"),
    TensorKey("positional_embedding", "text.table"),
    *_pair("ln_final", "text.norm_out"),
    TensorKey("text_projection", "text.project.weight", TRANSPOSE),
  ]
  for theirs, ours, layers in (
    ("visual.transformer", "visual", config.vision_layers),
    ("transformer", "text", config.text_layers),
  ):
    for index in range(layers):
      found += _block(f"{theirs}.resblocks.{index}", f"{ours}.blocks.{index}")
  return tuple(found)


def load(path: str | os.PathLike, config: CLIPConfig, *, dtype: Any = jnp.float32) -> CLIP:
  """A model with the weights of a `.safetensors` file.

  Raises:
    ValueError: when the file is damaged or does not fit the sizes.
  """
  model = nnx.eval_shape(lambda: CLIP(config, rngs=nnx.Rngs(0), param_dtype=dtype))
  return load_safetensors(path, model, keys(config))


def load_folder(folder: str | os.PathLike, *, dtype: Any = jnp.float32) -> CLIP:
  """A model from a folder in either layout; nothing in its files is executed.

  Raises:
    ValueError: as `config_of` and `weights_of`, or weights that are damaged or do not fit.
  """
  config, file = config_of(folder), weights_of(folder)
  model = nnx.eval_shape(lambda: CLIP(config, rngs=nnx.Rngs(0), param_dtype=dtype))
  opened = open_checkpoint(file)
  for name in ("", "state_dict"):  # HPS's file has the optimizer's state beside it
    if name in opened.parts:
      part = opened.parts[name]
      break
  else:
    raise ValueError(f"{file} has no state_dict; its parts are {', '.join(opened.parts)}.")
  tensors = {key.removeprefix("module."): tensor.view() for key, tensor in part.items()}
  if "text_model.final_layer_norm.weight" in tensors:
    tensors = dict(_as_open_clip(tensors))
  fill(model, to_ours(str(file), tensors.items(), keys(config), parameters(model)))
  return model


def _as_open_clip(tensors: Mapping[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
  """Tensors of transformers' `CLIPModel` under open_clip's names; unknown names stay."""
  plain = {
    "vision_model.embeddings.class_embedding": "visual.class_embedding",
    "vision_model.embeddings.patch_embedding.weight": "visual.conv1.weight",
    "vision_model.embeddings.position_embedding.weight": "visual.positional_embedding",
    "text_model.embeddings.token_embedding.weight": "token_embedding.weight",
    "text_model.embeddings.position_embedding.weight": "positional_embedding",
  }
  turned = {"visual_projection.weight": "visual.proj", "text_projection.weight": "text_projection"}
  renamed = (
    (r"vision_model\.pre_layrnorm", "visual.ln_pre"),
    (r"vision_model\.post_layernorm", "visual.ln_post"),
    (r"text_model\.final_layer_norm", "ln_final"),
    (r"vision_model\.encoder\.layers", "visual.transformer.resblocks"),
    (r"text_model\.encoder\.layers", "transformer.resblocks"),
    (r"layer_norm(\d)", r"ln_\1"),
    (r"self_attn\.out_proj", "attn.out_proj"),
    (r"mlp\.fc1", "mlp.c_fc"),
    (r"mlp\.fc2", "mlp.c_proj"),
  )

  def new(name: str) -> str:
    for pattern, into in renamed:
      name = re.sub(pattern, into, name)
    return name

  for name, tensor in tensors.items():
    if name.endswith(".position_ids"):
      continue  # a constant that older files hold
    if name in plain:
      yield plain[name], tensor
    elif name in turned:
      yield turned[name], tensor.T
    elif ".q_proj." in name:
      parts = [tensors.get(name.replace(".q_proj.", f".{x}_proj.")) for x in "qkv"]
      found = [part for part in parts if part is not None]
      root, kind = name.rsplit(".self_attn.q_proj.", 1)
      yield f"{new(root)}.attn.in_proj_{kind}", np.concatenate(found)
    elif ".k_proj." not in name and ".v_proj." not in name:
      yield new(name), tensor


def _pair(theirs: str, ours: str) -> list[TensorKey]:
  return [TensorKey(f"{theirs}.{name}", f"{ours}.{name}") for name in ("weight", "bias")]


def _block(theirs: str, ours: str) -> list[TensorKey]:
  return [
    *_pair(f"{theirs}.ln_1", f"{ours}.norm1"),
    *_pair(f"{theirs}.ln_2", f"{ours}.norm2"),
    TensorKey(f"{theirs}.attn.in_proj_weight", f"{ours}.qkv.weight"),
    TensorKey(f"{theirs}.attn.in_proj_bias", f"{ours}.qkv.bias"),
    *_pair(f"{theirs}.attn.out_proj", f"{ours}.out"),
    *_pair(f"{theirs}.mlp.c_fc", f"{ours}.up"),
    *_pair(f"{theirs}.mlp.c_proj", f"{ours}.down"),
  ]
