"""Steps whose workers take turns, driven on a virtual clock: as simulated, and through trouble."""

import dataclasses
import random

import numpy as np
import pytest

from sbjax.dataflow.costs import StepCosts
from sbjax.dataflow.place import search
from sbjax.emulation.device import STEP_KINDS
from sbjax.emulation.run import emulation_of
from sbjax.emulation.virtual import VirtualExecutor
from sbjax.runtime.driver import Driver
from sbjax.runtime.executor import InputLost, Result
from sbjax.runtime.roles import recipe_of, reward_of
from tests.emulation import setting

STEPS = 2


@dataclasses.dataclass(frozen=True)
class Wild(StepCosts):
  """Costs that are far from what was planned with, anew at every call."""

  draw: random.Random = dataclasses.field(default_factory=random.Random)

  def seconds(self, task, slot, shape):
    return super().seconds(task, slot, shape) * self.draw.choice((0.0, 0.1, 1.0, 3.0, 30.0))


class Troubled(VirtualExecutor):
  """Loses workers, and inputs whose workers live, now and then."""

  def __init__(self, emulation, seed):
    super().__init__(emulation)
    self.draw, self.deaths, self.losses = random.Random(seed), 0, 0
    self.killed, self.lost = 0, 0

  def wait(self, tickets, timeout_s):
    if self.deaths > self.killed and self.draw.random() < 0.1:
      self.killed += 1
      self.kill(self.draw.choice(sorted(self._specs)))
    return super().wait(tickets, timeout_s)

  def submit(self, worker, call, inputs=()):
    ticket = super().submit(worker, call, inputs)
    able = inputs[3:] if call.op == "update" else inputs
    running = self._calls[ticket]
    if (
      self.losses > self.lost
      and call.op in STEP_KINDS
      and able
      and isinstance(running.outcome, Result)
      and self.draw.random() < 0.1
    ):
      self.lost += 1
      running.outcome, running.end_s = InputLost("gone", tuple(able)), self._now_s
      self._free_s[worker] = self._now_s
    return ticket


def drive(run, tmp_path, *, seed=0, costs=None, deaths=0, losses=0):
  """Rewards and gradients of some steps, planned with the setting's costs; and the executor."""
  recipe, reward = recipe_of(run), reward_of(run)
  executor = Troubled(emulation_of(recipe, costs or setting.COSTS), seed)
  driver = Driver(recipe, executor, reward, str(tmp_path), setting.quiet, costs=setting.COSTS)
  driver.wait_for_workers()
  state, out = driver.start(setting.PROMPTS[0], None), []
  executor.deaths, executor.losses = deaths, losses
  for step in range(1, STEPS + 1):
    state, result = driver.run_step(state, step, setting.PROMPTS)
    out.append((result, {u: np.array(g) for u, g in driver.gradients.items()}))
  assert driver.plan is not None and driver.plan.turns, "the plan has no turns; this tests nothing"
  return out, executor


@pytest.fixture(autouse=True)
def short_search(monkeypatch):
  known = {}

  def short(shape, *args, **kwargs):
    if shape not in known:
      known[shape] = search(shape, *args, **kwargs, budget_s=0.02)
    return known[shape]

  monkeypatch.setattr("sbjax.runtime.planning.place.search", short)


RUNS = {
  "fused": {"runtime__fused": 1},
  "reference": {"algorithm__name": "flow_grpo", "algorithm__kl_coef": 0.05},
  "epochs": {"algorithm__epochs": 2, "runtime__fused": 0},
}


@pytest.mark.parametrize("fields", RUNS.values(), ids=RUNS)
def test_a_driven_step_of_turns_is_the_planned_one_and_survives_trouble(fields, tmp_path):
  run = setting.settings("sbjax", 2, 2, **{**fields, "rollout__group_size": 2})
  calm, _ = drive(run, tmp_path)
  metrics = calm[-1][0].metrics
  assert metrics["timing_s/step"] == pytest.approx(metrics["plan/simulated_s"], rel=1e-9)
  for seed, deaths, losses in ((0, 0, 0), (1, 2, 0), (2, 0, 4), (3, 2, 4)):
    costs = Wild(
      setting.COSTS.by_kind, setting.COSTS.dispatch_s, setting.COSTS.scale, random.Random(seed)
    )
    rough, executor = drive(run, tmp_path, seed=seed, costs=costs, deaths=deaths, losses=losses)
    trouble = (executor.killed > 0, executor.lost > 0)
    assert trouble == (deaths > 0, losses > 0), "too little trouble was made"
    for (a, one), (b, other) in zip(calm, rough, strict=True):
      assert [c.reward for c in a.candidates] == [c.reward for c in b.candidates]
      for update in one:
        np.testing.assert_allclose(one[update], other[update], rtol=1e-4, atol=1e-6)
