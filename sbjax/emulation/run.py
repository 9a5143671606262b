"""The real driver over emulated workers: on Ray, or on a virtual clock."""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator

from sbjax.dataflow.costs import StepCosts
from sbjax.emulation.device import EmulatedWorker, Emulation
from sbjax.emulation.virtual import VirtualExecutor
from sbjax.rewards.protocol import Reward
from sbjax.runtime.driver import Driver
from sbjax.runtime.executor import Executor
from sbjax.runtime.recipe import Recipe
from sbjax.runtime.roles import recipe_of, reward_of
from sbjax.settings import Settings

PIXEL_STRIDE = 8


def emulation_of(recipe: Recipe, costs: StepCosts) -> Emulation:
  """What emulated workers must know to answer a recipe's driver.

  Args:
    recipe: gives the form of every scalar.
    costs: what tasks take, with the time scale.
  """
  return Emulation(
    costs=costs,
    blocks=recipe.blocks,
    steps=recipe.schedule.stochastic,
    channels=len(recipe.objective.channels),
    statistics=len(recipe.objective.statistics),
    unit_weight=float(recipe.reduce_weights.sum()),
    pixel_stride=PIXEL_STRIDE,
    seed=recipe.settings.seed,
  )


def emulated_executor(settings: Settings, emulation: Emulation, *, virtual: bool) -> Executor:
  """Emulated workers in Ray processes, or on a virtual clock in this one.

  Args:
    settings: names the cluster, if any.
    emulation: what the workers are.
    virtual: True for the virtual clock.
  """
  if virtual:
    return VirtualExecutor(emulation)
  if not settings.runtime.ray_address:
    # Ray reads it when it is imported, and then listens on 127.0.0.1 only.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
  from sbjax.runtime.ray_executor import RayExecutor

  return RayExecutor(
    cores_per_worker=0,
    gpus_per_worker=0,
    cache_dir="",
    address=settings.runtime.ray_address or None,
    make_worker=functools.partial(EmulatedWorker, emulation),
  )


@contextlib.contextmanager
def emulated_driver(
  settings: Settings,
  costs: StepCosts,
  log_dir: str,
  say: Callable[[str], None],
  *,
  virtual: bool = False,
) -> Iterator[tuple[Driver, Reward]]:
  """A driver whose emulated workers have started; they end with the context.

  Args:
    settings: the run's settings; their model gives the form of scalars only and is never loaded.
    costs: what tasks take; `scale` is the time scale.
    log_dir: folder for worker logs.
    say: prints one line.
    virtual: True for the virtual clock.
  """
  recipe, reward = recipe_of(settings), reward_of(settings)
  executor = emulated_executor(settings, emulation_of(recipe, costs), virtual=virtual)

  def tell(text: str) -> None:
    say(f"{text}  (emulated)")

  try:
    driver = Driver(recipe, executor, reward, log_dir, tell, costs=costs)
    driver.wait_for_workers()
    yield driver, reward
  finally:
    executor.shutdown()
