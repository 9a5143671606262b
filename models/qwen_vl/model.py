"""The whole model: its parameters, and one forward pass over sequences with visuals in them."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from models.layers.dense import Tree
from models.qwen_vl.cache import causal_mix
from models.qwen_vl.presets import QwenVLConfig
from models.qwen_vl.text import TextDecoder, decode, embed_tokens, logits
from models.qwen_vl.vision import VisionTower


class QwenVL(nnx.Module):
  """Parameters of a model: `visual` and `text`.

  Args:
    config: the sizes.
    rngs: the stream `params` draws the weights.
    param_dtype: of the weights, and of the computation but for norms, rotation and softmax.
  """

  def __init__(self, config: QwenVLConfig, *, rngs: nnx.Rngs, param_dtype: Any = jnp.float32):
    self.config = config
    self.visual = VisionTower(config.vision, rngs=rngs, param_dtype=param_dtype)
    self.text = TextDecoder(config.text, rngs=rngs, param_dtype=param_dtype)


def forward(
  p: Tree,
  config: QwenVLConfig,
  ids: Int[Array, "batch tokens"],
  positions: Int[Array, "batch 3 tokens"],
  features: Float[Array, "rows dim"] | None = None,
  visual_rows: Int[Array, "batch tokens"] | None = None,
  deep: Float[Array, "levels rows dim"] | None = None,
  attended: Bool[Array, "batch tokens"] | None = None,
) -> Float[Array, "batch tokens vocab"]:
  """Logits of every token, differentiable by parameters and features.

  Args:
    p: the parameters (`tree_of`).
    config: the sizes.
    ids: token ids, placeholders included.
    positions: `positions.place` of each sequence.
    features: visual features, those of the whole batch one after the other.
    visual_rows: which row of `features` stands for each token; -1 for text.
    deep: deepstack features by level, rows as in `features`.
    attended: which tokens are real; None where padding stands at the end or there is none.
  """
  x = embed_tokens(p["text"], ids)
  levels = None
  if features is not None and visual_rows is not None:
    x, levels = insert_features(x, features, visual_rows, deep)
  hidden = decode(p["text"], config.text, x, positions, causal_mix(attended), levels)
  return logits(p["text"], config.text, hidden)


def insert_features(
  x: Float[Array, "batch tokens dim"],
  features: Float[Array, "rows dim"],
  visual_rows: Int[Array, "batch tokens"],
  deep: Float[Array, "levels rows dim"] | None,
) -> tuple[Float[Array, "batch tokens dim"], Float[Array, "levels batch tokens dim"] | None]:
  """Embeddings with features in the places of visual tokens, and the deepstack levels, spread."""
  is_visual = (visual_rows >= 0)[:, :, None]
  rows = jnp.maximum(visual_rows, 0)
  x = jnp.where(is_visual, features[rows].astype(x.dtype), x)
  if deep is None or deep.shape[0] == 0:
    return x, None
  return x, jnp.where(is_visual[None], deep[:, rows], jnp.zeros((), deep.dtype))
