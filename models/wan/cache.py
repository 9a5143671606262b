"""The key-value cache as a value: which slots a chunk attends to, and what the cache holds after
it.

Two published rules are implemented. They agree while the cache is exactly as long as the window;
they differ when it is longer, and when a chunk is written again.

* Self-Forcing: a new chunk that does not fit rolls the slots behind the sink to the left; a
  repeated chunk overwrites its own slots; the last `window` slots are attended.
* LongLive-1.3B: the same roll; a repeated chunk never overwrites the sink and leaves the indices
  alone; the sink is attended always, and of the rest the last `window − sink` slots.

The cache is never rolled before attention: keys carry their absolute rotary position, so the order
  of slots does not matter to a softmax, and an evicted slot is simply masked. The roll happens
  once, when the chunk is written.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from models.wan.presets import DiTConfig, SamplerConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
  """Keys (normed and roped) and values of the past.

  Attributes:
    k: `[layers, batch, heads, slots, head_dim]`; a slot is one token.
    v: as `k`.
    global_end: tokens written since the start (int32 scalar).
    local_end: filled slots (int32 scalar).
    tokens_per_frame: tokens of a latent frame.
    window_tokens: tokens attended at most, or None for all.
    sink_tokens: slots that never move.
    rule: "self_forcing" or "longlive".
  """

  k: Float[Array, "layers batch heads slots head_dim"]
  v: Float[Array, "layers batch heads slots head_dim"]
  global_end: Int[Array, ""]
  local_end: Int[Array, ""]
  tokens_per_frame: int = dataclasses.field(metadata={"static": True})
  window_tokens: int | None = dataclasses.field(metadata={"static": True})
  sink_tokens: int = dataclasses.field(metadata={"static": True})
  rule: str = dataclasses.field(metadata={"static": True})


class SlotPlan(NamedTuple):
  """What one chunk of `tokens` does to the slots; shared by all layers.

  Attributes:
    attend_cached: which of the present slots are attended, beside the chunk itself.
    attend_new: which of the chunk's own tokens are attended.
    source: the present slot whose content each slot holds after the roll.
    write_low: first slot that the chunk writes.
    write_high: one past the last slot that the chunk writes.
    global_end: the new index.
    local_end: the new index.
    overflow: whether a global cache has no room for the chunk.
  """

  attend_cached: Bool[Array, " slots"]
  attend_new: Bool[Array, " tokens"]
  source: Int[Array, " slots"]
  write_low: Int[Array, ""]
  write_high: Int[Array, ""]
  global_end: Int[Array, ""]
  local_end: Int[Array, ""]
  overflow: Bool[Array, ""]


def init_cache(
  cfg: DiTConfig,
  sampler: SamplerConfig,
  batch: int,
  dtype: jnp.dtype = jnp.float32,  # type: ignore[assignment]
) -> KVCache:
  """An empty cache of `sampler.cache_frames` frames for `batch` videos."""
  per_frame = sampler.tokens_per_frame(cfg)
  shape = (cfg.num_layers, batch, cfg.num_heads, sampler.cache_frames * per_frame, cfg.head_dim)
  window = None if sampler.window_frames is None else sampler.window_frames * per_frame
  zero = jnp.zeros((), jnp.int32)
  return KVCache(
    k=jnp.zeros(shape, dtype),
    v=jnp.zeros(shape, dtype),
    global_end=zero,
    local_end=zero,
    tokens_per_frame=per_frame,
    window_tokens=window,
    sink_tokens=sampler.sink_frames * per_frame,
    rule=sampler.cache_rule,
  )


def plan_slots(
  cache: KVCache, start_frame: Int[Array, ""], tokens: int, *, rewrite_sink: bool = False
) -> SlotPlan:
  """Slots that a chunk of `tokens` starting at `start_frame` attends to and writes.

  `start_frame` may be traced. `rewrite_sink` lets a repeated chunk overwrite the sink under
  LongLive's rule (its prompt switch with a sink that is not kept).

  Raises:
    ValueError: when the chunk is larger than the cache.
  """
  slots = cache.k.shape[3]
  if tokens > slots:
    raise ValueError(
      f"cache_frames is {slots // cache.tokens_per_frame}; a chunk of "
      f"{tokens // cache.tokens_per_frame} frames needs at least as many."
    )
  sink, longlive = cache.sink_tokens, cache.rule == "longlive"
  local, start = cache.local_end, start_frame.astype(jnp.int32) * cache.tokens_per_frame
  end = start + tokens
  grown = local + (end - cache.global_end)
  full = (end > cache.global_end) & (local + tokens > slots)
  evict = jnp.where(full, local + tokens - slots, 0) if cache.window_tokens is not None else 0
  new_local = grown - evict
  write_low, write_high = new_local - tokens, new_local
  repeated = (end <= cache.global_end) & (start > 0)
  if longlive and not rewrite_sink:
    write_low = jnp.where(repeated, jnp.maximum(write_low, sink), write_low)

  slot = jnp.arange(slots, dtype=jnp.int32)
  moved = (evict > 0) & (slot >= sink) & (slot + evict < local)
  source = jnp.where(moved, slot + evict, slot)
  # Where a present slot lies after the roll; -1 once it is evicted.
  lands = jnp.where(slot < sink, slot, jnp.where(slot >= sink + evict, slot - evict, -1))

  window = slots if cache.window_tokens is None else cache.window_tokens

  def attended(at: Array) -> Array:
    if longlive and sink > 0:
      recent = at >= jnp.maximum(sink, new_local - (window - sink))
      return (at < sink) | (recent & (at < new_local))
    return (at >= jnp.maximum(0, new_local - window)) & (at < new_local)

  own_slot = write_high - tokens + jnp.arange(tokens, dtype=jnp.int32)
  return SlotPlan(
    attend_cached=(lands >= 0) & attended(lands) & ((lands < write_low) | (lands >= write_high)),
    attend_new=(own_slot >= write_low) & attended(own_slot),
    source=source,
    write_low=write_low,
    write_high=write_high,
    global_end=jnp.where(repeated, cache.global_end, end) if longlive else end,
    local_end=jnp.where(repeated, local, new_local) if longlive else new_local,
    overflow=new_local > slots,
  )


def write_slots(
  cache: KVCache,
  plan: SlotPlan,
  k: Float[Array, "layers batch heads tokens head_dim"],
  v: Float[Array, "layers batch heads tokens head_dim"],
) -> KVCache:
  """The cache after the chunk: rolled, its keys and values written, its indices moved."""
  slots, tokens = cache.k.shape[3], k.shape[3]
  slot = jnp.arange(slots, dtype=jnp.int32)
  written = (slot >= plan.write_low) & (slot < plan.write_high)
  own = jnp.clip(slot - (plan.write_high - tokens), 0, tokens - 1)

  def put(old: Array, new: Array) -> Array:
    rolled = jnp.take(old, plan.source, axis=3)
    fresh = jnp.take(new.astype(old.dtype), own, axis=3)
    return jnp.where(written[None, None, None, :, None], fresh, rolled)

  return dataclasses.replace(
    cache,
    k=put(cache.k, k),
    v=put(cache.v, v),
    global_end=plan.global_end,
    local_end=plan.local_end,
  )
