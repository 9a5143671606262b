"""What all commands share: exit codes, one-sentence failures, signals, the environment."""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

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


def guarded(work: Callable[[], int]) -> int:
  """Does a command's work under signal handlers, and turns known failures into one sentence.

  SIGINT and SIGTERM raise `Stopped` inside the work, whose clean-up then writes what is to be kept;
  a second signal ends the process at once. With SBJAX_TRACEBACK=1 in the environment failures keep
  their traceback.

  Args:
    work: gives an exit code.

  Returns:
    The exit code.
  """
  received: list[int] = []

  def stop(signum: int, frame: FrameType | None) -> None:
    del frame
    received.append(signum)
    # A user who asks twice does not want to wait for the checkpoint.
    for known in (signal.SIGINT, signal.SIGTERM):
      signal.signal(known, signal.SIG_DFL)
    raise Stopped(signum)

  handlers = {s: signal.signal(s, stop) for s in (signal.SIGINT, signal.SIGTERM)}
  try:
    return work()
  except BaseException as error:
    # Not only `Stopped`: code between the handler and here may turn it into an error of its own, as
    # Ray's compiled calls do.
    if received:
      return 128 + received[0]
    if os.environ.get("SBJAX_TRACEBACK") == "1":
      raise
    if isinstance(error, ValueError) and "\n" not in str(error):  # ours are one sentence
      return refuse(error)
    if isinstance(error, OutputError | RunFailed):
      print(f"sbjax: {error}", file=sys.stderr, flush=True)
      return EXIT_FAILED
    raise
  finally:
    for signum, handler in handlers.items():
      signal.signal(signum, handler)


def answer(
  argv: Sequence[str],
  usage: str,
  read: Callable[[Sequence[str]], Any],
  run: Callable[[Any], int],
) -> int:
  """Reads a command line and runs what it asks, or prints the usage where it asks for help.

  Args:
    argv: program name and arguments.
    usage: the command's docstring.
    read: gives the request; its `ValueError` is the user's mistake and ends the command at once.
    run: does the work.

  Returns:
    The exit code.
  """
  if {"--help", "-h", "-help"} & set(argv[1:]):
    print(usage)
    return EXIT_DONE
  try:
    request = read(argv)
  except ValueError as error:
    return refuse(error)
  return guarded(lambda: run(request))


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
  # Ray's server keeps events of every task for its dashboard, and grows with each step.
  os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
  if not settings.runtime.ray_address:
    # Ray then listens on 127.0.0.1 only; on a cluster the user has asked for the network.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
