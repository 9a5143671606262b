"""What a reward is: jobs for a group, verdicts for jobs, rewards for candidates.

A failure is never a zero. A job that cannot be judged gives a verdict with a cause; a candidate
without a valid verdict has no reward, is left out of its group's statistics, and is counted.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from jaxtyping import UInt8

Video = UInt8[np.ndarray, "frames height width 3"]


@dataclasses.dataclass(frozen=True)
class Group:
  """The candidates of one prompt.

  Attributes:
    index: group index within the step.
    prompt: what was asked for.
    candidates: their indices within the step.
    seeds: one integer per candidate, which names its video.
    anchor: index of a further video of the prompt, which candidates are compared with and which
      earns nothing itself; None where there is none. It may be a candidate, in an evaluation of the
      adapter that made it.
  """

  index: int
  prompt: str
  candidates: tuple[int, ...]
  seeds: tuple[int, ...]
  anchor: int | None = None


@dataclasses.dataclass(frozen=True)
class Job:
  """One question to a judge.

  Attributes:
    candidates: whose videos it needs, in the order in which the judge sees them.
    prompt: what was asked for.
    seed: names the judge's random stream, where it has one.
    components: what the verdict must hold, finite.
    judge: which judge is asked, where a reward has several.
  """

  candidates: tuple[int, ...]
  prompt: str
  seed: int
  components: tuple[str, ...] = ()
  judge: str = ""


@dataclasses.dataclass(frozen=True)
class Verdict:
  """A judge's answer to one job.

  Attributes:
    components: values by component; None where judging failed.
    cause: why it failed, in a word or two that metrics can count; empty where it did not.
    rationale: what the judge says for itself, or the failure in full.
    retryable: False for a failure that asking again would repeat.
  """

  components: Mapping[str, float] | None
  cause: str = ""
  rationale: str = ""
  retryable: bool = True


@dataclasses.dataclass(frozen=True)
class CandidateReward:
  """What a candidate earned.

  Attributes:
    components: values by component; None where no valid verdict exists. An optional component
      that failed is absent.
    cause: why there is none.
    rationale: text of the judge.
  """

  components: Mapping[str, float] | None
  cause: str = ""
  rationale: str = ""


class Judge(Protocol):
  """The part of a reward that runs on a reward worker and may hold a model."""

  def judge(self, jobs: Sequence[Job], videos: Mapping[int, Video]) -> list[Verdict]:
    """Answers jobs, in order.

    Args:
      jobs: the questions; they are independent of each other.
      videos: the videos of every candidate that the jobs name.
    """
    ...


class Reward(Protocol):
  """The part of a reward that runs on the driver: scalars only."""

  @property
  def needs_anchor(self) -> bool:
    """Whether every group of a step needs a video of the run's first adapter to compare with."""
    ...

  @property
  def compares(self) -> bool:
    """Whether a candidate's reward depends on other videos; then single videos need an anchor."""
    ...

  def jobs(self, group: Group) -> tuple[Job, ...]:
    """Gives the questions that a group's rewards need."""
    ...

  def aggregate(
    self, group: Group, jobs: Sequence[Job], verdicts: Sequence[Verdict]
  ) -> dict[int, CandidateReward]:
    """Gives every candidate of the group its reward or the cause of its failure."""
    ...


@dataclasses.dataclass(frozen=True)
class PointwiseReward:
  """A reward that looks at one video at a time: one job per candidate.

  Attributes:
    components: what a verdict must hold.
  """

  components: tuple[str, ...]

  @property
  def needs_anchor(self) -> bool:
    """A video is judged by itself."""
    return False

  @property
  def compares(self) -> bool:
    """A video is judged by itself."""
    return False

  def jobs(self, group: Group) -> tuple[Job, ...]:
    """One job per candidate."""
    return tuple(
      Job((c,), group.prompt, seed, self.components)
      for c, seed in zip(group.candidates, group.seeds, strict=True)
    )

  def aggregate(
    self, group: Group, jobs: Sequence[Job], verdicts: Sequence[Verdict]
  ) -> dict[int, CandidateReward]:
    """A candidate's reward is its job's verdict."""
    return {
      job.candidates[0]: CandidateReward(v.components, v.cause, v.rationale)
      for job, v in zip(jobs, verdicts, strict=True)
    }


def checked(verdict: Verdict, components: Sequence[str]) -> Verdict:
  """Turns a verdict with a missing or non-finite component into a failure that says so."""
  if verdict.components is None:
    return verdict
  missing = [name for name in components if name not in verdict.components]
  if missing:
    return Verdict(None, "missing", f"no value for component {missing[0]!r}")
  for name in components:
    if not np.isfinite(verdict.components[name]):
      return Verdict(None, "not_finite", f"component {name!r} is {verdict.components[name]}")
  return verdict


def judge_with_retries(
  judge: Judge, jobs: Sequence[Job], videos: Mapping[int, Video], retries: int
) -> list[Verdict]:
  """Judges jobs together, and those that fail again one by one.

  Args:
    judge: the judge.
    jobs: the questions, with what each verdict must hold.
    videos: the videos they need.
    retries: further attempts for a job that failed, unless its verdict says that it would again.

  Returns:
    One verdict per job; failures carry the last attempt's cause.
  """

  def attempt(some: Sequence[Job]) -> list[Verdict]:
    try:
      answers = judge.judge(some, videos)
      return [checked(v, job.components) for v, job in zip(answers, some, strict=True)]
    except Exception as error:  # a judge is foreign code: whatever it raises is its failure
      text = f"{type(error).__name__}: {error}"
      return [Verdict(None, "raised", text) for _ in some]

  verdicts = attempt(jobs)
  for _ in range(retries):
    for index, verdict in enumerate(verdicts):
      if verdict.components is None and verdict.retryable:
        verdicts[index] = attempt([jobs[index]])[0]
  return verdicts
