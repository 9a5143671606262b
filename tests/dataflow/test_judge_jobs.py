"""Judge jobs in the step graph: pairs wait for both videos, groups for all of their jobs."""

import itertools

import pytest

from sbjax.dataflow.build import build_step
from sbjax.dataflow.plan import StepShape, fixed_plan, worker_slots
from sbjax.dataflow.schemes import scheme as scheme_of

GROUPS = ((0, 1, 2), (3, 4, 5))
PAIRS = tuple(pair for group in GROUPS for pair in itertools.combinations(group, 2))
ANCHORED = tuple((c, -1 - g) for g, group in enumerate(GROUPS) for c in group)
NAMES = ("colocated", "colocated_single_replay", "async_reward", "stagebreaker", "sbjax")


def graph_of(name, jobs):
  scheme = scheme_of(name)
  shape = StepShape(
    groups=GROUPS,
    updates=GROUPS,
    minibatches=2,
    block_chunks=(2, 1),
    jobs=jobs,
    advantage_scope="group",
  )
  return build_step(shape, scheme, fixed_plan(scheme, shape, worker_slots(scheme, 1, 2))), shape


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("jobs", [PAIRS, ANCHORED], ids=["pairs", "anchored"])
def test_a_job_waits_for_its_videos_and_a_group_for_its_jobs(name, jobs):
  graph, _ = graph_of(name, jobs)
  asked = []
  for task in graph.tasks.values():
    if task.kind == "judge":
      asked += task.jobs
      needed = {f"decode/c{c}" for job in task.jobs for c in jobs[job]}
      assert needed <= set(task.needs)
      assert all(c >= 0 for c in task.candidates)
  assert sorted(asked) == list(range(len(jobs)))
  for scope, group in enumerate(GROUPS):
    mine = {
      task.id
      for task in graph.tasks.values()
      if task.kind == "judge" and any(set(jobs[job]) & set(group) for job in task.jobs)
    }
    assert mine <= set(graph.tasks[f"advantage/s{scope}"].needs)


@pytest.mark.parametrize("name", NAMES)
def test_an_anchor_is_generated_and_decoded_once_and_trains_nothing(name):
  graph, shape = graph_of(name, ANCHORED)
  assert shape.anchors == (-1, -2) and shape.candidates == 6
  for anchor, update in ((-1, 0), (-2, 1)):
    mine = [task for task in graph.tasks.values() if anchor in task.candidates]
    assert sorted(task.kind for task in mine) == ["decode", "generate"]
    assert {task.update for task in mine} == {update}
  assert not any("c-" in task.id for task in graph_of(name, PAIRS)[0].tasks.values())
