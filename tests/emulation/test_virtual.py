"""The real driver on a virtual clock against the simulator, and what emulated workers answer."""

import dataclasses

import numpy as np
import pytest

from sbjax.dataflow.schemes import SCHEMES
from sbjax.dataflow.simulate import simulate
from sbjax.emulation.run import emulated_driver
from sbjax.runtime.judging import step_groups
from tests.emulation import setting


def shape_of(driver, reward, step):
  candidates = driver.candidates(step, setting.PROMPTS)
  groups = step_groups(driver.recipe.shape(step, ()).groups, candidates, reward)
  jobs = tuple(job.candidates for group in groups for job in reward.jobs(group))
  return driver.recipe.shape(step, jobs)


def drive(run, steps, tmp_path, costs=setting.COSTS):
  with emulated_driver(run, costs, str(tmp_path), setting.quiet, virtual=True) as (driver, reward):
    state = driver.start(setting.PROMPTS[0], None)
    results, gradients = [], []
    for step in range(1, steps + 1):
      state, result = driver.run_step(state, step, setting.PROMPTS)
      results.append(result)
      gradients.append({u: np.array(g) for u, g in driver.gradients.items()})
    shape = shape_of(driver, reward, steps)
    foreseen = simulate(shape, driver.scheme, driver.plan, driver.slots, costs).step_s
  return results, gradients, foreseen


@pytest.mark.parametrize("scheme", SCHEMES)
def test_driven_is_simulated(scheme, tmp_path):
  results, _, foreseen = drive(setting.settings(scheme), 2, tmp_path)
  assert results[-1].metrics["timing_s/step"] == pytest.approx(foreseen, rel=1e-9)


def test_the_scale_stretches_a_step(tmp_path):
  costs = dataclasses.replace(setting.COSTS, scale=3.0)
  run = setting.settings("stagebreaker")
  slow, _, _ = drive(run, 2, tmp_path, costs)
  fast, _, _ = drive(run, 2, tmp_path)
  key = "timing_s/step"
  assert slow[-1].metrics[key] == pytest.approx(3.0 * fast[-1].metrics[key], rel=1e-9)


def test_stand_ins_do_not_depend_on_the_scheme(tmp_path):
  merged = [drive(setting.settings(s), 1, tmp_path) for s in ("stagebreaker", "merged_replay")]
  for a, b in zip(*(rewards(results) for results, _, _ in merged), strict=True):
    assert a == b
  for a, b in zip(*(gradients[0][0] for _, gradients, _ in merged), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-6)
  metrics = merged[0][0][0].metrics
  assert metrics["check/logp_diff_rollout_replay"] == 0.0
  assert metrics["training/replays_per_candidate"] == 1.0
  assert len(set(rewards(merged[0][0]))) == 12


def rewards(results):
  return [record.reward for record in results[0].candidates]


def test_a_killed_worker_is_replaced_and_the_step_ends(tmp_path):
  run = setting.settings("stagebreaker")
  left = [1]
  with emulated_driver(run, setting.COSTS, str(tmp_path), setting.quiet, virtual=True) as opened:
    driver, _ = opened

    def on_progress(graph):
      if left and graph.counts()["replay"][0] == 3:
        left.pop()
        driver.executor.kill("actor-1")

    state = driver.start(setting.PROMPTS[0], None)
    _, result = driver.run_step(state, 1, setting.PROMPTS, on_progress=on_progress)
  undisturbed, _, _ = drive(run, 1, tmp_path)
  assert any(span.failed for span in result.spans)
  assert rewards([result]) == rewards(undisturbed)
