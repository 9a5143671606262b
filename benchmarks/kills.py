"""Random kills over real steps: the same adapters, nothing made again without need, nothing left.

    python -m benchmarks.kills [--kills=30] [--seed=0] [--config=configs/quickstart.py]
                               [--config.FIELD=…]

SIGKILL goes to the process of a random worker at a random time of a random length of a step, up to
three times a step, until all kills have happened; a step whose worker is still loading its models
is hit as well. The same steps then run again undisturbed, on the same driver, from the same state.

A task that ended twice was *made again*. That was needed where what it had made was lost: gradient
buffers, on a worker that was killed between its first end and its second start, before it had given
its sum. Everything else (trajectories, videos, verdicts, scores, sums) outlives the worker.

Exit code 1 unless every adapter, moving average and optimizer state is equal to the bit, nothing
was made again without need, and no process is left.
"""

import argparse
import collections
import dataclasses
import itertools
import os
import signal
import sys
import tempfile
import threading
import time

# Ray reads them when it is imported: it listens on 127.0.0.1 only.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import numpy as np

from benchmarks import processes
from sbjax import config as config_lib
from sbjax import prompts as prompt_lib
from sbjax.compilation import cache_dir
from sbjax.runtime.driver import Driver
from sbjax.runtime.pool import Pool
from sbjax.runtime.ray_executor import RayExecutor
from sbjax.runtime.records import Span, TrainHandles
from sbjax.runtime.roles import recipe_of, reward_of

# Smaller than the quickstart's step, so that a kill hits a larger share of it.
SMALL = ("--config.rollout.prompts_per_step=2", "--config.rollout.group_size=4")
PER_STEP = 3
HOLDING = {"replay", "fold", "backward", "generate"}
"""Kinds whose results stay on the worker; of `generate`, those with a gradient of their own."""


@dataclasses.dataclass(frozen=True)
class Kill:
  """One SIGKILL: the worker, when on the run's clock, the step, and what the worker was doing."""

  worker: str
  at_s: float
  step: int
  busy_with: str


class Killer(threading.Thread):
  """Kills workers of one step at given times after it is started.

  Args:
    executor: knows the workers' processes.
    pool: knows what they do.
    step: its number.
    plan: (seconds after the start, worker), in order.
  """

  def __init__(self, executor: RayExecutor, pool: Pool, step: int, plan: list[tuple[float, str]]):
    super().__init__(daemon=True)
    self._executor, self._pool, self._step, self._plan = executor, pool, step, plan
    self._over = threading.Event()
    self.done: list[Kill] = []

  def run(self) -> None:
    """Waits and kills until the plan or the step is over."""
    start = time.monotonic()
    for after_s, worker in self._plan:
      if self._over.wait(max(0.0, start + after_s - time.monotonic())):
        return
      while (process := self._executor.process(worker)) is None:  # it has just been killed
        if self._over.wait(0.02):
          return
      doing = self._pool.workers[worker]
      task = doing.busy_with if doing.ticket is not None else "no task"
      at_s = self._executor.now()
      try:
        os.kill(process.pid, signal.SIGKILL)
      except ProcessLookupError:
        continue  # it has ended, and the driver has not yet heard
      self.done.append(Kill(worker, at_s, self._step, task))

  def end(self) -> list[Kill]:
    """Ends the thread with the step, and gives the kills that happened."""
    self._over.set()
    self.join(10)
    return self.done


@dataclasses.dataclass(frozen=True)
class MadeAgain:
  """A task that ended once more: where, and whether what it had made was lost."""

  task: str
  worker: str
  needed: bool


def made_again(spans: list[Span], kills: list[Kill]) -> list[MadeAgain]:
  """Finds the tasks that ended more than once.

  Args:
    spans: all attempts of one step.
    kills: its kills.
  """
  ended: dict[str, list[Span]] = collections.defaultdict(list)
  for span in spans:
    # A sum has one part on each worker, and judging answers some jobs at a time.
    if not span.failed and span.kind not in ("reduce", "judge"):
      ended[span.task].append(span)
  found = []
  for task, runs in ended.items():
    runs.sort(key=lambda span: span.end_s)
    for before, after in itertools.pairwise(runs):
      needed = before.kind in HOLDING and any(
        _lost(before, after, kill, spans) for kill in kills if kill.worker == before.worker
      )
      found.append(MadeAgain(task, before.worker, needed))
  return found


