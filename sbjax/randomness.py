"""Where every random number of a run comes from.

A stream is named by integers (run seed, step, candidate, chunk, denoising step, purpose), never by
a worker's state, so that a task gives the same result on any worker and can be run again.
"""

import enum

import jax
import numpy as np
from jaxtyping import Array, Key


class Purpose(enum.IntEnum):
  """What a random draw is for; the last number of its name."""

  INITIAL = 0
  STEP = 1
  FORWARD = 2


def stream_seed(*name: int) -> int:
  """Gives the 32-bit seed of a named stream, the same on every machine.

  Args:
    *name: non-negative integers, for example (run seed, step, candidate).

  Returns:
    An integer in [0, 2**32).
  """
  return int(np.random.SeedSequence(list(name)).generate_state(1, np.uint32)[0])


def draw_key(
  seed: Array | int, chunk: Array | int, denoising_step: Array | int, purpose: Purpose
) -> Key[Array, ""]:
  """Gives the key of one draw of a candidate's stream; traceable in every integer."""
  key = jax.random.key(seed)
  for part in (chunk, denoising_step, int(purpose)):
    key = jax.random.fold_in(key, part)
  return key
