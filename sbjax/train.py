"""The whole loop: prompts, RL steps, evaluations, checkpoints, summary."""

import contextlib
import dataclasses
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from models.layers.lora import lora_shapes
from sbjax import prompts as prompt_lib
from sbjax.compilation import cache_dir, use_cache
from sbjax.dataflow.schemes import scheme as scheme_of
from sbjax.report.console import Progress
from sbjax.report.reporter import Reporter
from sbjax.runtime import memory, memory_plan
from sbjax.runtime.driver import Driver
from sbjax.runtime.executors import make_executor
from sbjax.runtime.planning import check_fused
from sbjax.runtime.pool import RunFailed
from sbjax.runtime.profiling import profile_for
from sbjax.runtime.recipe import Recipe
from sbjax.runtime.records import EvalResult, TrainHandles
from sbjax.runtime.roles import recipe_of, reward_of
from sbjax.settings import Settings
from sbjax.state.adapter import AdapterLayout, layout_of, save_adapter
from sbjax.state.checkpoint import Checkpointer, library_versions
from sbjax.state.workdir import Workdir, open_workdir


def train(settings: Settings, path: str) -> int:
  """Runs or continues a training run.

  Args:
    settings: checked settings.
    path: the workdir.

  Returns:
    0 when the run is complete, 1 when it failed; the reason is on stderr.

  Raises:
    ValueError: a mistake of the user that only shows here: a foreign workdir or checkpoint, a disk
      that cannot be written.
  """
  started = time.monotonic()
  recipe = recipe_of(settings)
  memory_plan.check_settings(recipe)
  profile = profile_for(settings)
  train_prompts, eval_prompts = prompt_lib.from_settings(settings)
  with contextlib.ExitStack() as stack:
    workdir = open_workdir(
      path,
      dataclasses.asdict(settings),
      resume=settings.resume,
      replay_mode=scheme_of(settings.scheme).replay_mode,
      command=sys.argv,
      versions=library_versions(),
    )
    stack.callback(workdir.close)
    checkpoints = stack.enter_context(
      Checkpointer(workdir.checkpoints, settings.checkpoint.keep, model_facts(recipe))
    )
    restored = checkpoints.restore() if checkpoints.latest_step() is not None else None
    first = restored.step if restored else 0
    check_fused(scheme_of(settings.scheme), recipe, restored.fused if restored else 0)

    if settings.runtime.executor == "inline":
      use_cache(cache_dir())
    executor = make_executor(recipe, cache_dir())
    stack.callback(executor.shutdown)
    driver = Driver(recipe, executor, reward_of(settings), str(workdir.root / "logs"), say)
    driver.wait_for_workers()
    if profile is not None:
      driver.use_profile(profile)
    reporter = Reporter(workdir, driver, first if workdir.resumed else None)
    stack.callback(reporter.close)
    reporter.banner(first + 1, workdir.notes)
    state = driver.start(train_prompts.prompts[0], restored)

    loop = Loop(settings, driver, reporter, checkpoints, train_prompts, eval_prompts)
    try:
      state = loop.run(state, first, restored.prompt_cursor if restored else 0)
    except RunFailed as error:
      loop.save()
      reporter.finish(loop.step, time.monotonic() - started, "failed", _resume(path))
      print(f"sbjax: the run ended at step {loop.step}: {error}", file=sys.stderr, flush=True)
      return 1
    except BaseException:
      loop.save()  # a signal: the step in progress is lost, what was completed is not
      reporter.finish(loop.step, time.monotonic() - started, "stopped", _resume(path))
      raise
    write_adapters(workdir, driver, state)
    reporter.finish(loop.step, time.monotonic() - started, "done", _compare(path))
  return 0


