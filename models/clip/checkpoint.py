"""open_clip's key names, which HPS v2.1 has too."""

import os
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.clip.model import CLIP
from models.clip.presets import CLIPConfig
from models.weights import TRANSPOSE, TensorKey, Transform, load_safetensors


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
