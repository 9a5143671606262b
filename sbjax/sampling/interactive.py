"""Prompts typed while the video is generated."""

import os
import select
from collections.abc import Callable

from sbjax.sampling.script import Cue


class TypedPrompts:
  """A director that takes at most one line from a terminal or pipe before each chunk.

  It never waits: without a new line the prompt stays. A line that is the prompt already, or an
  empty one, changes nothing. The end of the input (Ctrl-D) ends the video.
  """

  def __init__(
    self,
    prompt: str,
    accept: Callable[[str], None],
    say: Callable[[str], None],
    *,
    descriptor: int = 0,
  ):
    """Reads nothing yet.

    Args:
      prompt: what the video begins with.
      accept: raises `ValueError` for a prompt that cannot be used; its message is said, and the
        prompt stays.
      say: shows a sentence to the user.
      descriptor: file descriptor to read from; standard input by default.
    """
    self._prompt = prompt
    self._accept = accept
    self._say = say
    self._descriptor = descriptor
    self._buffer = b""
    self._ended = False

  def __call__(self, frame: int) -> Cue | None:
    """The next chunk's prompt."""
    if frame == 0:  # a line typed before the first chunk is for the second
      return Cue(self._prompt)
    line = self._line()
    if line is None:
      self._say(f"input ended: the video ends at latent frame {frame}")
      return None
    asked = line.strip()
    if not asked or asked == self._prompt:
      return Cue(self._prompt)
    try:
      self._accept(asked)
    except ValueError as error:
      self._say(str(error))
      return Cue(self._prompt)
    self._say(f"latent frame {frame}: {asked}")
    self._prompt = asked
    return Cue(asked, switched=True)

  def _line(self) -> str | None:
    """The oldest line that was typed, '' where there is none, None at the end."""
    while b"\n" not in self._buffer and not self._ended:
      # Not through sys.stdin: its buffer may hold a line of which select knows nothing.
      if not select.select([self._descriptor], [], [], 0)[0]:
        return ""
      data = os.read(self._descriptor, 4096)
      self._ended = not data
      self._buffer += data
    line, newline, rest = self._buffer.partition(b"\n")
    if not newline and not line:
      return None
    self._buffer = rest
    return line.decode(errors="replace")
