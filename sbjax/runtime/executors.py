"""Which executor a run's settings name: this process, or Ray with its environment set first."""

import os

from sbjax.runtime.executor import Executor
from sbjax.runtime.recipe import Recipe


def make_executor(recipe: Recipe, cache_dir: str) -> Executor:
  """The executor that the settings name.

  Args:
    recipe: the run's recipe.
    cache_dir: compilation cache that this machine's workers share.
  """
  runtime = recipe.settings.runtime
  if runtime.executor == "inline":
    from sbjax.runtime.inline import InlineExecutor

    return InlineExecutor()
  # Ray reads these when it is imported: a Ray of our own listens on 127.0.0.1 only.
  os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
  if not runtime.ray_address:
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    # By default what nobody refers to stays in the store for a second, or until a hundred such
    # objects have gathered: a step's videos and trajectories beside the next one's.
    os.environ.setdefault("RAY_free_objects_batch_size", "1")
    os.environ.setdefault("RAY_free_objects_period_milliseconds", "50")
    # Ray's raylet allocates with jemalloc, which by default keeps what was freed in an arena and
    # caches of every thread; so it grows for tens of steps. Nothing else here reads this.
    os.environ.setdefault("MALLOC_CONF", "narenas:1,tcache:false,dirty_decay_ms:0,muzzy_decay_ms:0")
  from sbjax.runtime.ray_executor import RayExecutor

  return RayExecutor(
    cores_per_worker=runtime.cores_per_worker,
    gpus_per_worker=runtime.gpus_per_worker,
    devices_per_worker=runtime.devices_per_worker,
    cache_dir=cache_dir,
    address=runtime.ray_address or None,
  )
