"""The lower bound: under every plan, and close where it can be known."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbjax.dataflow.bound import lower_bound
from sbjax.dataflow.plan import fixed_plan, worker_slots
from sbjax.dataflow.relax import Item, Machine, Pool, spread, whole_tasks
from sbjax.dataflow.schemes import SCHEMES, scheme
from sbjax.dataflow.simulate import simulate
from tests.dataflow.settings import Case, cases, step_costs, step_shape


@settings(max_examples=100, deadline=None)
@given(cases(), st.floats(1.0, 1.5))
def test_no_plan_beats_the_bound(case: Case, above: float):
  given_ = (case.shape, case.scheme, case.slots, case.costs)
  took = simulate(case.shape, case.scheme, case.plan, case.slots, case.costs).step_s
  fused = len(case.plan.fused)
  free = lower_bound(*given_)
  assert 0 < free <= took
  # Knowing how many fuse, or a plan that is no better, raises it at most to the truth.
  assert free <= lower_bound(*given_, fused=fused) * (1 + 1e-9) <= took * (1 + 2e-9)
  assert lower_bound(*given_, known_s=took * above) <= took


@pytest.mark.parametrize("name", ["colocated", "colocated_single_replay", "async_reward"])
def test_equal_shares_behind_barriers_meet_the_bound(name):
  chosen, shape = scheme(name), step_shape(groups=4, size=3, minibatches=2)
  slots = worker_slots(chosen, 4, 2)
  plan = fixed_plan(chosen, shape, slots)
  took = simulate(shape, chosen, plan, slots, step_costs()).step_s
  assert took <= 1.02 * lower_bound(shape, chosen, slots, step_costs())


@given(
  st.sampled_from(sorted(SCHEMES)),
  st.sampled_from(["generate_s", "decode_s", "backward_s", "replay_s", "update_s", "push_s"]),
)
def test_dearer_tasks_do_not_lower_the_bound(name, field):
  chosen, shape = scheme(name), step_shape()
  slots = worker_slots(chosen, 2, 1)
  costs = step_costs()
  dear = {k: dataclasses.replace(w, **{field: 3.0}) for k, w in costs.by_kind.items()}
  dearer = dataclasses.replace(costs, by_kind=dear)
  assert lower_bound(shape, chosen, slots, dearer) >= lower_bound(shape, chosen, slots, costs)


def test_divisible_work_goes_where_it_is_cheap():
  pool = Pool((1, 1))
  # The second worker is as fast with b and ten times slower with a.
  items = [Item(1, ({0: 1.0, 1: 10.0},)), Item(1, ({0: 1.0, 1: 1.0},))]
  assert spread(pool, items, (0.0, 0.0)) == pytest.approx(1.0)
  assert spread(pool, [items[1]], (0.0, 0.0)) == pytest.approx(0.5)
  assert spread(pool, [items[1]], (0.0, 0.4)) == pytest.approx(0.7)
  assert spread(pool, [Item(2, ({0: 1.0},))], (0.5, 0.0)) == pytest.approx(2.5)


@given(st.integers(1, 5), st.integers(0, 12), st.floats(0.1, 4.0), st.floats(0.0, 2.0))
def test_whole_tasks_on_equal_workers_take_whole_rounds(workers, tasks, seconds, head):
  rounds = -(-tasks // workers)
  expected = head + rounds * seconds if tasks else 0.0
  assert whole_tasks([Machine(workers, head, seconds)], tasks) == pytest.approx(expected)


def test_blocks_pack_no_better_than_their_sums():
  # Three tasks of blocks 4 and 3 on two workers: 21 units, and no worker can hold 11 below 11.
  assert whole_tasks([Machine(2, 0.0, 1.0)], 21, (4, 3)) == pytest.approx(11.0)
  # On four workers each would hold 5.25, and no sum of 4s and 3s lies between that and 6.
  assert whole_tasks([Machine(4, 0.0, 1.0)], 21, (4, 3)) == pytest.approx(6.0)
