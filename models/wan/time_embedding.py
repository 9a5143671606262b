"""Wan's sinusoid of the timestep, accurate to a few float32 roundings without float64.

The originals compute `t · frequency` in float64. In float32 the angle of t = 1000 is already off by
3e-5, so the product is carried here as a float32 sum `high + low` and the two are joined by the
addition theorem.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

_SPLIT = np.float32(
  4097.0
)  # 2¹² + 1 cuts a 24-bit mantissa into two halves whose products are exact


def timestep_sinusoid(
  timestep: Float[Array, "*batch"], dim: int, period: float = 10_000.0
) -> Float[Array, "*batch dim"]:
  """`[cos(t f_0) …, sin(t f_0) …]` with `f_i = period^(-i / (dim/2))`, float32.

  Fractional timesteps (833.3333) are meant: warped schedules have them.

  Raises:
    ValueError: when `dim` is odd.
  """
  if dim % 2:
    raise ValueError(f"freq_dim is {dim}; a sinusoid needs an even number.")
  exact = period ** (-np.arange(dim // 2, dtype=np.float64) / (dim // 2))
  row = (1,) * timestep.ndim + (-1,)
  high = exact.astype(np.float32)
  low = jnp.asarray((exact - high).astype(np.float32)).reshape(row)
  f = jnp.asarray(high).reshape(row)
  t = timestep.astype(jnp.float32)[..., None]
  angle = t * f
  t_high, t_low = _halves(t)
  f_high, f_low = _halves(f)
  rounding = ((t_high * f_high - angle) + t_high * f_low + t_low * f_high) + t_low * f_low
  rest = rounding + t * low
  cos, sin = jnp.cos(angle), jnp.sin(angle)
  cos_rest, sin_rest = jnp.cos(rest), jnp.sin(rest)
  return jnp.concatenate(
    [cos * cos_rest - sin * sin_rest, sin * cos_rest + cos * sin_rest], axis=-1
  )


def _halves(x: Array) -> tuple[Array, Array]:
  big = x * _SPLIT
  high = big - (big - x)
  return high, x - high
