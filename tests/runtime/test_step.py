"""RL steps of a tiny real model through the real runtime, in one process."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from sbjax.dataflow.plan import fixed_plan
from sbjax.rewards.protocol import Verdict
from sbjax.runtime.driver import Driver
from sbjax.runtime.executor import InputLost
from sbjax.runtime.inline import InlineExecutor
from sbjax.runtime.pool import RunFailed
from tests.runtime import tiny

BUILDER = "tests.runtime.tiny:build_roles"
PROMPTS = ("hello", "world!")


def drive(tmp_path, steps=2, each=None, builder=BUILDER, **overrides):
  settings = tiny.settings(**overrides)
  recipe = tiny.recipe_of(settings)
  said = []
  driver = Driver(
    recipe, InlineExecutor(), tiny.reward_of(settings), str(tmp_path), said.append, builder
  )
  driver.wait_for_workers()
  state = driver.start(PROMPTS[0], None)
  results, gradients = [], []
  for step in range(1, steps + 1):
    on_progress = each(driver) if each else (lambda graph: None)
    state, result = driver.run_step(state, step, PROMPTS, on_progress=on_progress)
    results.append(result)
    gradients.append({u: np.array(g) for u, g in driver.gradients.items()})
  return driver.train_state(state, steps, 0), results, gradients, said


@pytest.fixture(scope="module")
def merged(tmp_path_factory):
  return drive(tmp_path_factory.mktemp("merged"), steps=3)


@pytest.mark.parametrize(
  "overrides",
  [
    {"runtime__actor_workers": 2, "runtime__reward_workers": 2},
    {"runtime__actor_workers": 3, "runtime__reward_workers": 0},
    {"runtime__replays_on_reward": 1.0, "runtime__decodes_on_reward": 0.0},
  ],
)
def test_workers_and_placement_do_not_change_a_bit(merged, tmp_path, overrides):
  state, _, _, _ = drive(tmp_path, steps=3, **overrides)
  np.testing.assert_array_equal(state.adapter, merged[0].adapter)
  np.testing.assert_array_equal(state.ema, merged[0].ema)
  for a, b in zip(state.optimizer, merged[0].optimizer, strict=True):
    np.testing.assert_array_equal(a, b)


def split_everything(*args, **kwargs):
  plan = fixed_plan(*args, **kwargs)
  shape = args[1]
  splits = {(u, c): ((0,), (1,)) for u, members in enumerate(shape.updates) for c in members}
  return dataclasses.replace(plan, splits=splits, groups={})


@pytest.mark.parametrize("kills", [False, True])
def test_split_replays_do_not_change_a_bit(merged, tmp_path, monkeypatch, kills):
  monkeypatch.setattr("sbjax.runtime.planning.fixed_plan", split_everything)
  rng = np.random.default_rng(4)
  left = [3 if kills else 0]

  def each(driver):
    def on_progress(graph):
      assert any(task.kind == "fold" for task in graph.tasks.values())
      if left[0] and rng.random() < 0.2:
        left[0] -= 1
        driver.executor.kill(str(rng.choice(list(driver.pool.workers))))

    return on_progress

  state, _, _, _ = drive(
    tmp_path,
    steps=3,
    each=each,
    runtime__actor_workers=2,
    runtime__reward_workers=1,
  )
  np.testing.assert_array_equal(state.adapter, merged[0].adapter)


def test_schemes_agree_on_the_gradient_and_differ_in_replays(merged, tmp_path):
  _, results, gradients, _ = drive(tmp_path, steps=1, scheme="colocated")
  # The first update of both starts from the same adapter and trajectories.
  one, two = merged[2][0][0], gradients[0][0]
  assert np.linalg.norm(one) > 0
  assert np.linalg.norm(one - two) <= 1e-5 * np.linalg.norm(one)
  assert merged[1][0].metrics["training/replays_per_candidate"] == 1.0
  assert results[0].metrics["training/replays_per_candidate"] == 2.0


@pytest.mark.parametrize(
  ("name", "replays", "bits"),
  [
    ("colocated_single_replay", 1.0, True),
    ("merged_replay", 1.0, True),
    ("async_reward", 2.0, False),
    ("async_train", 2.0, False),
    ("sbjax", 1.0, True),
  ],
)
def test_every_scheme_gives_the_same_gradient(merged, tmp_path, name, replays, bits):
  state, results, gradients, _ = drive(tmp_path, steps=1, scheme=name)
  one, other = merged[2][0][0], gradients[0][0]
  assert np.linalg.norm(one - other) <= 1e-5 * np.linalg.norm(one)
  assert results[0].metrics["training/replays_per_candidate"] == replays
  if bits:
    np.testing.assert_array_equal(other, one)
    np.testing.assert_array_equal(gradients[0][1], merged[2][0][1])
  assert np.isfinite(state.adapter).all()


def test_fused_candidates_replay_less_and_give_the_same_gradient(merged, tmp_path):
  fused = {"scheme": "sbjax", "runtime__fused": 2}
  state, results, gradients, _ = drive(tmp_path / "a", steps=2, **fused)
  one, other = merged[2][0][0], gradients[0][0]
  assert np.linalg.norm(one - other) <= 1e-5 * np.linalg.norm(one)
  # Two of the six candidates' replays of the first mini-batch went into their rollout.
  assert results[0].metrics["training/replays_per_candidate"] == pytest.approx(1 - 2 / 6)
  assert state.fused == 2
  left = [2]

  def each(driver):
    def on_progress(graph):
      if left[0] and graph.is_done("generate/c2"):
        left[0] -= 1
        holder = "actor-0"
        driver.executor.kill(holder)

    return on_progress

  again, *_ = drive(tmp_path / "b", steps=2, each=each, runtime__actor_workers=2, **fused)
  np.testing.assert_array_equal(again.adapter, state.adapter)


def test_what_cannot_fuse_is_refused():
  from sbjax.dataflow.schemes import scheme
  from sbjax.runtime.planning import check_fused

  for overrides, kept, message in (
    ({"scheme": "stagebreaker"}, 2, "cannot continue a run that fuses 2"),
    ({"scheme": "sbjax", "runtime__fused": 9}, 0, "the first mini-batch has 3"),
    ({"scheme": "sbjax", "runtime__fused": 1, "algorithm__name": "fpo"}, 0, "runtime.fused=0"),
  ):
    run = tiny.settings(**overrides)
    with pytest.raises(ValueError, match=message):
      check_fused(scheme(run.scheme), tiny.recipe_of(run), kept)


def test_the_second_mini_batch_is_off_policy_and_the_first_is_not(merged):
  metrics = merged[1][1].metrics
  assert metrics["check/logp_diff_rollout_replay"] <= 5e-7
  assert abs(metrics["actor/ratio_mean/m0"] - 1.0) < 1e-6
  assert metrics["actor/ratio_std/m1"] > 1e-5


@pytest.mark.parametrize("name", ["flow_grpo", "grpo_guard", "fpo", "diffusion_nft"])
def test_every_objective_trains(tmp_path, name):
  overrides: dict[str, Any] = {"algorithm__kl_coef": 0.05} if name == "flow_grpo" else {}
  state, results, gradients, _ = drive(
    tmp_path, steps=1, algorithm__name=name, algorithm__clip_high=0.5, **overrides
  )
  _, _, baseline, _ = drive(
    tmp_path,
    steps=1,
    algorithm__name=name,
    algorithm__clip_high=0.5,
    scheme="colocated",
    **overrides,
  )
  assert state.version == 2
  assert results[0].metrics["training/skipped_updates"] == 0
  one, two = gradients[0][0], baseline[0][0]
  assert np.linalg.norm(one - two) <= 1e-5 * np.linalg.norm(one)


@pytest.mark.parametrize(
  "overrides",
  [
    {"algorithm__epochs": 2},
    {"algorithm__minibatch_order": "reference"},
    {"advantage__std": "global_population"},
    {"advantage__combine": "separate_loss"},
    {"advantage__combine": "gdpo"},
    {"rollout__best_of": 2},
    {"rollout__same_noise": "group"},
    {"algorithm__train_steps": "fraction:0.7"},
    {"algorithm__train_steps": "window:2"},
    {"algorithm__chunk_reduce": "mean"},
    {"rollout__transition": "dance_sde", "rollout__noise_level": 0.3},
    {"rollout__transition": "sde", "rollout__noise_level": 0.7},
    {"rollout__transition": "cps", "rollout__noise_level": 0.8},
  ],
  ids=lambda o: ",".join(f"{k}={v}" for k, v in o.items()),
)
def test_variants_train(tmp_path, overrides):
  state, results, _, _ = drive(tmp_path, steps=1, **overrides)
  epochs = overrides.get("algorithm__epochs", 1)
  assert state.version == 2 * epochs
  assert np.isfinite(state.adapter).all()
  assert results[0].metrics["check/logp_diff_rollout_replay"] <= 5e-7
  assert results[0].metrics["actor/grad_norm"] > 0


def test_a_mesh_of_four_devices_gives_the_gradient_of_one(merged, tmp_path):
  _, results, gradients, _ = drive(
    tmp_path, steps=1, runtime__devices_per_worker=4, runtime__mesh=(2, 2)
  )
  one, four = merged[2][0][0], gradients[0][0]
  assert np.linalg.norm(one - four) <= 1e-5 * np.linalg.norm(one)
  assert results[0].metrics["check/logp_diff_rollout_replay"] <= 5e-7


def test_more_devices_than_there_are_is_refused(tmp_path):
  with pytest.raises(RunFailed, match=r"devices_per_worker=8, but a worker has 4"):
    drive(tmp_path, steps=1, runtime__devices_per_worker=8, runtime__mesh=(4, 2))


class OneFails(tiny.PixelJudge):
  """Cannot judge the third job of every step, whatever is tried."""

  def judge(self, jobs, videos):
    if any(job.candidates == (2,) for job in jobs):
      raise OSError("the judge's connection broke")
    return super().judge(jobs, videos)


def build_one_fails(run, judges):
  return tiny.build_roles(run, judges, OneFails())


class AllNaN(tiny.PixelJudge):
  def judge(self, jobs, videos):
    # The warm-up's single job is answered; a step's are not.
    if jobs[0].candidates == (0,) and len(jobs) == 1 and jobs[0].seed == 0:
      return super().judge(jobs, videos)
    return [Verdict({"bright": float("nan"), "warm": 0.0}) for _ in jobs]


def build_all_nan(run, judges):
  return tiny.build_roles(run, judges, AllNaN())


def test_a_failed_reward_is_counted_and_never_a_zero(tmp_path):
  _, results, _, _ = drive(
    tmp_path,
    steps=1,
    builder="tests.runtime.test_step:build_one_fails",
    reward__max_failed_frac=0.5,
  )
  result = results[0]
  assert result.metrics["reward/failed"] == 1
  assert result.metrics["reward/failed/raised"] == 1
  assert result.candidates[2].reward is None
  assert "connection broke" in result.candidates[2].rationale
  assert all(c.reward is not None for c in result.candidates if c.index != 2)


def test_too_many_failures_skip_the_update_and_then_end_the_run(tmp_path):
  with pytest.raises(RunFailed, match=r"2 updates in a row were skipped.*not_finite"):
    drive(
      tmp_path,
      steps=2,
      builder="tests.runtime.test_step:build_all_nan",
      reward__max_skipped_in_row=2,
      algorithm__minibatches=1,
    )


@pytest.mark.parametrize("seed", range(6))
def test_killing_workers_anywhere_leaves_the_update_bit_equal(merged, tmp_path, seed):
  rng = np.random.default_rng(seed)
  kills = []

  def each(driver):
    def on_progress(graph):
      if len(kills) < 4 and rng.random() < 0.3:
        victim = str(rng.choice(list(driver.pool.workers)))
        if driver.pool.workers[victim].ticket is not None:
          kills.append(victim)
          driver.executor.kill(victim)

    return on_progress

  state, results, _, said = drive(
    tmp_path, steps=3, each=each, runtime__actor_workers=2, runtime__reward_workers=1
  )
  assert kills, "nothing was killed; the seed tests nothing"
  assert any("was ended" in line for line in said)
  np.testing.assert_array_equal(state.adapter, merged[0].adapter)
  assert sum(r.metrics["training/skipped_updates"] for r in results) == 0


def test_an_evaluation_is_the_same_for_every_number_of_workers(tmp_path):
  scores = []
  for workers in (1, 3):
    settings = tiny.settings(runtime__actor_workers=workers)
    recipe = tiny.recipe_of(settings)
    driver = Driver(
      recipe, InlineExecutor(), tiny.reward_of(settings), str(tmp_path), lambda line: None, BUILDER
    )
    driver.wait_for_workers()
    driver.start(PROMPTS[0], None)
    result = driver.evaluate({"base": None}, PROMPTS, (5, 6), 0)
    scores.append(result.scores["base"])
    assert len(result.records["base"]) == 4
  for name in ("reward", "bright", "warm", "heldout"):
    np.testing.assert_array_equal(scores[0][name], scores[1][name])


@pytest.mark.parametrize("seed", range(2))
def test_results_lost_with_their_node_are_made_again(merged, tmp_path, seed, monkeypatch):
  """Inputs vanish from the store when a call names them; the worker that was called lives."""
  rng, lost = np.random.default_rng(seed), []
  result = InlineExecutor.result
  inputs: dict[int, tuple] = {}
  submit = InlineExecutor.submit

  def remembering(self, worker, call, given=()):
    ticket = submit(self, worker, call, given)
    inputs[ticket] = (call.op, tuple(given))
    return ticket

  def losing(self, ticket):
    done = result(self, ticket)
    op, given = inputs.pop(ticket)
    able = given[3:] if op == "update" else given
    if able and op not in ("load", "set_adapter", "warm") and len(lost) < 6 and rng.random() < 0.2:
      lost.append(op)
      raise InputLost(f"{op}: an input was lost with its node", able)
    return done

  def each(driver):
    # After the warm-up, whose calls a lost input would end.
    monkeypatch.setattr(InlineExecutor, "submit", remembering)
    monkeypatch.setattr(InlineExecutor, "result", losing)
    return lambda graph: None

  state, *_ = drive(
    tmp_path, steps=3, each=each, runtime__actor_workers=2, runtime__reward_workers=1
  )
  assert len(lost) == 6, "too little was lost; the seed tests nothing"
  np.testing.assert_array_equal(state.adapter, merged[0].adapter)


def test_an_adapter_that_is_lost_ends_the_run_with_a_way_on(tmp_path, monkeypatch):
  result = InlineExecutor.result

  def losing(self, ticket):
    done = result(self, ticket)
    if "old_scores" in done.scalars:
      raise InputLost("generate on actor-0: an input was lost with its node", (object(),))
    return done

  def each(driver):
    monkeypatch.setattr(InlineExecutor, "result", losing)
    return lambda graph: None

  with pytest.raises(RunFailed, match=r"lost with its node; continue with --config.resume=auto"):
    drive(tmp_path, steps=1, each=each)
