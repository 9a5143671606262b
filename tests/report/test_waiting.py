"""Waiting for a reward: from what tasks need, not from which stage it is."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbjax.dataflow.build import build_step
from sbjax.dataflow.costs import StepCosts, WorkerCosts
from sbjax.dataflow.graph import Task
from sbjax.dataflow.plan import StepShape, fixed_plan, worker_slots
from sbjax.dataflow.schemes import SCHEMES
from sbjax.dataflow.simulate import simulate
from sbjax.report import plans, waiting
from sbjax.report.simulated import as_step
from sbjax.runtime.records import Span

SHAPE = StepShape(
  groups=((0, 1), (2, 3)),
  updates=((0, 1), (2, 3)),
  minibatches=2,
  block_chunks=(2, 1),
  jobs=((0,), (1,), (2,), (3,)),
  advantage_scope="group",
)


def span(worker, kind, name, start_s, end_s, failed=False):
  return Span(worker, worker.partition("-")[0], kind, name, 1, start_s, end_s, failed=failed)


TASKS = (
  Task("g", "generate"),
  Task("d", "decode", ("g",)),
  Task("j", "judge", ("d",)),
  Task("a", "advantage", ("j",)),
  Task("r", "replay", ("g",)),
  Task("c", "coefficients", ("a", "r")),
  Task("s", "reduce", ("c", "r")),
)


def anyone(task):
  return ("actor-0", "actor-1")


def test_only_a_missing_verdict_counts():
  spans = (
    span("actor-0", "generate", "g", 10.0, 11.0),
    span("reward-0", "decode", "d", 11.0, 12.0),
    span("reward-0", "judge", "j", 12.0, 18.0),
    span("actor-1", "replay", "r", 11.0, 15.0),
    span("actor-0", "reduce", "s", 18.0, 19.0),
  )
  waits = waiting.reward_waits(spans, TASKS, anyone)
  # Until 15 s the sum lacks a replay as well; from then on the verdict alone.
  assert waits["actor-0"] == ((15.0, 18.0),)
  assert waits["actor-1"] == ((15.0, 18.0),)
  assert waits["reward-0"] == ()
  assert waiting.wait_frac(waits, spans, 9.0) == pytest.approx(6.0 / (2 * 9.0))


def test_a_worker_that_may_not_run_the_task_does_not_wait():
  spans = (
    span("actor-0", "generate", "g", 0.0, 1.0),
    span("actor-1", "replay", "r", 1.0, 2.0),
    span("reward-0", "decode", "d", 1.0, 2.0),
    span("reward-0", "judge", "j", 2.0, 3.0),
    span("reward-0", "judge", "j", 4.0, 6.0),
    span("actor-1", "reduce", "s", 6.0, 7.0),
  )
  waits = waiting.reward_waits(spans, TASKS, lambda task: ("actor-1",))
  assert waits["actor-0"] == ()
  assert waits["actor-1"] == (
    (2.0, 6.0),
  )  # a judgement that is asked for twice ends the second time


def test_no_spans_no_waits():
  assert waiting.reward_waits((), TASKS, anyone) == {}
  assert waiting.wait_frac({}, (), 1.0) == 0.0


def simulated(name, judge_s, actors=2, rewards=1):
  scheme = SCHEMES[name]
  slots = worker_slots(scheme, actors, rewards)
  costs = WorkerCosts(1.0, 0.25, ((1, judge_s),), 0.5, 1.0, 1.0, update_s=0.1)
  plan = fixed_plan(scheme, SHAPE, slots, decodes_on_reward=1.0, replays_on_reward=0.5)
  graph = build_step(SHAPE, scheme, plan)
  costs_of = StepCosts({kind: costs for kind in ("actor", "reward", "both")})
  ran = simulate(SHAPE, scheme, plan, slots, costs_of, graph)
  return as_step(ran, graph, SHAPE, scheme, plan, slots), plan, graph


def test_training_that_does_not_wait_for_rewards_waits_less():
  blocked, _, _ = simulated("async_reward", 2.0)
  free, _, _ = simulated("async_train", 2.0)
  waited = [waiting.wait_frac(s.waits, s.spans, s.step_s) for s in (blocked, free)]
  assert waited[0] > 1.2 * waited[1] > 0
  assert blocked.replays_per_candidate == free.replays_per_candidate == 2.0
  assert simulated("merged_replay", 2.0)[0].replays_per_candidate == 1.0


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(SCHEMES)), st.floats(0.01, 4.0), st.integers(1, 3), st.integers(1, 3))
def test_waits_lie_in_idle_time_of_the_step(name, judge_s, actors, rewards):
  step, _, _ = simulated(name, judge_s, actors, rewards)
  for worker, windows in step.waits.items():
    last = 0.0
    for start, end in windows:
      assert last <= start < end <= step.step_s + 1e-9
      last = end
      for other in step.spans:
        if other.worker == worker:
          assert other.end_s <= start + 1e-9 or other.start_s >= end - 1e-9
  frac = waiting.wait_frac(step.waits, step.spans, step.step_s)
  assert 0 <= frac < 1


def test_a_plan_in_words():
  _, plan, graph = simulated("stagebreaker", 1.0)
  said = plans.words(plan, SCHEMES["stagebreaker"], graph.tasks.values())
  expected = "4 of 4 decodes and 1 + 1 of 2 + 2 replays on reward workers; judge tasks of 2 x 2"
  assert said == expected
  _, plan, graph = simulated("colocated", 1.0)
  assert plans.words(plan, SCHEMES["colocated"], graph.tasks.values()) == ("judge tasks of 2 x 2")
