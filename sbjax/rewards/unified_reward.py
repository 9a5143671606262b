"""A pointwise judge: it looks at one video and gives three scores from 1 to 5.

Source: UnifiedReward-2.0's pointwise scoring of alignment, coherence and style, scaled to 0 to 1.
The wording of the question is ours.
"""

import dataclasses
import re
from collections.abc import Sequence

import numpy as np

from sbjax.rewards.frames import evenly_spaced
from sbjax.rewards.generator import Frames, Message, Reply, Request, SingleRound
from sbjax.rewards.protocol import Job, Verdict, Video

SCORES = ("alignment", "coherence", "style")

_QUESTION = """\
These {count} images are evenly spaced frames of one generated video. It was made for this request:
{prompt}

Say in a few sentences what you see, then score the video from 1 (poor) to 5 (excellent):
Alignment: it shows what the request asks for.
Coherence: shapes, motion and identities are consistent and plausible.
Style: it looks good.
End with exactly these three lines, each with one number, which may have a decimal:
Alignment Score (1-5): X
Coherence Score (1-5): Y
Style Score (1-5): Z"""


def parse_scores(text: str) -> dict[str, float] | None:
  """Reads the three scores, scaled to 0 to 1; None where one is missing or out of range.

  A name that occurs several times counts where it occurs last.
  """
  values = {}
  for name in SCORES:
    pattern = rf"\b{name}\b[ \w]*(?:\(1-5\))?\s*[:=]\s*\**\s*(\d+(?:\.\d+)?)"
    found = re.findall(pattern, text, re.IGNORECASE)
    if not found or not 1.0 <= float(found[-1]) <= 5.0:
      return None
    values[name] = (float(found[-1]) - 1.0) / 4.0
  return values


@dataclasses.dataclass(frozen=True)
class UnifiedReward:
  """Implements `conversation.DialogueProtocol`.

  Attributes:
    frames: frames that it sees.
    max_tokens: budget of a reply.
    temperature: 0 is greedy.
  """

  frames: int = 8
  max_tokens: int = 512
  temperature: float = 0.0

  def view(self, video: Video) -> Frames:
    """The evenly spaced frames of one video."""
    return Frames(np.ascontiguousarray(video[evenly_spaced(len(video), self.frames)]))

  def dialogue(self, job: Job, views: Sequence[Frames]) -> SingleRound:
    """The frames of one video, then the question, in one user turn."""
    (view,) = views
    question = _QUESTION.format(count=len(view.pixels), prompt=job.prompt)
    message = Message("user", (view, question))
    return SingleRound(Request((message,), job.seed, self.max_tokens, self.temperature))

  def verdict(self, replies: Sequence[Reply]) -> Verdict:
    """The three scores, and their mean as `overall`."""
    text = replies[-1].text
    scores = parse_scores(text)
    if scores is None:
      what = f"the answer has no three scores from 1 to 5: {text}"
      return Verdict(None, "unparsable", what, retryable=False)
    return Verdict({"overall": sum(scores.values()) / len(scores), **scores}, rationale=text)
