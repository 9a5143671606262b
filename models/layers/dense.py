"""Linear maps stored `[out, in]`, as checkpoints of language models store them.

Reading a row of weights per output is what decoding one token does, and on CPUs it then runs at the
memory's speed. There are two forms: activations with features last, and with features first. The
second needs no repacking of the weights when there are few tokens, and decodes a small batch nearly
twice as fast on CPUs.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

Tree = Mapping[str, Any]


class Dense(nnx.Module):
  """Parameters of `y = W x + b`: `weight` `[out, in]` and, where asked for, `bias` `[out]`.

  Attributes:
    weight: normal with standard deviation `1/√in` when made.
    bias: zeros when made.
  """

  def __init__(
    self,
    in_dim: int,
    out_dim: int,
    *,
    rngs: nnx.Rngs,
    bias: bool = False,
    param_dtype: Any = jnp.float32,
  ):
    drawn = jax.random.normal(rngs.params(), (out_dim, in_dim), jnp.float32) * in_dim**-0.5
    self.weight = nnx.Param(drawn.astype(param_dtype))
    if bias:
      self.bias = nnx.Param(jnp.zeros((out_dim,), param_dtype))


class Norm(nnx.Module):
  """Parameters of an RMS norm (`weight`) or of a layer norm (`weight` and `bias`), `[dim]` each."""

  def __init__(self, dim: int, *, bias: bool = False, param_dtype: Any = jnp.float32):
    self.weight = nnx.Param(jnp.ones((dim,), param_dtype))
    if bias:
      self.bias = nnx.Param(jnp.zeros((dim,), param_dtype))


def tree_of(module: nnx.Module) -> dict[str, Any]:
  """The module's parameter arrays as nested dictionaries, which is what the functions take.

  Layers are keyed by their number. A dictionary crosses `jax.jit` far faster than a module.
  """
  return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def dense(p: Tree, x: Float[Array, "*batch in"]) -> Float[Array, "*batch out"]:
  """`W x + b` with features last, in the type of `x`."""
  y = jax.lax.dot_general(x, p["weight"].astype(x.dtype), (((x.ndim - 1,), (1,)), ((), ())))
  if "bias" in p:
    y = y + p["bias"].astype(x.dtype).reshape((1,) * (x.ndim - 1) + (-1,))
  return y


def dense_first(p: Tree, x: Float[Array, "in *batch"]) -> Float[Array, "out *batch"]:
  """`W x + b` with features first, in the type of `x`."""
  y = jax.lax.dot_general(p["weight"].astype(x.dtype), x, (((1,), (0,)), ((), ())))
  if "bias" in p:
    y = y + p["bias"].astype(x.dtype).reshape((-1,) + (1,) * (x.ndim - 1))
  return y
