"""Linear maps: their parameters as an NNX module, their application as a pure function with an
optional LoRA.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

Initializer = Callable[..., Array]


class Linear(nnx.Module):
  """Parameters of `y = x W + b`: kernel `[in, out]` and bias `[out]`, both with a leading layer
  axis when stacked.
  """

  def __init__(
    self,
    in_dim: int,
    out_dim: int,
    *,
    rngs: nnx.Rngs,
    layers: int | None = None,
    kernel_init: Initializer | None = None,
    param_dtype: jnp.dtype = jnp.float32,  # type: ignore[assignment]
  ):
    """Draws the kernel, Xavier-uniform by default, and zeroes the bias.

    Each layer is drawn on its own, so that the fan is that of one layer.
    """
    kernel_init = kernel_init or nnx.initializers.xavier_uniform()
    shape = (in_dim, out_dim)
    if layers is None:
      kernel = kernel_init(rngs.params(), shape, param_dtype)
      bias_shape: tuple[int, ...] = (out_dim,)
    else:
      keys = jax.random.split(rngs.params(), layers)
      kernel = jax.vmap(lambda key: kernel_init(key, shape, param_dtype))(keys)
      bias_shape = (layers, out_dim)
    self.kernel = nnx.Param(kernel)
    self.bias = nnx.Param(jnp.zeros(bias_shape, param_dtype))


def linear(
  x: Float[Array, "*batch in"],
  kernel: Float[Array, "in out"],
  bias: Float[Array, " out"],
  lora: Mapping[str, Float[Array, "..."]] | None = None,
  lora_scale: float = 1.0,
) -> Float[Array, "*batch out"]:
  """`x W + b`, plus `lora_scale · (x A) B` where an adapter `{"a": [in, r], "b": [r, out]}` is
  given.

  Parameters are cast to the type of `x`, so a model computes in the type of its activations.
  """
  row = (1,) * (x.ndim - 1) + (-1,)
  y = x @ kernel.astype(x.dtype) + bias.astype(x.dtype).reshape(row)
  if lora is None:
    return y
  update = (x @ lora["a"].astype(x.dtype)) @ lora["b"].astype(x.dtype)
  return y + update * jnp.asarray(lora_scale, x.dtype)
