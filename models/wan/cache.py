"""The key-value cache as a value: which slots a chunk attends to, and what the cache holds after
it.

Three published rules are implemented. The first two agree while the cache is exactly as long as the
window; they differ when it is longer, and when a chunk is written again.

* Self-Forcing: a new chunk that does not fit rolls the slots behind the sink to the left; a
  repeated chunk overwrites its own slots; the last `window` slots are attended.
* LongLive-1.3B: the same roll; a repeated chunk never overwrites the sink and leaves the indices
  alone; the sink is attended always, and of the rest the last `window − sink` slots.
* LongLive 2.0 (multi-shot): as Self-Forcing's with a cache as long as the window, and the first
  chunk of the last scene is pinned beside the sink: it moves left with its neighbours until it
  touches the sink, and stays. `begin_shot` and `pin_shot` tell the cache of scene cuts.

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

NO_PIN = -1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Shots:
  """What the multi-shot rule remembers of scenes.

  Attributes:
    index: scene cuts so far (int32 scalar).
    pin_start: first slot of the pinned chunk, `NO_PIN` before the first cut (int32 scalar).
    pin_tokens: slots that a pin protects.
    rope_offset_frames: by how many frames every cut moves the positions of what follows.
  """

  index: Int[Array, ""]
  pin_start: Int[Array, ""]
  pin_tokens: int = dataclasses.field(metadata={"static": True})
  rope_offset_frames: int = dataclasses.field(metadata={"static": True})


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
    rule: "self_forcing", "longlive" or "multi_shot".
    shots: the scenes, under the multi-shot rule only.
  """

  k: Float[Array, "layers batch heads slots head_dim"]
  v: Float[Array, "layers batch heads slots head_dim"]
  global_end: Int[Array, ""]
  local_end: Int[Array, ""]
  tokens_per_frame: int = dataclasses.field(metadata={"static": True})
  window_tokens: int | None = dataclasses.field(metadata={"static": True})
  sink_tokens: int = dataclasses.field(metadata={"static": True})
  rule: str = dataclasses.field(metadata={"static": True})
  shots: Shots | None = None

  @property
  def position_offset(self) -> int | Int[Array, ""]:
    """Frames by which scene cuts have moved positions."""
    return 0 if self.shots is None else self.shots.index * self.shots.rope_offset_frames


class SlotPlan(NamedTuple):
  """What one chunk of `tokens` does to the slots; shared by all layers.

  Slots are counted after the roll. Of them only the first `past` can hold anything that the chunk
  attends to: the rest is room for the chunk.

  Attributes:
    attend_past: which of the first `past` slots are attended, beside the chunk itself.
    attend_own: which of the chunk's own tokens are attended.
    sink: slots that the roll does not move.
    evict: by how many slots the roll moves what lies behind them.
    write_low: first slot that the chunk writes.
    write_high: one past the last slot that the chunk writes.
    global_end: the new index.
    local_end: the new index.
    overflow: whether a global cache has no room for the chunk.
  """

  attend_past: Bool[Array, " past"]
  attend_own: Bool[Array, " tokens"]
  sink: int | Int[Array, ""]
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
  shots = None
  if sampler.cache_rule == "multi_shot":
    pinned = min(sampler.sink_frames, sampler.frames_per_chunk) * per_frame
    shots = Shots(zero, jnp.full((), NO_PIN, jnp.int32), pinned, sampler.shot_offset_frames)
  return KVCache(
    k=jnp.zeros(shape, dtype),
    v=jnp.zeros(shape, dtype),
    global_end=zero,
    local_end=zero,
    tokens_per_frame=per_frame,
    window_tokens=window,
    sink_tokens=sampler.sink_frames * per_frame,
    rule=sampler.cache_rule,
    shots=shots,
  )


def begin_shot(cache: KVCache, cut: Bool[Array, ""]) -> KVCache:
  """The cache before a chunk that begins a new scene where `cut`: its position moves on.

  Raises:
    ValueError: for a cache of another rule.
  """
  shots = _shots(cache)
  index = shots.index + cut.astype(jnp.int32)
  return dataclasses.replace(cache, shots=dataclasses.replace(shots, index=index))


def pin_shot(cache: KVCache, tokens: int, cut: Bool[Array, ""]) -> KVCache:
  """The cache after the clean pass of a chunk of `tokens`, which is pinned where `cut`.

  It takes the place of the last scene's pin.

  Raises:
    ValueError: for a cache of another rule.
  """
  shots = _shots(cache)
  if not shots.pin_tokens:
    return cache
  start = jnp.where(cut, cache.local_end - tokens, shots.pin_start)
  return dataclasses.replace(cache, shots=dataclasses.replace(shots, pin_start=start))


def _shots(cache: KVCache) -> Shots:
  if cache.shots is None:
    raise ValueError(f"cache_rule is {cache.rule!r}; scenes need 'multi_shot'.")
  return cache.shots


def _fixed_tokens(cache: KVCache) -> int | Array:
  """Slots that do not move: the sink, and the pinned chunk once it touches it."""
  shots = cache.shots
  if shots is None:
    return cache.sink_tokens
  return jnp.where(
    shots.pin_start == cache.sink_tokens, cache.sink_tokens + shots.pin_tokens, cache.sink_tokens
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
    sink=_fixed_tokens(cache),
    evict=evict,
    write_low=write_low,
    write_high=write_high,
    global_end=jnp.where(repeated, cache.global_end, end) if longlive else end,
    local_end=jnp.where(repeated, local, new_local) if longlive else new_local,
    overflow=new_local > slots,
  )


def past_slots(
  slots: Float[Array, "batch heads slots head_dim"], plan: SlotPlan
) -> Float[Array, "batch heads past head_dim"]:
  """The slots of one layer, rolled, without the room that the chunk itself takes."""
  past, sink = plan.attend_past.shape[0], plan.sink
  if plan.evict is None:
    return slots[:, :, :past]
  if not isinstance(sink, int):
    slot = jnp.arange(past, dtype=jnp.int32)
    return jnp.take(slots, jnp.where(slot < sink, slot, slot + plan.evict), axis=2)
  moved = jax.lax.dynamic_slice_in_dim(slots, sink + plan.evict, past - sink, axis=2)
  return jnp.concatenate([slots[:, :, :sink], moved], axis=2) if sink else moved


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
    moved = (slot >= plan.sink) & (slot + plan.evict < cache.local_end)
    source = jnp.where(moved, slot + plan.evict, slot)

  def put(old: Array, new: Array) -> Array:
    rolled = old if plan.evict is None else jnp.take(old, source, axis=3)
    fresh = jnp.take(new.astype(old.dtype), own, axis=3)
    return jnp.where(written[None, None, None, :, None], fresh, rolled)

  shots = cache.shots
  if shots is not None and plan.evict is not None:
    # A pin moves with its slots. It never moves past the sink: whole chunks are evicted.
    # Within the sink, or not there at all, a pin stays as it is.
    floating = shots.pin_start > cache.sink_tokens
    moved = jnp.maximum(shots.pin_start - plan.evict, cache.sink_tokens)
    start = jnp.where(floating, moved, shots.pin_start)
    shots = dataclasses.replace(shots, pin_start=start)
  return dataclasses.replace(
    cache,
    k=put(cache.k, k),
    v=put(cache.v, v),
    global_end=plan.global_end,
    local_end=plan.local_end,
    shots=shots,
  )
