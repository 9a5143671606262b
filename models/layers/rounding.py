"""Rounding to bfloat16 that the compiler may not skip, and matrix products in bfloat16.

XLA may keep more precision than a program asks for: a result that is cast to bfloat16 and back is
left as it was. Where the place of a rounding is part of a published model's arithmetic it is
written as `reduce_precision`, which stays.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def round_to(x: Float[Array, "..."], dtype: Any) -> Float[Array, "..."]:
  """`x` in `dtype`; to bfloat16 it is rounded for certain."""
  if dtype == jnp.bfloat16:
    return jax.lax.reduce_precision(x.astype(jnp.float32), 8, 7).astype(jnp.bfloat16)
  return x.astype(dtype)


@jax.custom_vjp
def matmul_f32(
  x: Float[Array, "*batch in"], kernel: Float[Array, "in out"]
) -> Float[Array, "*batch out"]:
  """`x kernel` summed and given in float32.

  The gradient is rounded to the type of `x` before it is multiplied, as where the product's result
  had been rounded: both products of the backward pass then run in that type too.
  """
  return jnp.matmul(x, kernel, preferred_element_type=jnp.float32)


def _forward(x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
  return matmul_f32(x, kernel), (x, kernel)


def _backward(saved: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
  x, kernel = saved
  g = round_to(g, x.dtype)
  rows, columns = x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1])
  return g @ kernel.T, (rows.T @ columns).astype(kernel.dtype)


matmul_f32.defvjp(_forward, _backward)
