"""The command that compares execution schemes on your own config.

    python -m sbjax.compare --config=configs/quickstart.py --schemes=all --workdir=runs/compared

Every scheme runs from the same seed, adapter and prompts: warm-up steps, then the measured ones.

    --config=FILE       a config file or a run's config.json; its scheme does not matter
    --config.FIELD=…    overrides, as for training
    --schemes=NAMES     all, or some of colocated, colocated_single_replay, async_reward,
                        async_train, merged_replay, stagebreaker, sbjax; default: all
    --steps=N           measured steps of each scheme; default: 3
    --paired            all schemes keep their workers and take turns, step by step, so that noise
                        of the machine hits all alike; every scheme's workers must fit at once
    --emulated=FILE     a profile: workers compute nothing and wait as long as it says, so that many
                        devices can be tried on one machine
    --time_scale=X      with --emulated: what its times are multiplied by; default: 1
    --workdir=DIR       a new or empty folder

It writes `report.html`, `report.json`, `timelines.png`, `steps.png`, and in `timeline/` a trace for
Perfetto per scheme. docs/scheduling.md tells how to read them.

Exit codes: 0 done; 1 failed; 2 the command cannot work, with one sentence on stderr; 130 and 143
after SIGINT and SIGTERM.
"""

import contextlib
import dataclasses
import functools
import os
import pathlib
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from sbjax import command
from sbjax import config as config_lib
from sbjax.dataflow.costs import StepCosts
from sbjax.dataflow.profile import read_profile
from sbjax.settings import Settings

if TYPE_CHECKING:
  from sbjax.report.compare import Opened

FLAGS = {
  "schemes": "which schemes",
  "steps": "measured steps of each scheme",
  "paired": "whether the schemes take turns",
  "emulated": "a profile to emulate",
  "time_scale": "what its times are multiplied by",
  "workdir": "folder for the results",
}
DEFAULT_STEPS = 3


@dataclasses.dataclass(frozen=True)
class Request:
  """What is to be compared.

  Attributes:
    settings: checked settings; their scheme does not matter.
    config: path of the config file.
    schemes: `all`, or names with commas between.
    steps: measured steps of each scheme.
    paired: whether the schemes take turns.
    workdir: a new or empty folder.
    emulated: costs of emulated workers; None: real ones.
  """

  settings: Settings
  config: str
  schemes: str
  steps: int
  paired: bool
  workdir: pathlib.Path
  emulated: StepCosts | None = None


def main(argv: Sequence[str]) -> int:
  """Runs the command.

  Args:
    argv: program name and arguments.

  Returns:
    the exit code; see the module's docstring.
  """
  return command.answer(argv, str(__doc__), read_request, run)


def read_request(argv: Sequence[str]) -> Request:
  """Reads the command line.

  Raises:
    ValueError: anything that cannot work and shows before workers start.
  """
  words = ["--paired=true" if word == "--paired" else word for word in argv]
  asked = config_lib.parse(words, FLAGS)
  values = asked.values
  settings = config_lib.validate(asked.config)
  if not values["workdir"]:
    raise ValueError("--workdir is missing; name a folder for the results, such as runs/compared.")
  workdir = pathlib.Path(values["workdir"])
  if workdir.exists() and (not workdir.is_dir() or any(workdir.iterdir())):
    raise ValueError(f"--workdir is {values['workdir']!r}, which is not empty; name a new folder.")
  steps = values["steps"] or str(DEFAULT_STEPS)
  if not steps.isdecimal() or int(steps) < 1:
    raise ValueError(f"--steps is {steps!r}; use a whole number from 1.")
  paired = values["paired"] or "false"
  if paired not in ("true", "false"):
    raise ValueError(f"--paired is {paired!r}; write --paired alone, or leave it out.")
  return Request(
    settings,
    asked.config_file,
    values["schemes"] or "all",
    int(steps),
    paired == "true",
    workdir,
    _costs(settings, values["emulated"], values["time_scale"]),
  )


def _costs(settings: Settings, path: str | None, time_scale: str | None) -> StepCosts | None:
  try:
    scale = float(time_scale or 1.0)
  except ValueError:
    scale = 0.0
  if not 0.0 < scale < float("inf"):
    raise ValueError(f"--time_scale is {time_scale!r}; use a number above 0.")
  if path is None:
    if time_scale is not None:
      raise ValueError("--time_scale goes with --emulated; real workers take the time they take.")
    return None
  profile = read_profile(path)
  largest = max(profile.rows, key=lambda row: row.height_px * row.width_px)
  return profile.costs(settings.model.frames, largest.height_px, largest.width_px, scale=scale)