def _lost(before: Span, after: Span, kill: Kill, spans: list[Span]) -> bool:
  """Tells whether a kill cost the worker the buffers that it had made in `before`."""
  # The driver hears of an end a little after it; a kill may fall in between.
  if not before.end_s <= kill.at_s + 0.5 or kill.at_s > after.start_s:
    return False
  summed = [s for s in spans if s.kind == "reduce" and not s.failed and s.worker == kill.worker]
  return not any(
    s.minibatch == before.minibatch and before.end_s <= s.start_s and s.end_s <= kill.at_s
    for s in summed
  )


def state_of(driver: Driver, state: TrainHandles, step: int) -> list[np.ndarray]:
  """Adapter, moving average and optimizer state, here."""
  held = driver.train_state(state, step, 0)
  return [held.adapter, held.ema, *held.optimizer]


def main() -> int:
  """Runs the steps and prints the account."""
  parser = argparse.ArgumentParser(description="Random kills over real steps.")
  parser.add_argument("--kills", type=int, default=30)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--config", default="configs/quickstart.py")
  asked, overrides = parser.parse_known_args()
  mark = processes.mark()
  words = ["kills", f"--config={asked.config}", *SMALL, *overrides]
  settings = config_lib.validate(config_lib.parse(words, {}).config)
  recipe = recipe_of(settings)
  prompts, _ = prompt_lib.from_settings(settings)
  ok = False
  with tempfile.TemporaryDirectory() as logs:
    runtime = settings.runtime
    executor = RayExecutor(
      cores_per_worker=runtime.cores_per_worker,
      gpus_per_worker=runtime.gpus_per_worker,
      devices_per_worker=runtime.devices_per_worker,
      cache_dir=cache_dir(),
    )
    driver = Driver(recipe, executor, reward_of(settings), logs, print)
    try:
      driver.wait_for_workers()
      start = driver.start(prompts.prompts[0], None)
      ok = compare(driver, executor, start, prompts, asked.kills, asked.seed)
    finally:
      driver.shutdown()
  left = processes.wait_until_gone(mark)
  print(f"processes left: {left or 'none'}")
  return 0 if ok and not left else 1


def compare(
  driver: Driver,
  executor: RayExecutor,
  start: TrainHandles,
  prompts: prompt_lib.PromptSet,
  wanted: int,
  seed: int,
) -> bool:
  """Runs disturbed steps until all kills have happened, then the same steps undisturbed."""
  settings = driver.recipe.settings
  size = settings.rollout.prompts_per_step
  rng = np.random.default_rng(seed)

  def run(state: TrainHandles, step: int):
    texts = prompts.take(settings.seed, (step - 1) * size, size)
    return driver.run_step(state, step, texts)

  # How long an undisturbed step takes, so that kills fall anywhere in one.
  _, calm = run(start, 1)
  step_s = calm.metrics["timing_s/step"]
  workers = list(driver.pool.workers)
  kills: list[Kill] = []
  again: list[MadeAgain] = []
  states, state = [], start
  while len(kills) < wanted:
    step = len(states) + 1
    count = min(PER_STEP, wanted - len(kills))
    times = sorted(rng.uniform(0.0, step_s, count))
    plan = [(float(t), workers[rng.integers(len(workers))]) for t in times]
    killer = Killer(executor, driver.pool, step, plan)
    killer.start()
    state, result = run(state, step)
    done = killer.end()
    kills += done
    redone = made_again(list(result.spans), done)
    again += redone
    states.append(state_of(driver, state, step))
    if not done:  # an undisturbed step that ended before its kills: they were drawn too late
      step_s = min(step_s, result.metrics["timing_s/step"])
    hit = ", ".join(f"{k.worker} in {k.busy_with}" for k in done) or "nothing"
    print(
      f"step {step}: {len(done)} kills ({hit}); {sum(s.failed for s in result.spans)} attempts "
      f"lost, {len(redone)} made again; {len(kills)} of {wanted} kills",
      flush=True,
    )
  state, different = start, []
  for index, hurt in enumerate(states):
    state, _ = run(state, index + 1)
    calm_state = state_of(driver, state, index + 1)
    if not all(np.array_equal(a, b) for a, b in zip(hurt, calm_state, strict=True)):
      different.append(index + 1)
  needless = [a for a in again if not a.needed]
  print(f"kills: {len(kills)} over {len(states)} steps of {step_s:.2f} s undisturbed, seed {seed}")
  print(f"steps whose adapter, moving average or optimizer differs: {different or 'none'}")
  print(f"made again because its buffers were lost: {len(again) - len(needless)}")
  print(f"made again without need: {[f'{a.task} of {a.worker}' for a in needless] or 'none'}")
  return not different and not needless


if __name__ == "__main__":
  sys.exit(main())
