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
  flow = jax.jit(
    lambda x, t, context, cache, start: dit(x[None], jnp.full((1, 1), t), context, cache, start)[0][
      0
    ]
  )
  write = jax.jit(lambda x, context, cache, start: dit.write_cache(x[None], context, cache, start))
  cache, expected = init_cache(tiny.DIT, sampler, 1), []
  for frame, cue in enumerate(cues):
    context = dit.embed_text(jnp.asarray(tiny.embed([cue.prompt])))
    cut, start = jnp.asarray(frame == 1), jnp.asarray(frame, jnp.int32)
    cache = begin_shot(cache, cut)
    noise = jax.random.normal(draw_key(SEED, frame, 0, Purpose.INITIAL), (1, 4, 4, 4), jnp.float32)
    state = unipc_start(noise)
    for k in range(2):
      velocity = flow(state.x, tables.timesteps[k], context, cache, start)
      state = unipc_step(tables, state, velocity, jnp.asarray(k, jnp.int32))
    cache = pin_shot(write(state.x, context, cache, start), 4, cut)
    expected.append(state.x)
  # Two compiled programs of one float32 network, in a loop of four chunks.
  np.testing.assert_allclose(latents_of(models, cues), np.stack(expected), rtol=0, atol=1e-4)


def test_only_a_switch_to_a_scene_prompt_cuts(models):
  def switched(prompt, switch=True):
    return latents_of(models, [Cue(prompt if not switch else "a"), Cue(prompt, switch)])

  np.testing.assert_array_equal(tiny.embed([CUT]), tiny.embed([NO_CUT]))
  assert np.abs(switched(CUT)[1] - switched(NO_CUT)[1]).max() > 1e-3
  np.testing.assert_array_equal(switched(CUT, switch=False), switched(NO_CUT, switch=False))
