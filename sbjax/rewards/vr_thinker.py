"""VR-Thinker: a comparison in several rounds, in which the judge asks for the frames it wants.

Source: VR-Thinker (arXiv 2510.10518): both videos' frames form one numbered pool, the judge sees a
few, reasons, gives a provisional answer and calls a tool for more, until it gives a final answer.
Of the frames that it fetched only the latest stay in view (a memory window of one call). The
wording is ours.
"""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sbjax.rewards.frames import evenly_spaced
from sbjax.rewards.generator import Frames, Message, Reply, Request
from sbjax.rewards.protocol import Job, Verdict, Video

# The letters of the answer and the names of the components.
KEYS = {"OA": "overall", "TA": "alignment", "MQ": "motion", "VQ": "quality"}
_POINTS = {0: 0.5, 1: 1.0, 2: 0.0}  # tie, the first is better, the second is

TOOL = "select_frames"
CALL_END = "</tool_call>"

_SYSTEM = """\
You compare two generated videos with care and may look at more of their frames.

# Tools
You may call one function per turn. Its signature, in XML tags <tools></tools>:
<tools>
{signature}
</tools>
To call it, return a JSON object with its name and arguments in XML tags:
<tool_call>
{{"name": "{tool}", "arguments": {{"target_frames": [1, 2]}}}}
</tool_call>"""

_QUESTION = """\
Both videos were made for this request:
{prompt}

Their frames are numbered 1 to {total}: frames 1 to {half} are Video 1, frames {after} to {total} \
are Video 2, evenly spaced in time. You see frames {shown}.

Compare the videos in text alignment (TA), visual quality (VQ), motion quality (MQ) and over all \
(OA): 1 means that Video 1 is better, 2 that Video 2 is, 0 that neither is. CF is how sure you \
are, from 1 (very) to 3 (hardly).

In every turn write first <snapshot>what the frames show</snapshot>, then <think>your \
reasoning</think>, and then one of these two:
- if you need other frames, a provisional answer and a call of {tool} with at most {most} frames:
<recommend answer>TA=1,VQ=0,MQ=2,OA=1,CF=2</recommend answer>
<tool_call>...</tool_call>
- if you have seen enough:
<final answer>TA=1,VQ=0,MQ=2,OA=1</final answer>"""

_FETCHED = "These are the frames that you chose ({shown}):"
_FETCHED_BEFORE = "Frames {shown} stood here; they are no longer in view."
_LAST = "You can fetch no more frames. Give your final answer now."


def parse_answer(text: str) -> dict[str, int] | None:
  """Reads the letters of the last final answer, else of the last provisional one.

  Args:
    text: one reply, or several in order.

  Returns:
    Letter -> value, those within range only (0 to 2; CF 1 to 3); None where no answer is tagged.
  """
  for tag in (r"(?:final )?answer", r"recommend answer"):
    found = re.findall(rf"<{tag}>(.*?)(?:</{tag}>|$)", text, re.IGNORECASE | re.DOTALL)
    if found:
      break
  else:
    return None
  values = {}
  for key, digit in re.findall(r"\b(TA|VQ|MQ|OA|CF)\s*=\s*(\d)(?!\d)", found[-1], re.IGNORECASE):
    key, value = key.upper(), int(digit)
    if value in ((1, 2, 3) if key == "CF" else (0, 1, 2)):
      values[key] = value
  return values


def parse_call(text: str, total: int, most: int) -> tuple[int, ...] | str | None:
  """Reads a tool call.

  Args:
    text: one reply.
    total: frames in the pool.
    most: frames that one call may ask for.

  Returns:
    Frame numbers from 1; a sentence for the judge where the call cannot be served; None where
    there is no call.
  """
  _, opened, inner = text.rpartition("<tool_call>")
  if not opened:
    return None
  try:
    call = json.loads(inner.partition(CALL_END)[0])
  except (ValueError, RecursionError):
    return "The call could not be read as JSON."
  if not isinstance(call, Mapping) or "name" not in call or "arguments" not in call:
    return "The call needs a name and arguments."
  if call["name"] != TOOL:
    return f"There is no function {call['name']!r}; there is {TOOL}."
  frames = call["arguments"].get("target_frames") if isinstance(call["arguments"], Mapping) else 0
  if not isinstance(frames, list) or not frames or not all(_whole(f) for f in frames):
    return "target_frames must be a list of at least one frame number."
  if len(frames) > most:
    return f"{len(frames)} frames are too many; ask for at most {most}."
  outside = [frame for frame in frames if not 1 <= frame <= total]
  if outside:
    return f"Frame {outside[0]} does not exist; frames are numbered 1 to {total}."
  return tuple(frames)


def _whole(value: Any) -> bool:
  return isinstance(value, int) and not isinstance(value, bool)