@dataclasses.dataclass
class Loop:
  """The training loop and the last state that it completed.

  Attributes:
    settings: the run's settings.
    driver: runs steps and evaluations.
    reporter: tells about them.
    checkpoints: keeps states.
    train_prompts: what candidates are made of.
    eval_prompts: what evaluations are made of.
    step: steps completed.
    cursor: prompts consumed.
    state: where adapter, EMA and optimizer state are.
  """

  settings: Settings
  driver: Driver
  reporter: Reporter
  checkpoints: Checkpointer
  train_prompts: prompt_lib.PromptSet
  eval_prompts: prompt_lib.PromptSet
  step: int = 0
  cursor: int = 0
  state: TrainHandles | None = None

  def run(self, state: TrainHandles, step: int, cursor: int) -> TrainHandles:
    """Runs every step that is left."""
    self.state, self.step, self.cursor = state, step, cursor
    rollout, total = self.settings.rollout, self.settings.total_steps
    if step == 0:
      self.evaluate()
      self.save()  # a disk that cannot be written shows before the first step, not after the last
    memory.settle()
    while self.step < total:
      step = self.step + 1
      prompts = self.train_prompts.take(self.settings.seed, self.cursor, rollout.prompts_per_step)
      self.reporter.begin_step(step)
      state, result = self.driver.run_step(
        self.state,
        step,
        prompts,
        keep_videos=self.reporter.videos_wanted(step),
        on_progress=self.reporter.on_progress,
      )
      self.state, self.step = state, step
      self.cursor += rollout.prompts_per_step
      self.reporter.step(result)
      if due(self.settings.eval.every, step) or step == total:
        self.evaluate()
      if due(self.settings.checkpoint.every, step) or step == total:
        self.save()
      memory.give_back()
    self.checkpoints.wait()
    return self.state

  def evaluate(self) -> None:
    """Evaluates base, online and EMA adapters on the fixed prompts and seeds."""
    config = self.settings.eval
    if not config.every or self.state is None:
      return
    adapters: dict[str, Any] = {"base": None}
    if self.step:
      adapters |= {"online": self.state.adapter, "ema": self.state.ema}
    prompts = self.eval_prompts.prompts[: config.prompts]
    result = evaluate(
      self.driver, adapters, prompts, config.seeds, self.step, self.settings.report.samples
    )
    self.reporter.evaluation(result)

  def save(self) -> None:
    """Writes a checkpoint of the last completed step, or of the start, and waits for it."""
    if self.state is None:
      return
    self.checkpoints.save(self.driver.train_state(self.state, self.step, self.cursor))
    self.checkpoints.wait()


def evaluate(
  driver: Driver,
  adapters: Mapping[str, Any],
  prompts: Sequence[str],
  seeds: Sequence[int],
  step: int,
  keep_videos: int,
) -> EvalResult:
  """Evaluates adapters with a line of progress."""
  with Progress("evaluation") as progress:
    return driver.evaluate(
      adapters, prompts, seeds, step, keep_videos=keep_videos, on_progress=progress.at
    )


def due(every: int, step: int) -> bool:
  """Tells whether something that happens every n steps happens now; never for 0."""
  return bool(every) and step % every == 0


def model_facts(recipe: Recipe) -> dict[str, Any]:
  """What a checkpoint or an adapter must share with a run to fit it."""
  settings = recipe.settings
  return {
    "model": settings.model.name,
    "parameters": recipe.adapter_parameters,
    "rank": recipe.lora.rank,
    "alpha": recipe.lora.alpha,
    "targets": list(recipe.lora.resolved),
  }


def adapter_layout(recipe: Recipe) -> AdapterLayout:
  """Names and shapes of the tensors in a flat adapter."""
  shapes = lora_shapes(recipe.lora, recipe.dit)
  return layout_of(
    {
      target: {k: jax.ShapeDtypeStruct(shape, "float32") for k, shape in pair.items()}
      for target, pair in shapes.items()
    }
  )


def write_adapters(workdir: Workdir, driver: Driver, state: TrainHandles) -> None:
  """Writes the final adapters as safetensors, for `sbjax.sample --adapter`."""
  layout, facts = adapter_layout(driver.recipe), model_facts(driver.recipe)
  for path, handle in ((workdir.adapter, state.adapter), (workdir.ema, state.ema)):
    save_adapter(path, driver.executor.fetch(handle), layout, facts)


def say(text: str) -> None:
  """Prints one line."""
  print(text, flush=True)


def _resume(path: str) -> str:
  return f"continue with --workdir={path} --config.resume=auto"


def _compare(path: str) -> str:
  return f"python -m sbjax.sample --checkpoint={path} --out={path}/videos"
