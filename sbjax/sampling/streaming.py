"""Decoding and writing a video while its later chunks are generated."""

import collections
import concurrent.futures
import dataclasses
import os
from collections.abc import Callable, Iterable
from typing import Literal

from models.wan.vae import DecoderCache
from sbjax.runtime.pool import RunFailed
from sbjax.sampling.chunks import Chunk
from sbjax.sampling.mp4 import GrowingMp4
from sbjax.worlds.decoding import DecodeChunk

# Chunks that wait for the decoder or are in it while the next one is generated. A decoder that is
# slower than the generator then holds it up instead of filling the memory.
BEHIND = 2


@dataclasses.dataclass(frozen=True)
class Event:
  """Something that happened to a chunk.

  Attributes:
    kind: `generated`: its latents are there; `written`: its frames were given to the encoder.
    chunk: its index.
    prompt: what it shows.
    frames: pixel frames written so far.
  """

  kind: Literal["generated", "written"]
  chunk: int
  prompt: str
  frames: int


def stream_video(
  chunks: Iterable[Chunk],
  decode: DecodeChunk,
  path: str | os.PathLike[str],
  fps: int,
  *,
  timeout_s: float,
  tell: Callable[[Event], None],
) -> int:
  """Writes a video chunk by chunk.

  Chunks are generated in the calling thread, decoded and encoded in another: on an accelerator the
  two share the device, on a CPU its cores. When chunk n is begun, the frames of chunk n − 3 are in
  the encoder.

  Args:
    chunks: the iterator that generates them.
    decode: the streaming decoder.
    path: the mp4; see `GrowingMp4`.
    fps: frames per second.
    timeout_s: how long a chunk may take from decoder to encoder, compiling included.
    tell: called for every event, from both threads, never at the same time for one kind.

  Returns:
    Pixel frames of the video; 0 where there was no chunk, and then no file.

  Raises:
    OutputError: the file cannot be written.
    RunFailed: the decoder or the encoder takes too long.
  """
  cache: DecoderCache | None = None
  with GrowingMp4(path, fps, end_timeout_s=timeout_s) as file:

    def finish(chunk: Chunk) -> None:
      nonlocal cache
      # Frame by frame: the decoder's memory is that of one latent frame, however long a chunk is.
      for i in range(chunk.latents.shape[0]):
        frames, cache = decode(chunk.latents[i : i + 1], cache)
        file.write(frames)
      tell(Event("written", chunk.index, chunk.prompt, file.frames))

    def wait(job: "concurrent.futures.Future[None]") -> None:
      try:
        job.result(timeout_s)
      except TimeoutError as error:
        file.kill()
        raise RunFailed(
          f"decoding and writing a chunk of {os.fspath(path)} took longer than {timeout_s:g} s"
        ) from error

    pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="decode")
    try:
      pending: collections.deque[concurrent.futures.Future[None]] = collections.deque()
      for chunk in chunks:
        tell(Event("generated", chunk.index, chunk.prompt, file.frames))
        pending.append(pool.submit(finish, chunk))
        while len(pending) > BEHIND:
          wait(pending.popleft())
      while pending:
        wait(pending.popleft())
    finally:
      # Whatever ended this, the chunk in the decoder still reaches the file.
      pool.shutdown(cancel_futures=True)
    return file.frames
