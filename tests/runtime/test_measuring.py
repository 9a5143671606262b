"""Profiling: what emulated devices cost is measured again, and what a real tiny model gives."""

import math

import pytest

from sbjax.dataflow.profile import Profile
from sbjax.emulation.run import emulated_driver
from sbjax.runtime import measuring, profiling
from sbjax.runtime.driver import Driver
from sbjax.runtime.executor import Call, TaskRaised
from sbjax.runtime.inline import InlineExecutor
from tests.emulation import setting
from tests.runtime import tiny


def measure(driver, reward, rounds, most):
  ticks = []
  size = profiling.video_size(driver.recipe, driver.pixel_stride)
  rows = measuring.Measuring(
    driver.pool,
    driver.recipe,
    size,
    rounds=rounds,
    timeout_s=60.0,
    progress=lambda: ticks.append(1),
  ).run("hello", reward, most)
  assert len(ticks) == measuring.measured_kinds(driver.recipe, most)
  devices = profiling.devices_of(driver.facts, driver.slots)
  return Profile(rows, profiling.fingerprint(driver.recipe.settings), devices), size


@pytest.mark.parametrize("scheme", ["sbjax", "colocated"])
def test_it_finds_what_emulated_devices_cost(scheme, tmp_path):
  run = setting.settings(scheme)
  with emulated_driver(run, setting.COSTS, str(tmp_path), setting.quiet, virtual=True) as opened:
    profile, size = measure(*opened, rounds=2, most=4)
  costs = profile.costs(*size)
  kinds = ("both",) if scheme == "colocated" else ("actor", "reward")
  for kind in kinds:
    found, meant = costs.by_kind[kind], setting.WORKER
    for field in vars(meant):
      if field not in ("judge_s", "reference_s"):
        assert getattr(found, field) == pytest.approx(getattr(meant, field)), field
    assert math.isinf(found.reference_s)  # without a KL there is no such task
    if kind == "actor":  # never asked to judge, so it holds no judge that could be measured
      assert math.isinf(found.judging_s(1))
      continue
    assert [n for n, _ in found.judge_s] == [1, 2, 4]
    for n, seconds in found.judge_s:
      assert seconds == pytest.approx(meant.judging_s(n))


def test_a_real_model_can_be_measured(tmp_path):
  run = tiny.settings(runtime__plan="search")
  driver = Driver(
    tiny.recipe_of(run),
    InlineExecutor(),
    tiny.reward_of(run),
    str(tmp_path),
    setting.quiet,
    "tests.runtime.tiny:build_roles",
  )
  driver.wait_for_workers()
  profile, size = measure(driver, tiny.reward_of(run), rounds=1, most=2)
  for kind in ("actor", "reward"):
    costs = profile.costs(*size).by_kind[kind]
    for field in ("generate_s", "decode_s", "prefix_s", "forward_s", "backward_s", "fold_s"):
      assert 0.0 < getattr(costs, field) < 60.0, field
  profile.write(tmp_path / "profile.json")
  only_the_reward_worker_judges(driver)


def only_the_reward_worker_judges(driver):
  """An actor holds no judge, is not warmed up for it and not asked; plans and evaluations agree."""
  driver.start("hello", None)
  assert driver.pool.judges == ["reward-0"]
  assert set(driver.warm.seconds["judge"]) == {"reward"}
  assert set(driver.warm.seconds["decode"]) == {"actor", "reward"}
  assert math.isinf(driver.costs.by_kind["actor"].judging_s(4))
  assert math.isfinite(driver.costs.by_kind["reward"].judging_s(4))
  plan = driver.planner.plan_for(driver.recipe.shape(1, tuple((c,) for c in range(6))))
  assert plan.simulated_s is not None and math.isfinite(plan.simulated_s)
  found = driver.evaluate({"base": None}, ("hello", "world!"), (5, 6), 1)
  assert len(found.records["base"]) == 4
  executor = driver.pool.executor
  for _ in range(2):
    ticket = executor.submit("actor-0", Call("judge", {"jobs": (), "candidates": (), "retries": 0}))
    executor.wait([ticket], 0.0)
    with pytest.raises(TaskRaised, match="actor-0 holds no judge"):
      executor.result(ticket)
    executor.respawn("actor-0")  # one that starts again after its death is no different


def test_batches():
  assert measuring.judge_batches(1) == (1,)
  assert measuring.judge_batches(2) == (1, 2)
  assert measuring.judge_batches(4) == (1, 2, 4)
  assert measuring.judge_batches(12) == (1, 2, 4, 8, 12)


def test_the_fingerprint_follows_what_tasks_cost():
  base = profiling.fingerprint(tiny.settings())
  same = [{"runtime__actor_workers": 3}, {"optim__learning_rate": 1.0}, {"model__frames": 21}]
  other = [{"lora__rank": 4}, {"runtime__chunk_blocks": 3}, {"rollout__transition": "dance_sde"}]
  for fields in same:
    assert profiling.fingerprint(tiny.settings(**fields)) == base
  for fields in other:
    assert profiling.fingerprint(tiny.settings(**fields)) != base
