"""The embedded world's reward: a learned reader that looks for what the prompt asked."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from sbjax.rewards.protocol import Job, Verdict, Video

Reader = Callable[[np.ndarray, Sequence[str], int], Mapping[str, np.ndarray]]
"""(videos, prompts, views) -> component -> a value per video."""


class WorldJudge:
  """Implements `Judge` with the digits world's reader: components digit, colour, motion.

  Args:
    read: the world's reader.
    views: how many shifted readings of a video are averaged; the time grows with them.
  """

  def __init__(self, read: Reader, views: int):
    self._read, self._views = read, views

  def judge(self, jobs: Sequence[Job], videos: Mapping[int, Video]) -> list[Verdict]:
    """One video a job; a component is the probability that the reader gives what was asked."""
    verdicts = []
    for job in jobs:
      # One at a time: a video's verdict must not depend on who else is in the batch.
      video = videos[job.candidates[0]]
      values = self._read(np.asarray(video)[None], [job.prompt], self._views)
      components = {name: float(v[0]) for name, v in values.items()}
      verdicts.append(Verdict(components, rationale=_in_words(components)))
    return verdicts


def _in_words(components: Mapping[str, float]) -> str:
  return ", ".join(f"{name} as asked: {value:.2f}" for name, value in components.items())
