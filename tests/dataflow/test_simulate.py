"""The simulator: what a simulated step may not do, and what it must cost."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings

from sbjax.dataflow.build import build_step
from sbjax.dataflow.plan import Plan, WorkerSlot, fixed_plan, judge_batches, worker_slots
from sbjax.dataflow.queue import Order
from sbjax.dataflow.schemes import SCHEMES, scheme
from sbjax.dataflow.simulate import simulate
from tests.dataflow.settings import Case, cases, step_costs, step_shape


@settings(max_examples=60, deadline=None)
@given(cases())
def test_a_simulated_step_respects_needs_and_does_one_task_a_worker_at_a_time(case: Case):
  done = simulate(case.shape, case.scheme, case.plan, case.slots, case.costs)
  graph = build_step(case.shape, case.scheme, case.plan)
  ends: dict[str, float] = {}
  for interval in done.intervals:
    ends[interval.task.id] = max(ends.get(interval.task.id, 0.0), interval.end_s)
  driver_side = {name for name in graph.tasks if name not in ends}
  assert {graph.tasks[name].kind for name in driver_side} <= {
    *("advantage", "barrier", "coefficients", "early"),
  }

  def ended(name: str) -> float:
    if name in ends:
      return ends[name]
    return max((ended(need) for need in graph.tasks[name].needs), default=0.0)

  for interval in done.intervals:
    assert all(ended(need) <= interval.start_s + 1e-9 for need in interval.task.needs)
  by_worker = sorted(done.intervals, key=lambda i: (i.worker, i.start_s, i.end_s))
  for before, after in itertools.pairwise(by_worker):
    assert before.worker != after.worker or before.end_s <= after.start_s + 1e-9
  assert len(done.updates_s) == len(case.shape.updates)
  assert done.updates_s == tuple(sorted(done.updates_s))
  assert done.step_s >= max(i.end_s for i in done.intervals)


def test_one_worker_takes_the_sum_of_its_tasks():
  shape, chosen = step_shape(groups=1, size=2, minibatches=1), scheme("merged_replay")
  slots, costs = worker_slots(chosen, 1, 0), step_costs()
  plan = fixed_plan(chosen, shape, slots)
  done = simulate(shape, chosen, plan, slots, costs)
  # Two generations, decodes, judgements and replays, a sum, the optimizer, and the adapter's way.
  tasks = 2 * (1.0 + 0.4 + 1.0 + 1.2) + 2 * 0.01 + 0.02
  assert done.step_s == pytest.approx(tasks + 10 * 0.002 + 0.01)


def test_a_slower_worker_makes_a_longer_step():
  shape, chosen = step_shape(), scheme("colocated")
  slots = worker_slots(chosen, 1, 1)
  costs = step_costs()
  slow = dataclasses.replace(costs.by_kind["both"], generate_s=3.0)
  unequal = dataclasses.replace(costs, by_kind={**costs.by_kind, "slow": slow})
  mixed = (slots[0], WorkerSlot("both-1", "both", "slow"))
  plan = fixed_plan(chosen, shape, slots)
  equal_s = simulate(shape, chosen, plan, slots, costs).step_s
  assert simulate(shape, chosen, plan, mixed, unequal).step_s > equal_s


def test_generation_before_decode_is_an_order_of_its_own():
  shape, chosen = step_shape(groups=1, size=2, minibatches=1), scheme("sbjax")
  slots = worker_slots(chosen, 1, 1)
  orders: tuple[tuple[Order, str], ...] = (("kind", "decode"), ("rollout", "generate"))
  for order, second in orders:
    plan = Plan({}, judge_batches(shape, 1), order=order)
    done = simulate(shape, chosen, plan, slots, step_costs())
    mine = [i.task.kind for i in done.intervals if i.worker == "actor-0"]
    assert mine[:2] == ["generate", second]


def test_waking_a_sleeping_judge_has_its_price():
  shape, chosen = step_shape(groups=1, size=2, minibatches=1), scheme("merged_replay")
  slots, costs = worker_slots(chosen, 1, 0), step_costs(offload_s=0.5)
  plan = fixed_plan(chosen, shape, slots)
  awake = simulate(shape, chosen, plan, slots, costs).step_s
  asleep = simulate(shape, chosen, dataclasses.replace(plan, offload=True), slots, costs)
  kinds = [i.task.kind == "judge" for i in asleep.intervals if i.task.kind not in _LIGHT]
  changes = sum(a != b for a, b in itertools.pairwise([False, *kinds]))
  assert changes > 0
  assert asleep.step_s == pytest.approx(awake + 0.5 * changes)


_LIGHT = ("reduce",)


def test_costs_that_lack_a_kind_of_worker_are_refused():
  shape, chosen = step_shape(), SCHEMES["colocated"]
  slots = (WorkerSlot("both-0", "both", "unheard"),)
  with pytest.raises(ValueError, match="no worker kind 'unheard'"):
    simulate(shape, chosen, fixed_plan(chosen, shape, slots), slots, step_costs())
