"""UnifiedReward-Flex: one look at eight frames of each of two videos, one JSON verdict.

Source: UnifiedReward-Flex (arXiv 2602.02380): three mandatory categories, sub-dimensions that the
judge chooses for the prompt, scores that share ten points, a winner by category and overall. The
wording of the question is ours.
"""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sbjax.rewards.frames import evenly_spaced
from sbjax.rewards.generator import Frames, Message, Reply, Request, SingleRound
from sbjax.rewards.protocol import Job, Verdict, Video

CATEGORIES = ("alignment", "quality", "narrative")

_QUESTION = """\
You are an experienced judge of generated video. Two videos were made for the same request. Decide \
which one answers it better, and account for your decision.

Judge in these three categories, always all of them and in this order:
A. Alignment and accuracy: are the things, attributes, numbers, actions and relations that the \
request names there, and correct?
B. Visual quality and dynamic realism: sharpness, artefacts, stable shapes and identities, \
plausible and smooth motion.
C. Narrative, aesthetics and cinematography: composition, light, colour, camera work, and whether \
the shot holds together as a small story.
Add a fourth category only where the request asks for something that none of these covers.

In each category choose three to five sub-dimensions that matter for this very request. Give both \
videos a score in each; the two scores of a sub-dimension add up to 10. Every reason must point at \
something that can be seen in the frames.

The request was:
{prompt}

The frames are spaced evenly over each video. The first {first} images are Video 1, the next \
{second} images are Video 2.

Answer with one JSON object and nothing else, of this form:
{{"prompt": "the request",
 "categories": [
  {{"name": "A. ...",
   "dims": [{{"name": "...", "reason_1": "...", "reason_2": "...", "score_1": 6, "score_2": 4}}],
   "cat_reason": "...", "cat_winner": "Video 1"}}],
 "reason": "why the winner wins over all", "winner": "Video 1"}}
A winner is "Video 1" or "Video 2"."""

_SIDES = tuple(re.compile(rf"\b(?:video|image)\s*{side}\b") for side in (1, 2))


@dataclasses.dataclass(frozen=True)
class Answer:
  """What a reply says.

  Attributes:
    overall: 1 the first video wins, 0 the second, 0.5 neither or both are named.
    categories: (name as written, the same by category), the first three of them.
  """

  overall: float
  categories: tuple[tuple[str, float], ...]


def parse_answer(text: str, *, lenient: bool = False) -> Answer | None:
  """Reads a reply: the whole of it as JSON, else what lies between its outermost braces.

  Args:
    text: the reply.
    lenient: take an object without a `winner` for a tie, as the reference does.

  Returns:
    None where it cannot be parsed.
  """
  found = _json_object(text)
  if found is None or (not lenient and "winner" not in found):
    return None
  listed = found.get("categories")
  categories = [c for c in listed if isinstance(c, Mapping)] if isinstance(listed, list) else []
  return Answer(
    _winner(found.get("winner")),
    tuple((str(c.get("name", "")).strip(), _winner(c.get("cat_winner"))) for c in categories[:3]),
  )


def _json_object(text: str) -> Mapping[str, Any] | None:
  text = text.strip()
  for part in (text, text[text.find("{") : text.rfind("}") + 1]):
    try:
      found = json.loads(part)
    except (ValueError, RecursionError):
      continue
    return found if isinstance(found, Mapping) else None
  return None


def _winner(text: Any) -> float:
  """1 or 0 where exactly one of the two is named, else a tie."""
  named = [bool(side.search(str(text).lower())) for side in _SIDES]
  return 0.5 if named[0] == named[1] else float(named[0])


@dataclasses.dataclass(frozen=True)
class UnifiedRewardFlex:
  """Implements `conversation.DialogueProtocol`: how it is asked, how its answers are read.

  Attributes:
    frames: frames that it sees of each video.
    max_tokens: budget of a reply.
    temperature: 0 is greedy.
    lenient: as `parse_answer` takes it.
  """

  frames: int = 8
  max_tokens: int = 4096
  temperature: float = 0.0
  lenient: bool = False

  def view(self, video: Video) -> Frames:
    """The evenly spaced frames of one video."""
    return Frames(np.ascontiguousarray(video[evenly_spaced(len(video), self.frames)]))

  def dialogue(self, job: Job, views: Sequence[Frames]) -> SingleRound:
    """Frames of the first video, frames of the second, then the question, in one user turn."""
    first, second = (len(view.pixels) for view in views)
    question = _QUESTION.format(prompt=job.prompt, first=first, second=second)
    message = Message("user", (*views, question))
    return SingleRound(Request((message,), job.seed, self.max_tokens, self.temperature))

  def verdict(self, replies: Sequence[Reply]) -> Verdict:
    """Overall and by category, from the side of the first video.

    Categories go by their place, not by the name that the judge wrote: its spelling varies from
    pair to pair.
    """
    text = replies[-1].text
    answer = parse_answer(text, lenient=self.lenient)
    if answer is None:
      why = "cut off at its budget of tokens" if replies[-1].truncated else "not the JSON asked for"
      return Verdict(None, "unparsable", f"the answer is {why}: {text}", retryable=False)
    values = {"overall": answer.overall}
    values |= {name: value for name, (_, value) in zip(CATEGORIES, answer.categories, strict=False)}
    return Verdict(values, rationale=text)
