"""The vision towers: patches of slices to features of tokens.

Every temporal slice is an item of the batch, since slices never attend to each other; all slices of
a call have the same size. Windows need no reordering of the stream: rows are gathered into windows
for attention only.

Source: Qwen2.5-VL and Qwen3-VL as Hugging Face computes them; the parity tests compare.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from models.layers.dense import Dense, Norm, Tree, dense
from models.layers.norms import layer_norm, rms_norm
from models.qwen_vl.positions import patch_angles, table_corners, windows
from models.qwen_vl.presets import VisionConfig


class Features(NamedTuple):
  """What a tower gives.

  Attributes:
    tokens: `[slices, tokens, out_dim]`, which replace the placeholders' embeddings.
    deep: `[levels, slices, tokens, out_dim]`, which are added after the first decoder layers, level
      by level; no levels for Qwen2.5.
  """

  tokens: Float[Array, "slices tokens out"]
  deep: Float[Array, "levels slices tokens out"]


class Attention(nnx.Module):
  """Parameters of a block's attention."""

  def __init__(self, config: VisionConfig, **made: Any):
    self.qkv = Dense(config.dim, 3 * config.dim, bias=True, **made)
    self.proj = Dense(config.dim, config.dim, bias=True, **made)


class FeedForward(nnx.Module):
  """Parameters of a block's feed-forward layer, gated for Qwen2.5."""

  def __init__(self, config: VisionConfig, **made: Any):
    if config.family == "qwen2.5":
      self.gate = Dense(config.dim, config.ffn_dim, bias=True, **made)
    self.up = Dense(config.dim, config.ffn_dim, bias=True, **made)
    self.down = Dense(config.ffn_dim, config.dim, bias=True, **made)


class Block(nnx.Module):
  """Parameters of a block."""

  def __init__(self, config: VisionConfig, *, rngs: nnx.Rngs, param_dtype: Any):
    norm = {"bias": config.family == "qwen3", "param_dtype": param_dtype}
    self.norm1 = Norm(config.dim, **norm)
    self.attn = Attention(config, rngs=rngs, param_dtype=param_dtype)
    self.norm2 = Norm(config.dim, **norm)
    self.mlp = FeedForward(config, rngs=rngs, param_dtype=param_dtype)


class Merger(nnx.Module):
  """Parameters that make one token of `merge` × `merge` patches.

  A deepstack merger norms the joined patches, the last one each patch by itself.
  """

  def __init__(self, config: VisionConfig, *, deep: bool = False, rngs: nnx.Rngs, param_dtype: Any):
    joined = config.dim * config.merge**2
    bias = config.family == "qwen3"
    self.norm = Norm(joined if deep else config.dim, bias=bias, param_dtype=param_dtype)
    self.fc1 = Dense(joined, joined, bias=True, rngs=rngs, param_dtype=param_dtype)
    self.fc2 = Dense(joined, config.out_dim, bias=True, rngs=rngs, param_dtype=param_dtype)


class VisionTower(nnx.Module):
  """Parameters of a tower.

  Args:
    config: the sizes.
    rngs: the stream `params` draws the weights.
    param_dtype: of the weights, and of the computation but for norms, rotation and softmax.
  """

  def __init__(self, config: VisionConfig, *, rngs: nnx.Rngs, param_dtype: Any = jnp.float32):
    made = {"rngs": rngs, "param_dtype": param_dtype}
    self.patch = Dense(config.patch_width, config.dim, bias=config.family == "qwen3", **made)
    if config.family == "qwen3":
      drawn = jax.random.normal(rngs.params(), (config.table_side**2, config.dim), jnp.float32)
      self.table = nnx.Param((0.02 * drawn).astype(param_dtype))
    self.blocks = nnx.List([Block(config, **made) for _ in range(config.depth)])
    self.merger = Merger(config, **made)
    if config.deepstack:
      self.deep = nnx.List([Merger(config, deep=True, **made) for _ in config.deepstack])


