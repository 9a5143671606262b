"""What workers reserve on a cluster, who is refused, and which cores they get."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbjax.runtime import placement
from sbjax.runtime.executor import WorkerSpec
from tests.runtime import tiny


def specs(actors, rewards, **overrides):
  run = tiny.settings(
    runtime__actor_workers=actors,
    runtime__reward_workers=rewards,
    **{f"runtime__{name}": value for name, value in overrides.items()},
  )
  names = [("actor", i) for i in range(actors)] + [("reward", i) for i in range(rewards)]
  return [WorkerSpec(f"{g}-{i}", g, n, run, "x.log") for n, (g, i) in enumerate(names)]


def test_a_worker_reserves_cores_or_gpus_and_one_of_its_group_s_resource():
  actor, reward = specs(1, 1, cores_per_worker=2, actor_resource="a", reward_resource="r")
  assert placement.bundle(actor) == {"CPU": 2.0, "a": 1.0}
  assert placement.bundle(reward) == {"CPU": 2.0, "r": 1.0}
  (gpu,) = specs(1, 0, gpus_per_worker=4, devices_per_worker=4, mesh=(4, 1))
  assert placement.bundle(gpu) == {"GPU": 4.0, "CPU": 1.0}


@pytest.mark.parametrize(
  ("nodes", "words"),
  [
    ([{"CPU": 8.0, "a": 2.0}], ("runtime.reward_workers is 1", "room for 0 of the 1", '{"r": n}')),
    (
      [{"CPU": 8.0, "r": 1.0}, {"CPU": 8.0, "a": 1.0}],
      ("runtime.actor_workers is 2", "room for 1"),
    ),
    ([{"CPU": 2.0, "a": 2.0, "r": 1.0}], ("3 CPUs in all", "have 2")),
    ([], ("room for 0 of the 2",)),
  ],
)
def test_too_few_resources_are_one_sentence(nodes, words):
  with pytest.raises(ValueError) as refusal:
    placement.check_room(specs(2, 1, actor_resource="a", reward_resource="r"), nodes)
  text = str(refusal.value)
  assert all(word in text for word in words), text
  assert text.count(". ") == 0 and text.endswith(".") and "\n" not in text


def test_resources_on_different_nodes_do_not_add_up_for_one_worker():
  (spec,) = specs(1, 0, cores_per_worker=4)
  placement.check_room([spec], [{"CPU": 2.0}, {"CPU": 4.0}])
  with pytest.raises(ValueError, match="room for 0"):
    placement.check_room([spec], [{"CPU": 2.0}, {"CPU": 2.0}])


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=12), st.integers(1, 3))
def test_workers_of_one_machine_share_no_core_while_there_are_enough(machines, per_worker):
  hosts = {f"w{i}": host for i, host in enumerate(machines)}
  slots = placement.core_slots(hosts)
  cores = range(10, 10 + per_worker * len(machines))
  for host in set(machines):
    taken = [placement.pinned(slots[w], per_worker, cores) for w, h in hosts.items() if h == host]
    flat = [core for worker in taken for core in worker]
    assert len(set(flat)) == len(flat) == per_worker * machines.count(host)
    assert min(flat) == 10, "the first worker of each machine takes its first core"


def test_more_workers_than_cores_share_them_evenly():
  assert [placement.pinned(slot, 1, (4, 7)) for slot in range(4)] == [(4,), (7,), (4,), (7,)]
  assert placement.pinned(0, 0, (4, 7)) == ()
