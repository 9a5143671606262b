"""Finds processes that a benchmark started and that still run, wherever they are in the tree."""

import os
import pathlib
import time
import uuid

MARK = "SBJAX_BENCHMARK"


def mark() -> str:
  """Marks this process's environment, which every process that it starts inherits."""
  os.environ[MARK] = uuid.uuid4().hex
  return os.environ[MARK]


def left(value: str) -> list[str]:
  """Command lines of the living processes that carry the mark; this one's own does not count."""
  found = []
  for folder in pathlib.Path("/proc").glob("[0-9]*"):
    try:
      if f"{MARK}={value}".encode() in (folder / "environ").read_bytes().split(b"\0"):
        command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        found.append(f"{folder.name} {command.strip()}")
    except OSError:
      continue  # it ended while it was looked at, or is another user's
  return [line for line in found if not line.startswith(f"{os.getpid()} ")]


def wait_until_gone(value: str, timeout_s: float = 20.0) -> list[str]:
  """Gives what is left once all have ended or the time is over."""
  end = time.monotonic() + timeout_s
  while (lines := left(value)) and time.monotonic() < end:
    time.sleep(0.2)
  return lines
