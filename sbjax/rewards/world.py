"""The embedded world's reward: a learned reader that looks for what the prompt asked."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sbjax.rewards.protocol import Job, Verdict, Video
from sbjax.worlds.digits import world as digits


class WorldJudge:
  """Implements `Judge` with the digits world's reader: components digit, colour, motion.

  Args:
    world: the loaded world.
    views: how many shifted readings of a video are averaged; the time grows with them.
  """

  def __init__(self, world: Any, views: int):
    self._world, self._views = world, views

  def judge(self, jobs: Sequence[Job], videos: Mapping[int, Video]) -> list[Verdict]:
    """One video a job; a component is the probability that the reader gives what was asked."""
    verdicts = []
    for job in jobs:
      # One at a time: a video's verdict must not depend on who else is in the batch.
      video = videos[job.candidates[0]]
      values = digits.judge_videos(self._world, np.asarray(video)[None], [job.prompt], self._views)
      components = {name: float(v[0]) for name, v in values.items()}
      verdicts.append(Verdict(components, rationale=_in_words(components)))
    return verdicts


def _in_words(components: Mapping[str, float]) -> str:
  return ", ".join(f"{name} as asked: {value:.2f}" for name, value in components.items())
