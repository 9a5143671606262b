"""Turns: the fast simulation agrees with the slow one, and being late costs only that."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbjax.dataflow.build import build_step
from sbjax.dataflow.costs import StepCosts
from sbjax.dataflow.paper import PaperCosts, paper_costs, paper_shape
from sbjax.dataflow.place import search
from sbjax.dataflow.plan import Turn, fixed_plan, worker_slots
from sbjax.dataflow.polish import planned_turns, polished
from sbjax.dataflow.schemes import scheme
from sbjax.dataflow.simulate import simulate
from sbjax.dataflow.timetable import Timetable
from sbjax.dataflow.turns import TurnQueue
from tests.dataflow.settings import Case, cases, step_costs, step_shape


@dataclasses.dataclass(frozen=True)
class Late(StepCosts):
  """Costs whose tasks take longer, each by its own share."""

  shares: tuple[float, ...] = ()

  def seconds(self, task, slot, shape):
    index = sum(map(ord, task.id)) % len(self.shares)
    return super().seconds(task, slot, shape) * (1.0 + self.shares[index])


def with_turns(case: Case):
  given = (case.shape, case.scheme, case.plan, case.slots, case.costs)
  return planned_turns(case.plan, case.scheme, case.slots, simulate(*given).intervals)


@settings(max_examples=60, deadline=None)
@given(cases())
def test_turns_give_the_schedule_that_they_were_taken_from(case: Case):
  plain = simulate(case.shape, case.scheme, case.plan, case.slots, case.costs)
  again = simulate(case.shape, case.scheme, with_turns(case), case.slots, case.costs)
  assert again.step_s == pytest.approx(plain.step_s, rel=1e-12)
  where = {i.task.id: i.worker for i in plain.intervals if i.task.kind != "reduce"}
  assert where == {i.task.id: i.worker for i in again.intervals if i.task.kind != "reduce"}


@settings(max_examples=60, deadline=None)
@given(cases())
def test_the_fast_simulation_agrees_with_the_slow_one(case: Case):
  if case.plan.offload:
    return
  plan = dataclasses.replace(case.plan, turns={})
  ran = simulate(case.shape, case.scheme, plan, case.slots, case.costs)
  table = Timetable(case.shape, case.scheme, plan, case.slots, case.costs)
  turns = table.turns(ran.intervals)
  assert table.step_s(turns) == pytest.approx(ran.step_s, rel=1e-9)


@settings(max_examples=60, deadline=None)
@given(cases(), st.lists(st.floats(0.0, 0.1), min_size=7, max_size=7))
def test_a_step_of_turns_is_late_by_no_more_than_its_tasks(case: Case, shares):
  plan = with_turns(case)
  late = Late(case.costs.by_kind, case.costs.dispatch_s, case.costs.scale, tuple(shares))
  planned_s = simulate(case.shape, case.scheme, plan, case.slots, case.costs).step_s
  took_s = simulate(case.shape, case.scheme, plan, case.slots, late).step_s
  assert took_s <= planned_s * (1.0 + max(shares)) * (1.0 + 1e-9)


def test_without_turns_a_late_task_costs_more_than_its_lateness():
  shape, chosen = paper_shape(24, 2), scheme("sbjax")
  slots, costs = worker_slots(chosen, 4, 2), paper_costs(PaperCosts())
  plan = search(shape, chosen, slots, costs, budget_s=1.0)
  late = Late(costs.by_kind, costs.dispatch_s, costs.scale, (0.0, 0.01, 0.0, 0.02, 0.005))
  took_s = simulate(shape, chosen, plan, slots, late).step_s
  assert took_s <= 1.02 * plan.simulated_s
  by_rule_s = simulate(shape, chosen, dataclasses.replace(plan, turns={}), slots, late).step_s
  assert by_rule_s > 1.04 * plan.simulated_s


@settings(max_examples=20, deadline=None)
@given(cases())
def test_searching_turns_keeps_every_task_and_makes_no_step_longer(case: Case):
  ran = simulate(case.shape, case.scheme, case.plan, case.slots, case.costs)
  found = polished(
    case.plan, case.shape, case.scheme, case.slots, case.costs, ran.intervals, tries=40
  )
  assert found.simulated_s <= ran.step_s * (1.0 + 1e-9)
  kinds = {i.task.id for i in ran.intervals if i.task.kind in case.scheme.bindings}
  named = [turn.task for mine in found.turns.values() for turn in mine]
  assert sorted(name for name in named if name in kinds) == sorted(kinds)
  again = simulate(case.shape, case.scheme, found, case.slots, case.costs)
  # The driver also fills what its workers wait.
  assert again.step_s <= found.simulated_s * (1.0 + 1e-9)


def test_a_group_takes_over_no_new_kind_of_task_where_memory_counts():
  shape, chosen = step_shape(groups=2, size=3, minibatches=2), scheme("sbjax")
  slots, costs = worker_slots(chosen, 1, 2), step_costs()
  plan = dataclasses.replace(search(shape, chosen, slots, costs, budget_s=0.02), turns={})
  groups = {name: "actor" for name in plan.groups if name.startswith(("generate", "replay"))}
  plan = dataclasses.replace(plan, groups={**plan.groups, **groups})
  ran = simulate(shape, chosen, plan, slots, costs)
  free = polished(plan, shape, chosen, slots, costs, ran.intervals, tries=400)
  kept = polished(plan, shape, chosen, slots, costs, ran.intervals, tries=400, keep_roles=True)

  def on_reward(found):
    mine = [t.task for name, turns in found.turns.items() if name != "actor-0" for t in turns]
    return {name.partition("/")[0] for name in mine}

  assert on_reward(free) & {"generate", "replay"}
  assert not on_reward(kept) & {"generate", "replay"}


class Clock:
  now_s = 0.0


def queue_of_two(turns):
  """A queue over one candidate's tasks of two mini-batches, and its graph."""
  shape, chosen = step_shape(groups=2, size=1, minibatches=1), scheme("sbjax")
  slots = worker_slots(chosen, 1, 1)
  plan = search(shape, chosen, slots, step_costs(), budget_s=0.01, fused=0)
  graph = build_step(shape, chosen, dataclasses.replace(plan, splits={}))
  clock, names = Clock(), tuple(slot.name for slot in slots)
  given = {w: tuple(Turn(*one) for one in mine) for w, mine in turns.items()}
  queue = TurnQueue(graph, lambda task: names, "kind", given, lambda: clock.now_s)
  return queue, graph, clock


