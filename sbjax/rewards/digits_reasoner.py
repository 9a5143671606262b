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
from sbjax.rewards.generator import Frames, Message, Reply, Request
from sbjax.rewards.protocol import Job, Verdict, Video

# The shipped model, which `reward.judge.checkpoint='world'` stands for.
WEIGHTS = pathlib.Path(__file__).parents[1] / "worlds" / "digits" / "weights" / "reasoner"
COMPONENTS = ("digit", "colour", "motion")
ANSWERS = ("overall", *COMPONENTS)
WINNERS = {"one": 1.0, "two": 0.0, "equal": 0.5}
THINK_END = "</think>"
SEEN_FRAMES = 6
FRAMES_PER_S = 16


def view(video: Video) -> Frames:
  """The evenly spaced frames of a video that are looked at, as one video."""
  chosen = evenly_spaced(len(video), SEEN_FRAMES)
  return Frames(np.ascontiguousarray(video[chosen]), tuple(i / FRAMES_PER_S for i in chosen))


def question(prompt: str, views: Sequence[Frames]) -> Message:
  """What the judge is asked about two videos."""
  asked = f"asked for: {prompt}. video one:"
  return Message("user", (asked, views[0], "video two:", views[1], "which is better?"))


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
  scores = {name: re.findall(rf"\b{name} ([1-5])\b", reasoning) for name in COMPONENTS}
  if any(len(found) != 2 for found in scores.values()):
    return None
  first, second = ({name: int(found[i]) for name, found in scores.items()} for i in (0, 1))
  return first, second


@dataclasses.dataclass(frozen=True)
class ReasonerDialogue:
  """One comparison: a single round.

  Attributes:
    views: the two videos.
    prompt: what was asked for.
    seed: names the random stream.
    max_tokens: budget of the reply.
    temperature: of its sampling.
  """

  views: tuple[Frames, Frames]
  prompt: str
  seed: int
  max_tokens: int
  temperature: float

  def request(self, replies: Sequence[Reply]) -> Request | None:
    """Both videos and the question in one user turn."""
    if replies:
      return None
    message = question(self.prompt, self.views)
    return Request((message,), self.seed, self.max_tokens, self.temperature)


@dataclasses.dataclass(frozen=True)
class DigitsReasoner:
  """Implements `conversation.DialogueProtocol`.

  Attributes:
    max_tokens: budget of a reply.
    temperature: 0 is greedy.
  """

  max_tokens: int = 128
  temperature: float = 0.0

  def view(self, video: Video) -> Frames:
    """The frames of one video that are looked at."""
    return view(video)

  def dialogue(self, job: Job, views: Sequence[Frames]) -> ReasonerDialogue:
    """The dialogue of one pair."""
    pair = (views[0], views[1])
    return ReasonerDialogue(pair, job.prompt, job.seed, self.max_tokens, self.temperature)

  def verdict(self, replies: Sequence[Reply]) -> Verdict:
    """Overall and by component, from the side of the first video; the reasoning is kept."""
    text = replies[-1].text
    values = parse_answer(text)
    if values is None:
      why = "cut off at its budget of tokens" if replies[-1].truncated else "not the form asked for"
      return Verdict(None, "unparsable", f"the answer is {why}: {text}", retryable=False)
    return Verdict(values, rationale=text)
