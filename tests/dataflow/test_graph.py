"""The step graph's protocol, and the tasks that schemes make."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbjax.dataflow.build import build_step
from sbjax.dataflow.graph import StepGraph, Task
from sbjax.dataflow.plan import StepShape, fixed_plan, worker_slots
from sbjax.dataflow.schemes import SCHEMES, scheme


def shape(groups=2, size=3, minibatches=2, epochs=1, blocks=2, scope="group"):
  members = tuple(tuple(range(g * size, (g + 1) * size)) for g in range(groups))
  candidates = [c for group in members for c in group]
  per = len(candidates) // minibatches
  batches = tuple(tuple(candidates[m * per : (m + 1) * per]) for m in range(minibatches))
  jobs = tuple((c,) for c in candidates)
  return StepShape(members, batches * epochs, minibatches, (2,) * blocks, jobs, scope)


def step(name, actors=1, rewards=1, **kwargs):
  chosen, where = scheme(name), shape(**kwargs)
  slots = worker_slots(chosen, actors, rewards)
  plan = fixed_plan(chosen, where, slots, decodes_on_reward=1.0, replays_on_reward=0.5)
  return build_step(where, chosen, plan)


def run(graph, rng=None):
  order, ready = [], []
  while graph.is_active():
    ready += graph.get_ready()
    assert ready, "the graph is stuck"
    task = ready.pop(rng.randrange(len(ready)) if rng else 0)
    graph.start(task.id)
    graph.done(task.id)
    order.append(task.id)
  return order


@given(
  name=st.sampled_from(sorted(SCHEMES)),
  groups=st.integers(1, 4).map(lambda g: 2 * g),
  size=st.integers(1, 4),
  epochs=st.integers(1, 2),
  scope=st.sampled_from(["group", "minibatch", "step"]),
  seed=st.integers(0, 99),
)
def test_every_order_respects_every_need(name, groups, size, epochs, scope, seed):
  graph = step(name, groups=groups, size=size, epochs=epochs, scope=scope)
  order = run(graph, random.Random(seed))
  place = {task: i for i, task in enumerate(order)}
  assert sorted(order) == sorted(graph.tasks)
  for task in graph.tasks.values():
    assert all(place[need] < place[task.id] for need in task.needs)


def test_a_merged_step_replays_once_and_a_two_pass_step_twice():
  for name in SCHEMES:
    kinds = [t.kind for t in step(name).tasks.values()]
    twice = scheme(name).forward_first
    assert (kinds.count("forward") == 6) == twice
    assert kinds.count("replay") + kinds.count("backward") == 6
  merged = [t.kind for t in step("stagebreaker").tasks.values()]
  two_pass = [t.kind for t in step("colocated").tasks.values()]
  assert (merged.count("replay"), merged.count("forward"), merged.count("backward")) == (6, 0, 0)
  assert (two_pass.count("replay"), two_pass.count("forward"), two_pass.count("backward")) == (
    0,
    6,
    6,
  )


def test_colocated_stages_do_not_overlap():
  order = run(step("colocated"), random.Random(1))
  kinds = [name.split("/")[0] for name in order]
  for before, after in (("generate", "decode"), ("decode", "judge"), ("judge", "forward")):
    last = max(i for i, k in enumerate(kinds) if k == before)
    assert last < kinds.index(after)


def test_a_merged_replay_waits_for_no_reward():
  for name in ("stagebreaker", "sbjax", "merged_replay"):
    for task in step(name).tasks.values():
      if task.kind == "replay" and task.update == 0:
        made, *others = task.needs
        assert made == f"generate/c{task.candidates[0]}"
        # Only StageBreaker's reward devices finish judging first, whoever needs the verdicts.
        assert set(others) in ({"judge/b0", "judge/b1"}, set())
        assert not others or name == "stagebreaker"
      if task.kind == "replay" and task.update == 1:
        assert "update/u0" in task.needs


def test_reopened_tasks_hold_back_those_that_have_not_used_them():
  graph = StepGraph(
    [Task("a", "generate"), Task("b", "decode", ("a",)), Task("c", "judge", ("a",))]
  )
  for name in ("a", "b"):
    graph.start(name)
    graph.done(name)
  graph.reopen("a")
  assert [t.id for t in graph.get_ready()] == ["a"]
  graph.start("a")
  graph.done("a")
  assert [t.id for t in graph.get_ready()] == ["c"]
  assert graph.is_done("b")


def test_a_lost_attempt_can_start_again():
  graph = StepGraph([Task("a", "generate")])
  graph.start("a")
  assert graph.get_ready() == []
  graph.fail("a")
  assert [t.id for t in graph.get_ready()] == ["a"]


@pytest.mark.parametrize(
  ("tasks", "message"),
  [
    ([Task("a", "generate"), Task("a", "decode")], "twice"),
    ([Task("a", "decode", ("b",))], "not in the graph"),
    ([Task("a", "decode", ("b",)), Task("b", "decode", ("a",))], "cycle"),
  ],
)
def test_impossible_graphs_are_refused(tasks, message):
  with pytest.raises(ValueError, match=message):
    StepGraph(tasks)


def test_stagebreaker_judges_in_one_batch_per_reward_device_in_mini_batch_order():
  chosen, where = scheme("stagebreaker"), shape(groups=4, size=2)
  slots = worker_slots(chosen, 2, 2)
  plan = fixed_plan(chosen, where, slots, decodes_on_reward=1.0, replays_on_reward=0.25)
  assert plan.judge_batches == ((0, 1), (2, 3), (4, 5), (6, 7))
  moved = sorted(key for key, group in plan.groups.items() if group == "reward")
  assert moved == [f"decode/c{c}" for c in range(8)] + ["replay/u0/c3/b0-1", "replay/u1/c7/b0-1"]


def test_one_device_has_both_roles():
  assert [s.name for s in worker_slots(scheme("stagebreaker"), 1, 0)] == ["both-0"]
  assert [s.group for s in worker_slots(scheme("colocated"), 1, 1)] == ["both", "both"]
  assert [s.group for s in worker_slots(scheme("stagebreaker"), 2, 1)] == [
    "actor",
    "actor",
    "reward",
  ]


def test_the_dataflow_package_imports_no_jax():
  import subprocess
  import sys

  code = "import sys, sbjax.dataflow.build, sbjax.dataflow.plan; sys.exit('jax' in sys.modules)"
  assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
