"""One block of Wan's transformer: its stacked parameters, and its application as pure functions."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from models.layers.attention import KeySet, attention, head_major, merge_heads
from models.layers.linear import Linear
from models.layers.norms import layer_norm, rms_norm
from models.layers.rope import apply_rope
from models.wan.precision import Precision, activation, apply_linear, policy
from models.wan.presets import DiTConfig

Lora = Mapping[str, Mapping[str, Array]]
Tree = Mapping[str, Any]


class Rotary(NamedTuple):
  """Cosine and signed sine per token, `[tokens, head_dim]` each."""

  cos: Array
  sin: Array


# From roped queries and keys and values, `[batch, heads, tokens, head_dim]` each, to the mixed
# values `[batch, tokens, dim]`.
Mixer = Callable[[Array, Array, Array], Array]


class _Norm(nnx.Module):
  def __init__(self, layers: int, dim: int, param_dtype: Any, *, bias: bool = False):
    self.scale = nnx.Param(jnp.ones((layers, dim), param_dtype))
    if bias:
      self.bias = nnx.Param(jnp.zeros((layers, dim), param_dtype))


class _Attention(nnx.Module):
  def __init__(self, cfg: DiTConfig, rngs: nnx.Rngs, param_dtype: Any):
    for name in ("q", "k", "v", "o"):
      projection = Linear(
        cfg.dim, cfg.dim, rngs=rngs, layers=cfg.num_layers, param_dtype=param_dtype
      )
      setattr(self, name, projection)
    self.norm_q = _Norm(cfg.num_layers, cfg.dim, param_dtype)
    self.norm_k = _Norm(cfg.num_layers, cfg.dim, param_dtype)


class _FeedForward(nnx.Module):
  def __init__(self, cfg: DiTConfig, rngs: nnx.Rngs, param_dtype: Any):
    layers = cfg.num_layers
    self.up = Linear(cfg.dim, cfg.ffn_dim, rngs=rngs, layers=layers, param_dtype=param_dtype)
    self.down = Linear(cfg.ffn_dim, cfg.dim, rngs=rngs, layers=layers, param_dtype=param_dtype)


class BlockParams(nnx.Module):
  """The parameters of all blocks, stacked on a leading layer axis."""

  def __init__(self, cfg: DiTConfig, rngs: nnx.Rngs, param_dtype: Any):
    self.modulation = nnx.Param(modulation_init(rngs, (cfg.num_layers, 6, cfg.dim), param_dtype))
    self.self_attn = _Attention(cfg, rngs, param_dtype)
    self.norm3 = _Norm(cfg.num_layers, cfg.dim, param_dtype, bias=True)
    self.cross_attn = _Attention(cfg, rngs, param_dtype)
    self.ffn = _FeedForward(cfg, rngs, param_dtype)


def modulation_init(rngs: nnx.Rngs, shape: tuple[int, ...], param_dtype: Any) -> Array:
  """A modulation table as Wan2.1 starts it: normal, with variance 1 / dim."""
  return jax.random.normal(rngs.params(), shape, param_dtype) * jnp.asarray(
    shape[-1] ** -0.5, param_dtype
  )


class Block(NamedTuple):
  """One transformer block: its parameters and adapters, applied as pure functions."""

  cfg: DiTConfig
  params: Tree
  lora: Lora
  lora_scale: float

  def __call__(
    self, x: Array, e0: Array, context: Array, rotary: Rotary, mixer: Mixer
  ) -> tuple[Array, Array, Array]:
    """The block's output and its roped keys and values, head-major."""
    add, modulation = self._precision.add, self._modulation(e0)
    q, k, v = self.queries_keys_values(x, e0, rotary)
    x = add(x, self._gate(self._linear("self_attn.o", mixer(q, k, v)), modulation[2]))
    x = add(x, self._cross(x, context))
    hidden = self._modulated(x, modulation[3], modulation[4])
    hidden = activation(gelu, self._linear("ffn.0", hidden))
    return add(x, self._gate(self._linear("ffn.2", hidden), modulation[5])), k, v

  def queries_keys_values(self, x: Array, e0: Array, rotary: Rotary) -> tuple[Array, Array, Array]:
    """Normed and roped queries and keys, raw values: `[batch, heads, tokens, head_dim]`."""
    modulation = self._modulation(e0)
    hidden = self._modulated(x, modulation[0], modulation[1])
    q, k = (
      apply_rope(self._heads(self._normed("self_attn", name, hidden)), *rotary) for name in "qk"
    )
    v = self._heads(self._linear("self_attn.v", hidden))
    return head_major(q), head_major(k), head_major(v)

  def _cross(self, x: Array, context: Array) -> Array:
    norm = self.params["norm3"]
    hidden = layer_norm(x, self.cfg.eps, norm["scale"], norm["bias"])
    q = head_major(self._heads(self._normed("cross_attn", "q", hidden)))
    k = head_major(self._heads(self._normed("cross_attn", "k", context)))
    v = head_major(self._heads(self._linear("cross_attn.v", context)))
    mixed = merge_heads(attention(q[:, :, None], (KeySet(k, v),))[:, :, 0])
    return self._linear("cross_attn.o", mixed)

  @property
  def _precision(self) -> Precision:
    return policy(self.cfg.precision)

  def _linear(self, target: str, x: Array) -> Array:
    group, name = target.split(".")
    p = self.params[group][{"0": "up", "2": "down"}.get(name, name)]
    dtype = self._precision.compute
    return apply_linear(x, p["kernel"], p["bias"], dtype, self.lora.get(target), self.lora_scale)

  def _normed(self, group: str, name: str, x: Array) -> Array:
    weight = self.params[group][f"norm_{name}"]["scale"]
    return rms_norm(self._linear(f"{group}.{name}", x), weight, self.cfg.eps)

  def _heads(self, x: Array) -> Array:
    return x.reshape(*x.shape[:2], self.cfg.num_heads, self.cfg.head_dim)

  def _modulation(self, e0: Array) -> tuple[Array, ...]:
    """Shift, scale and gate of attention, then of the feed-forward layer: `[batch, frames, 1, dim]`
    each.
    """
    table = self._precision.add(self.params["modulation"][None, None].astype(e0.dtype), e0)
    return tuple(table[:, :, i : i + 1] for i in range(6))

  def _modulated(self, x: Array, shift: Array, scale: Array) -> Array:
    normed = layer_norm(x, self.cfg.eps).reshape(x.shape[0], shift.shape[1], -1, x.shape[-1])
    return modulated(normed, shift, scale, self._precision).reshape(x.shape)

  def _gate(self, y: Array, gate: Array) -> Array:
    framed = y.reshape(y.shape[0], gate.shape[1], -1, y.shape[-1])
    return self._precision.multiply(framed, gate).reshape(y.shape)


def modulated(x: Array, shift: Array, scale: Array, precision: Precision) -> Array:
  """`x · (1 + scale) + shift`, each operation rounded as the policy says."""
  one = jnp.ones((), precision.stream)
  return precision.add(precision.multiply(x, precision.add(one, scale)), shift)


def gelu(x: Array) -> Array:
  """GELU by its tanh approximation, as Wan2.1 has it."""
  return jax.nn.gelu(x, approximate=True)
