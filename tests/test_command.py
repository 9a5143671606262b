"""Exit codes: signals, failures that are one sentence, and failures that keep their traceback."""

import os
import signal
import subprocess
import sys

import pytest

from sbjax import command
from sbjax.files import OutputError
from sbjax.runtime.pool import RunFailed


def test_the_work_s_own_code_is_passed_on():
  assert command.guarded(lambda: 0) == 0
  assert command.guarded(lambda: 1) == 1


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_lets_the_work_clean_up(signum, code):
  kept = []

  def work():
    try:
      os.kill(os.getpid(), signum)
      raise AssertionError("the signal did not interrupt the work")
    except BaseException:
      kept.append("checkpoint")
      raise

  before = signal.getsignal(signum)
  assert command.guarded(work) == code
  assert kept == ["checkpoint"]
  assert signal.getsignal(signum) is before


def test_a_signal_counts_whatever_the_code_around_makes_of_it():
  def work():
    try:
      os.kill(os.getpid(), signal.SIGTERM)
    except BaseException as error:
      raise SystemError("returned a result with an exception set") from error
    return 0

  assert command.guarded(work) == 143


def test_no_handler_for_exceptions_swallows_a_signal():
  def work():
    try:
      os.kill(os.getpid(), signal.SIGTERM)
    except Exception:
      return 0
    return 0

  assert command.guarded(work) == 143


def test_a_second_signal_ends_the_process_at_once():
  code = """
import os, signal, time
from sbjax import command
def work():
  try:
    os.kill(os.getpid(), signal.SIGINT)
  finally:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
command.guarded(work)
"""
  done = subprocess.run([sys.executable, "-c", code], timeout=50, check=False)
  assert done.returncode == -signal.SIGTERM


@pytest.mark.parametrize(
  ("error", "code"),
  [
    (ValueError("the field is 3; use 4"), 2),
    (RunFailed("actor-0 died 3 times"), 1),
    (OutputError("cannot write x: disk full"), 1),
  ],
)
def test_known_failures_are_one_sentence(capsys, monkeypatch, error, code):
  def work():
    raise error

  monkeypatch.delenv("SBJAX_TRACEBACK", raising=False)
  assert command.guarded(work) == code
  assert capsys.readouterr().err == f"sbjax: {error}\n"
  monkeypatch.setenv("SBJAX_TRACEBACK", "1")
  with pytest.raises(type(error)):
    command.guarded(work)


@pytest.mark.parametrize("error", [KeyError("x"), ValueError("first\nsecond"), ZeroDivisionError()])
def test_other_failures_keep_their_traceback(error):
  def work():
    raise error

  with pytest.raises(type(error)):
    command.guarded(work)
