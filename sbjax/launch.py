"""The command that trains.

    python -m sbjax.launch --config=configs/quickstart.py --workdir=runs/quickstart

Any field of the config is overridden as `--config.FIELD=VALUE`. Everything that a run writes goes
under `--workdir`.

Exit codes: 0 the run is complete; 1 the run failed; 2 the command, config or workdir cannot work,
with one sentence on stderr; 130 after SIGINT (Ctrl-C) and 143 after SIGTERM, once a checkpoint is
written and all workers have ended. A second signal ends the process at once.
"""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType

from sbjax import config as config_lib
from sbjax.settings import Settings

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2

FLAGS = {"workdir": "folder for everything that the run writes"}


class Stopped(BaseException):
  """A signal asked the run to end; not an `Exception`, so that no handler for those swallows it."""

  def __init__(self, signum: int):
    super().__init__(f"received {signal.Signals(signum).name}")
    self.signum = signum

  @property
  def exit_code(self) -> int:
    """The shell's code for a process that this signal ended."""
    return 128 + self.signum


def main(argv: Sequence[str]) -> int:
  """Runs the command.

  Args:
    argv: program name and arguments.

  Returns:
    the exit code; see the module's docstring.
  """
  if {"--help", "-h", "-help"} & set(argv[1:]):
    print(__doc__)
    return EXIT_DONE
  try:
    command = config_lib.parse(argv, FLAGS)
    workdir = command.values["workdir"]
    if not workdir:
      raise ValueError("--workdir is missing; name a folder for the run, such as runs/quickstart.")
    settings = config_lib.validate(command.config)
  except ValueError as error:
    return refuse(error)
  prepare_environment(settings)
  return run(settings, workdir)


def run(settings: Settings, workdir: str) -> int:
  """Trains, and gives the exit code."""
  # Not at the top: a command that is refused never waits for this import.
  from sbjax import train

  return guarded(lambda: train.train(settings, workdir))


def guarded(work: Callable[[], int]) -> int:
  """Does a command's work under signal handlers, and turns known failures into one sentence.

  A signal raises `Stopped` inside the work, whose clean-up then writes what is to be kept. With
  SBJAX_TRACEBACK=1 in the environment failures keep their traceback.

  Args:
    work: gives an exit code.

  Returns:
    The exit code.
  """
  from sbjax.files import OutputError
  from sbjax.runtime.pool import RunFailed

  plain = os.environ.get("SBJAX_TRACEBACK") == "1"
  handlers = {s: signal.signal(s, _stop) for s in (signal.SIGINT, signal.SIGTERM)}
  try:
    return work()
  except Stopped as stopped:
    return stopped.exit_code
  except ValueError as error:
    if plain or "\n" in str(error):  # not one of ours: those are one sentence
      raise
    return refuse(error)
  except (OutputError, RunFailed) as error:
    if plain:
      raise
    print(f"sbjax: {error}", file=sys.stderr, flush=True)
    return EXIT_FAILED
  finally:
    for signum, handler in handlers.items():
      signal.signal(signum, handler)


def refuse(error: Exception) -> int:
  """Prints a user's mistake as one sentence and gives its exit code."""
  print(f"sbjax: {error}", file=sys.stderr, flush=True)
  return EXIT_USAGE


def prepare_environment(settings: Settings) -> None:
  """Sets what JAX and Ray read when they start, before either does anything."""
  # A driver that owned an accelerator would take its memory from the worker; in the inline executor
  # driver and worker are one process. Not by the environment, which Ray's workers would inherit.
  if settings.runtime.executor == "ray" or not settings.runtime.gpus_per_worker:
    import jax

    jax.config.update("jax_platforms", "cpu")
  os.environ.setdefault("RAY_DEDUP_LOGS", "0")
  os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
  os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")


def _stop(signum: int, frame: FrameType | None) -> None:
  del frame
  # A user who asks twice does not want to wait for the checkpoint.
  signal.signal(signal.SIGINT, signal.SIG_DFL)
  signal.signal(signal.SIGTERM, signal.SIG_DFL)
  raise Stopped(signum)


if __name__ == "__main__":
  sys.exit(main(sys.argv))
