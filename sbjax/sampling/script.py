"""What a video shows when: a prompt, and prompts that it switches to.

A switch names a latent frame. It takes effect at the first chunk that starts there or later, as in
LongLive: frame 40 means frame 42 where chunks have three frames.
"""

import dataclasses
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sbjax import prompts as prompts_lib


@dataclasses.dataclass(frozen=True)
class Switch:
  """From some chunk on another prompt.

  Attributes:
    frame: latent frame, at least 1.
    prompt: what is shown from there on.
  """

  frame: int
  prompt: str


@dataclasses.dataclass(frozen=True)
class Script:
  """One video's prompts.

  Attributes:
    prompt: what the video begins with.
    switches: by rising frame.
  """

  prompt: str
  switches: tuple[Switch, ...] = ()


@dataclasses.dataclass(frozen=True)
class Cue:
  """What the next chunk shows.

  Attributes:
    prompt: its prompt.
    switched: whether the prompt is new, so that the cache must be computed again.
  """

  prompt: str
  switched: bool = False


Director = Callable[[int], Cue | None]
"""Asked before each chunk with its first latent frame; None ends the video there."""


def director_of(script: Script, frames_per_chunk: int) -> Director:
  """Plays a script; a pure function of the frame.

  Args:
    script: the prompts.
    frames_per_chunk: latent frames of a chunk.
  """

  def cue(frame: int) -> Cue:
    reached = [s for s in script.switches if s.frame <= frame]
    if not reached:
      return Cue(script.prompt)
    return Cue(reached[-1].prompt, reached[-1].frame > frame - frames_per_chunk)

  return cue


def read_switch(text: str) -> Switch:
  """Reads `FRAME:PROMPT`.

  Raises:
    ValueError: no whole number before a colon, or no prompt behind it.
  """
  frame, colon, prompt = text.partition(":")
  if not (colon and frame.strip().isdecimal() and prompt.strip()):
    raise ValueError(
      f"--switch is {text!r}; write a latent frame, a colon and a prompt, such as "
      "'12:a new prompt'."
    )
  return Switch(int(frame), prompt.strip())


def check(script: Script, latent_frames: int, frames_per_chunk: int) -> None:
  """Refuses switches that no chunk carries out.

  Args:
    script: the prompts.
    latent_frames: of the video.
    frames_per_chunk: latent frames of a chunk.

  Raises:
    ValueError: a switch at frame 0, behind the last chunk's start, or at the same chunk as the one
      before it.
  """
  before = 0
  last = latent_frames - frames_per_chunk
  for switch in script.switches:
    if not 1 <= switch.frame <= last:
      raise ValueError(
        f"a switch is at latent frame {switch.frame}; the last chunk starts at {last}, so use 1 to "
        f"{last}."
      )
    start = -(-switch.frame // frames_per_chunk) * frames_per_chunk
    if start <= before:
      raise ValueError(
        f"a switch is at latent frame {switch.frame}; the one before it takes effect at {before}, "
        f"so use a frame above that, in rising order."
      )
    before = start


def load(source: str, accept: Callable[[str], None]) -> tuple[Script, ...]:
  """Reads the scripts of a prompt source; only JSONL lines can hold switches.

  A line is `{"prompt": …, "switches": [{"frame": 12, "prompt": …}, …]}`, without switches where
  that key is missing.

  Args:
    source: as `sbjax.prompts.load`.
    accept: raises `ValueError` for a prompt that cannot be used.

  Raises:
    ValueError: as `sbjax.prompts.load`; or switches of another form, with file and line.
  """
  prompts = prompts_lib.load(source, accept).prompts
  if Path(source).suffix.lower() not in (".jsonl", ".json"):
    return tuple(Script(prompt) for prompt in prompts)
  scripts = []
  with io.StringIO(Path(source).read_text(encoding="utf-8-sig")) as lines:
    for number, line in enumerate(lines, 1):
      if line.strip():
        switches = _switches(json.loads(line).get("switches", []), f"{source} line {number}")
        for switch in switches:
          _accepted(switch, accept, f"{source} line {number}")
        scripts.append(Script(prompts[len(scripts)], switches))
  return tuple(scripts)


def _switches(value: Any, place: str) -> tuple[Switch, ...]:
  found = []
  for item in value if isinstance(value, Sequence) and not isinstance(value, str) else [value]:
    frame = item.get("frame") if isinstance(item, dict) else None
    prompt = item.get("prompt") if isinstance(item, dict) else None
    if type(frame) is not int or not isinstance(prompt, str) or not prompt.strip():
      raise ValueError(
        f'{place} has the switch {item!r}; write {{"frame": 12, "prompt": "…"}}, in a list under '
        '"switches".'
      )
    found.append(Switch(frame, prompt.strip()))
  return tuple(found)


def _accepted(switch: Switch, accept: Callable[[str], None], place: str) -> None:
  try:
    accept(switch.prompt)
  except ValueError as error:
    raise ValueError(f"{place}, switch at {switch.frame}: {error}") from error
