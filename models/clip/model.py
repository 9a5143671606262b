"""CLIP's two towers and their score, the cosine between image and text.

Pre-norm transformer blocks. An image is its class token's row, a text the row of
its end token, each normed, projected and scaled to length one.

Source: open_clip's ViT models, and HPS v2.1, which is one of them; the parity tests compare.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from models.clip.presets import CLIPConfig
from models.layers.dense import Dense, Norm, Tree, dense
from models.layers.norms import layer_norm


class Block(nnx.Module):
  """Parameters of a block."""

  def __init__(self, dim: int, ffn_dim: int, **made: Any):
    kind = made["param_dtype"]
    self.norm1 = Norm(dim, bias=True, param_dtype=kind)
    self.qkv = Dense(dim, 3 * dim, bias=True, **made)
    self.out = Dense(dim, dim, bias=True, **made)
    self.norm2 = Norm(dim, bias=True, param_dtype=kind)
    self.up = Dense(dim, ffn_dim, bias=True, **made)
    self.down = Dense(ffn_dim, dim, bias=True, **made)


class ImageTower(nnx.Module):
  """Parameters of the image tower."""

  def __init__(self, config: CLIPConfig, **made: Any):
    dim, kind = config.vision_dim, made["param_dtype"]
    rngs = made["rngs"]
    self.patch = Dense(3 * config.patch_px**2, dim, **made)
    self.class_token = nnx.Param(_normal(rngs, (dim,), dim, kind))
    self.table = nnx.Param(_normal(rngs, (config.patches + 1, dim), dim, kind))
    self.norm_in = Norm(dim, bias=True, param_dtype=kind)
    self.blocks = nnx.List(
      [Block(dim, config.vision_ffn_dim, **made) for _ in range(config.vision_layers)]
    )
    self.norm_out = Norm(dim, bias=True, param_dtype=kind)
    self.project = Dense(dim, config.out_dim, **made)


class TextTower(nnx.Module):
  """Parameters of the text tower."""

  def __init__(self, config: CLIPConfig, **made: Any):
    dim, kind = config.text_dim, made["param_dtype"]
    rngs = made["rngs"]
    self.embed = nnx.Param(_normal(rngs, (config.vocab_size, dim), dim, kind))
    self.table = nnx.Param(_normal(rngs, (config.context, dim), dim, kind))
    self.blocks = nnx.List(
      [Block(dim, config.text_ffn_dim, **made) for _ in range(config.text_layers)]
    )
    self.norm_out = Norm(dim, bias=True, param_dtype=kind)
    self.project = Dense(dim, config.out_dim, **made)


class CLIP(nnx.Module):
  """Parameters of a model: `visual`, `text`, and the scale that its training used.

  Args:
    config: the sizes.
    rngs: the stream `params` draws the weights.
    param_dtype: of the weights, and of the computation but for norms and softmax.
  """

  def __init__(self, config: CLIPConfig, *, rngs: nnx.Rngs, param_dtype: Any = jnp.float32):
    made = {"rngs": rngs, "param_dtype": param_dtype}
    self.config = config
    self.visual = ImageTower(config, **made)
    self.text = TextTower(config, **made)
    self.logit_scale = nnx.Param(jnp.zeros((), param_dtype))


def encode_images(
  p: Tree, config: CLIPConfig, images: Float[Array, "batch 3 side side"]
) -> Float[Array, "batch out"]:
  """Unit vectors of normalised images (`models.clip.preprocess`)."""
  p = p["visual"]
  kind = p["class_token"].dtype
  count, side, patch = images.shape[0], config.image_px // config.patch_px, config.patch_px
  cut = images.astype(kind).reshape(count, 3, side, patch, side, patch)
  flat = cut.transpose(0, 2, 4, 1, 3, 5).reshape(count, side * side, -1)
  first = jnp.broadcast_to(p["class_token"][None, None], (count, 1, config.vision_dim))
  x = jnp.concatenate([first, dense(p["patch"], flat)], axis=1) + p["table"][None]
  x = _norm(p["norm_in"], config, x)
  x = _blocks(p["blocks"], config, x, config.vision_heads, config.vision_layers, None)
  return _unit(dense(p["project"], _norm(p["norm_out"], config, x[:, 0])))


def encode_texts(
  p: Tree, config: CLIPConfig, ids: Int[Array, "batch context"]
) -> Float[Array, "batch out"]:
  """Unit vectors of texts; the end token is the one with the largest id."""
  p = p["text"]
  tokens = ids.shape[1]
  x = p["embed"][ids] + p["table"][None, :tokens]
  causal = jnp.tril(jnp.ones((tokens, tokens), bool))
  x = _blocks(p["blocks"], config, x, config.text_heads, config.text_layers, causal)
  x = _norm(p["norm_out"], config, x)
  end = jnp.argmax(ids, axis=-1)
  last = jnp.take_along_axis(x, end[:, None, None], axis=1)[:, 0]
  return _unit(dense(p["project"], last))


def score(
  images: Float[Array, "batch out"], texts: Float[Array, "batch out"]
) -> Float[Array, " batch"]:
  """Cosine of each pair of unit vectors."""
  return jnp.sum(images * texts, axis=-1)


def _blocks(
  blocks: Any, config: CLIPConfig, x: Array, heads: int, layers: int, attended: Array | None
) -> Array:
  for index in range(layers):
    p = blocks[index]
    x = x + _attention(p, _norm(p["norm1"], config, x), heads, attended)
    h = dense(p["up"], _norm(p["norm2"], config, x))
    h = h * jax.nn.sigmoid(1.702 * h) if config.quick_gelu else jax.nn.gelu(h, approximate=False)
    x = x + dense(p["down"], h)
  return x


def _attention(p: Tree, x: Array, heads: int, attended: Array | None) -> Array:
  batch, tokens, dim = x.shape
  qkv = dense(p["qkv"], x).reshape(batch, tokens, 3, heads, dim // heads)
  q, k, v = qkv.transpose(2, 0, 3, 1, 4)
  scores = jnp.einsum("bhqd,bhkd->bhqk", q, k, preferred_element_type=jnp.float32)
  scores = scores * (dim // heads) ** -0.5
  if attended is not None:
    scores = jnp.where(attended[None, None], scores, -jnp.inf)
  weights = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
  mixed = jnp.einsum("bhqk,bhkd->bhqd", weights, v)
  return dense(p["out"], mixed.transpose(0, 2, 1, 3).reshape(batch, tokens, dim))


def _norm(p: Tree, config: CLIPConfig, x: Array) -> Array:
  return layer_norm(x, config.eps, p["weight"], p["bias"])


def _unit(x: Array) -> Array:
  x = x.astype(jnp.float32)
  return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def _normal(rngs: nnx.Rngs, shape: tuple[int, ...], dim: int, kind: Any) -> Array:
  return (dim**-0.5 * jax.random.normal(rngs.params(), shape, jnp.float32)).astype(kind)
