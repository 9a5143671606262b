"""LongLive 2.0's cache rule and presets: what chunks attend to across scene cuts."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import example, given, settings
from hypothesis import strategies as st

from models.wan.cache import (
  NO_PIN,
  KVCache,
  begin_shot,
  init_cache,
  past_slots,
  pin_shot,
  plan_slots,
  write_slots,
)
from models.wan.dit import CausalWanDiT
from models.wan.presets import DiTConfig, SamplerConfig, preset
from models.wan.schedule import denoising_schedule
from models.wan.unipc import unipc_tables
from tests.models.wan22_files import randomised

PER_FRAME = 2
DIT = DiTConfig("tags", 6, 6, 1, 1, in_dim=1, out_dim=1, text_dim=4, text_len=2, freq_dim=4)
SIZES: dict[str, Any] = {"latent_channels": 1, "latent_height": 2, "latent_width": 2 * PER_FRAME}
PUBLISHED = dataclasses.replace(preset("longlive-2.0-5b")[1], **SIZES)


def _chunk(cache: KVCache, chunk: int, frames: int, cut: bool) -> tuple[list[int], KVCache]:
  """Frames attended by a chunk whose keys carry their frame, and the cache after it."""
  tokens = frames * PER_FRAME
  cache = begin_shot(cache, jnp.asarray(cut))
  plan = plan_slots(cache, jnp.int32(chunk * frames), tokens)
  past = np.asarray(past_slots(cache.k[0], plan))[0, 0, :, 0]
  own = chunk * frames + np.arange(tokens) // PER_FRAME + 1.0
  assert bool(plan.attend_own.all())
  seen = np.concatenate([past[np.asarray(plan.attend_past)], own]).astype(int) - 1
  new = jnp.asarray(np.broadcast_to(own[None, None, None, :, None], (1, 1, 1, tokens, 6)))
  cache = write_slots(cache, plan, new, new)
  return sorted(set(seen.tolist())), pin_shot(cache, tokens, jnp.asarray(cut))


TABLE = {
  0: [*range(8)],
  1: [*range(16)],
  2: [*range(24)],
  3: [*range(32)],
  4: [*range(8), *range(16, 40)],
  5: [*range(8), *range(16, 24), *range(32, 48)],
  6: [*range(8), *range(16, 24), *range(40, 56)],
  7: [*range(8), *range(40, 64)],
  8: [*range(8), *range(48, 72)],
  9: [*range(8), *range(48, 56), *range(64, 80)],
}


def test_cuts_at_chunks_2_and_6_attend_the_published_frames():
  cache = init_cache(DIT, PUBLISHED, 1)
  for chunk, frames in TABLE.items():
    seen, cache = _chunk(cache, chunk, 8, cut=chunk in (2, 6))
    assert seen == frames
  assert cache.shots is not None
  assert int(cache.shots.index) == 2
  assert int(cache.position_offset) == 16


def _sampler(chunk: int, sink: int, window: int) -> SamplerConfig:
  return SamplerConfig(
    frames_per_chunk=chunk,
    window_frames=window,
    sink_frames=sink,
    cache_frames=window,
    cache_rule="multi_shot",
    **SIZES,
  )


# A few sizes, since each compiles anew: no room beside the pin, room, a sink of two chunks.
SAMPLERS = (_sampler(1, 1, 3), _sampler(2, 2, 10), _sampler(1, 2, 5))
CUTS = st.lists(st.booleans(), min_size=6, max_size=9)


@settings(max_examples=12, deadline=None)
@example(SAMPLERS[2], [False, True, False, False, False, False])  # a pin within the sink
@given(st.sampled_from(SAMPLERS), CUTS)
def test_any_cuts_keep_sink_pin_and_the_latest(sampler, cuts):
  """Against plain Python: frames in slot order, and the pinned ones among them."""
  size, sink = sampler.frames_per_chunk, sampler.sink_frames
  cache, slots, pin = init_cache(DIT, sampler, 1), [], None
  for chunk, cut in enumerate(cuts):
    cut = cut and chunk > 0
    frames = list(range(chunk * size, (chunk + 1) * size))
    while len(slots) + size > sampler.cache_frames:
      fixed = sink + (len(pin) if pin and slots[sink : sink + len(pin)] == pin else 0)
      del slots[fixed]
    slots += frames
    seen, cache = _chunk(cache, chunk, size, cut)
    assert seen == sorted(slots)
    pin = frames if cut and sink else pin


def test_other_rules_have_no_scenes():
  cache = init_cache(DIT, SamplerConfig(**SIZES), 1)
  assert cache.shots is None
  assert cache.position_offset == 0
  for call in (
    lambda: begin_shot(cache, jnp.asarray(True)),
    lambda: pin_shot(cache, 2, jnp.asarray(True)),
  ):
    with pytest.raises(ValueError, match="cache_rule is 'self_forcing'; scenes need 'multi_shot'"):
      call()


def test_a_cut_moves_positions_and_a_pin_stays_unset_without_a_sink():
  no_sink = dataclasses.replace(PUBLISHED, sink_frames=0)
  cache = pin_shot(init_cache(DIT, no_sink, 1), 4, jnp.asarray(True))
  assert cache.shots is not None
  assert int(cache.shots.pin_start) == NO_PIN

  sampler = dataclasses.replace(
    PUBLISHED, frames_per_chunk=1, sink_frames=1, window_frames=3, cache_frames=3
  )
  model = randomised(lambda: CausalWanDiT(DIT, rngs=nnx.Rngs(0)))
  x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 1, 1, 2, 4)), jnp.float32)
  context = jnp.ones((1, 2, 6))
  write = jax.jit(lambda cache, start: model.write_cache(x, context, cache, start))
  moved = write(begin_shot(init_cache(DIT, sampler, 1), jnp.asarray(True)), jnp.int32(0))
  far = dataclasses.replace(init_cache(DIT, sampler, 1), global_end=jnp.int32(8 * PER_FRAME))
  plain = write(far, jnp.int32(8))  # the same position without a cut
  assert float(jnp.abs(moved.k).max()) > 0.1
  np.testing.assert_array_equal(moved.k, plain.k)


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"window_frames": 24}, "must equal cache_frames"),
    ({"sink_frames": 4}, "sink_frames is 4; under the multi-shot rule it must be a multiple"),
    ({"cache_frames": 36, "window_frames": 36}, "cache_frames is 36; .* must be a multiple"),
    ({"cache_frames": 16, "window_frames": 16}, "need 24"),
    ({"shot_offset_frames": -1}, "shot_offset_frames is -1"),
    ({"cache_rule": "longlive"}, "shot_offset_frames is 8; under cache_rule 'longlive'"),
    ({"unipc_steps": 0}, "unipc_steps is 0"),
  ],
)
def test_settings_that_cannot_work_are_refused(fields, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(PUBLISHED, **fields)


def test_a_schedule_with_log_probabilities_is_refused_for_unipc():
  with pytest.raises(ValueError, match="unipc_steps is 4; UniPC draws no noise between steps"):
    denoising_schedule(PUBLISHED)
  _, trained = preset("longlive-2.0-5b-renoise")
  assert dataclasses.replace(trained, unipc_steps=4) == preset("longlive-2.0-5b")[1]
  sigmas = unipc_tables(4, trained.timestep_shift).sigmas[:-1]
  np.testing.assert_allclose(denoising_schedule(trained)[1], sigmas, rtol=0, atol=4e-4)


def test_published_sizes():
  dit, sampler = preset("longlive-2.0-5b")
  assert (dit.head_dim, sampler.tokens_per_frame(dit)) == (128, 880)
  base = preset("wan2.2-ti2v-5b")[0]
  assert dataclasses.replace(dit, name=base.name) == base
