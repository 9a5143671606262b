"""What the processes of a run occupy, read from /proc: cheap enough for every step."""

import ctypes
import dataclasses
import gc
import mmap
import os
import socket
from collections.abc import Iterable, Mapping


@dataclasses.dataclass(frozen=True)
class Usage:
  """Memory of one worker and of the Ray node that it runs on.

  Attributes:
    rss_bytes: resident memory of the process, with the shared pages that it has touched.
    node: machine and process id of the node's raylet; workers of one node name the same.
    node_rss_bytes: resident memory of the raylet, 0 where there is none.
    store_bytes: memory that the node's object store occupies. The store keeps pages for its next
      objects, so this is flat unless something holds on to objects.
  """

  rss_bytes: int
  node: str
  node_rss_bytes: int
  store_bytes: int


def usage() -> Usage:
  """Measures this process and the raylet that started it."""
  raylet = os.getppid()
  store = _store_bytes(raylet)
  node = f"{socket.gethostname()}/{raylet}"
  # The inline executor's parent is a shell: it has no store, and its memory is not ours to tell.
  return Usage(rss_bytes(), node, rss_bytes(raylet) if store else 0, store)


def rss_bytes(pid: int | None = None) -> int:
  """Resident memory of a process.

  Args:
    pid: its number; None for this process.
  """
  with open(f"/proc/{pid or 'self'}/statm", encoding="ascii") as file:
    return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _store_bytes(raylet: int) -> int:
  """Bytes that the object store's files occupy; the raylet alone keeps them open."""
  total, folder = 0, f"/proc/{raylet}/fd"
  try:
    for name in os.listdir(folder):
      path = f"{folder}/{name}"
      if "/plasma" in os.readlink(path):
        total += os.stat(path).st_blocks * 512
  except OSError:
    return 0  # a parent that is not ours to look at is no raylet
  return total


def metrics(workers: Mapping[str, Usage]) -> dict[str, float]:
  """Gives `perf/rss_bytes/<worker>` and `perf/object_store_bytes`; docs/metrics.md defines them.

  Args:
    workers: usage by worker name; one that died at the step's end is missing.
  """
  out = {f"perf/rss_bytes/{name}": float(used.rss_bytes) for name, used in workers.items()}
  out["perf/rss_bytes/driver"] = float(rss_bytes())
  nodes: Iterable[Usage] = {used.node: used for used in workers.values()}.values()
  stores = [used for used in nodes if used.store_bytes]
  if stores:
    out["perf/rss_bytes/raylets"] = float(sum(used.node_rss_bytes for used in stores))
    out["perf/object_store_bytes"] = float(sum(used.store_bytes for used in stores))
  return out


def settle() -> None:
  """Tells the garbage collector that what there is now stays: it need not look at it again.

  Libraries leave a million objects behind; without them `give_back` takes milliseconds.
  """
  gc.collect()
  gc.freeze()


def give_back() -> None:
  """Gives memory that nothing uses back to the system.

  Figures and graphs refer to themselves, so what they hold (pictures, references to videos in the
  object store) stays until the collector runs, which it may not do for fifty steps. Pictures and
  checkpoints take many megabytes for a moment, and the C library keeps them in the arenas of the
  threads that drew and wrote. Pages of the object store that were read count as this process's own
  until it lets go of them; they stay in the store.
  """
  gc.collect()
  library = ctypes.CDLL(None)
  trim = getattr(library, "malloc_trim", None)
  if trim is not None:  # C libraries without it have nothing to give back
    trim(0)
  for start, end in _store_mappings():
    library.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)


def _store_mappings() -> list[tuple[int, int]]:
  """Addresses at which this process sees the object store's files; shared, so safe to let go of."""
  with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
    lines = [line.split(maxsplit=5) for line in file if "/plasma" in line]
  ranges = [line[0].split("-") for line in lines if "s" in line[1]]
  return [(int(start, 16), int(end, 16)) for start, end in ranges]
