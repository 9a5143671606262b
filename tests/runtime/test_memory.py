"""What processes occupy, as metrics: measured for real, and added up per node."""

import numpy as np

from sbjax.runtime import memory


def test_resident_memory_follows_what_is_allocated():
  before = memory.rss_bytes()
  held = np.ones(2**23)  # 64 MiB, written to
  assert memory.rss_bytes() - before > 0.9 * held.nbytes
  assert memory.usage().rss_bytes > held.nbytes


def test_a_process_without_a_raylet_has_no_store():
  assert memory.usage().store_bytes == 0
  assert set(memory.metrics({"w": memory.usage()})) == {
    "perf/rss_bytes/w",
    "perf/rss_bytes/driver",
  }


def test_a_node_counts_once_whatever_the_number_of_its_workers():
  workers = {
    "actor-0": memory.Usage(10, "a/1", 5, 100),
    "actor-1": memory.Usage(20, "a/1", 5, 100),
    "reward-0": memory.Usage(30, "b/1", 7, 1000),
  }
  found = memory.metrics(workers)
  assert found["perf/object_store_bytes"] == 1100
  assert found["perf/rss_bytes/raylets"] == 12
  assert found["perf/rss_bytes/actor-1"] == 20
