"""How much the processes of a run have grown since its tenth step, from its metrics.

    python -m benchmarks.memory WORKDIR [--first=10] [--most=0.02]

Prints, for each process and the object stores, the median memory of the ten steps from that step
on, of the last ten steps, and the highest in between: a worker's memory goes up and down by the
arrays of the task that it has just ended, so single steps tell nothing. Exit code 1 where the last
ten are more than `--most` above the first ten.
"""

import argparse
import pathlib
import statistics
import sys

from sbjax.report.writers import read_jsonl

_WINDOW = 10
PROCESS = "perf/rss_bytes/"
STORE = "perf/object_store_bytes"


def series(rows: list[dict], key: str) -> dict[int, float]:
  """One metric by step."""
  return {row["step"]: row[key] for row in rows if row.get(key) is not None}


def main() -> int:
  """Prints the table and gives the exit code."""
  parser = argparse.ArgumentParser(description="Memory growth of a run's processes.")
  parser.add_argument("workdir", type=pathlib.Path)
  parser.add_argument("--first", type=int, default=10, help="the step to compare with")
  parser.add_argument("--most", type=float, default=0.02, help="growth that is allowed")
  asked = parser.parse_args()
  rows = read_jsonl(asked.workdir / "metrics.jsonl")
  keys = sorted({k for row in rows for k in row if k.startswith(PROCESS) or k == STORE})
  grown = []
  print(
    f"{'process':24s} {'step':>10s} {'MiB':>9s} {'last MiB':>9s} {'peak MiB':>9s} {'growth':>8s}"
  )
  for key in keys:
    values = series(rows, key)
    after = [value for step, value in sorted(values.items()) if step >= asked.first]
    if len(after) < 2 * _WINDOW:
      print(
        f"benchmarks.memory: {key} has {len(after)} steps from {asked.first} on; "
        f"{2 * _WINDOW} are needed",
        file=sys.stderr,
      )
      return 1
    first, last = statistics.median(after[:_WINDOW]), statistics.median(after[-_WINDOW:])
    growth = last / first - 1.0
    steps = f"{asked.first}-{max(values)}"
    sizes = " ".join(f"{value / 2**20:9.1f}" for value in (first, last, max(after)))
    print(f"{key.removeprefix(PROCESS):24s} {steps:>10s} {sizes} {growth:8.2%}")
    grown += [key] if growth > asked.most else []
  if not keys:
    print(f"benchmarks.memory: {asked.workdir} has no memory metrics", file=sys.stderr)
    return 1
  print(f"more than {asked.most:.0%}: {', '.join(grown) or 'none'}")
  return 1 if grown else 0


if __name__ == "__main__":
  sys.exit(main())
