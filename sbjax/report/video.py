"""Videos as files that any player shows: mp4 and GIF, large enough to look at, side by side."""

import math
import os
import subprocess
from collections.abc import Sequence

import imageio.v3 as iio
import imageio_ffmpeg
import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageDraw, ImageFont

from sbjax import files

_SMALL_PX = 160  # a video whose longer side is below this is enlarged
_SCALE = 4
_LABEL_PX = 20
_GAP_PX = 4


def enlarged(
  video: UInt8[np.ndarray, "frames height width 3"],
) -> UInt8[np.ndarray, "frames h w 3"]:
  """Enlarges a tiny video four times by repeating pixels; a larger one passes as it is.

  Args:
    video: uint8 frames.

  Returns:
    uint8 frames.

  Raises:
    ValueError: where `video` is no uint8 array of that shape, or has no frame.
  """
  _check(video)
  if max(video.shape[1:3]) >= _SMALL_PX:
    return video
  return video.repeat(_SCALE, axis=1).repeat(_SCALE, axis=2)


def write_mp4(
  path: str | os.PathLike[str], video: UInt8[np.ndarray, "frames height width 3"], fps: int
) -> None:
  """Writes an H.264 mp4 (yuv420p, so that browsers play it), atomically.

  Args:
    path: the file, ending in `.mp4`.
    video: uint8 frames; an odd side is extended by its last row or column, since subsampled
      colour needs even ones.
    fps: frames per second.

  Raises:
    ValueError: where `video` is no uint8 video.
    OutputError: where the file cannot be written.
  """
  _check(video)
  odd_rows, odd_columns = video.shape[1] % 2, video.shape[2] % 2
  frames = np.pad(video, ((0, 0), (0, odd_rows), (0, odd_columns), (0, 0)), mode="edge")
  height, width = frames.shape[1:3]
  source = f"-f rawvideo -pix_fmt rgb24 -s {width}x{height} -r {fps} -i -".split()
  coding = ["-an", "-c:v", "libx264", "-preset", "veryfast", "-crf", "16", "-pix_fmt", "yuv420p"]
  with files.atomic_output(path) as temporary:
    # Not through imageio_ffmpeg.write_frames, which forks: JAX warns of that, and it does not tell
    # whether the encoder succeeded. A session of its own keeps Ctrl-C from the encoder.
    encoder = subprocess.run(
      [imageio_ffmpeg.get_ffmpeg_exe(), "-loglevel", "error", "-y", *source, *coding, temporary],
      input=frames.tobytes(),
      stdout=subprocess.DEVNULL,
      stderr=subprocess.PIPE,
      start_new_session=True,
      check=False,
    )
    if encoder.returncode:
      reason = encoder.stderr.decode(errors="replace").strip().splitlines()
      raise files.OutputError(
        f"cannot write {os.fspath(path)}: the mp4 encoder ended with code {encoder.returncode} "
        f"({reason[0] if reason else 'it gave no reason'}); free some space, then resume"
      )


def gif_bytes(video: UInt8[np.ndarray, "frames height width 3"], fps: int) -> bytes:
  """Encodes an endless animated GIF, the only moving picture that TensorBoard shows.

  Args:
    video: uint8 frames.
    fps: frames per second; GIF rounds a frame to hundredths of a second.

  Returns:
    The GIF's bytes.

  Raises:
    ValueError: where `video` is no uint8 video.
  """
  _check(video)
  frames = list(video)
  return iio.imwrite("<bytes>", frames, extension=".gif", duration=1000 / fps, loop=0)  # type: ignore[return-value]


def grid(videos: UInt8[np.ndarray, "videos frames height width 3"]) -> UInt8[np.ndarray, "t h w 3"]:
  """Tiles several videos of one size into one, in rows as close to a square as it goes.

  Args:
    videos: uint8 videos.

  Returns:
    One video; empty places are black.

  Raises:
    ValueError: where there is no video.
  """
  if videos.ndim != 5 or videos.shape[0] == 0:
    raise ValueError(
      f"videos have shape {videos.shape}; give [videos, frames, height, width, 3] with one or more"
    )
  count, frames, height, width, channels = videos.shape
  columns = math.ceil(math.sqrt(count))
  rows = math.ceil(count / columns)
  missing = np.zeros((rows * columns - count, *videos.shape[1:]), videos.dtype)
  tiles = np.concatenate([videos, missing]).reshape(rows, columns, frames, height, width, channels)
  return tiles.transpose(2, 0, 3, 1, 4, 5).reshape(frames, rows * height, columns * width, channels)


def side_by_side(
  videos: Sequence[UInt8[np.ndarray, "frames height width 3"]], labels: Sequence[str]
) -> UInt8[np.ndarray, "frames h w 3"]:
  """Puts videos of one size next to each other, each under its label.

  Args:
    videos: uint8 videos; each is enlarged first where it is tiny.
    labels: one short text each.

  Returns:
    One uint8 video.

  Raises:
    ValueError: where the videos differ in shape or the labels in number.
  """
  if len(videos) != len(labels) or not videos:
    raise ValueError(
      f"{len(videos)} videos have {len(labels)} labels; give one label to each video"
    )
  if len({video.shape for video in videos}) != 1:
    raise ValueError(f"videos have shapes {[v.shape for v in videos]}; give videos of one shape")
  columns = []
  for video, label in zip(videos, labels, strict=True):
    frames = enlarged(video)
    strip = Image.new("RGB", (frames.shape[2], _LABEL_PX), "white")
    ImageDraw.Draw(strip).text((4, 3), label, "black", ImageFont.load_default(size=12))
    head = np.broadcast_to(np.asarray(strip), (frames.shape[0], _LABEL_PX, frames.shape[2], 3))
    columns.append(np.concatenate([head, frames], axis=1))
    columns.append(np.full((*columns[-1].shape[:2], _GAP_PX, 3), 255, np.uint8))
  return np.concatenate(columns[:-1], axis=2)


def _check(video: np.ndarray) -> None:
  if video.dtype != np.uint8 or video.ndim != 4 or video.shape[-1] != 3 or video.shape[0] == 0:
    raise ValueError(
      f"a video has type {video.dtype} and shape {video.shape}; "
      "give uint8 frames [frames, height, width, 3]"
    )
