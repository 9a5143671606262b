"""The command that measures what tasks take, for planning.

    python -m sbjax.profile --config=configs/quickstart.py --workdir=runs/profile

Every kind of task runs on every worker at the same time, warm, `--rounds` times; judges at batches
of 1, 2, 4 and so on; videos at a third, two thirds and all of the config's length, where whole
chunks allow. It prints the medians and writes `profile.json`, which `--config.runtime.profile=FILE`
makes a run plan with, and which `python -m sbjax.simulate` asks. A file that is there already, of
the same config and devices, is completed: newer measurements replace older ones.

    --config=FILE       a config file or a run's config.json
    --config.FIELD=…    overrides, as for training
    --rounds=N          timed repetitions of every kind; default: 5
    --workdir=DIR       folder for profile.json and the workers' logs

Exit codes: 0 done; 1 failed; 2 the command cannot work, with one sentence on stderr; 130 and 143
after SIGINT and SIGTERM.
"""

import contextlib
import dataclasses
import math
import pathlib
import sys
from collections.abc import Sequence

from sbjax import checks, command
from sbjax import config as config_lib
from sbjax.dataflow.profile import Profile, read_profile
from sbjax.settings import Settings
from sbjax.sizes import model_sizes

FLAGS = {"rounds": "timed repetitions of every kind", "workdir": "folder for the profile"}
DEFAULT_ROUNDS = 5


def main(argv: Sequence[str]) -> int:
  """Runs the command.

  Args:
    argv: program name and arguments.

  Returns:
    the exit code; see the module's docstring.
  """
  return command.answer(argv, str(__doc__), read_request, run)


def read_request(argv: Sequence[str]) -> tuple[Settings, pathlib.Path, int]:
  """Reads the command line: settings, workdir and rounds.

  Raises:
    ValueError: anything that cannot work.
  """
  asked = config_lib.parse(argv, FLAGS)
  if not asked.values["workdir"]:
    raise ValueError("--workdir is missing; name a folder for the profile, such as runs/profile.")
  rounds = asked.values["rounds"] or str(DEFAULT_ROUNDS)
  if not rounds.isdecimal() or int(rounds) < 1:
    raise ValueError(f"--rounds is {rounds!r}; use a whole number from 1.")
  return config_lib.validate(asked.config), pathlib.Path(asked.values["workdir"]), int(rounds)


def lengths(settings: Settings) -> tuple[int, ...]:
  """Pixel frames of a third, two thirds and all of the configured chunks, longest last."""
  _, sampler = model_sizes(settings)
  per_chunk = checks.FRAMES_PER_LATENT * sampler.frames_per_chunk
  missing = checks.FRAMES_PER_LATENT - 1
  chunks = (settings.model.frames + missing) // per_chunk
  wanted = {math.ceil(chunks / 3), math.ceil(2 * chunks / 3), chunks}
  kept = sorted(n for n in wanted if n >= settings.runtime.chunk_blocks)
  return tuple(n * per_chunk - missing for n in kept)


def run(request: tuple[Settings, pathlib.Path, int]) -> int:
  """Measures, prints and writes.

  Raises:
    ValueError: the folder holds a profile of another config or other devices.
  """
  settings, workdir, rounds = request
  command.prepare_environment(settings)
  file = workdir / "profile.json"
  before = read_profile(file) if file.exists() else None
  workdir.mkdir(parents=True, exist_ok=True)
  for frames in lengths(settings):
    model = dataclasses.replace(settings.model, frames=frames)
    now = measure(dataclasses.replace(settings, model=model), workdir, rounds)
    before = now if before is None else before.merged(now)
    before.write(file)
    print(table(now), flush=True)
  print(f"profile {file}", flush=True)
  return command.EXIT_DONE


def measure(settings: Settings, workdir: pathlib.Path, rounds: int) -> Profile:
  """Measures one length on workers of its own.

  Args:
    settings: checked settings; the scheme decides whether roles are shared.
    workdir: folder for the workers' logs.
    rounds: timed repetitions of every kind.

  Returns:
    The profile of that length.

  Raises:
    RunFailed: a worker died or a task raised.
  """
  # Not at the top: a command that is refused never waits for these imports.
  from sbjax import prompts as prompt_lib
  from sbjax.compilation import cache_dir, use_cache
  from sbjax.report.console import Progress
  from sbjax.runtime import measuring, profiling
  from sbjax.runtime.driver import Driver
  from sbjax.runtime.executors import make_executor
  from sbjax.runtime.roles import recipe_of, reward_of

  recipe, reward = recipe_of(settings), reward_of(settings)
  prompt = prompt_lib.from_settings(settings)[0].prompts[0]
  if settings.runtime.executor == "inline":
    use_cache(cache_dir())
  with contextlib.ExitStack() as stack:
    executor = make_executor(recipe, cache_dir())
    stack.callback(executor.shutdown)
    driver = Driver(recipe, executor, reward, str(workdir / "logs"), print)
    driver.wait_for_workers()
    size = profiling.video_size(recipe, driver.pixel_stride)
    judges = sum(slot.group != "actor" for slot in driver.slots)
    most = math.ceil(len(measuring.step_jobs(recipe, reward)) / judges)
    total = measuring.measured_kinds(recipe, most)
    line = stack.enter_context(Progress(f"profiling {settings.model.frames} frames", total))
    measured = measuring.Measuring(
      driver.pool,
      recipe,
      size,
      rounds=rounds,
      timeout_s=settings.runtime.startup_timeout_s,
      progress=line.advance,
    )
    rows = measured.run(prompt, reward, most)
    devices = profiling.devices_of(driver.facts, driver.slots)
  print_ = profiling.fingerprint(settings)
  return Profile(rows, print_, devices, judges=tuple(measured.judges))


def table(profile: Profile) -> str:
  """The rows in words: kind, worker, batch, milliseconds and spread."""
  lines = [f"{'kind':<10} {'worker':<8} {'batch':>5} {'ms':>9} {'spread':>8}"]
  lines += [
    f"{r.kind:<10} {r.worker:<8} {r.batch:>5} {1e3 * r.seconds:>9.2f} {1e3 * r.spread_s:>8.2f}"
    for r in profile.rows
  ]
  return "\n".join(lines)


if __name__ == "__main__":
  sys.exit(main(sys.argv))
