"""RMS and layer normalisation as the Wan models round them.

Both take statistics in float32 whatever the input type is, and give back the input type. A Wan RMS
norm rounds to the input type *before* it multiplies by its weight; in bfloat16 that differs from
one rounding at the end in about a quarter of the elements, so the order is kept.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from models.layers.rounding import round_to


def rms_norm(
  x: Float[Array, "*batch dim"], weight: Float[Array, " dim"], eps: float
) -> Float[Array, "*batch dim"]:
  """`x / sqrt(mean(x²) + eps) · weight` over the last axis.

  Wan2.1 norms queries and keys so, over the full width of all heads together.
  """
  x32 = x.astype(jnp.float32)
  variance = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
  normed = round_to(x32 * jax.lax.rsqrt(variance + eps), x.dtype)
  scale = weight.astype(x.dtype).reshape((1,) * (x.ndim - 1) + (-1,))
  return round_to(normed.astype(jnp.float32) * scale.astype(jnp.float32), x.dtype)


def layer_norm(
  x: Float[Array, "*batch dim"],
  eps: float,
  weight: Float[Array, " dim"] | None = None,
  bias: Float[Array, " dim"] | None = None,
) -> Float[Array, "*batch dim"]:
  """Layer norm over the last axis, with an affine map only where weight and bias are given
  (Wan2.1's norm3).
  """
  x32 = x.astype(jnp.float32)
  centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
  variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
  normed = centred * jax.lax.rsqrt(variance + eps)
  row = (1,) * (x.ndim - 1) + (-1,)
  if weight is not None:
    normed = normed * weight.astype(jnp.float32).reshape(row)
  if bias is not None:
    normed = normed + bias.astype(jnp.float32).reshape(row)
  return round_to(normed, x.dtype)
