"""Which of several servers takes a request: the least loaded living one; dead ones are left alone.

A server is evicted after some failures in a row, and is tried again when it has been left alone for
a while: with one request at first, whose success brings it back.
"""

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence


@dataclasses.dataclass
class _State:
  running: int = 0
  failures_in_row: int = 0
  dead_until_s: float = 0.0
  evicted: bool = False


class Endpoints:
  """Keeps the servers' load and health; safe to use from several threads.

  Args:
    urls: their addresses.
    evict_after: failures in a row after which a server is evicted.
    cooldown_s: how long it is left alone then.
    now: a clock, in seconds.
  """

  def __init__(
    self,
    urls: Sequence[str],
    *,
    evict_after: int,
    cooldown_s: float,
    now: Callable[[], float] = time.monotonic,
  ):
    self._evict_after, self._cooldown_s, self._now = evict_after, cooldown_s, now
    self._states = {url: _State() for url in urls}
    self._condition = threading.Condition()
    self._last_failure = "none yet"

  def acquire(self, deadline_s: float) -> str | None:
    """Takes the least loaded server that lives, the first of equals.

    Where none lives it waits for one to return.

    Args:
      deadline_s: on the clock; waiting beyond it makes no sense.

    Returns:
      Its address; give it back with `release`. None where no server returns by then.
    """
    with self._condition:
      while True:
        now = self._now()
        living = [url for url, state in self._states.items() if _free(state, now)]
        if living:
          url = min(living, key=lambda u: self._states[u].running)
          self._states[url].running += 1
          return url
        back_s = min(
          (s.dead_until_s for s in self._states.values() if s.dead_until_s > now),
          default=deadline_s,
        )
        if now >= deadline_s or back_s > deadline_s:
          return None
        self._condition.wait(min(back_s, deadline_s) - now)

  def release(self, url: str, failure: str = "") -> None:
    """Hands a server back.

    Args:
      url: as `acquire` gave it.
      failure: what it did instead of answering as a living server does; empty where it answered.
    """
    failed = bool(failure)
    with self._condition:
      self._last_failure = failure or self._last_failure
      state = self._states[url]
      state.running -= 1
      state.failures_in_row = state.failures_in_row + 1 if failed else 0
      if not failed:
        state.evicted = False
      elif state.evicted or state.failures_in_row >= self._evict_after:
        state.evicted = True
        state.dead_until_s = self._now() + self._cooldown_s
      self._condition.notify_all()

  @property
  def last_failure(self) -> str:
    """What the last failure of any server was."""
    with self._condition:
      return self._last_failure

  @property
  def living(self) -> tuple[str, ...]:
    """Addresses of the servers that are not evicted."""
    with self._condition:
      return tuple(url for url, state in self._states.items() if not state.evicted)


def _free(state: _State, now: float) -> bool:
  if not state.evicted:
    return True
  # After its cool-down a dead server gets one request, not all that wait.
  return now >= state.dead_until_s and state.running == 0
