"""Evaluates adapters beside a training run: every adapter on the same prompts and seeds."""

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float

from sbjax import files, train
from sbjax.compilation import cache_dir, use_cache
from sbjax.runtime.driver import Driver
from sbjax.runtime.executors import make_executor
from sbjax.runtime.records import EvalResult
from sbjax.runtime.roles import recipe_of, reward_of
from sbjax.settings import Settings


def evaluate(
  settings: Settings,
  adapters: Mapping[str, Float[np.ndarray, " parameters"] | None],
  prompts: Sequence[str],
  seeds: Sequence[int],
  *,
  step: int = 0,
  keep_videos: int = 0,
  log_dir: str,
) -> EvalResult:
  """Makes a video of every prompt and seed under every adapter, and judges it.

  Args:
    settings: model, reward, executor and workers.
    adapters: flat adapter by name; None for the model without one.
    prompts: what is asked for.
    seeds: each gives one video of every prompt, from the same noise under every adapter.
    step: RL steps behind the adapters, for the record.
    keep_videos: how many videos of each adapter the result holds.
    log_dir: folder for the workers' logs.

  Returns:
    Scores and records; the same numbers whatever the number of workers.

  Raises:
    ValueError: the model cannot be loaded.
    RunFailed: workers fail again and again.
  """
  settings = _asking(_patient(settings), prompts, pathlib.Path(log_dir) / "prompts.jsonl")
  recipe = recipe_of(settings)
  if settings.runtime.executor == "inline":
    use_cache(cache_dir())
  with contextlib.ExitStack() as stack:
    executor = make_executor(recipe, cache_dir())
    stack.callback(executor.shutdown)
    driver = Driver(recipe, executor, reward_of(settings), log_dir, train.say)
    driver.wait_for_workers()
    # An adapter whose B is zero changes nothing, whatever its A.
    none = np.zeros(recipe.adapter_parameters, np.float32)
    handles = {
      name: executor.put(none if flat is None else flat) for name, flat in adapters.items()
    }
    return train.evaluate(driver, handles, prompts, seeds, step, keep_videos)


def _asking(settings: Settings, prompts: Sequence[str], path: pathlib.Path) -> Settings:
  """Names the prompts as the run's own, so that workers embed all of them before they begin."""
  lines = (json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
  files.atomic_write(path, "".join(lines))
  named = dataclasses.replace(settings.prompts, train=str(path), eval=str(path))
  # As few as were asked for, whatever a run would evaluate.
  every = dataclasses.replace(settings.eval, prompts=1)
  return dataclasses.replace(settings, prompts=named, eval=every)


def _patient(settings: Settings) -> Settings:
  """Gives every task the time that compiling takes: nothing is warmed up here."""
  longest_s = max(settings.runtime.startup_timeout_s, settings.runtime.task_timeout_s)
  return dataclasses.replace(
    settings,
    runtime=dataclasses.replace(settings.runtime, task_timeout_s=longest_s),
    reward=dataclasses.replace(
      settings.reward, timeout_s=max(longest_s, settings.reward.timeout_s)
    ),
  )
