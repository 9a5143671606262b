"""Writing files so that a reader never sees half of one, and disk faults in one sentence."""

import contextlib
import os
import pathlib
from collections.abc import Iterator


class OutputError(OSError):
  """A file of a run cannot be written: full or read-only disk, missing permission, no folder."""

  def __init__(self, message: str, errno: int | None = None):
    super().__init__(message)  # one argument, so that str() gives the bare sentence
    self.errno = errno


@contextlib.contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
  """Turns an `OSError` of the enclosed block into one sentence that names `path`.

  Args:
    path: the file or folder that the block writes.

  Raises:
    OutputError: where the block raises `OSError`; an `OutputError` from inside passes unchanged.
  """
  try:
    yield
  except OutputError:
    raise
  except OSError as error:
    reason = error.strerror or str(error)
    raise OutputError(
      f"cannot write {os.fspath(path)}: {reason}; free some space, repair the permissions or name "
      "another workdir, then resume",
      error.errno,
    ) from error


@contextlib.contextmanager
def atomic_output(path: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
  """Gives a temporary path beside `path` and renames it to `path` when the block ends well.

  The temporary name keeps the suffix, because encoders choose a format by it. Where the block
  raises, the temporary file goes away and an older `path` stays as it was.

  Args:
    path: the final file; its folder is made where it does not exist.

  Yields:
    The path to write to.

  Raises:
    OutputError: where the disk refuses.
  """
  final = pathlib.Path(path)
  temporary = final.with_name(f".{final.stem}.tmp-{os.getpid()}{final.suffix}")
  with writing(final):
    final.parent.mkdir(parents=True, exist_ok=True)
    try:
      yield temporary
      # Without this a power cut could leave the new name with old or no bytes behind it.
      with temporary.open("rb+") as file:
        os.fsync(file.fileno())
      temporary.replace(final)
    finally:
      with contextlib.suppress(OSError):  # the first error is the one that matters
        temporary.unlink(missing_ok=True)


def atomic_write(path: str | os.PathLike[str], data: bytes | str) -> None:
  """Writes a whole file at once: afterwards `path` holds either all of `data` or what it held.

  Args:
    path: the file; its folder is made where it does not exist.
    data: its content, text as UTF-8.

  Raises:
    OutputError: where the disk refuses.
  """
  with atomic_output(path) as temporary:
    temporary.write_bytes(data.encode() if isinstance(data, str) else data)
