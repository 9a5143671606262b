"""The re-computed cache against teacher forcing and against LongLive's published procedure."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.wan.cache import init_cache
from sbjax.sampling.recache import first_frame, recache
from tests.sampling import tiny

# Two compiled programs of the same float32 network: sums of up to 64 terms in another order.
ROUNDING = 1e-5


@pytest.fixture(scope="module")
def dit():
  return tiny.dit()


@pytest.fixture(scope="module")
def contexts(dit):
  return tiny.contexts(dit, [tiny.OLD, tiny.NEW])


@pytest.fixture(scope="module")
def network(dit):
  """(latents, timestep, context, cache, start) -> (flow, cache with the latents)."""

  @jax.jit
  def run(latents, timestep, context, cache, start):
    times = jnp.full((1, latents.shape[0]), timestep, jnp.float32)
    flow, after = dit(latents[None], times, context[None], cache, start)
    return flow[0], after

  return run


@pytest.fixture(scope="module")
def write(network):
  """The clean pass: (latents, context, cache, start) -> cache."""
  return lambda latents, context, cache, start: network(latents, 0.0, context, cache, start)[1]


def filled(write, sampler, context, upto):
  cache = init_cache(tiny.DIT, sampler, 1)
  for frame in range(upto):
    chunk = tiny.latents()[frame : frame + 1]
    cache = write(chunk, context, cache, jnp.asarray(frame, jnp.int32))
  return cache


def again(write, sampler, cache, context, upto):
  def under(latents, cache, start):
    return write(latents, context, cache, start)

  return recache(under, cache, tiny.latents()[:upto], upto, sampler)


def assert_equal(ours, theirs):
  ends = int(theirs.local_end)
  assert (int(ours.local_end), int(ours.global_end)) == (ends, int(theirs.global_end))
  for name in "kv":
    a, b = (np.asarray(getattr(c, name))[..., :ends, :] for c in (ours, theirs))
    np.testing.assert_allclose(a, b, rtol=0, atol=ROUNDING)


def test_the_same_prompt_gives_the_same_cache_until_frames_leave_the_window(write, contexts):
  sampler = tiny.sampler()
  cache = filled(write, sampler, contexts[0], 4)
  assert_equal(again(write, sampler, cache, contexts[0], 4), cache)


def test_another_prompt_gives_what_teacher_forcing_sees(dit, network, write, contexts):
  """The next chunk's flow, over the cache and in one forward over clean and noisy chunks."""
  sampler = tiny.sampler()
  noisy = tiny.latents(4, seed=5)
  whole = jax.jit(
    lambda: dit.teacher_forcing(
      tiny.latents()[None, :4],
      noisy[None, None],
      jnp.full((1, 1, 4), 625.0, jnp.float32),
      contexts[1:],
      frames_per_chunk=1,
    )
  )()[0, 0, 3]

  def next_flow(cache):
    return network(noisy[3:], 625.0, contexts[1], cache, jnp.asarray(3, jnp.int32))[0][0]

  stale = filled(write, sampler, contexts[0], 3)
  cache = again(write, sampler, stale, contexts[1], 3)
  np.testing.assert_allclose(next_flow(cache), whole, rtol=0, atol=ROUNDING)
  assert np.abs(next_flow(stale) - whole).max() > 1000 * ROUNDING  # the old prompt's is another


@pytest.mark.parametrize("frame", [4, 5, 7])
def test_longlive_is_the_published_procedure(write, contexts, frame):
  """One pass over the window's frames on the cache as it is, which spares the sink by itself."""
  sampler = tiny.sampler(sink_frames=1, cache_rule="longlive")
  cache = filled(write, sampler, contexts[0], frame)
  first = max(0, frame - 4)
  published = write(tiny.latents()[first:frame], contexts[1], cache, jnp.asarray(first, jnp.int32))
  ours = again(write, sampler, cache, contexts[1], frame)
  assert_equal(ours, published)
  kept = np.array_equal(ours.k[..., :4, :], cache.k[..., :4, :])
  assert kept == (frame > 4)  # the sink is encoded anew only while it is in the window


def test_published_frames_are_encoded_again():
  longlive = tiny.sampler(
    window_frames=12, sink_frames=3, cache_frames=12, frames_per_chunk=3, cache_rule="longlive"
  )
  assert [first_frame(longlive, f) for f in (3, 12, 15, 18, 42)] == [0, 0, 6, 9, 33]
  whole = tiny.sampler(window_frames=None, cache_frames=21)
  assert first_frame(whole, 20) == 0
  uneven = tiny.sampler(window_frames=8, cache_frames=8, sink_frames=1, frames_per_chunk=3)
  assert first_frame(uneven, 12) == 6  # whole chunks only


def test_too_few_latents_are_refused():
  sampler = tiny.sampler()
  cache = init_cache(tiny.DIT, sampler, 1)
  with pytest.raises(ValueError, match="holds 2 frames; the cache at frame 6 needs the last 4"):
    recache(lambda latents, cache, start: cache, cache, tiny.latents()[:2], 6, sampler)
