"""The UMT5 text encoder of Wan2.1 in Flax NNX, for any width.

It differs from T5 in that every layer has a relative position table of its own. Attention logits
are not scaled, nothing has a bias, norms are RMS norms without mean. The layers' parameters are
stacked on a leading axis.

Source: google/umt5 as Hugging Face's `UMT5EncoderModel` computes it; the parity tests compare.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int

Ids = Int[Array, "batch tokens"]
Mask = Bool[Array, "batch tokens"] | Int[Array, "batch tokens"]
Embeddings = Float[Array, "batch tokens dim"]


@dataclasses.dataclass(frozen=True)
class UMT5Config:
  """Sizes of the encoder.

  Attributes:
    vocab_size: rows of the embedding table.
    dim: width of the residual stream, and of the result.
    dim_attn: width of all heads together.
    num_heads, head_dim: heads and their width; their product is `dim_attn`.
    ffn_dim: width of the gated feed-forward layer.
    num_layers: how many layers.
    num_buckets: of relative positions; half for each direction, half of a half exact.
    max_distance: in tokens, from where on all distances share the last bucket.
    eps: of the RMS norms.
    scan_unroll: layers unrolled per step of the loop over layers.

  Raises:
    ValueError: a field that does not fit the others.
  """

  vocab_size: int
  dim: int
  dim_attn: int
  num_heads: int
  head_dim: int
  ffn_dim: int
  num_layers: int
  num_buckets: int = 32
  max_distance: int = 128
  eps: float = 1e-6
  scan_unroll: int = 1

  def __post_init__(self):
    if self.num_heads * self.head_dim != self.dim_attn:
      raise ValueError(
        f"dim_attn is {self.dim_attn}; num_heads={self.num_heads} times head_dim={self.head_dim} "
        f"gives {self.num_heads * self.head_dim}."
      )
    if self.num_buckets < 4 or self.num_buckets % 4:
      raise ValueError(f"num_buckets is {self.num_buckets}; it must be a multiple of 4.")
    if self.max_distance <= self.num_buckets // 4:
      raise ValueError(
        f"max_distance is {self.max_distance}; it must exceed a quarter of num_buckets, "
        f"{self.num_buckets // 4}."
      )


PRESETS = {
  "umt5-xxl": UMT5Config(
    vocab_size=256_384,
    dim=4096,
    dim_attn=4096,
    num_heads=64,
    head_dim=64,
    ffn_dim=10_240,
    num_layers=24,
  ),
  "digits": UMT5Config(
    vocab_size=64,
    dim=64,
    dim_attn=64,
    num_heads=4,
    head_dim=16,
    ffn_dim=128,
    num_layers=2,
    scan_unroll=2,
  ),
}


def umt5_preset(name: str) -> UMT5Config:
  """The configuration of that name.

  Raises:
    ValueError: an unknown name.
  """
  if name not in PRESETS:
    raise ValueError(f"UMT5 preset {name!r} is unknown; known are {', '.join(sorted(PRESETS))}.")
  return PRESETS[name]


def relative_buckets(
  tokens: int, num_buckets: int, max_distance: int
) -> Int[np.ndarray, "query key"]:
  """Bucket of every pair of positions, by key position minus query position.

  Half of the buckets are for keys after the query. Of each half, the first half holds one distance
  each, the rest grow with the logarithm of the distance (T5's bidirectional rule). Computed on the
  host in float64, so that distances on a border fall as in the original.
  """
  positions = np.arange(tokens)
  relative = positions[None, :] - positions[:, None]
  half = num_buckets // 2
  exact = half // 2
  distance = np.abs(relative)
  growth = np.log(np.maximum(distance, exact) / exact) / np.log(max_distance / exact)
  far = np.minimum(exact + (growth * (half - exact)).astype(np.int32), half - 1)
  return (np.where(relative > 0, half, 0) + np.where(distance < exact, distance, far)).astype(
    np.int32
  )


def rms_norm(x: Array, scale: Array, eps: float) -> Array:
  """x / sqrt(mean(x²) + eps) * scale over the last axis; float32 inside, result as `x`."""
  wide = x.astype(jnp.float32)
  wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + jnp.float32(eps))
  return wide.astype(x.dtype) * scale.astype(x.dtype).reshape((1,) * (x.ndim - 1) + (-1,))


class Blocks(nnx.Module):
  """The parameters of all layers, each with a leading axis `layers`."""

  def __init__(self, config: UMT5Config, *, rngs: nnx.Rngs, param_dtype: Any):
    layers = config.num_layers

    def normal(std: float, *shape: int) -> nnx.Param:
      value = std * jax.random.normal(rngs.params(), (layers, *shape), jnp.float32)
      return nnx.Param(value.astype(param_dtype))

    def ones() -> nnx.Param:
      return nnx.Param(jnp.ones((layers, config.dim), param_dtype))

    into = config.dim**-0.5
    self.norm1 = ones()
    # Logits are not scaled, so the queries start smaller by the root of the head width.
    self.q = normal(into * config.head_dim**-0.5, config.dim, config.dim_attn)
    self.k = normal(into, config.dim, config.dim_attn)
    self.v = normal(into, config.dim, config.dim_attn)
    self.o = normal(config.dim_attn**-0.5, config.dim_attn, config.dim)
    self.position = normal(into, config.num_buckets, config.num_heads)
    self.norm2 = ones()
    self.gate = normal(into, config.dim, config.ffn_dim)
    self.fc1 = normal(into, config.dim, config.ffn_dim)
    self.fc2 = normal(config.ffn_dim**-0.5, config.ffn_dim, config.dim)

  def stacked(self) -> dict[str, Array]:
    """The arrays by name."""
    names = ("norm1", "q", "k", "v", "o", "position", "norm2", "gate", "fc1", "fc2")
    return {name: getattr(self, name)[...] for name in names}


class UMT5Encoder(nnx.Module):
  """Token ids to embeddings.

  Args:
    config: the sizes.
    rngs: the stream `params` initialises the weights.
    param_dtype: of the weights, and of the computation but for norms and softmax (float32).
  """

  def __init__(self, config: UMT5Config, *, rngs: nnx.Rngs, param_dtype: Any = jnp.float32):
    self.config = config
    table = jax.random.normal(rngs.params(), (config.vocab_size, config.dim), jnp.float32)
    self.token_embedding = nnx.Param(table.astype(param_dtype))
    self.blocks = Blocks(config, rngs=rngs, param_dtype=param_dtype)
    self.norm = nnx.Param(jnp.ones((config.dim,), param_dtype))

  def __call__(self, ids: Ids, mask: Mask) -> Embeddings:
    """Embeds prompts that were padded to one length.

    Args:
      ids: token ids below `vocab_size`.
      mask: nonzero where a token is real; the others are attended by nobody. Their own rows are
        computed all the same and mean nothing: see `encode_tokens`.

    Raises:
      ValueError: `mask` of another shape than `ids`.
    """
    if ids.shape != mask.shape:
      raise ValueError(f"mask has shape {mask.shape}; it must be that of ids, {ids.shape}.")
    config = self.config
    buckets = jnp.asarray(relative_buckets(ids.shape[1], config.num_buckets, config.max_distance))
    attended = (mask != 0)[:, None, None, :]

    def layer(x: Array, p: dict[str, Array]) -> tuple[Array, None]:
      x = x + _attention(rms_norm(x, p["norm1"], config.eps), p, buckets, attended, config)
      h = rms_norm(x, p["norm2"], config.eps)
      h = (h @ p["fc1"]) * jax.nn.gelu(h @ p["gate"], approximate=True)
      return x + h @ p["fc2"], None

    x = self.token_embedding[...][ids]
    x, _ = lax.scan(layer, x, self.blocks.stacked(), unroll=config.scan_unroll)
    return rms_norm(x, self.norm[...], config.eps)


def _attention(
  x: Array, p: dict[str, Array], buckets: Array, attended: Array, config: UMT5Config
) -> Array:
  batch, tokens, _ = x.shape

  def heads(weight: Array) -> Array:
    y = (x @ weight).reshape(batch, tokens, config.num_heads, config.head_dim)
    return y.transpose(0, 2, 1, 3)

  bias = p["position"][buckets].transpose(2, 0, 1)[None]
  # The bound replaces the bias of a padded key, it is not added to it.
  bias = jnp.where(attended, bias, jnp.finfo(x.dtype).min)
  logits = jnp.einsum("bnqd,bnkd->bnqk", heads(p["q"]), heads(p["k"])) + bias
  weights = jax.nn.softmax(logits.astype(jnp.float32), axis=-1).astype(x.dtype)
  attended_values = jnp.einsum("bnqk,bnkd->bqnd", weights, heads(p["v"]))
  return attended_values.reshape(batch, tokens, config.dim_attn) @ p["o"]


def mask_rows(embeddings: Embeddings, mask: Mask) -> Embeddings:
  """Zeroes the rows at or past each prompt's length, the number of real tokens in its mask.

  Wan attends all rows, also these, so that they must be zero and not whatever the encoder left.
  """
  length = jnp.sum(mask != 0, axis=1, dtype=jnp.int32)[:, None]
  inside = jnp.arange(mask.shape[1], dtype=jnp.int32)[None] < length
  return jnp.where(inside[:, :, None], embeddings, jnp.zeros((), embeddings.dtype))


def encode_tokens(encoder: UMT5Encoder, ids: Ids, mask: Mask) -> Embeddings:
  """The prompt embeddings that Wan's transformer takes: encoded, rows past the prompt zero."""
  return mask_rows(encoder(ids, mask), mask)
