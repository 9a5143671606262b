"""Keeps a failed background write of Orbax from printing tracebacks around our one sentence."""

import logging
import sys
from collections.abc import Callable
from typing import Any


class OrbaxQuiet:
  """Drops what Orbax prints of an error that it also raises to us, and nothing else.

  Two things get there: Orbax logs the traceback of a failed write, and TensorStore's other writes,
  still under way, find Orbax's event loop closed and report that from their own threads.
  """

  def __init__(self):
    """Starts to filter; `stop` ends it."""
    self._logger = logging.getLogger("absl")
    self._filter = _Tracebacks()
    self._logger.addFilter(self._filter)
    self._previous: Callable[[Any], Any] = sys.unraisablehook
    self._hook = self._unraisable
    sys.unraisablehook = self._hook

  def stop(self) -> None:
    """Puts everything back; calling it again does nothing."""
    self._logger.removeFilter(self._filter)
    if sys.unraisablehook is self._hook:  # else another hook passes on to ours, which is harmless
      sys.unraisablehook = self._previous

  def _unraisable(self, report: Any) -> None:
    closed_loop = isinstance(report.exc_value, RuntimeError) and str(report.exc_value) == (
      "Event loop is closed"
    )
    if not closed_loop:
      self._previous(report)


class _Tracebacks(logging.Filter):
  def filter(self, record: logging.LogRecord) -> bool:
    return not (record.exc_info and "orbax" in record.pathname)