def run(request: Request) -> int:
  """Runs the schemes, prints the table and where everything is.

  Raises:
    ValueError: a scheme that these settings cannot run.
  """
  command.prepare_environment(request.settings)
  # Not at the top: a command that is refused never waits for these imports.
  from sbjax import prompts as prompt_lib
  from sbjax.dataflow import schemes
  from sbjax.report import compare
  from sbjax.runtime.planning import check_fused
  from sbjax.runtime.roles import recipe_of

  settings = compare.scheme_settings(request.settings, request.schemes)
  for mine in settings.values():
    check_fused(schemes.scheme(mine.scheme), recipe_of(mine))
  train_prompts, _ = prompt_lib.from_settings(request.settings)
  emulated = request.emulated
  if emulated is not None:
    _say(f"no model is computed: every task waits, time scale {emulated.scale:g}  (emulated)")
  elif request.settings.runtime.executor == "inline":
    _say("runtime.executor is inline: tasks run one after another, so nothing overlaps")
  with contextlib.ExitStack() as stack:
    if request.paired:
      stack.enter_context(room(list(settings.values())))
    compare.compare(
      settings,
      train_prompts,
      request.workdir,
      open_workers if emulated is None else functools.partial(open_emulated, emulated),
      config=request.config,
      steps=request.steps,
      paired=request.paired,
      emulated=emulated is not None,
      say=_say,
    )
  tail = "" if emulated is None else "  (emulated)"
  for name in ("report.html", "report.json", "timelines.png", "steps.png", "timeline", "logs"):
    _say(f"{name:<14} {request.workdir / name}{tail}")
  return command.EXIT_DONE


@contextlib.contextmanager
def open_workers(
  settings: Settings, log_dir: str, say: Callable[[str], None]
) -> "Iterator[Opened]":
  """Makes a scheme's workers, as a training run does, and ends them.

  Args:
    settings: checked settings.
    log_dir: folder for the workers' output.
    say: prints one line.
  """
  from sbjax.compilation import cache_dir, use_cache
  from sbjax.report.compare import Opened
  from sbjax.runtime.driver import Driver
  from sbjax.runtime.executors import make_executor
  from sbjax.runtime.profiling import profile_for
  from sbjax.runtime.roles import recipe_of, reward_of

  if settings.runtime.executor == "inline":
    use_cache(cache_dir())
  recipe, reward, profile = recipe_of(settings), reward_of(settings), profile_for(settings)
  executor = make_executor(recipe, cache_dir())
  try:
    driver = Driver(recipe, executor, reward, log_dir, say)
    driver.wait_for_workers()
    if profile is not None:
      driver.use_profile(profile)
    yield Opened(driver, reward, profiled=profile is not None)
  finally:
    executor.shutdown()


@contextlib.contextmanager
def open_emulated(
  costs: StepCosts,
  settings: Settings,
  log_dir: str,
  say: Callable[[str], None],
  *,
  virtual: bool = False,
) -> "Iterator[Opened]":
  """Makes emulated workers of a scheme, and ends them.

  Args:
    costs: what tasks take.
    settings: checked settings.
    log_dir: folder for the workers' output.
    say: prints one line.
    virtual: True for a clock that never waits.
  """
  from sbjax.emulation.run import emulated_driver
  from sbjax.report.compare import Opened

  with emulated_driver(settings, costs, log_dir, say, virtual=virtual) as (driver, reward):
    yield Opened(driver, reward, profiled=True)


@contextlib.contextmanager
def room(settings: Sequence[Settings]) -> Iterator[None]:
  """Starts Ray on this machine with CPUs for the workers of all schemes at once.

  An executor alone would start it with CPUs for its own. Only one scheme works at a time, so that
  the cores that they share are not overfilled. A cluster, and the inline executor, are left alone.

  Args:
    settings: of every scheme.
  """
  runtime = settings[0].runtime
  if runtime.executor != "ray" or runtime.ray_address:
    yield
    return
  import ray

  workers = len(settings) * (runtime.actor_workers + runtime.reward_workers)
  cpus = max(workers * max(1, runtime.cores_per_worker), os.cpu_count() or 1)
  handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
  ray.init(
    address="local",
    num_cpus=cpus,
    include_dashboard=False,
    log_to_driver=False,
    configure_logging=False,
  )
  for number, handler in handlers.items():  # Ray's own end the process without a word
    signal.signal(number, handler)
  try:
    yield
  finally:
    ray.shutdown()


def _say(text: str) -> None:
  print(text, flush=True)


if __name__ == "__main__":
  sys.exit(main(sys.argv))
