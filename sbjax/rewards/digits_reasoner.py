"""The digits world's vision-language judge: it describes two videos, scores each, and compares.

Question, answer and their reading are here; `sbjax.worlds.digits.reasoner` writes the same answers
for training. The scores within the reasoning make the comparison easy for a small model, as a chain
of thought does for a large one.
"""

import dataclasses
import pathlib
import re
from collections.abc import Mapping, Sequence

import numpy as np

from sbjax.rewards.frames import evenly_spaced
from sbjax.rewards.generator import Frames, Message, Reply, Request, SingleRound
from sbjax.rewards.protocol import Job, Verdict, Video

# The shipped model, which `reward.judge.checkpoint='world'` stands for.
WEIGHTS = pathlib.Path(__file__).parents[1] / "worlds" / "digits" / "weights" / "reasoner"
COMPONENTS = ("digit", "colour", "motion")
ANSWERS = ("overall", *COMPONENTS)
WINNERS = {"first": 1.0, "second": 0.0, "equal": 0.5}
THINK_END = "</think>"
SEEN_FRAMES = 6
FRAMES_PER_S = 16
SIDE_PX = 32
DARK = 51  # of 255: what is darker is background


def view(video: Video) -> Frames:
  """What the judge looks at: six whole frames at half size, then close-ups of the same six.

  The whole frames show motion. A close-up is cut around the centre of what is bright, so that a
  digit stands in its middle wherever it is: a small model then needs few examples to read it.

  Raises:
    ValueError: if the video is not of 64x64 pixels.
  """
  chosen = evenly_spaced(len(video), SEEN_FRAMES)
  return seen(np.asarray(video)[chosen], tuple(i / FRAMES_PER_S for i in chosen))


def seen(frames: Video, times_s: tuple[float, ...]) -> Frames:
  """The view of frames that were chosen already."""
  if frames.shape[1:] != (2 * SIDE_PX, 2 * SIDE_PX, 3):
    raise ValueError(f"video has frames of shape {frames.shape[1:]}; it must be 64x64 RGB")
  halves = frames.reshape(len(frames), SIDE_PX, 2, SIDE_PX, 2, 3).mean((2, 4))
  whole = np.round(halves).astype(np.uint8)
  return Frames(np.concatenate([whole, _close_ups(frames)]), times_s + times_s)


def _close_ups(frames: Video) -> Video:
  """Squares around the centre of intensity; the middle of the frame where nothing is bright."""
  side = frames.shape[1]
  bright = np.maximum(frames.max(-1).astype(np.float32) - DARK, 0.0)
  mass = bright.sum((1, 2)) + 1.0
  from_middle = np.arange(side, dtype=np.float32) - (side - 1) / 2
  rows = np.rint((bright.sum(2) * from_middle).sum(1) / mass).astype(int)
  columns = np.rint((bright.sum(1) * from_middle).sum(1) / mass).astype(int)
  half = SIDE_PX // 2
  padded = np.pad(frames, ((0, 0), (half, half), (half, half), (0, 0)), "edge")
  first = side // 2
  return np.stack(
    [
      frame[first + row :, first + column :][:SIDE_PX, :SIDE_PX]
      for frame, row, column in zip(padded, rows, columns, strict=True)
    ]
  )


def question(prompt: str, views: Sequence[Frames]) -> Message:
  """What the judge is asked about two videos."""
  asked = f"asked for: {prompt}. first video:"
  return Message("user", (asked, views[0], "second video:", views[1], "which is better?"))


def parse_answer(text: str) -> dict[str, float] | None:
  """Reads the winners after the reasoning: 1 the first video, 0 the second, 0.5 neither.

  Returns:
    a value for each of `ANSWERS`; None where one is missing, or there is no reasoning.
  """
  reasoning, ended, verdict = text.rpartition(THINK_END)
  if not ended or not reasoning.strip():
    return None
  values = {}
  for name in ANSWERS:
    found = re.findall(rf"\b{name}\s*:\s*({'|'.join(WINNERS)})\b", verdict, re.IGNORECASE)
    if len(found) != 1:
      return None
    values[name] = WINNERS[found[0].lower()]
  return values


def parse_scores(text: str) -> tuple[Mapping[str, int], Mapping[str, int]] | None:
  """Reads the scores, 1 to 5, that the reasoning gives each video; None where one is missing."""
  reasoning = text.rpartition(THINK_END)[0]
  scores = {name: re.findall(rf"\b{name} [a-z ]+ ([1-5])\b", reasoning) for name in COMPONENTS}
  if any(len(found) != 2 for found in scores.values()):
    return None
  first, second = ({name: int(found[i]) for name, found in scores.items()} for i in (0, 1))
  return first, second


@dataclasses.dataclass(frozen=True)
class DigitsReasoner:
  """Implements `conversation.DialogueProtocol`.

  Attributes:
    max_tokens: budget of a reply.
    temperature: 0 is greedy.
  """

  max_tokens: int = 112
  temperature: float = 0.0

  def view(self, video: Video) -> Frames:
    """What is looked at of one video."""
    return view(video)

  def dialogue(self, job: Job, views: Sequence[Frames]) -> SingleRound:
    """Both videos and the question in one user turn."""
    message = question(job.prompt, views)
    return SingleRound(Request((message,), job.seed, self.max_tokens, self.temperature))

  def verdict(self, replies: Sequence[Reply]) -> Verdict:
    """Overall and by component, from the side of the first video; the reasoning is kept."""
    text = replies[-1].text
    values = parse_answer(text)
    if values is None:
      why = "cut off at its budget of tokens" if replies[-1].truncated else "not the form asked for"
      return Verdict(None, "unparsable", f"the answer is {why}: {text}", retryable=False)
    return Verdict(values, rationale=text)
