"""Emulated devices in Ray processes: the step takes the simulated time, and no worker knows JAX."""

import dataclasses
import pathlib

from sbjax.emulation.run import emulated_driver
from tests.emulation import setting


def modules_of(pid):
  return pathlib.Path(f"/proc/{pid}/maps").read_text()


def test_steps_take_their_time_in_processes_without_jax(tmp_path):
  run = setting.settings("stagebreaker", actors=2, rewards=1)
  costs = dataclasses.replace(setting.COSTS, dispatch_s=0.0, scale=0.2)
  said = []
  with emulated_driver(run, costs, str(tmp_path), said.append) as (driver, _):
    state = driver.start(setting.PROMPTS[0], None)
    results = []
    for step in (1, 2):
      state, result = driver.run_step(state, step, setting.PROMPTS)
      results.append(result)
    assert driver.plan is not None and driver.plan.simulated_s is not None
    # A machine that is busy only makes it longer.
    assert results[-1].metrics["timing_s/step"] >= driver.plan.simulated_s
    for name in driver.pool.workers:
      process = driver.executor.process(name)
      assert process is not None
      assert "jaxlib" not in modules_of(process.pid)
  assert all(text.endswith("(emulated)") for text in said)
  judged = [span for span in results[-1].spans if span.kind == "judge"]
  assert {span.group for span in judged} == {"reward"}
