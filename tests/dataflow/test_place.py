"""The search: never worse than a plan by hand, repeatable, honest, and within memory."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbjax.dataflow.memory import Memory, peaks
from sbjax.dataflow.paper import paper_shape
from sbjax.dataflow.place import search
from sbjax.dataflow.plan import fixed_plan, worker_slots
from sbjax.dataflow.prune import Branches
from sbjax.dataflow.schemes import SCHEMES, scheme
from sbjax.dataflow.simulate import simulate
from sbjax.dataflow.space import _cut, space
from tests.dataflow.settings import Case, cases, seconds, step_costs, step_shape

GIB = 2**30


@settings(max_examples=15, deadline=None)
@given(cases(), st.sampled_from([0.0, 0.3, 1.0]), st.sampled_from([0.0, 0.5]))
def test_a_searched_plan_is_no_worse_than_one_by_hand(case: Case, decodes, replays):
  plan = search(case.shape, case.scheme, case.slots, case.costs, budget_s=0.05)
  again = simulate(case.shape, case.scheme, plan, case.slots, case.costs).step_s
  assert plan.simulated_s == again
  assert plan.bound_s is not None and plan.gap is not None
  assert plan.bound_s <= again and plan.gap >= 0
  if plan.searched == "exhaustive" and case.scheme.name == "stagebreaker":
    by_hand = fixed_plan(
      case.scheme,
      case.shape,
      case.slots,
      decodes_on_reward=decodes,
      replays_on_reward=replays,
    )
    assert again <= simulate(case.shape, case.scheme, by_hand, case.slots, case.costs).step_s * (
      1 + 1e-12
    )


def test_the_space_of_stagebreaker_is_searched_throughout_where_it_is_small():
  shape, chosen = step_shape(groups=2, size=3, minibatches=2), scheme("stagebreaker")
  slots, costs = worker_slots(chosen, 2, 1), step_costs()
  plan = search(shape, chosen, slots, costs, budget_s=2.0)
  assert plan.searched == "exhaustive"
  where = space(shape, chosen, slots)
  assert where.size == 7 * 4 * 4
  points = itertools.product(*(range(len(knob.values)) for knob in where.knobs))
  every = [simulate(shape, chosen, where.plan(p), slots, costs).step_s for p in points]
  assert plan.simulated_s == min(every)


def test_what_branch_and_bound_leaves_out_is_no_better():
  shape, chosen = (
    step_shape(groups=2, size=3, minibatches=2, reference=True),
    scheme("stagebreaker"),
  )
  slots, costs = worker_slots(chosen, 2, 1), step_costs()
  plan = search(shape, chosen, slots, costs, budget_s=0.2)
  assert plan.searched == "branch_and_bound"
  whole = search(shape, chosen, slots, costs, budget_s=1.0)
  assert whole.searched == "exhaustive"
  assert seconds(plan) == seconds(whole)


@settings(max_examples=40, deadline=None)
@given(cases(), st.data())
def test_a_branch_is_bounded_from_below(case: Case, data):
  chosen = scheme("stagebreaker")
  slots = worker_slots(chosen, 2, 1 + len(case.slots) % 2)
  where = space(case.shape, chosen, slots)
  branches = Branches(where, case.costs)
  point = tuple(data.draw(st.integers(0, len(k.values) - 1)) for k in where.knobs)
  if not any(point):  # nothing moved: judged upon arrival, and simulated by every search
    return
  took = simulate(case.shape, chosen, where.plan(point), slots, case.costs).step_s
  picked = list(where.chosen(point).items())
  for known in range(len(picked) + 1):
    assert branches.least_s(dict(picked[:known])) <= took


def test_a_search_that_cannot_see_everything_says_so():
  shape, chosen = step_shape(groups=4, size=3, minibatches=2), scheme("sbjax")
  plan = search(shape, chosen, worker_slots(chosen, 4, 2), step_costs(), budget_s=0.02)
  assert plan.searched == "local"
  only = scheme("colocated")
  assert search(shape, only, worker_slots(only, 4, 2), step_costs()).searched == "fixed"


@pytest.mark.parametrize("name", ["stagebreaker", "sbjax"])
def test_equal_inputs_give_equal_plans(name):
  shape, chosen = step_shape(groups=4, size=2, minibatches=2), scheme(name)
  slots = worker_slots(chosen, 2, 1)
  plans = [search(shape, chosen, slots, step_costs(), budget_s=0.05) for _ in range(2)]
  assert plans[0] == plans[1]


def test_sbjax_is_faster_than_stagebreaker_where_a_mini_batch_has_few_candidates():
  shape = step_shape(groups=3, size=2, minibatches=3)
  took = {}
  for name in ("stagebreaker", "sbjax"):
    chosen = scheme(name)
    plan = search(shape, chosen, worker_slots(chosen, 4, 2), step_costs(), budget_s=0.3)
    took[name] = seconds(plan)
  assert took["sbjax"] < 0.95 * took["stagebreaker"]


def test_the_number_of_fused_candidates_can_be_given():
  shape, chosen = step_shape(groups=4, size=2, minibatches=2), scheme("sbjax")
  slots = worker_slots(chosen, 2, 1)
  for count in (0, 3):
    plan = search(shape, chosen, slots, step_costs(), budget_s=0.05, fused=count)
    assert len(plan.fused) == count
  with pytest.raises(ValueError, match="first mini-batch has 4 candidates"):
    search(shape, chosen, slots, step_costs(), fused=5)
  plain = scheme("stagebreaker")
  plan = search(shape, plain, worker_slots(plain, 2, 1), step_costs(), budget_s=0.05, fused=3)
  assert not plan.fused


def sized(slots, gib: float):
  return tuple(dataclasses.replace(slot, memory_bytes=int(gib * GIB)) for slot in slots)


MEMORY = Memory(
  policy_bytes=4 * GIB,
  decoder_bytes=GIB,
  judge_bytes=8 * GIB,
  optimizer_bytes=GIB,
  activations_bytes=(("replay", 3 * GIB), ("generate", GIB), ("judge", 2 * GIB)),
  folded_bytes=GIB // 2,
  unit_bytes=2 * GIB,
)


def test_a_plan_that_does_not_fit_is_no_plan():
  shape, chosen = step_shape(groups=2, size=3, minibatches=2), scheme("stagebreaker")
  slots, costs = worker_slots(chosen, 2, 1), step_costs()
  free = search(shape, chosen, slots, costs, memory=MEMORY, budget_s=2.0)
  tight = (*sized(slots[:2], 24), *sized(slots[2:], 10.5))
  plan = search(shape, chosen, tight, costs, memory=MEMORY, budget_s=2.0)
  # A reward worker of 10.5 GiB has room for the judge alone.
  assert all(group == "actor" for group in plan.groups.values())
  assert seconds(plan) > seconds(free)
  done = simulate(shape, chosen, plan, tight, costs)
  used = peaks(shape, chosen, plan, tight, done.intervals, MEMORY)
  assert used["reward-0"] == 10 * GIB
  # Policy, decoder, optimizer, a replay's activations; its buffers and those of two before it.
  assert used["actor-0"] <= 24 * GIB
  small = (*tight[:2], *sized(slots[2:], 9))
  with pytest.raises(ValueError, match=r"reward-0 has 9\.00 GiB and scheme stagebreaker needs"):
    search(shape, chosen, small, costs, memory=MEMORY, budget_s=2.0)


def test_a_judge_that_can_sleep_makes_room_and_costs_time():
  shape, chosen = step_shape(groups=1, size=2, minibatches=1), scheme("merged_replay")
  slots = sized(worker_slots(chosen, 1, 0), 16.5)
  costs = step_costs(offload_s=0.2)
  with pytest.raises(ValueError, match=r"both-0 has 16\.50 GiB"):
    search(shape, chosen, slots, costs, memory=MEMORY)
  sleepy = dataclasses.replace(MEMORY, may_offload=True)
  plan = search(shape, chosen, slots, costs, memory=sleepy)
  roomy = search(shape, chosen, sized(slots, 99), costs, memory=sleepy)
  assert plan.offload and not roomy.offload
  assert seconds(plan) > seconds(roomy)


def test_unequal_devices_are_planned_for():
  shape, chosen = step_shape(groups=4, size=2, minibatches=2), scheme("sbjax")
  slots, costs = worker_slots(chosen, 3, 1), step_costs()
  slow = dataclasses.replace(
    costs.by_kind["actor"], generate_s=4.0, decode_s=1.6, backward_s=4.8, replay_s=5.2
  )
  mixed = (*slots[:2], dataclasses.replace(slots[2], kind="slow"), slots[3])
  unequal = dataclasses.replace(costs, by_kind={**costs.by_kind, "slow": slow})
  equal_s = seconds(search(shape, chosen, slots, costs, budget_s=0.1))
  plan = search(shape, chosen, mixed, unequal, budget_s=0.1)
  assert equal_s < seconds(plan) < 2.5 * equal_s
  assert plan.bound_s is not None and plan.bound_s <= seconds(plan)


def test_every_scheme_plans_with_one_worker_of_each_role_and_with_one_in_all():
  shape = step_shape(groups=2, size=2, minibatches=2, anchors=True, reference=True)
  for name, chosen in SCHEMES.items():
    for rewards in (1, 0):
      plan = search(shape, chosen, worker_slots(chosen, 1, rewards), step_costs(), budget_s=0.02)
      assert plan.gap is not None and plan.gap >= 0, name


def test_dealt_judge_tasks_hold_the_same_jobs_and_are_ready_together():
  shape, slots = paper_shape(24, 2), worker_slots(scheme("sbjax"), 4, 2)
  where = space(shape, scheme("sbjax"), slots)
  names = [knob.name for knob in where.knobs]
  home = [0] * len(names)
  home[names.index("judge_tasks")] = where.knobs[names.index("judge_tasks")].values.index(2)
  runs = where.plan(tuple(home)).judge_batches
  home[names.index("judge_dealt")] = 1
  dealt = where.plan(tuple(home)).judge_batches
  assert runs[:2] == (tuple(range(6)), tuple(range(6, 12)))
  assert dealt[:2] == (tuple(range(0, 12, 2)), tuple(range(1, 12, 2)))
  for batches in (runs, dealt):
    assert sorted(job for batch in batches for job in batch) == list(range(24))


@given(st.integers(1, 30), st.integers(1, 12), st.integers(0, 3), st.booleans())
def test_every_way_to_cut_judge_tasks_keeps_every_job_once(jobs, tasks, late, dealt):
  tasks = min(tasks, jobs)
  cut = _cut([tuple(range(jobs))], tasks, late, dealt=dealt)
  assert sorted(job for batch in cut for job in batch) == list(range(jobs))
  assert all(cut) and len(cut) <= tasks + 1


def test_a_search_ends_where_its_points_have_fewer_plans_than_it_may_simulate():
  shape, chosen = step_shape(groups=1, size=2, minibatches=1, blocks=(4,)), scheme("sbjax")
  slots = worker_slots(chosen, 1, 1)
  where = space(shape, chosen, slots)
  points = itertools.product(*(range(len(knob.values)) for knob in where.knobs))
  plans = len({where.canonical(point) for point in points})
  # Between the two: too many points to try each, more simulations than there are plans.
  simulations = (plans + where.size) // 2
  tasks = 2 * shape.candidates + len(shape.jobs) + shape.candidates
  plan = search(shape, chosen, slots, step_costs(), budget_s=simulations * tasks / 60_000)
  assert plans < simulations < where.size
  assert plan.searched == "local"
