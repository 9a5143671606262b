"""Where metrics, videos and texts of a run go: JSON lines, TensorBoard, and any other tracker.

The method names are those of CLU's metric writers, which a JAX user knows; CLU itself needs
TensorFlow at import.
"""

import importlib
import json
import math
import os
import pathlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from jaxtyping import UInt8
from tensorboardX import summary as tb_summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import (
  Event,  # pyright: ignore[reportAttributeAccessIssue]
  SessionLog,  # pyright: ignore[reportAttributeAccessIssue]
)
from tensorboardX.proto.summary_pb2 import (
  Summary,  # pyright: ignore[reportAttributeAccessIssue]
)

from sbjax import files
from sbjax.report import video as video_lib

Videos = Mapping[str, UInt8[np.ndarray, "videos frames height width 3"]]


class Writer(Protocol):
  """Takes what a step gives; every method may raise `OutputError` where a disk refuses."""

  def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
    """Takes scalars by key; the keys are defined in docs/metrics.md."""
    ...

  def write_videos(self, step: int, videos: Videos) -> None:
    """Takes uint8 videos [N, T, H, W, 3] by key."""
    ...

  def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
    """Takes texts (Markdown where the tracker shows it) by key."""
    ...

  def write_hparams(self, hparams: Mapping[str, Any]) -> None:
    """Takes the resolved config, nested or flat, once."""
    ...

  def flush(self) -> None:
    """Makes everything given so far visible to readers."""
    ...

  def close(self) -> None:
    """Flushes and lets go of files and connections; calling it again does nothing."""
    ...


WriterFactory = Callable[[str, Mapping[str, Any]], Writer]


class JsonlWriter:
  """Scalars as `metrics.jsonl`: one JSON object a call, `{"step": …, key: value, …}`.

  JSON has no NaN and no infinity: both are written as null. Videos and texts are left to the
  files under `samples/` and `evaluation/`, hyper-parameters to `config.json`.
  """

  def __init__(self, path: str | os.PathLike[str], resume_step: int | None = None):
    """Opens the file for appending.

    Args:
      path: the file; made where it does not exist.
      resume_step: where given, lines of later steps and a broken last line are dropped first, so
        that a resumed run leaves the file that an undisturbed one would.

    Raises:
      OutputError: where the file cannot be written.
    """
    self._path = pathlib.Path(path)
    if resume_step is not None and self._path.exists():
      truncate_jsonl(self._path, resume_step)
    with files.writing(self._path):
      self._path.parent.mkdir(parents=True, exist_ok=True)
      # Unbuffered: a line that did not reach the disk must raise now, not at the close.
      self._file = self._path.open("ab", buffering=0)

  def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
    """Appends one line; numbers keep their full precision."""
    line = json.dumps({"step": int(step)} | {k: _number(v) for k, v in scalars.items()})
    data = memoryview(line.encode() + b"\n")
    with files.writing(self._path):
      while data:
        data = data[self._file.write(data) :]

  def write_videos(self, step: int, videos: Videos) -> None:
    """Does nothing: see the class."""

  def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
    """Does nothing: see the class."""

  def write_hparams(self, hparams: Mapping[str, Any]) -> None:
    """Does nothing: see the class."""

  def flush(self) -> None:
    """Does nothing: each line is handed to the system when it is written."""

  def close(self) -> None:
    """Closes the file."""
    self._file.close()


class TensorBoardWriter:
  """Scalars, videos (animated GIFs), texts and hyper-parameters as TensorBoard events.

  Events are written in the calling thread: tensorboardX's `SummaryWriter` hands them to a thread
  that dies silently on a full disk and then blocks the run when its queue is full.
  """

  def __init__(
    self, directory: str | os.PathLike[str], fps: int = 16, resume_step: int | None = None
  ):
    """Starts a new event file.

    Args:
      directory: the log folder; made where it does not exist.
      fps: frames per second of the videos.
      resume_step: where given, TensorBoard hides events of later steps from earlier files.

    Raises:
      OutputError: where the file cannot be written.
    """
    self._directory = os.fspath(directory)
    self._fps = fps
    self._closed = False
    with files.writing(self._directory):
      os.makedirs(self._directory, exist_ok=True)
      # The default name has seconds only: two starts within one would share a file.
      suffix = f".{os.getpid()}.{time.time_ns()}"
      self._events = EventsWriter(os.path.join(self._directory, "events"), suffix)
      if resume_step is not None:
        start = SessionLog(status=SessionLog.START)
        self._add(resume_step + 1, session_log=start)
      self._events.flush()

  def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
    """Adds one point a key."""
    values = [Summary.Value(tag=key, simple_value=float(value)) for key, value in scalars.items()]
    self._add(step, summary=Summary(value=values))
    self.flush()

  def write_videos(self, step: int, videos: Videos) -> None:
    """Adds each key's videos as one tiled GIF in the Images tab."""
    for key, value in videos.items():
      tiles = video_lib.enlarged(video_lib.grid(value))
      image = Summary.Image(
        height=tiles.shape[1],
        width=tiles.shape[2],
        colorspace=3,
        encoded_image_string=video_lib.gif_bytes(tiles, self._fps),
      )
      value_pb = Summary.Value(tag=key, image=image)
      self._add(step, summary=Summary(value=[value_pb]))
    self.flush()

  def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
    """Adds Markdown to the Text tab."""
    for key, text in texts.items():
      self._add(step, summary=tb_summary.text(key, text))
    self.flush()

  def write_hparams(self, hparams: Mapping[str, Any]) -> None:
    """Adds the config to the HParams tab, nested names joined by dots."""
    flat = {
      key: value if isinstance(value, (bool, int, float, str)) else str(value)
      for key, value in flatten(hparams).items()
    }
    for part in tb_summary.hparams(flat, {}):
      self._add(0, summary=part)
    self.flush()

  def flush(self) -> None:
    """Writes buffered events to the file."""
    with files.writing(self._directory):
      self._events.flush()

  def close(self) -> None:
    """Flushes and closes the file."""
    if not self._closed:
      self._closed = True
      with files.writing(self._directory):
        self._events.close()

  def _add(self, step: int, **content: Any) -> None:
    with files.writing(self._directory):
      self._events.write_event(Event(wall_time=time.time(), step=step, **content))


