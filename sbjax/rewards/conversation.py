"""A judge that is a dialogue with a language model: protocol and generator together."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from sbjax.rewards.generator import Dialogue, Frames, Generator, Reply
from sbjax.rewards.protocol import Job, Verdict, Video


class DialogueProtocol(Protocol):
  """How a judge is asked and how its answers are read; it holds no model."""

  def view(self, video: Video) -> Frames:
    """The frames of one video that the judge may see."""
    ...

  def dialogue(self, job: Job, views: Sequence[Frames]) -> Dialogue:
    """The dialogue of one job; `views` are of its candidates, in order."""
    ...

  def verdict(self, replies: Sequence[Reply]) -> Verdict:
    """Reads a dialogue none of whose replies failed."""
    ...


class ConversationJudge:
  """Implements `protocol.Judge`.

  Args:
    protocol: how the judge is asked.
    generator: who answers.
  """

  def __init__(self, protocol: DialogueProtocol, generator: Generator):
    self._protocol, self._generator = protocol, generator

  @property
  def generator(self) -> Generator:
    """Who answers."""
    return self._generator

  def judge(self, jobs: Sequence[Job], videos: Mapping[int, Video]) -> list[Verdict]:
    """Runs all jobs' dialogues together; a video's frames are chosen once for all of them."""
    wanted = {candidate for job in jobs for candidate in job.candidates}
    views = {candidate: self._protocol.view(videos[candidate]) for candidate in sorted(wanted)}
    dialogues = [self._protocol.dialogue(job, [views[c] for c in job.candidates]) for job in jobs]
    return [self._verdict(replies) for replies in self._generator.generate(dialogues)]

  def _verdict(self, replies: Sequence[Reply]) -> Verdict:
    failed = replies[-1]
    if failed.cause:
      return Verdict(None, failed.cause, failed.detail)
    return self._protocol.verdict(replies)
