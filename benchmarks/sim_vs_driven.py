"""Simulated against driven steps on emulated devices, over a seeded sample of cells.

    python -m benchmarks.sim_vs_driven [--cells=24] [--seed=0] [--step_s=2.5]

Each cell is a scheme, a length, a number of candidates and mini-batches and a judge, in the paper's
fitted setting on 4 + 2 emulated devices: one warm-up step and three more under the real driver and
Ray, whose median stands beside the simulated length. Every cell's time scale makes its simulated
step last `--step_s`. The time of a message on this machine is measured first and enters the
simulation. Everything here is emulated.

Exit code 1 where the median of |driven / simulated - 1| is above 5 %.
"""

import argparse
import itertools
import random
import statistics
import sys
import tempfile

from benchmarks import emulated, paper_fit
from benchmarks.paper_fit import Cell
from sbjax.dataflow.paper import paper_shape
from sbjax.dataflow.schemes import SCHEMES
from sbjax.emulation.run import emulated_driver

LIMIT = 0.05


def main() -> int:
  """Runs the benchmark."""
  parser = argparse.ArgumentParser(description="Simulated against driven steps.")
  parser.add_argument("--cells", type=int, default=24)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--step_s", type=float, default=2.5)
  arguments = parser.parse_args()
  costs = paper_fit.fit().costs
  differences = []
  with (
    tempfile.TemporaryDirectory() as logs,
    emulated.one_ray(paper_fit.ACTORS + paper_fit.REWARDS),
  ):
    message_s = measure_message(costs, logs)
    print(f"a message takes {1e3 * message_s:.2f} ms  (emulated)", flush=True)
    for cell, scheme in sample(arguments.cells, arguments.seed):
      rough_s = paper_fit.step_s(cell, scheme, costs)
      scale = arguments.step_s / rough_s
      mine = emulated.costs_of(cell, costs, scale, message_s)
      run = emulated.settings_of(cell, scheme)
      with emulated_driver(run, mine, logs, lambda text: None) as (driver, _):
        state = driver.start("prompt", None)
        state, _ = emulated.steps_of(driver, state, 1, 1)
        _, results = emulated.steps_of(driver, state, 2, 3)
        assert driver.plan is not None and driver.plan.simulated_s is not None
        simulated_s = driver.plan.simulated_s
      driven_s = statistics.median(r.metrics["timing_s/step"] for r in results)
      differences.append(driven_s / simulated_s - 1.0)
      print(
        f"{scheme:<24} {cell.judge:<20} frames {cell.frames} candidates {cell.candidates:>2} "
        f"mini-batches {cell.minibatches}  scale {scale:.3f}  simulated {simulated_s:.3f} s  "
        f"driven {driven_s:.3f} s  {differences[-1]:+.1%}  (emulated)",
        flush=True,
      )
  sizes = sorted(abs(d) for d in differences)
  median = statistics.median(sizes)
  print(
    f"{len(sizes)} cells: |difference| median {median:.1%}, largest {sizes[-1]:.1%}  (emulated)"
  )
  return 0 if median <= LIMIT else 1


def sample(count: int, seed: int) -> list[tuple[Cell, str]]:
  """Draws cells that can exist, each with a scheme."""
  every = []
  for judge, frames, candidates, minibatches in itertools.product(
    ("vr_thinker", "unified_reward_flex"), (21, 33, 45), (6, 12, 24), (1, 2, 3, 4)
  ):
    try:
      paper_shape(candidates, minibatches, frames)
    except ValueError:  # groups of one
      continue
    every += [
      (Cell("dancegrpo", judge, frames, candidates, minibatches), scheme) for scheme in SCHEMES
    ]
  return random.Random(seed).sample(every, count)


def measure_message(costs, logs: str) -> float:
  """Seconds of a message on this machine."""
  cell = Cell()
  run, mine = emulated.settings_of(cell, "colocated"), emulated.costs_of(cell, costs, 0.01, 0.0)
  with emulated_driver(run, mine, logs, lambda text: None) as (driver, _):
    return emulated.message_s(driver)


if __name__ == "__main__":
  sys.exit(main())
