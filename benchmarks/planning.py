"""How long planning takes, and how far plans are above their bound.

    python -m benchmarks.planning

Plans `stagebreaker` and `sbjax` for 24 candidates on one actor and one reward worker and on 4 + 2,
and for 4,096 candidates on 1,024 devices. Seconds are of this process (its processor time, since
nothing waits) and of the wall. Exit code 1 where a plan takes more than 1 s, or 10 s for the last.
"""

import dataclasses
import sys
import time

from sbjax.dataflow.paper import PaperCosts, paper_costs, paper_shape
from sbjax.dataflow.place import search
from sbjax.dataflow.plan import worker_slots
from sbjax.dataflow.schemes import scheme


@dataclasses.dataclass(frozen=True)
class Size:
  """A planning problem.

  Attributes:
    candidates: of a step of two mini-batches.
    actors: actor workers.
    rewards: reward workers.
    budget_s: what the search may take.
    limit_s: what is too long.
  """

  candidates: int
  actors: int
  rewards: int
  budget_s: float
  limit_s: float


SIZES = (
  Size(24, 1, 1, 0.8, 1.0),
  Size(24, 4, 2, 0.8, 1.0),
  Size(4096, 683, 341, 8.0, 10.0),
)


def main() -> int:
  """Runs the benchmark."""
  costs, late = paper_costs(PaperCosts()), False
  print("| candidates | devices | scheme | step | bound | gap | search | plan, cpu | plan, wall |")
  print("|---|---|---|---|---|---|---|---|---|")
  for size in SIZES:
    for name in ("stagebreaker", "sbjax"):
      chosen = scheme(name)
      slots = worker_slots(chosen, size.actors, size.rewards)
      shape = paper_shape(size.candidates, 2)
      cpu_s, wall_s = time.process_time(), time.perf_counter()
      plan = search(shape, chosen, slots, costs, budget_s=size.budget_s)
      cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
      print(
        f"| {size.candidates} | {size.actors} + {size.rewards} | {name} | {plan.simulated_s:.2f} | "
        f"{plan.bound_s:.2f} | {plan.gap:.1%} | {plan.searched} | {cpu_s:.2f} s | {wall_s:.2f} s |",
        flush=True,
      )
      late |= cpu_s > size.limit_s
  return 1 if late else 0


if __name__ == "__main__":
  sys.exit(main())
