"""LoRA as a tree of its own: which linear maps it adapts, how it starts, how it is merged.

The tree is `{target: {"a": [layers, in, rank], "b": [layers, rank, out]}}` in float32. It is
applied unmerged (`models.layers.linear`): `y = W x + b + (alpha / rank) (x A) B`. Targets carry the
official names of the linear maps of a Wan block.
"""

import dataclasses
import fnmatch
from collections.abc import Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

TARGETS = (
  "self_attn.q",
  "self_attn.k",
  "self_attn.v",
  "self_attn.o",
  "cross_attn.q",
  "cross_attn.k",
  "cross_attn.v",
  "cross_attn.o",
  "ffn.0",
  "ffn.2",
)

LoRATree = dict[str, dict[str, Float[Array, "..."]]]


class BlockSizes(Protocol):
  """What a LoRA must know of the model: its width, its feed-forward width and its depth."""

  @property
  def dim(self) -> int:
    """Model width."""
    ...

  @property
  def ffn_dim(self) -> int:
    """Feed-forward width."""
    ...

  @property
  def num_layers(self) -> int:
    """Number of blocks."""
    ...


@dataclasses.dataclass(frozen=True)
class LoRAConfig:
  """A low-rank adapter.

  Attributes:
    rank: inner width.
    alpha: numerator of the scale `alpha / rank`.
    targets: names or shell patterns of the linear maps to adapt; all ten of a block by default.
  """

  rank: int = 16
  alpha: float = 16.0
  targets: tuple[str, ...] = TARGETS

  def __post_init__(self):
    """Refuses a rank below one and patterns that match nothing."""
    if self.rank < 1:
      raise ValueError(f"rank is {self.rank}; it must be at least 1.")
    if not self.targets:
      raise ValueError(f"targets is empty; name at least one of {', '.join(TARGETS)}.")
    for pattern in self.targets:
      if not fnmatch.filter(TARGETS, pattern):
        raise ValueError(
          f"targets has {pattern!r}, which matches nothing; use patterns of {', '.join(TARGETS)}."
        )

  @property
  def scale(self) -> float:
    """`alpha / rank`, which multiplies the low-rank product."""
    return self.alpha / self.rank

  @property
  def resolved(self) -> tuple[str, ...]:
    """The adapted linear maps, in the order of a block."""
    matched = [any(fnmatch.fnmatchcase(t, p) for p in self.targets) for t in TARGETS]
    return tuple(t for t, hit in zip(TARGETS, matched, strict=True) if hit)


def lora_shapes(cfg: LoRAConfig, dit: BlockSizes) -> dict[str, dict[str, tuple[int, int, int]]]:
  """Shapes of the adapter tree."""
  widths = {"ffn.0": (dit.dim, dit.ffn_dim), "ffn.2": (dit.ffn_dim, dit.dim)}
  shapes = {}
  for target in cfg.resolved:
    fan_in, fan_out = widths.get(target, (dit.dim, dit.dim))
    shapes[target] = {
      "a": (dit.num_layers, fan_in, cfg.rank),
      "b": (dit.num_layers, cfg.rank, fan_out),
    }
  return shapes


def init_lora(cfg: LoRAConfig, dit: BlockSizes, key: Key[Array, ""]) -> LoRATree:
  """A fresh adapter: A uniform in ±1/√in (PEFT's Kaiming choice), B zero, so that it changes
  nothing.
  """
  tree: LoRATree = {}
  for index, (target, shapes) in enumerate(lora_shapes(cfg, dit).items()):
    bound = shapes["a"][1] ** -0.5
    drawn = jax.random.uniform(
      jax.random.fold_in(key, index), shapes["a"], jnp.float32, -bound, bound
    )
    tree[target] = {"a": drawn, "b": jnp.zeros(shapes["b"], jnp.float32)}
  return tree


def merge_lora(
  params: nnx.State, lora: Mapping[str, Mapping[str, Any]], lora_scale: float
) -> nnx.State:
  """The parameters with `W + lora_scale · A B` in place of every adapted kernel.

  Worked out in float32 and cast to the kernel's type; `params` itself stays as it is.

  Raises:
    ValueError: for a target that the model does not have.
  """
  flat = dict(nnx.to_flat_state(params))
  names = {"ffn.0": "ffn.up", "ffn.2": "ffn.down"}
  for target, pair in lora.items():
    path = ("blocks", *names.get(target, target).split("."), "kernel")
    if path not in flat:
      raise ValueError(f"lora has the target {target!r}; use one of {', '.join(TARGETS)}.")
    kernel = flat[path][...]
    product = jnp.einsum(
      "lir,lro->lio", pair["a"].astype(jnp.float32), pair["b"].astype(jnp.float32)
    )
    merged = (kernel.astype(jnp.float32) + lora_scale * product).astype(kernel.dtype)
    flat[path] = flat[path].replace(merged)
  return nnx.from_flat_state(flat)