@dataclasses.dataclass(frozen=True)
class VRThinker:
  """Implements `conversation.DialogueProtocol`: how the judge is asked, how its answers are read.

  Attributes:
    pool: frames of each video that the judge can see.
    initial: frames of each video that it sees at first.
    calls: tool calls that it may make.
    frames_per_call: frames that one call may fetch.
    max_images: frames that a dialogue may show in all; a call beyond them is not served.
    max_tokens: budget of each reply.
    temperature: 0 is greedy.
  """

  pool: int = 48
  initial: int = 4
  calls: int = 3
  frames_per_call: int = 8
  max_images: int = 64
  max_tokens: int = 2048
  temperature: float = 0.0

  def view(self, video: Video) -> Frames:
    """The pool of one video."""
    return Frames(np.ascontiguousarray(video[evenly_spaced(len(video), self.pool)]))

  def dialogue(self, job: Job, views: Sequence[Frames]) -> "ThinkerDialogue":
    """The dialogue of one pair; the longer pool is cut to the shorter one's length."""
    half = min(len(view.pixels) for view in views)
    stride = max(half // self.initial, 1)
    one = range(0, half, stride)[: self.initial]
    shown = tuple(1 + start + place for start in (0, half) for place in one)
    album = _Album((views[0].pixels[:half], views[1].pixels[:half]))
    return ThinkerDialogue(self, job.prompt, job.seed, album, shown)

  def verdict(self, replies: Sequence[Reply]) -> Verdict:
    """Overall and by dimension, from the side of the first video."""
    text = "\n\n".join(reply.text for reply in replies)
    letters = parse_answer(text)
    if letters is None or "OA" not in letters:
      return Verdict(None, "unparsable", f"no answer names OA: {text}", retryable=False)
    values = {name: _POINTS[letters[key]] for key, name in KEYS.items() if key in letters}
    return Verdict(values, rationale=text)


class _Album:
  """Both videos' frames by number; the same numbers give the same object, encoded once."""

  def __init__(self, videos: tuple[np.ndarray, np.ndarray]):
    # Not joined to one array: a step has many pairs and each video is in most of them.
    self._videos, self._half = videos, len(videos[0])
    self._made: dict[tuple[int, ...], Frames] = {}

  def __len__(self) -> int:
    return 2 * self._half

  def frames(self, numbers: tuple[int, ...]) -> Frames:
    if numbers not in self._made:
      places = [divmod(number - 1, self._half) for number in numbers]
      self._made[numbers] = Frames(np.stack([self._videos[v][frame] for v, frame in places]))
    return self._made[numbers]


@dataclasses.dataclass(frozen=True)
class ThinkerDialogue:
  """One comparison: rounds until there is no call, or no call is left.

  Attributes:
    protocol: its limits.
    prompt: what was asked for.
    seed: names the random stream.
    album: both videos' frames.
    shown: numbers of the frames that the judge sees at first.
  """

  protocol: VRThinker
  prompt: str
  seed: int
  album: _Album
  shown: tuple[int, ...]

  def request(self, replies: Sequence[Reply]) -> Request | None:
    """The chat so far; None where the last reply ends it."""
    messages = [
      Message("system", (_system(len(self.album), self.protocol.frames_per_call),)),
      Message("user", (self.album.frames(self.shown), self._question())),
    ]
    images = len(self.shown)
    latest = self._latest_fetch(replies)
    for number, reply in enumerate(replies):
      asked = parse_call(reply.text, len(self.album), self.protocol.frames_per_call)
      if asked is None or number == self.protocol.calls:
        return None
      if not isinstance(asked, str):
        if images + len(asked) > self.protocol.max_images:
          return None
        images += len(asked)
      # What follows a call was written without its result.
      said = reply.text.rpartition("<tool_call>")
      call = said[2].partition(CALL_END)[0]
      messages.append(Message("assistant", (f"{said[0]}{said[1]}{call}{CALL_END}",)))
      messages.append(self._result(asked, number == latest, number + 1 == self.protocol.calls))
    return Request(
      tuple(messages),
      self.seed,
      self.protocol.max_tokens,
      self.protocol.temperature,
      (CALL_END,),
      more_rounds=len(replies) < self.protocol.calls,
    )

  def _question(self) -> str:
    total = len(self.album)
    return _QUESTION.format(
      prompt=self.prompt,
      total=total,
      half=total // 2,
      after=total // 2 + 1,
      shown=_listed(self.shown),
      tool=TOOL,
      most=self.protocol.frames_per_call,
    )

  def _latest_fetch(self, replies: Sequence[Reply]) -> int:
    """The last reply whose call was served; -1 where there is none."""
    asked = [parse_call(r.text, len(self.album), self.protocol.frames_per_call) for r in replies]
    served = [number for number, frames in enumerate(asked) if isinstance(frames, tuple)]
    return served[-1] if served else -1

  def _result(self, asked: tuple[int, ...] | str, in_view: bool, last: bool) -> Message:
    """What the judge hears after a call: frames, that there were some, or why there are none."""
    ending = (_LAST,) if last else ()
    if isinstance(asked, str):
      return Message("user", (asked, *ending))
    if not in_view:
      return Message("user", (_FETCHED_BEFORE.format(shown=_listed(asked)), *ending))
    lead_in = _FETCHED.format(shown=_listed(asked))
    return Message("user", (lead_in, self.album.frames(asked), *ending))


def _system(total: int, most: int) -> str:
  signature = {
    "type": "function",
    "function": {
      "name": TOOL,
      "description": "Shows further frames of the two videos.",
      "parameters": {
        "type": "object",
        "properties": {
          "target_frames": {
            "type": "array",
            "items": {"type": "integer", "minimum": 1, "maximum": total},
            "maxItems": most,
            "description": "numbers of the frames to show",
          }
        },
        "required": ["target_frames"],
      },
    },
  }
  return _SYSTEM.format(signature=json.dumps(signature), tool=TOOL)


def _listed(numbers: Sequence[int]) -> str:
  return ", ".join(map(str, numbers))
