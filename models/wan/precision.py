"""The three precision policies of a Wan transformer: types, and where results are rounded.

* `fp32`: everything in float32.
* `sf_bf16`: what Self-Forcing and LongLive run: every tensor is bfloat16 and every elementary
  operation rounds, the timestep's sinusoid, modulation, norms and the residual stream included.
  Products are summed in float32. Released weights were trained under it.
* `mixed`: Wan's own autocast: linear maps and attention of patches, text and blocks in bfloat16;
  time embedding, modulation, norms, gates, the residual stream and the head in float32. Best for
  training.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from models.layers.linear import linear
from models.layers.rounding import matmul_f32, round_to

LINEAR_RESULT = "linear_result"
"""Marks what `remat="dots"` keeps of a linear map in bfloat16, whose product has a gradient rule of
its own, so that the policy cannot see it."""


@dataclasses.dataclass(frozen=True)
class Precision:
  """Types of a policy.

  Attributes:
    compute: of linear maps and attention, and of the cache.
    stream: of the residual stream, norms, modulation, time embedding and head.
  """

  compute: Any
  stream: Any

  def add(self, a: Array, b: Array) -> Array:
    """`a + b` in float32, rounded to the stream's type."""
    return round_to(a.astype(jnp.float32) + b.astype(jnp.float32), self.stream)

  def multiply(self, a: Array, b: Array) -> Array:
    """`a · b` in float32, rounded to the stream's type."""
    return round_to(a.astype(jnp.float32) * b.astype(jnp.float32), self.stream)


_POLICIES = {
  "fp32": Precision(jnp.float32, jnp.float32),
  "sf_bf16": Precision(jnp.bfloat16, jnp.bfloat16),
  "mixed": Precision(jnp.bfloat16, jnp.float32),
}


def policy(name: str) -> Precision:
  """The policy of a name that `DiTConfig` accepts."""
  return _POLICIES[name]


def apply_linear(
  x: Array,
  kernel: Array,
  bias: Array,
  dtype: Any,
  lora: Mapping[str, Array] | None = None,
  lora_scale: float = 1.0,
) -> Array:
  """A linear map in `dtype`, with an optional adapter.

  In bfloat16 product and bias are added up in float32 and rounded once, as PyTorch's linear layer
  does; the adapter's two products, its scaling and the sum are rounded each, as PEFT's layers do.
  """
  x = round_to(x, dtype)
  if dtype == jnp.float32:
    return linear(x, kernel, bias, lora, lora_scale)

  def product(a: Array, b: Array) -> Array:
    return matmul_f32(a, b.astype(dtype))

  row = (1,) * (x.ndim - 1) + (-1,)
  y = round_to(product(x, kernel) + bias.astype(jnp.float32).reshape(row), dtype)
  if lora is None:
    return checkpoint_name(y, LINEAR_RESULT)
  low = round_to(product(x, lora["a"]), dtype)
  update = round_to(product(low, lora["b"]), dtype)
  scaled = round_to(update.astype(jnp.float32) * jnp.float32(lora_scale), dtype)
  y = round_to(y.astype(jnp.float32) + scaled.astype(jnp.float32), dtype)
  return checkpoint_name(y, LINEAR_RESULT)


def activation(function: Callable[[Array], Array], x: Array) -> Array:
  """An activation, worked out in float32 and rounded once to the type of `x`."""
  return round_to(function(x.astype(jnp.float32)), x.dtype)
