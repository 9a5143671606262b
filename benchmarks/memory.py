"""How much the processes of a run have grown since its tenth step, from its metrics.

    python -m benchmarks.memory WORKDIR [--first=10] [--most=0.02]

Prints, for each process and the object stores, the memory at that step, at the last one and at the
highest one in between. Exit code 1 where the highest is more than `--most` above the first.
"""

import argparse
import pathlib
import sys

from sbjax.report.writers import read_jsonl

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
    if asked.first not in values or max(values) <= asked.first:
      print(f"benchmarks.memory: {key} has no steps after {asked.first}", file=sys.stderr)
      return 1
    first, last = values[asked.first], max(values)
    peak = max(value for step, value in values.items() if step >= asked.first)
    growth = peak / first - 1.0
    steps = f"{asked.first}-{last}"
    sizes = " ".join(f"{value / 2**20:9.1f}" for value in (first, values[last], peak))
    print(f"{key.removeprefix(PROCESS):24s} {steps:>10s} {sizes} {growth:8.2%}")
    grown += [key] if growth > asked.most else []
  if not keys:
    print(f"benchmarks.memory: {asked.workdir} has no memory metrics", file=sys.stderr)
    return 1
  print(f"more than {asked.most:.0%}: {', '.join(grown) or 'none'}")
  return 1 if grown else 0


if __name__ == "__main__":
  sys.exit(main())