def encode_slices(
  p: Tree,
  config: VisionConfig,
  patches: Float[Array, "slices patches width"],
  height: int,
  width: int,
) -> Features:
  """Features of slices of `height` × `width` patches.

  Args:
    p: the tower's parameters (`tree_of`).
    config: the sizes.
    patches: flat patches in merge-block order, numbers in the order channel, frame, row, column.
    height: rows of patches.
    width: columns of patches.

  Raises:
    ValueError: when `patches` has another shape than the sizes ask for.
  """
  wanted = (patches.shape[0], height * width, config.patch_width)
  if patches.shape != wanted:
    raise ValueError(f"patches has shape {patches.shape}; a {height}x{width} slice needs {wanted}.")
  x = dense(p["patch"], patches.astype(p["patch"]["weight"].dtype))
  if config.family == "qwen3":
    corners, weights = table_corners(config, height, width)
    rows = p["table"].astype(jnp.float32)[corners]
    x = x + jnp.sum(rows * weights[:, :, None], axis=0).astype(x.dtype)[None]
  angles = patch_angles(config, height, width)
  cos, sin = jnp.asarray(jnp.cos(angles)), jnp.asarray(jnp.sin(angles))
  levels = []
  for index in range(config.depth):
    block = p["blocks"][index]
    windowed = config.family == "qwen2.5" and index not in config.full_blocks
    view = windows(config, height, width) if windowed else None
    x = x + _attention(block["attn"], config, _norm(block["norm1"], config, x), cos, sin, view)
    x = x + _feed_forward(block["mlp"], config, _norm(block["norm2"], config, x))
    if index in config.deepstack:
      merger = p["deep"][config.deepstack.index(index)]
      levels.append(_merge(merger, config, x, deep=True))
  tokens = _merge(p["merger"], config, x, deep=False)
  deep = jnp.stack(levels) if levels else jnp.zeros((0, *tokens.shape), tokens.dtype)
  return Features(tokens, deep)


def _norm(p: Tree, config: VisionConfig, x: Array) -> Array:
  if "bias" in p:
    return layer_norm(x, config.eps, p["weight"], p["bias"])
  return rms_norm(x, p["weight"], config.eps)


def _rotate(x: Array, cos: Array, sin: Array) -> Array:
  """Turns the pairs (j, j + half) of a head by each patch's angles, in float32."""
  low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1).astype(x.dtype)


def _attention(p: Tree, config: VisionConfig, x: Array, cos: Array, sin: Array, view: Any) -> Array:
  slices, patches, _ = x.shape
  qkv = dense(p["qkv"], x).reshape(slices, patches, 3, config.num_heads, config.head_dim)
  q, k, v = qkv.transpose(2, 0, 3, 1, 4)  # [slices, heads, patches, head_dim] each
  q, k = (_rotate(a, cos[None, None], sin[None, None]) for a in (q, k))
  if view is None:
    mixed = _attend(q, k, v, None)
  else:
    # [slices, heads, windows, size, head_dim]; empty places hold patch 0, which nobody attends to.
    q, k, v = (a[:, :, view.members] for a in (q, k, v))
    mixed = _attend(q, k, v, jnp.asarray(view.filled)[None, None, :, None])
    mixed = mixed.reshape(slices, config.num_heads, -1, config.head_dim)[:, :, view.place]
  return dense(p["proj"], mixed.transpose(0, 2, 1, 3).reshape(slices, patches, config.dim))


def _attend(q: Array, k: Array, v: Array, attended: Bool[Array, "..."] | None) -> Array:
  scores = jnp.einsum("...qd,...kd->...qk", q, k, preferred_element_type=jnp.float32)
  scores = scores * q.shape[-1] ** -0.5
  if attended is not None:
    scores = jnp.where(attended, scores, -jnp.inf)
  weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
  return jnp.einsum("...qk,...kd->...qd", weights, v)


def _feed_forward(p: Tree, config: VisionConfig, x: Array) -> Array:
  if config.family == "qwen2.5":
    return dense(p["down"], jax.nn.silu(dense(p["gate"], x)) * dense(p["up"], x))
  return dense(p["down"], jax.nn.gelu(dense(p["up"], x), approximate=True))


def _merge(p: Tree, config: VisionConfig, x: Array, *, deep: bool) -> Array:
  shape = (x.shape[0], x.shape[1] // config.merge**2, -1)
  x = _norm(p["norm"], config, x.reshape(shape)) if deep else _norm(p["norm"], config, x)
  x = jax.nn.gelu(dense(p["fc1"], x.reshape(shape)), approximate=False)
  return dense(p["fc2"], x)
