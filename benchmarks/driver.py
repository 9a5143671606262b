"""The driver's own cost: its time outside waiting, per task and as a share of a step.

    python -m benchmarks.driver [--steps=5] [--scale=0.4]

The paper's setting with 24 candidates on 4 + 2 emulated devices, scheme `sbjax`, under the real
driver and Ray. The driver's own cost is what its thread does while it is not waiting for a task to
end: choosing, submitting, taking results, its arithmetic. Processor time is what it would cost on a
machine that is not shared; wall time is printed beside it.

Exit code 1 above 2 ms a task or 1 % of the step (processor time).
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from benchmarks import emulated, paper_fit
from benchmarks.paper_fit import Cell
from sbjax.emulation.run import emulated_driver

PER_TASK_S, SHARE = 2e-3, 0.01


class Waiting:
  """Counts the time that a driver spends waiting, by the clock and by the processor.

  Args:
    executor: whose waits are counted.
  """

  def __init__(self, executor: Any):
    self._wait = executor.wait
    self.wall_s = self.processor_s = 0.0
    executor.wait = self.wait

  def wait(self, tickets: Sequence[Any], timeout_s: float) -> list[Any]:
    """Waits."""
    wall, processor = time.perf_counter(), time.thread_time()
    try:
      return self._wait(tickets, timeout_s)
    finally:
      self.wall_s += time.perf_counter() - wall
      self.processor_s += time.thread_time() - processor


def main() -> int:
  """Runs the benchmark."""
  parser = argparse.ArgumentParser(description="The driver's own cost.")
  parser.add_argument("--steps", type=int, default=5)
  parser.add_argument("--scale", type=float, default=0.4)
  arguments = parser.parse_args()
  cell, costs = Cell(), paper_fit.fit().costs
  wall, processor, per_task, lengths = [], [], [], []
  with (
    tempfile.TemporaryDirectory() as logs,
    emulated.one_ray(paper_fit.ACTORS + paper_fit.REWARDS),
  ):
    run = emulated.settings_of(cell, "sbjax")
    mine = emulated.costs_of(cell, costs, arguments.scale, 0.002)
    with emulated_driver(run, mine, logs, lambda text: None) as (driver, _):
      waiting = Waiting(driver.executor)
      state = driver.start("prompt", None)
      state, _ = emulated.steps_of(driver, state, 1, 1)
      for step in range(2, arguments.steps + 2):
        before = waiting.wall_s, waiting.processor_s, time.perf_counter(), time.thread_time()
        state, (result,) = emulated.steps_of(driver, state, step, 1)
        step_s = time.perf_counter() - before[2]
        wall.append(step_s - (waiting.wall_s - before[0]))
        processor.append(time.thread_time() - before[3] - (waiting.processor_s - before[1]))
        per_task.append(processor[-1] / len(result.spans))
        lengths.append(step_s)
  share = statistics.median(p / s for p, s in zip(processor, lengths, strict=True))
  task_s = statistics.median(per_task)
  print(
    f"step {statistics.median(lengths):.2f} s, {cell.candidates} candidates; outside waiting: "
    f"processor {1e3 * statistics.median(processor):.1f} ms a step, {1e3 * task_s:.2f} ms a task, "
    f"{share:.2%} of the step; wall {1e3 * statistics.median(wall):.1f} ms  (emulated)"
  )
  return 0 if task_s <= PER_TASK_S and share <= SHARE else 1


if __name__ == "__main__":
  sys.exit(main())
