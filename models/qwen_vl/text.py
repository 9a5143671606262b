"""The text decoder with grouped-query attention and rotary positions on three axes.

Layers are written out one after the other and activations stand features first (see
`models.layers.dense`): that is what decoding on CPUs wants, and other devices do not mind. The
decoder itself does not know how keys and values are kept; `mix` does (see `models.qwen_vl.cache`).

Source: Qwen2.5-VL and Qwen3-VL as Hugging Face computes them; the parity tests compare.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from models.layers.dense import Dense, Norm, Tree, dense_first
from models.layers.norms import rms_norm
from models.qwen_vl.positions import rotary_axes
from models.qwen_vl.presets import TextConfig

# (layer, q [batch, kv_heads, groups, tokens, head_dim], k and v [batch, kv_heads, tokens,
# head_dim]) to what the queries see, of q's shape.
Mix = Callable[[int, Array, Array, Array], Array]


class Layer(nnx.Module):
  """Parameters of a decoder layer."""

  def __init__(self, config: TextConfig, *, rngs: nnx.Rngs, param_dtype: Any):
    made = {"rngs": rngs, "param_dtype": param_dtype}
    queries, keys = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
    self.norm1 = Norm(config.dim, param_dtype=param_dtype)
    self.q = Dense(config.dim, queries, bias=config.qkv_bias, **made)
    self.k = Dense(config.dim, keys, bias=config.qkv_bias, **made)
    self.v = Dense(config.dim, keys, bias=config.qkv_bias, **made)
    self.o = Dense(queries, config.dim, **made)
    if config.qk_norm:
      self.q_norm = Norm(config.head_dim, param_dtype=param_dtype)
      self.k_norm = Norm(config.head_dim, param_dtype=param_dtype)
    self.norm2 = Norm(config.dim, param_dtype=param_dtype)
    self.gate = Dense(config.dim, config.ffn_dim, **made)
    self.up = Dense(config.dim, config.ffn_dim, **made)
    self.down = Dense(config.ffn_dim, config.dim, **made)


class TextDecoder(nnx.Module):
  """Parameters of a decoder.

  Args:
    config: the sizes.
    rngs: the stream `params` draws the weights.
    param_dtype: of the weights, and of the computation but for norms, rotation and softmax.
  """

  def __init__(self, config: TextConfig, *, rngs: nnx.Rngs, param_dtype: Any = jnp.float32):
    shape = (config.vocab_size, config.dim)
    drawn = jax.random.normal(rngs.params(), shape, jnp.float32) * config.dim**-0.5
    self.embed = nnx.Param(drawn.astype(param_dtype))
    self.layers = nnx.List(
      [Layer(config, rngs=rngs, param_dtype=param_dtype) for _ in range(config.num_layers)]
    )
    self.norm = Norm(config.dim, param_dtype=param_dtype)
    if not config.tied:
      self.head = Dense(config.dim, config.vocab_size, rngs=rngs, param_dtype=param_dtype)


def embed_tokens(p: Tree, ids: Int[Array, "*batch"]) -> Float[Array, "*batch dim"]:
  """Embeddings of token ids."""
  return p["embed"][ids]


def decode(
  p: Tree,
  config: TextConfig,
  x: Float[Array, "batch tokens dim"],
  positions: Int[Array, "batch 3 tokens"],
  mix: Mix,
  deep: Float[Array, "levels batch tokens dim"] | None = None,
) -> Float[Array, "dim batch tokens"]:
  """Runs the layers and the last norm; the result has its features first, as `logits` takes it.

  Args:
    p: the decoder's parameters (`tree_of`).
    config: the sizes.
    x: embeddings, with visual features in the places of their tokens.
    positions: time, row and column of each token.
    mix: attention with whatever cache there is.
    deep: added after the first layers, level by level; zero where a token is not visual.
  """
  cos, sin = rotary_tables(config, positions)
  x = jnp.moveaxis(x, -1, 0)
  for index in range(config.num_layers):
    layer = p["layers"][index]
    h = _norm(layer["norm1"], config, x)
    q = _heads(dense_first(layer["q"], h), config)
    k, v = (_heads(dense_first(layer[name], h), config) for name in "kv")
    if config.qk_norm:
      q = rms_norm(q, layer["q_norm"]["weight"], config.eps)
      k = rms_norm(k, layer["k_norm"]["weight"], config.eps)
    q, k = (_rotate(a, cos, sin) for a in (q, k))
    batch, _, tokens, head_dim = q.shape
    groups = config.num_heads // config.num_kv_heads
    q = q.reshape(batch, config.num_kv_heads, groups, tokens, head_dim)
    mixed = mix(index, q, k, v).reshape(batch, -1, tokens, head_dim)
    joined = mixed.transpose(1, 3, 0, 2).reshape(-1, batch, tokens)
    x = x + dense_first(layer["o"], joined)
    h = _norm(layer["norm2"], config, x)
    gated = jax.nn.silu(dense_first(layer["gate"], h)) * dense_first(layer["up"], h)
    x = x + dense_first(layer["down"], gated)
    if deep is not None and index < deep.shape[0]:
      x = x + jnp.moveaxis(deep[index], -1, 0).astype(x.dtype)
  return _norm(p["norm"], config, x)


def logits(
  p: Tree, config: TextConfig, hidden: Float[Array, "dim *batch"]
) -> Float[Array, "*batch vocab"]:
  """Logits in float32 from what `decode` gives."""
  head = {"weight": p["embed"]} if config.tied else p["head"]
  # Without the barrier XLA folds the transposition into the product, which then takes a slow path.
  scores = jax.lax.optimization_barrier(dense_first(head, hidden))
  return jnp.moveaxis(scores, 0, -1).astype(jnp.float32)


def rotary_tables(
  config: TextConfig, positions: Int[Array, "batch 3 tokens"]
) -> tuple[Float[Array, "batch 1 tokens half"], Float[Array, "batch 1 tokens half"]]:
  """Cosine and sine per token and frequency, each frequency following its own axis."""
  axes, frequencies = rotary_axes(config)
  at = jnp.take(positions, axes, axis=1).astype(jnp.float32)
  angles = (at * frequencies[None, :, None]).transpose(0, 2, 1)[:, None]
  return jnp.cos(angles), jnp.sin(angles)


def _norm(p: Tree, config: TextConfig, x: Array) -> Array:
  """The RMS norm of `models.layers.norms` over the first axis."""
  x32 = x.astype(jnp.float32)
  scale = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=0, keepdims=True) + config.eps)
  return (x32 * scale).astype(x.dtype) * p["weight"].astype(x.dtype)[:, None, None]


def _heads(x: Array, config: TextConfig) -> Array:
  """[heads·head_dim, batch, tokens] to [batch, heads, tokens, head_dim]."""
  return x.reshape(-1, config.head_dim, *x.shape[1:]).transpose(2, 0, 3, 1)


def _rotate(x: Array, cos: Array, sin: Array) -> Array:
  low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1).astype(x.dtype)