def pop(queue, graph):
  pair = queue.pop(lambda task, worker: graph.is_ready(task.id))
  if pair is not None:
    graph.start(pair[0].id)
  return None if pair is None else (pair[0].id, pair[1])


@pytest.mark.parametrize(
  ("at_s", "taken"),
  [
    (0.25, True),
    (1.0, False),  # a second is left of generate/c0, and generate/c1 takes more
    (4.5, True),  # what runs for twice its time is lost
  ],
)
def test_a_worker_waits_for_its_turn_and_fills_only_what_fits(at_s, taken):
  turns = {
    "actor-0": (("generate/c0", 2.0),),
    "reward-0": (("decode/c0", 1.0), ("generate/c1", 1.5)),
  }
  queue, graph, clock = queue_of_two(turns)
  queue.push(graph.get_ready())
  queue.free("actor-0")
  assert pop(queue, graph) == ("generate/c0", "actor-0")
  clock.now_s = at_s
  queue.free("reward-0")
  assert pop(queue, graph) == (("generate/c1", "reward-0") if taken else None)


@pytest.mark.parametrize(
  ("at_s", "theirs_s", "rest", "taken"),
  [
    (0.5, 3.0, (), False),
    (1.5, 3.0, (), True),
    (1.5, 5.0, (), False),
    (1.5, 3.0, ("reduce/u0",), True),  # which waits for generate/c1
    (1.5, 3.0, ("decode/c1",), False),
  ],
)
def test_a_worker_without_turns_takes_over_what_is_late_if_it_is_sooner(
  at_s, theirs_s, rest, taken
):
  turns = {
    "actor-0": (("generate/c0", 2.0, 2.0), ("generate/c1", 2.0, 4.0)),
    "reward-0": (("decode/c0", theirs_s, 9.0), *((task, 1.0, 9.0) for task in rest)),
  }
  queue, graph, clock = queue_of_two(turns)
  queue._typical["reward-0", "generate"] = theirs_s
  del queue._due["reward-0"][0]
  queue.push(graph.get_ready())
  clock.now_s = at_s
  queue.free("actor-0")
  queue.free("reward-0")
  assert pop(queue, graph) == ("generate/c0", "actor-0")
  assert pop(queue, graph) == (("generate/c1", "reward-0") if taken else None)


def test_a_task_that_is_run_again_goes_to_whoever_is_idle():
  turns = {"actor-0": (("generate/c0", 2.0), ("generate/c1", 2.0)), "reward-0": ()}
  queue, graph, _ = queue_of_two(turns)
  queue.push(graph.get_ready())
  queue.free("actor-0")
  assert pop(queue, graph) == ("generate/c0", "actor-0")
  graph.fail("generate/c0")
  queue.push(graph.get_ready())
  queue.free("reward-0")
  assert pop(queue, graph) == ("generate/c0", "reward-0")


def test_a_part_that_is_made_again_where_its_sum_was_passed_over_is_summed():
  shape, chosen = step_shape(groups=1, size=1, minibatches=1, blocks=(1,)), scheme("sbjax")
  graph = build_step(shape, chosen, fixed_plan(chosen, shape, worker_slots(chosen, 1, 1)))
  workers = ("actor-0", "reward-0")
  turns = {worker: (Turn("reduce/u0", 1.0),) for worker in workers}
  queue = TurnQueue(graph, lambda task: workers, "kind", turns, lambda: 0.0)
  total = graph.tasks["reduce/u0"]

  def pop_sum():
    return queue.pop(lambda task, worker: graph.is_running(task.id))

  while ready := [t for t in graph.tasks.values() if graph.is_ready(t.id) and t.kind != "reduce"]:
    for task in ready:
      graph.start(task.id)
      graph.done(task.id)
  for worker in workers:
    queue.free(worker)
  graph.start(total.id)
  queue.push_for(total, "reward-0")  # who was to hold a part as well holds none
  assert pop_sum() == (total, "reward-0")
  queue.free("reward-0")
  assert pop_sum() is None
  graph.done(total.id)
  graph.reopen(total.id)
  graph.start(total.id)
  queue.push_for(total, "actor-0")
  assert pop_sum() == (total, "actor-0")


def test_a_turn_a_hundred_updates_away_is_waited_for():
  count = 120
  shape, chosen = step_shape(groups=count, size=1, minibatches=count, blocks=(1,)), scheme("sbjax")
  graph = build_step(shape, chosen, fixed_plan(chosen, shape, worker_slots(chosen, 1, 1)))
  turns = {"actor-0": (Turn(f"reduce/u{count - 1}", 1.0), Turn("generate/c0", 0.0))}
  queue = TurnQueue(graph, lambda task: ("actor-0",), "kind", turns, lambda: 0.0)
  queue.push([graph.tasks["generate/c0"]])
  queue.free("actor-0")
  assert queue.pop(lambda task, worker: True) == (graph.tasks["generate/c0"], "actor-0")
