"""The same steps under Ray: real processes, real kills, deadlines, nothing left behind."""

import os
import signal
import time

import numpy as np
import pytest
import ray
from ray.cluster_utils import Cluster

from benchmarks import processes
from sbjax.runtime.driver import Driver
from sbjax.runtime.inline import InlineExecutor
from sbjax.runtime.ray_executor import RayExecutor
from tests.runtime import tiny

BUILDER = "tests.runtime.tiny:build_roles"
PROMPTS = ("hello", "world!")


class SleepyJudge(tiny.PixelJudge):
  """Never answers about one candidate."""

  def judge(self, jobs, videos):
    if any(job.candidates == (4,) for job in jobs):
      time.sleep(600)
    return super().judge(jobs, videos)


def build_sleepy(run, judges):
  return tiny.build_roles(run, judges, SleepyJudge())


@pytest.fixture(scope="module")
def cluster():
  # One cluster of two nodes for the module; each driver makes its own workers in it.
  mark = processes.mark()
  nodes = Cluster()
  nodes.add_node(num_cpus=2, resources={"actors": 2}, include_dashboard=False)
  nodes.add_node(num_cpus=2, resources={"rewards": 2})
  ray.init(address=nodes.address, log_to_driver=False, configure_logging=False)
  yield mark
  ray.shutdown()
  nodes.shutdown()


def drive(tmp_path, steps, kill=None, builder=BUILDER, **overrides):
  bound = {"runtime__actor_resource": "actors", "runtime__reward_resource": "rewards"}
  settings = tiny.settings(runtime__executor="ray", **bound, **overrides)
  recipe = tiny.recipe_of(settings)
  executor = RayExecutor(
    cores_per_worker=1,
    gpus_per_worker=0,
    cache_dir=os.environ["JAX_COMPILATION_CACHE_DIR"],
  )
  said, killed = [], []
  driver = Driver(recipe, executor, tiny.reward_of(settings), str(tmp_path), said.append, builder)
  try:
    driver.wait_for_workers()
    state = driver.start(PROMPTS[0], None)
    there = {name: executor.process(name) for name in ("actor-0", "reward-0")}
    assert there["actor-0"].node != there["reward-0"].node, "the groups share a node"

    def on_progress(graph):
      done = sum(d for d, _ in graph.counts().values())
      # At least: several tasks may end between two calls.
      if kill and done >= kill[0] and not killed:
        killed.append(kill[1])
        os.kill(there[kill[1]].pid, kill[2])

    for step in range(1, steps + 1):
      state, result = driver.run_step(state, step, PROMPTS, on_progress=on_progress)
    assert bool(killed) == bool(kill), "the kill never happened; this run tests nothing"
    return driver.train_state(state, steps, 0), result, said
  finally:
    driver.shutdown()


def test_ray_gives_the_bits_of_the_inline_executor_and_survives_a_kill(cluster, tmp_path):
  settings = tiny.settings()
  driver = Driver(
    tiny.recipe_of(settings),
    InlineExecutor(),
    tiny.reward_of(settings),
    str(tmp_path),
    lambda line: None,
    BUILDER,
  )
  driver.wait_for_workers()
  state = driver.start(PROMPTS[0], None)
  for step in (1, 2):
    state, _ = driver.run_step(state, step, PROMPTS)
  inline = driver.train_state(state, 2, 0)
  plain, _, _ = drive(tmp_path, 2)
  np.testing.assert_array_equal(plain.adapter, inline.adapter)
  hurt, result, said = drive(tmp_path, 2, kill=(9, "actor-0", signal.SIGKILL))
  np.testing.assert_array_equal(hurt.adapter, plain.adapter)
  (told,) = [line for line in said if "died" in line]
  for word in ("actor-0 (actor", "node ", "core 0", "pid ", "actor-0.log", "last task: "):
    assert word in told, told
  for key in ("actor-0", "reward-0", "driver", "raylets"):
    assert result.metrics[f"perf/rss_bytes/{key}"] > 1e7
  assert result.metrics["perf/object_store_bytes"] > 1e4


def test_a_stopped_worker_is_replaced_while_others_go_on(cluster, tmp_path):
  plain, _, _ = drive(tmp_path, 1)
  hurt, result, said = drive(
    tmp_path, 1, kill=(4, "reward-0", signal.SIGSTOP), runtime__task_timeout_s=6.0
  )
  np.testing.assert_array_equal(hurt.adapter, plain.adapter)
  told = [line for line in said if "did not end within 6 s" in line]
  for word in ("reward-0 (reward", "node ", "core 1", "reward-0.log", "last task: "):
    assert word in told[0], told
  stopped = next(s for s in result.spans if s.failed)
  assert stopped.worker == "reward-0"
  during = [s for s in result.spans if s.worker == "actor-0" and s.start_s > stopped.start_s]
  assert any(s.end_s < stopped.end_s for s in during), "the actor waited for the stopped worker"


def test_workers_that_no_node_can_hold_are_refused_before_anything_compiles(cluster, tmp_path):
  for overrides, words in (
    ({"runtime__actor_workers": 3}, ("runtime.actor_workers is 3", "room for 2 of the 3")),
    ({"runtime__gpus_per_worker": 1}, ("runtime.actor_workers is 1", "1 GPU", "room for 0")),
  ):
    with pytest.raises(ValueError) as refusal:
      drive(tmp_path, 1, **overrides)
    for word in words:
      assert word in str(refusal.value)
    assert str(refusal.value).count("\n") == 0


def test_a_judge_that_never_returns_costs_its_own_verdict_only(cluster, tmp_path):
  _, result, said = drive(
    tmp_path,
    1,
    builder="tests.runtime.test_ray:build_sleepy",
    reward__timeout_s=1.5,
    reward__retries=0,
    reward__max_failed_frac=0.5,
  )
  assert result.metrics["reward/failed/timeout"] == 1
  assert result.candidates[4].reward is None
  assert sum(c.reward is not None for c in result.candidates) == 5
  assert any("did not end within" in line and "judge" in line for line in said)


def test_ray_listens_on_the_loopback_only(cluster):
  listening = set()
  for table in ("/proc/net/tcp", "/proc/net/tcp6"):
    with open(table) as file:
      for line in file.readlines()[1:]:
        fields = line.split()
        if fields[3] == "0A":
          listening.add((fields[1].split(":")[0], int(fields[9])))
  mine = inodes([os.getpid(), *(int(line.split()[0]) for line in processes.left(cluster))])
  assert mine, "no listening socket of Ray was found"
  loopback = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
  assert {address for address, inode in listening if inode in mine} <= loopback


def inodes(pids):
  found = set()
  for pid in pids:
    try:
      for fd in os.listdir(f"/proc/{pid}/fd"):
        target = os.readlink(f"/proc/{pid}/fd/{fd}")
        if target.startswith("socket:["):
          found.add(int(target[8:-1]))
    except OSError:
      continue  # the process ended while it was looked at
  return found
