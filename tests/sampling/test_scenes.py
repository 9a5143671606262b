"""LongLive 2.0's way: UniPC in every chunk, a prompt for each, scenes that the cache knows of."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.wan.cache import begin_shot, init_cache, pin_shot
from models.wan.unipc import unipc_start, unipc_step, unipc_tables
from sbjax.randomness import Purpose, draw_key
from sbjax.sampling.chunks import SCENE_CUT, generate_chunks
from sbjax.sampling.script import Cue
from tests.sampling import tiny

SEED = 99
SIZES = {
  "cache_rule": "multi_shot",
  "sink_frames": 1,
  "shot_offset_frames": 8,
  "unipc_steps": 2,
}
CUT = SCENE_CUT + "b"
NO_CUT = "b" * len(CUT)  # as long, and so of the same embedding in the tiny world


@pytest.fixture(scope="module")
def models():
  return tiny.models(**SIZES)


def latents_of(models, cues):
  chunks = generate_chunks(models.generator, lambda f: cues[f], chunks=len(cues), seed=SEED)
  return np.stack([np.asarray(chunk.latents) for chunk in chunks])


def test_chunks_are_unipc_with_the_cache_told_of_scenes(models):
  cues = [Cue("a"), Cue(CUT, switched=True), Cue(CUT), Cue("a", switched=True)]
  dit, sampler = tiny.dit(), tiny.sampler(**SIZES)
  tables = unipc_tables(2, sampler.timestep_shift)

  @jax.jit
  def network(x, timestep, context, cache, start):
    """The flow, and the cache with the chunk, which at timestep 0 is the clean pass."""
    flow, after = dit(x[None], jnp.full((1, 1), timestep), context, cache, start)
    return flow[0], after

  contexts = tiny.contexts(dit, [cue.prompt for cue in cues])
  cache, expected = init_cache(tiny.DIT, sampler, 1), []
  for frame in range(len(cues)):
    context = contexts[frame : frame + 1]
    cut, start = jnp.asarray(frame == 1), jnp.asarray(frame, jnp.int32)
    cache = begin_shot(cache, cut)
    noise = jax.random.normal(draw_key(SEED, frame, 0, Purpose.INITIAL), (1, 4, 4, 4), jnp.float32)
    state = unipc_start(noise)
    for k in range(2):
      velocity = network(state.x, tables.timesteps[k], context, cache, start)[0]
      state = unipc_step(tables, state, velocity, jnp.asarray(k, jnp.int32))
    _, cache = network(state.x, jnp.float32(0.0), context, cache, start)
    cache = pin_shot(cache, 4, cut)
    expected.append(state.x)
  # Two compiled programs of one float32 network, in a loop of four chunks.
  np.testing.assert_allclose(latents_of(models, cues), np.stack(expected), rtol=0, atol=1e-4)


def test_only_a_switch_to_a_scene_prompt_cuts(models):
  def switched(prompt, switch=True):
    return latents_of(models, [Cue(prompt if not switch else "a"), Cue(prompt, switch)])

  np.testing.assert_array_equal(tiny.embed([CUT]), tiny.embed([NO_CUT]))
  assert np.abs(switched(CUT)[1] - switched(NO_CUT)[1]).max() > 1e-3
  np.testing.assert_array_equal(switched(CUT, switch=False), switched(NO_CUT, switch=False))