class MultiWriter:
  """Hands everything to several writers.

  Our own files are required: where one cannot be written, the run must end. A tracker that a user
  added is optional: the first time it raises, its error is printed and it gets nothing more, since
  a server that is down must not end an overnight run.
  """

  def __init__(self, required: Sequence[Writer], optional: Mapping[str, Writer] | None = None):
    """Keeps the writers in order.

    Args:
      required: writers whose errors are raised.
      optional: further writers by the name that a message gives them.
    """
    self._required = tuple(required)
    self._optional = dict(optional or {})

  def write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
    """Hands scalars on."""
    self._each(lambda writer: writer.write_scalars(step, scalars))

  def write_videos(self, step: int, videos: Videos) -> None:
    """Hands videos on."""
    self._each(lambda writer: writer.write_videos(step, videos))

  def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
    """Hands texts on."""
    self._each(lambda writer: writer.write_texts(step, texts))

  def write_hparams(self, hparams: Mapping[str, Any]) -> None:
    """Hands the config on."""
    self._each(lambda writer: writer.write_hparams(hparams))

  def flush(self) -> None:
    """Flushes all."""
    self._each(lambda writer: writer.flush())

  def close(self) -> None:
    """Closes all."""
    self._each(lambda writer: writer.close())

  def _each(self, call: Callable[[Writer], None]) -> None:
    for writer in self._required:
      call(writer)
    for name, writer in tuple(self._optional.items()):
      try:
        call(writer)
      except Exception as error:  # a foreign tracker may raise anything
        del self._optional[name]
        print(
          f"warning: the writer {name} raised {type(error).__name__}: {error}; "
          "the run goes on without it",
          file=sys.stderr,
        )


def open_writer(
  *,
  metrics: str | os.PathLike[str],
  tensorboard: str | os.PathLike[str],
  fps: int = 16,
  resume_step: int | None = None,
  extra: Sequence[str] = (),
  workdir: str = "",
  config: Mapping[str, Any] | None = None,
) -> MultiWriter:
  """Opens a run's writers.

  Args:
    metrics: path of `metrics.jsonl`.
    tensorboard: folder of the TensorBoard events.
    fps: frames per second of TensorBoard's videos.
    resume_step: the step from which a run resumes; see the writers.
    extra: factories of further trackers, `module:function`, each called with the workdir and the
      resolved config (the seam for wandb, MLflow and the like).
    workdir: what a factory is given.
    config: what a factory is given.

  Returns:
    One writer for all of them.

  Raises:
    ValueError: where a factory cannot be imported or called.
    OutputError: where a file cannot be written.
  """
  optional = {}
  for name in extra:
    optional[name] = _factory(name)(workdir, config or {})
  required = (JsonlWriter(metrics, resume_step), TensorBoardWriter(tensorboard, fps, resume_step))
  return MultiWriter(required, optional)


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
  """Reads a file of JSON lines; a broken last line (a killed run) is left out.

  Args:
    path: the file; one that does not exist counts as empty.

  Returns:
    One dictionary a line.

  Raises:
    ValueError: where a line before the last is not JSON.
  """
  path = pathlib.Path(path)
  if not path.exists():
    return []
  lines = path.read_bytes().split(b"\n")
  rows = []
  for number, line in enumerate(lines, 1):
    if not line:
      continue
    try:
      rows.append(json.loads(line))
    except ValueError as error:
      if number < len(lines):
        raise ValueError(
          f"line {number} of {path} is not JSON; remove it or restore the file"
        ) from error
  return rows


def truncate_jsonl(path: str | os.PathLike[str], last_step: int) -> None:
  """Keeps the lines whose `step` is at most `last_step`, atomically.

  Args:
    path: a file of JSON lines; one that does not exist stays so.
    last_step: the last step to keep.

  Raises:
    ValueError: where a line before the last is not JSON.
    OutputError: where the file cannot be written.
  """
  if pathlib.Path(path).exists():
    kept = [row for row in read_jsonl(path) if row.get("step", 0) <= last_step]
    files.atomic_write(path, "".join(json.dumps(row) + "\n" for row in kept))


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
  """Gives nested dictionaries as one, names joined by dots: `{"a": {"b": 1}}` → `{"a.b": 1}`."""
  flat = {}
  for key, value in tree.items():
    name = f"{prefix}{key}"
    flat |= flatten(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
  return flat


def _number(value: Any) -> int | float | None:
  if isinstance(value, (bool, int, np.integer, np.bool_)):
    return int(value)
  number = float(value)
  return number if math.isfinite(number) else None


def _factory(name: str) -> Callable[..., Any]:
  module_name, _, function_name = name.partition(":")
  wanted = "name an importable 'module:function' that takes (workdir, config)"
  try:
    factory = getattr(importlib.import_module(module_name), function_name)
  except (ImportError, AttributeError, ValueError) as error:
    raise ValueError(f"report.writers has '{name}', which gives {error}; {wanted}") from error
  if callable(factory):
    return factory
  raise ValueError(f"report.writers has '{name}', which cannot be called; {wanted}")
