"""What processes occupy, as metrics: measured for real, and added up per node."""

import mmap

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


class Figure:
  """Holds pixels and itself, as figures do."""

  def __init__(self):
    self.pixels, self.me = np.ones(2**23), self


def test_what_only_refers_to_itself_is_given_back():
  memory.give_back()
  before = memory.rss_bytes()
  Figure()
  assert memory.rss_bytes() - before > 6e7
  memory.give_back()
  assert memory.rss_bytes() - before < 6e6


def test_pages_of_the_store_are_let_go_of_and_stay_in_the_store(tmp_path):
  path = tmp_path / "plasma"
  path.write_bytes(bytes(2**25))
  with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as seen:
    memory.give_back()
    before = memory.rss_bytes()
    seen[:] = bytes([7]) * len(seen)
    assert memory.rss_bytes() - before > 3e7
    memory.give_back()
    assert memory.rss_bytes() - before < 6e6
    assert seen[:] == bytes([7]) * len(seen)
