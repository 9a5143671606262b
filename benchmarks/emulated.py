"""What the benchmarks on emulated devices share: a cell's settings, one Ray, a message's time."""

import contextlib
import dataclasses
import os
import statistics
import warnings
from collections.abc import Iterator
from typing import Any

from benchmarks.paper_fit import ACTORS, REWARDS, Cell
from configs import paper_emulated
from sbjax import config as config_lib
from sbjax.dataflow.costs import StepCosts
from sbjax.dataflow.paper import PaperCosts, paper_costs, paper_shape
from sbjax.runtime.driver import Driver
from sbjax.runtime.executor import Call, Result
from sbjax.runtime.records import StepResult, TrainHandles
from sbjax.settings import Settings

PIXEL_FRAMES_PER_LATENT = 4


def settings_of(cell: Cell, scheme: str) -> Settings:
  """The settings of a DanceGRPO cell."""
  shape = paper_shape(cell.candidates, cell.minibatches, cell.frames)
  c: Any = paper_emulated.get_config()
  c.scheme = scheme
  c.model.frames = PIXEL_FRAMES_PER_LATENT * (cell.frames - 1) + 1
  c.rollout.prompts_per_step = len(shape.groups)
  c.rollout.group_size = len(shape.groups[0])
  c.algorithm.minibatches = cell.minibatches
  c.runtime.actor_workers, c.runtime.reward_workers = ACTORS, REWARDS
  return config_lib.convert(c)


def costs_of(cell: Cell, costs: PaperCosts, scale: float, dispatch_s: float) -> StepCosts:
  """A cell's costs on the emulation's clock, with this machine's own time of a message."""
  made = paper_costs(costs, cell.frames, cell.judge)
  return dataclasses.replace(made, scale=scale, dispatch_s=dispatch_s / scale)


@contextlib.contextmanager
def one_ray(workers: int) -> Iterator[None]:
  """Ray on this machine for several drivers in a row; it ends with the context."""
  # Ray reads it when it is imported, and then listens on 127.0.0.1 only.
  os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
  import ray

  with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="os.fork", category=RuntimeWarning)
    ray.init(
      address="local",
      num_cpus=workers,
      include_dashboard=False,
      log_to_driver=False,
      configure_logging=False,
    )
  try:
    yield
  finally:
    ray.shutdown()


def message_s(driver: Driver, count: int = 40) -> float:
  """Seconds of a call that does nothing, from its submission to its result: the lower quartile.

  What lies above it is other programs' work; the machine is shared.
  """
  name, times = driver.slots[0].name, []
  for _ in range(count):
    box: list[Any] = []
    start = driver.executor.now()
    driver.pool.submit(name, Call("load", {}), (), "message", 60.0, box.append)
    driver.pool.drain()
    assert isinstance(box[0], Result)
    times.append(driver.executor.now() - start - box[0].seconds)
  return statistics.quantiles(times, n=4)[0]


def steps_of(
  driver: Driver, state: TrainHandles, first: int, count: int
) -> tuple[TrainHandles, list[StepResult]]:
  """Takes some steps, every one with the same number of prompts."""
  prompts = [f"prompt {i}" for i in range(driver.recipe.settings.rollout.prompts_per_step)]
  results = []
  for step in range(first, first + count):
    state, result = driver.run_step(state, step, prompts)
    results.append(result)
  return state, results
