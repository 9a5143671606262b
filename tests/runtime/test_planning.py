"""Planning between steps: what a run measures of itself, when it plans anew, what never changes."""

import dataclasses

import pytest

from sbjax.dataflow.build import build_step
from sbjax.dataflow.costs import StepCosts, WorkerCosts
from sbjax.dataflow.plan import worker_slots
from sbjax.dataflow.schemes import scheme
from sbjax.dataflow.simulate import simulate
from sbjax.runtime.planning import Planner, drift, refined
from sbjax.runtime.records import Span
from tests.runtime import tiny

WORKER = WorkerCosts(
  generate_s=0.09,
  fused_s=0.05,
  decode_s=0.08,
  judge_s=((1, 0.06),),
  forward_s=0.05,
  backward_s=0.1,
  replay_s=0.11,
  prefix_s=0.01,
  push_s=0.001,
)
COSTS = StepCosts({"actor": WORKER, "reward": WORKER}, dispatch_s=0.002)


def planner_of(name="sbjax", profiled=COSTS, **overrides):
  run = tiny.settings(scheme=name, runtime__plan="search", **overrides)
  recipe = tiny.recipe_of(run)
  chosen = scheme(name)
  slots = worker_slots(chosen, 1, 1)
  jobs = tuple((c,) for c in range(6))
  return Planner(recipe, chosen, slots, profiled), recipe.shape(1, jobs), chosen, slots


def step_of(planner, shape, chosen, slots, costs):
  """The spans of a step that takes what `costs` say."""
  plan = planner.plan_for(shape)
  graph = build_step(shape, chosen, plan)
  ran = simulate(shape, chosen, plan, slots, costs, graph)
  group = {slot.name: slot.group for slot in slots}
  return tuple(
    Span(
      i.worker,
      group[i.worker],
      i.task.kind,
      i.task.id,
      1,
      i.start_s + costs.dispatch_s * costs.scale,
      i.end_s,
      candidate=i.task.candidates[0] if len(i.task.candidates) == 1 else None,
      minibatch=i.task.update,
    )
    for i in ran.intervals
  )


def slower(factor, field="generate_s"):
  by_kind = {
    k: dataclasses.replace(w, **{field: factor * getattr(w, field)})
    for k, w in COSTS.by_kind.items()
  }
  return dataclasses.replace(COSTS, by_kind=by_kind)


def test_a_plan_is_kept_while_shape_and_costs_are():
  planner, shape, *_ = planner_of()
  assert planner.plan_for(shape) is planner.plan_for(shape)
  assert planner.plan.simulated_s >= planner.plan.bound_s > 0


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_a_step_teaches_its_own_times(scale):
  known = dataclasses.replace(COSTS, scale=scale)
  planner, shape, chosen, slots = planner_of(profiled=known)
  truth = slower(2.0, "decode_s")
  truth = dataclasses.replace(truth, scale=scale)
  spans = step_of(planner, shape, chosen, slots, truth)
  learned = refined(known, spans, planner.plan, slots)
  ran = {(s.group, s.kind) for s in spans}
  for kind in ("actor", "reward"):
    expected = truth if (kind, "decode") in ran else COSTS
    assert learned.by_kind[kind].decode_s == pytest.approx(expected.by_kind[kind].decode_s)
  sizes = {len(b) for b in planner.plan.judge_batches}
  judged = {n: s for n, s in learned.by_kind["reward"].judge_s if n in sizes}
  assert judged == pytest.approx({n: 0.06 * n for n in sizes})
  assert learned.dispatch_s == pytest.approx(COSTS.dispatch_s, abs=1e-3)


def judging(*table):
  by_kind = {k: dataclasses.replace(w, judge_s=table) for k, w in COSTS.by_kind.items()}
  return dataclasses.replace(COSTS, by_kind=by_kind)


def test_sizes_of_judge_tasks_that_did_not_run_keep_their_proportion():
  known = judging((1, 0.06), (2, 0.1), (24, 0.6))
  planner, shape, chosen, slots = planner_of(profiled=known)
  spans = step_of(planner, shape, chosen, slots, judging((1, 0.12), (2, 0.2), (24, 1.2)))
  learned = dict(refined(known, spans, planner.plan, slots).by_kind["reward"].judge_s)
  assert (learned[1], learned[2], learned[24]) == pytest.approx((0.12, 0.2, 1.2))


def test_drift_plans_anew_only_when_it_is_asked_for():
  for limit, expected in ((0.0, False), (0.5, True), (3.0, False)):
    planner, shape, chosen, slots = planner_of(runtime__replan_drift=limit)
    said = [planner.observe(step_of(planner, shape, chosen, slots, slower(2.0))) for _ in range(4)]
    assert any(said) == expected
    # A plan may move generations to workers that had made none, whose times are news once more.
    lines = [line for line in said if line]
    assert all("generate on" in line and "100%" in line for line in lines)
    assert len(lines) == len(set(lines)) <= 2


def test_planning_anew_never_changes_who_fuses():
  planner, shape, chosen, slots = planner_of(runtime__replan_drift=0.5)
  first = planner.plan_for(shape)
  assert first.fused, "these costs make fusing pay"
  for _ in range(4):
    planner.observe(step_of(planner, shape, chosen, slots, slower(50.0, "fused_s")))
  second = planner.plan_for(shape)
  assert second is not first
  assert second.fused == first.fused


def test_a_run_without_a_profile_plans_once_more_by_its_own_measurements():
  planner, shape, chosen, slots = planner_of(profiled=None)
  planner.costs = COSTS  # as the warm-up leaves it
  said = [planner.observe(step_of(planner, shape, chosen, slots, slower(2.0))) for _ in range(4)]
  assert [bool(s) for s in said] == [False, True, False, False]


def test_drift_overlooks_what_takes_no_time():
  assert drift(COSTS, slower(3.0, "push_s")) == (0.0, "nothing")
  share, what = drift(COSTS, slower(1.5, "replay_s"))
  assert share == pytest.approx(0.5)
  assert what.startswith("replay on")
