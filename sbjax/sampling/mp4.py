"""An mp4 file that grows frame by frame and can be watched while it grows."""

import contextlib
import io
import os
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import IO

import imageio_ffmpeg
import numpy as np
from jaxtyping import UInt8

from sbjax import files
from sbjax.report.video import enlarged

# A fragment for every frame: whatever was written can be played, also after a crash. Without
# `zerolatency` the encoder would hold some forty frames back.
_CODING = "-an -c:v libx264 -preset veryfast -tune zerolatency -crf 16 -pix_fmt yuv420p"
_FORMAT = "-movflags empty_moov+default_base_moof+frag_every_frame -flush_packets 1 -f mp4"


class GrowingMp4:
  """Writes H.264 (yuv420p, so that browsers play it) as a fragmented mp4; a context manager.

  The file has its final name from the first frame on. An exception inside the block leaves it with
  the frames so far.
  """

  def __init__(self, path: str | os.PathLike[str], fps: int, *, end_timeout_s: float = 60.0):
    """Opens nothing yet: the size is known with the first frames.

    Args:
      path: the file, ending in `.mp4`; its folder is made where it does not exist.
      fps: frames per second.
      end_timeout_s: how long the encoder may take at the end for what it still holds.
    """
    self._path = Path(path)
    self._fps = fps
    self._end_timeout_s = end_timeout_s
    self._encoder: subprocess.Popen[bytes] | None = None
    self._said: IO[bytes] = io.BytesIO()
    self._closed = False
    self.frames = 0

  def __enter__(self) -> "GrowingMp4":
    return self

  def __exit__(
    self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
  ) -> None:
    try:
      self.close()
    except files.OutputError:
      if kind is None:  # else the first error is the one that matters
        raise

  def write(self, frames: UInt8[np.ndarray, "frames height width 3"]) -> None:
    """Appends frames; a tiny video is enlarged, an odd side extended by its last row or column.

    Args:
      frames: uint8, all of one size.

    Raises:
      ValueError: no uint8 frames of that shape.
      OutputError: the encoder has ended, or the file is closed.
    """
    if self._closed:
      raise files.OutputError(f"cannot write {self._path}: it is closed already")
    frames = enlarged(frames)
    odd_rows, odd_columns = frames.shape[1] % 2, frames.shape[2] % 2
    frames = np.pad(frames, ((0, 0), (0, odd_rows), (0, odd_columns), (0, 0)), mode="edge")
    if self._encoder is None:
      self._encoder = self._start(*frames.shape[1:3])
    encoder = self._encoder
    assert encoder.stdin is not None
    try:
      encoder.stdin.write(frames.tobytes())
      encoder.stdin.flush()
    except OSError as error:
      self.close()  # it knows the encoder's reason
      raise files.OutputError(f"cannot write {self._path}: the mp4 encoder has ended") from error
    self.frames += frames.shape[0]

  def close(self) -> None:
    """Ends the file; does nothing where no frame came or it is closed already.

    Raises:
      OutputError: the encoder failed, or did not end in time.
    """
    encoder, self._encoder = self._encoder, None
    self._closed = True
    if encoder is None:
      return
    with self._said:
      assert encoder.stdin is not None
      with contextlib.suppress(OSError):  # an encoder that has ended: its code tells
        encoder.stdin.close()
      try:
        encoder.wait(self._end_timeout_s)
      except subprocess.TimeoutExpired:
        encoder.kill()
        encoder.wait()
      if encoder.returncode:
        raise self._failure(encoder)

  def kill(self) -> None:
    """Ends the encoder from another thread than the one that waits for it in `write`."""
    if self._encoder is not None:
      self._encoder.kill()

  def _start(self, height: int, width: int) -> "subprocess.Popen[bytes]":
    source = f"-f rawvideo -pix_fmt rgb24 -s {width}x{height} -r {self._fps} -i -".split()
    with files.writing(self._path):
      self._path.parent.mkdir(parents=True, exist_ok=True)
      self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `close`
      # A session of its own keeps Ctrl-C from the encoder: the frames so far reach the file.
      return subprocess.Popen(
        [
          imageio_ffmpeg.get_ffmpeg_exe(),
          *("-loglevel", "error", "-y", "-probesize", "32"),
          *source,
          *_CODING.split(),
          *_FORMAT.split(),
          os.fspath(self._path),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=self._said,
        start_new_session=True,
      )

  def _failure(self, encoder: "subprocess.Popen[bytes]") -> files.OutputError:
    """What the encoder said, as one sentence."""
    self._said.seek(0)
    reason = self._said.read().decode(errors="replace").strip().splitlines()
    return files.OutputError(
      f"cannot write {self._path}: the mp4 encoder ended with code {encoder.returncode} "
      f"({reason[0] if reason else 'it gave no reason'}); free some space, then run it again"
    )
