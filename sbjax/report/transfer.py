"""Progress of reading and writing large files, in gigabytes."""

import contextlib
import sys
from collections.abc import Callable, Iterator

from sbjax.report.console import Progress


@contextlib.contextmanager
def transfer(title: str) -> Iterator[Callable[[int, int], None]]:
  """Shows on standard error how far work over bytes is, in percent, if it takes over two seconds.

  Args:
    title: what the work is, e.g. `writing`.

  Yields:
    A function of bytes done and bytes in all.
  """
  shown = 0
  with Progress(f"{title} %", 100, stream=sys.stderr) as progress:

    def advance(done: int, total: int) -> None:
      nonlocal shown
      while shown < 100 * done // max(1, total):
        shown += 1
        progress.advance(f"{done / 1e9:.2f} of {total / 1e9:.2f} GB")

    yield advance
