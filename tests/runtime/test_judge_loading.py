"""Which workers load a judge, warm it up and are asked; with what weights."""

import dataclasses

import pytest

from sbjax.emulation.run import emulated_driver
from sbjax.runtime import roles
from sbjax.runtime.driver import Driver
from sbjax.runtime.executor import Call
from sbjax.runtime.inline import InlineExecutor
from tests.emulation import setting
from tests.runtime import tiny


@pytest.mark.parametrize(
  "fields", [{"scheme": "colocated"}, {"scheme": "stagebreaker", "runtime__reward_workers": 0}]
)
def test_every_worker_judges_where_groups_are_not_separate(fields, tmp_path):
  run = tiny.settings(**fields)
  made = Driver(
    tiny.recipe_of(run), InlineExecutor(), tiny.reward_of(run), str(tmp_path), lambda line: None
  )
  assert made.pool.judges == list(made.pool.workers)


def test_a_worker_that_does_not_judge_never_touches_the_judge(tmp_path):
  file = tmp_path / "mine.py"
  file.write_text("raise ValueError('loaded')\n")
  run = tiny.settings(reward__name="function", reward__function=f"{file}:score")
  built = roles.build_roles(run, judges=False)
  assert built.judge is None
  with pytest.raises(ValueError, match="loaded"):
    roles.build_roles(run, judges=True)


def test_a_long_wait_says_for_whom_and_what(tmp_path):
  costs = dataclasses.replace(setting.COSTS, scale=45.0 / setting.WORKER.decode_s)
  said = []
  run = setting.settings("stagebreaker")
  with emulated_driver(run, costs, str(tmp_path), said.append, virtual=True) as (driver, _):
    driver.pool.submit("reward-0", Call("decode", {}, 1), (0,), "a decode", 600.0, lambda _: None)
    said.clear()
    driver.pool.drain()
  # After ten seconds, twenty and forty; the call ends before eighty.
  assert len(said) == 3
  assert all(line.startswith("waiting for reward-0") for line in said)
  assert "a decode, 11 s of at most 600 s" in said[0]
