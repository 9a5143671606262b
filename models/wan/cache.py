"""The key-value cache as a value: which slots a chunk attends to, and what the cache holds after
it.

Two published rules are implemented. They agree while the cache is exactly as long as the window;
they differ when it is longer, and when a chunk is written again.

* Self-Forcing: a new chunk that does not fit rolls the slots behind the sink to the left; a
  repeated chunk overwrites its own slots; the last `window` slots are attended.
* LongLive-1.3B: the same roll; a repeated chunk never overwrites the sink and leaves the indices
  alone; the sink is attended always, and of the rest the last `window − sink` slots.

A chunk attends to two key sets: what is left of the cache after the roll (`past_slots`) and itself.
  Its own keys need not be written first, so denoising steps and gradients leave the cache alone.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from models.wan.precision import policy
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

  Slots are counted after the roll. Of them only the first `past` can hold anything that the chunk
  attends to: the rest is room for the chunk.

  Attributes:
    attend_past: which of the first `past` slots are attended, beside the chunk itself.
    attend_own: which of the chunk's own tokens are attended.
    evict: by how many slots the roll moves what lies behind the sink.
    write_low: first slot that the chunk writes.
    write_high: one past the last slot that the chunk writes.
    global_end: the new index.
    local_end: the new index.
    overflow: whether a global cache has no room for the chunk.
  """

  attend_past: Bool[Array, " past"]
  attend_own: Bool[Array, " tokens"]
  evict: Int[Array, ""] | None
  write_low: Int[Array, ""]
  write_high: Int[Array, ""]
  global_end: Int[Array, ""]
  local_end: Int[Array, ""]
  overflow: Bool[Array, ""]


def init_cache(
  cfg: DiTConfig,
  sampler: SamplerConfig,
  batch: int,
  dtype: Any = None,
) -> KVCache:
  """An empty cache of `sampler.cache_frames` frames for `batch` videos.

  `dtype` is by default the type that keys are computed in under the model's precision.
  """
  dtype = policy(cfg.precision).compute if dtype is None else dtype
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
  new_local = local + (end - cache.global_end)
  evict = None
  if cache.window_tokens is not None:
    full = (end > cache.global_end) & (local + tokens > slots)
    evict = jnp.where(full, local + tokens - slots, 0)
    new_local = new_local - evict
  write_low, write_high = new_local - tokens, new_local
  repeated = (end <= cache.global_end) & (start > 0)
  if longlive and not rewrite_sink:
    write_low = jnp.where(repeated, jnp.maximum(write_low, sink), write_low)
  window = slots if cache.window_tokens is None else cache.window_tokens

  def attended(slot: Array) -> Array:
    if longlive and sink > 0:
      recent = slot >= jnp.maximum(sink, new_local - (window - sink))
      return (slot < sink) | (recent & (slot < new_local))
    return (slot >= jnp.maximum(0, new_local - window)) & (slot < new_local)

  past = jnp.arange(max(slots - tokens, sink), dtype=jnp.int32)
  own = write_high - tokens + jnp.arange(tokens, dtype=jnp.int32)
  return SlotPlan(
    attend_past=attended(past) & ((past < write_low) | (past >= write_high)),
    attend_own=attended(own) & (own >= write_low),
    evict=evict,
    write_low=write_low,
    write_high=write_high,
    global_end=jnp.where(repeated, cache.global_end, end) if longlive else end,
    local_end=jnp.where(repeated, local, new_local) if longlive else new_local,
    overflow=new_local > slots,
  )


def past_slots(
  slots: Float[Array, "batch heads slots head_dim"], plan: SlotPlan, sink_tokens: int
) -> Float[Array, "batch heads past head_dim"]:
  """The slots of one layer, rolled, without the room that the chunk itself takes."""
  past = plan.attend_past.shape[0]
  if plan.evict is None:
    return slots[:, :, :past]
  moved = jax.lax.dynamic_slice_in_dim(slots, sink_tokens + plan.evict, past - sink_tokens, axis=2)
  return jnp.concatenate([slots[:, :, :sink_tokens], moved], axis=2) if sink_tokens else moved


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
  source = slot
  if plan.evict is not None:
    moved = (slot >= cache.sink_tokens) & (slot + plan.evict < cache.local_end)
    source = jnp.where(moved, slot + plan.evict, slot)

  def put(old: Array, new: Array) -> Array:
    rolled = old if plan.evict is None else jnp.take(old, source, axis=3)
    fresh = jnp.take(new.astype(old.dtype), own, axis=3)
    return jnp.where(written[None, None, None, :, None], fresh, rolled)

  return dataclasses.replace(
    cache,
    k=put(cache.k, k),
    v=put(cache.v, v),
    global_end=plan.global_end,
    local_end=plan.local_end,
  )
