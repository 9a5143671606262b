"""What a chunk attends to and what the cache holds, against the published tables and rules."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.wan.cache import KVCache, init_cache, plan_slots, write_slots
from models.wan.presets import DiTConfig, SamplerConfig

PER_FRAME = 2
DIT = DiTConfig("tags", 6, 6, 1, 1, in_dim=1, out_dim=1)
NONE = -1


def _sampler(**kwargs) -> SamplerConfig:
  return SamplerConfig(latent_channels=1, latent_height=2, latent_width=2 * PER_FRAME, **kwargs)


def _tags(cache: KVCache) -> np.ndarray:
  """Per slot the tag written there, NONE where nothing was."""
  return np.asarray(cache.k)[0, 0, 0, :, 0].astype(int) - 1


def _step(cache: KVCache, start_frame: int, frames: int, tag: int, rewrite_sink: bool = False):
  """Tags (see `_tag`) attended by a chunk, split in past and own, and the cache after it."""
  tokens = frames * PER_FRAME
  plan = plan_slots(cache, jnp.int32(start_frame), tokens, rewrite_sink=rewrite_sink)
  sink, past = cache.sink_tokens, plan.attend_past.shape[0]
  evict = 0 if plan.evict is None else int(plan.evict)
  slots = _tags(cache)
  rolled = np.concatenate([slots[:sink], slots[sink + evict :], np.full(evict, NONE)])[:past]
  own = _tag(tag, start_frame * PER_FRAME + np.arange(tokens))
  new = np.broadcast_to((own + 1)[None, None, None, :, None], (1, 1, 1, tokens, 6))
  after = write_slots(cache, plan, jnp.asarray(new, jnp.float32), jnp.asarray(new, jnp.float32))
  attended = np.concatenate(
    [rolled[np.asarray(plan.attend_past)], own[np.asarray(plan.attend_own)]]
  )
  return sorted(attended.tolist()), after


def _tag(pass_index: int, token: np.ndarray) -> np.ndarray:
  """A number that names the pass and the token: repeated passes can be told apart."""
  return pass_index * 1000 + token


def _frames(tags: list[int]) -> list[int]:
  return sorted({tag % 1000 // PER_FRAME for tag in tags})


TABLE = {
  0: [*range(3)],
  1: [*range(6)],
  2: [*range(9)],
  3: [*range(12)],
  4: [*range(3), *range(6, 15)],
  5: [*range(3), *range(9, 18)],
}


@pytest.mark.parametrize("rule", ["self_forcing", "longlive"])
def test_window_12_sink_3_attends_the_published_frames(rule):
  sampler = _sampler(window_frames=12, sink_frames=3, cache_frames=12, cache_rule=rule)
  cache = init_cache(DIT, sampler, 1)
  for chunk, frames in TABLE.items():
    for tag in range(3):  # two denoising steps and the clean pass
      attended, cache = _step(cache, chunk * 3, 3, tag)
      assert _frames(attended) == frames
    assert int(cache.global_end) == (chunk + 1) * 3 * PER_FRAME


def test_a_larger_cache_keeps_the_longlive_sink_and_loses_the_self_forcing_one():
  for rule, frames in (
    ("longlive", [0, 1, 2, *range(21, 30)]),
    ("self_forcing", [*range(18, 30)]),
  ):
    sampler = _sampler(window_frames=12, sink_frames=3, cache_frames=33, cache_rule=rule)
    cache = init_cache(DIT, sampler, 1)
    for chunk in range(10):
      attended, cache = _step(cache, chunk * 3, 3, 0)
    assert _frames(attended) == frames


def _filled_to_frame_18(sampler: SamplerConfig) -> KVCache:
  cache = init_cache(DIT, sampler, 1)
  for chunk in range(6):
    _, cache = _step(cache, chunk * 3, 3, 0)
  return cache


def test_a_prompt_switch_keeps_a_global_sink():
  sampler = _sampler(window_frames=12, sink_frames=3, cache_frames=12, cache_rule="longlive")
  attended, cache = _step(_filled_to_frame_18(sampler), 6, 12, 1)
  assert _frames([t for t in attended if t < 1000]) == [0, 1, 2]  # the old prompt's sink
  assert _frames([t for t in attended if t >= 1000]) == [*range(9, 18)]
  assert (_tags(cache)[: 3 * PER_FRAME] < 1000).all()
  assert (_tags(cache)[3 * PER_FRAME :] >= 1000).all()
  attended, _ = _step(cache, 18, 3, 2)
  assert _frames(attended) == [0, 1, 2, *range(12, 21)]


def test_a_prompt_switch_without_a_global_sink_rewrites_it():
  sampler = _sampler(window_frames=12, sink_frames=3, cache_frames=12, cache_rule="longlive")
  filled = _filled_to_frame_18(sampler)
  cache = dataclasses.replace(filled, k=jnp.zeros_like(filled.k), v=jnp.zeros_like(filled.v))
  attended, cache = _step(cache, 6, 12, 1, rewrite_sink=True)
  assert _frames(attended) == [*range(6, 18)]
  for start, frames in ((18, [6, 7, 8, *range(12, 21)]), (21, [6, 7, 8, *range(15, 24)])):
    attended, cache = _step(cache, start, 3, 2)
    assert _frames(attended) == frames


class _Original:
  """The published procedures, slot by slot, in plain Python."""

  def __init__(self, sampler: SamplerConfig):
    self.rule, self.window = sampler.cache_rule, sampler.window_frames
    self.sink = sampler.sink_frames * PER_FRAME
    self.slots = [NONE] * (sampler.cache_frames * PER_FRAME)
    self.local = self.global_end = 0

  def step(self, start_frame: int, frames: int, tag: int) -> list[int]:
    cap, tokens = len(self.slots), frames * PER_FRAME
    start = start_frame * PER_FRAME
    end = start + tokens
    own = _tag(tag, start + np.arange(tokens)).tolist()
    local = self.local + end - self.global_end
    recompute = self.rule == "longlive" and end <= self.global_end and start > 0
    low = local - tokens
    if self.window is not None and end > self.global_end and tokens + self.local > cap:
      evict = tokens + self.local - cap
      roll = self.local - evict - self.sink
      old = list(self.slots)
      self.slots[self.sink : self.sink + roll] = old[self.sink + evict : self.sink + evict + roll]
      local -= evict
      low = local - tokens
    first = max(low, self.sink) if recompute else low
    self.slots[first:local] = own[first - low :]
    limit = cap if self.window is None else self.window * PER_FRAME
    if self.rule == "longlive" and self.sink:
      begin = max(self.sink, local - (limit - self.sink))
      attended = self.slots[: self.sink] + self.slots[begin:local]
    else:
      attended = self.slots[max(0, local - limit) : local]
    if not recompute:
      self.local, self.global_end = local, end
    return sorted(attended)


@st.composite
def _runs(draw):
  chunk = draw(st.integers(1, 3))
  sink = draw(st.integers(0, 4))
  window = draw(st.one_of(st.none(), st.integers(sink + chunk, sink + chunk + 6)))
  chunks = draw(st.integers(1, 8))
  cache = chunks * chunk if window is None else window + draw(st.integers(0, 5))
  return (
    _sampler(
      frames_per_chunk=chunk,
      window_frames=window,
      sink_frames=min(sink, cache),
      cache_frames=cache,
      cache_rule=draw(st.sampled_from(["self_forcing", "longlive"])),
    ),
    chunks,
    draw(st.integers(1, 3)),
  )


@settings(max_examples=25, deadline=None)
@given(_runs())
def test_any_window_sink_and_cache_agree_with_the_published_procedures(run):
  sampler, chunks, passes = run
  cache, original = init_cache(DIT, sampler, 1), _Original(sampler)
  for chunk in range(chunks):
    for tag in range(passes):
      start = chunk * sampler.frames_per_chunk
      want = original.step(start, sampler.frames_per_chunk, tag)
      attended, cache = _step(cache, start, sampler.frames_per_chunk, tag)
      assert attended == want
      assert _tags(cache).tolist() == original.slots
      assert (int(cache.local_end), int(cache.global_end)) == (original.local, original.global_end)


def test_a_traced_start_gives_what_a_static_one_gives():
  sampler = _sampler(window_frames=6, sink_frames=3, cache_frames=6)
  cache = init_cache(DIT, sampler, 1)
  for chunk in range(4):
    _, cache = _step(cache, chunk * 3, 3, 0)
  plan = plan_slots(cache, jnp.int32(12), 6)
  traced = jax.jit(lambda s: plan_slots(cache, s, 6))(jnp.int32(12))
  for a, b in zip(plan, traced, strict=True):
    np.testing.assert_array_equal(a, b)


def test_a_chunk_larger_than_the_cache_is_refused():
  cache = init_cache(DIT, _sampler(cache_frames=3), 1)
  with pytest.raises(ValueError, match="cache_frames is 3; a chunk of 4 frames"):
    plan_slots(cache, jnp.int32(0), 4 * PER_FRAME)
