"""A judge cut over the devices of a reward worker says what it says on one device."""

import dataclasses

import jax
import numpy as np
import pytest

from sbjax.rewards.generator import Frames
from sbjax.runtime import roles
from tests.rewards.test_combined import settings_with
from tests.rewards.test_engine_generator import Rounds, folder  # noqa: F401  (a fixture)
from tests.runtime import tiny

FRAMES = Frames(np.random.default_rng(0).integers(0, 256, (1, 32, 32, 3), dtype=np.uint8))


def generator_of(path, mesh):
  """The generator of a judge that a reward worker with such a mesh builds."""
  reward = settings_with(
    name="unified_reward",
    components=("overall",),
    weights=(1.0,),
    judge__mode="pointwise",
    judge__endpoints=(),
    judge__model="",
    judge__checkpoint=str(path),
    judge__slots=2,
    judge__context_tokens=240,
  )
  settings = tiny.settings(runtime__devices_per_worker=int(np.prod(mesh)), runtime__mesh=mesh)
  table = roles._judge(dataclasses.replace(settings, reward=reward), None)  # type: ignore[arg-type]
  return table._judges["unified_reward"]._generator  # type: ignore[attr-defined]


def replies(generator):
  """Causes of failures, and the tokens of every reply in the order of submission."""
  engine, found = generator._engine, {}
  step = engine.step

  def noted():
    results = step()
    found.update({result.id: result.tokens.tolist() for result in results})
    return results

  engine.step = noted
  said = generator.generate([Rounds(FRAMES, "Which?", 2), Rounds(FRAMES, "How?", 1)])
  return [reply.cause for one in said for reply in one], [found[n] for n in sorted(found)]


@pytest.fixture(scope="module")
def alone(folder):  # noqa: F811
  return replies(generator_of(folder, (1, 1)))


@pytest.mark.parametrize("mesh", [(2, 1), (1, 4)])
def test_a_judge_says_the_same_on_any_mesh(folder, alone, mesh):  # noqa: F811
  generator = generator_of(folder, mesh)
  assert replies(generator) == alone
  assert alone[0] == ["", "", ""] and all(len(tokens) == 4 for tokens in alone[1])
  places = generator._engine._places
  kinds = {"weights": generator._engine._p["layers"][0]["up"]["weight"], "keys": places.cache.k[0]}
  for name, array in kinds.items():
    assert len(array.sharding.device_set) == np.prod(mesh), name
    share = array.sharding.shard_shape(array.shape)
    cut = np.prod(array.shape) // np.prod(share)
    assert cut == (np.prod(mesh) if name == "keys" else mesh[0]), name
  assert len(jax.devices()) == 4
