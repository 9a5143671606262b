"""What all commands share: exit codes, one-sentence failures, signals, the environment."""

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

from sbjax.files import OutputError
from sbjax.runtime.pool import RunFailed
from sbjax.settings import Settings

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2


class Stopped(BaseException):
  """A signal asked the run to end; not an `Exception`, so that no handler for those swallows it."""

  def __init__(self, signum: int):
    super().__init__(f"received {signal.Signals(signum).name}")
    self.signum = signum

  @property
  def exit_code(self) -> int:
    """The shell's code for a process that this signal ended."""
    return 128 + self.signum


def guarded(work: Callable[[], int]) -> int:
  """Does a command's work under signal handlers, and turns known failures into one sentence.

  A signal raises `Stopped` inside the work, whose clean-up then writes what is to be kept. With
  SBJAX_TRACEBACK=1 in the environment failures keep their traceback.

  Args:
    work: gives an exit code.

  Returns:
    The exit code.
  """
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
