"""Several judges as one reward: jobs for each, components of all, required and optional ones."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from sbjax.rewards.protocol import CandidateReward, Group, Job, Judge, Reward, Verdict, Video


@dataclasses.dataclass(frozen=True)
class CombinedReward:
  """Implements `protocol.Reward`.

  With one part components keep their names; with several each is `part.component`.

  Attributes:
    parts: rewards by the name of their judge.
    components: what the run weighs.
    optional: of these, the ones that may fail: where one fails for any candidate that has its
      required ones, it is left out of the sum for the whole group, so that candidates are compared
      by the same sum. A candidate that lacks a required one has failed.
  """

  parts: Mapping[str, Reward]
  components: tuple[str, ...]
  optional: tuple[str, ...] = ()

  @property
  def needs_anchor(self) -> bool:
    """Whether any part does."""
    return any(part.needs_anchor for part in self.parts.values())

  @property
  def compares(self) -> bool:
    """Whether any part does."""
    return any(part.compares for part in self.parts.values())

  def jobs(self, group: Group) -> tuple[Job, ...]:
    """Every part's jobs, with the name of its judge."""
    return tuple(
      dataclasses.replace(job, judge=name)
      for name, part in self.parts.items()
      for job in part.jobs(group)
    )

  def aggregate(
    self, group: Group, jobs: Sequence[Job], verdicts: Sequence[Verdict]
  ) -> dict[int, CandidateReward]:
    """Every part's rewards side by side, then what required and optional mean."""
    found: dict[str, dict[int, CandidateReward]] = {}
    for name, part in self.parts.items():
      mine = [(j, v) for j, v in zip(jobs, verdicts, strict=True) if j.judge == name]
      found[name] = part.aggregate(group, [j for j, _ in mine], [v for _, v in mine])
    merged = {c: self._merged({n: r[c] for n, r in found.items()}) for c in group.candidates}
    return self._without_failed_options(merged)

  def _merged(self, parts: Mapping[str, CandidateReward]) -> CandidateReward:
    several = len(self.parts) > 1
    values: dict[str, float] = {}
    for name, reward in parts.items():
      for component, value in (reward.components or {}).items():
        values[f"{name}.{component}" if several else component] = value
    texts = [f"{n}: {r.rationale}" if several else r.rationale for n, r in parts.items()]
    rationale = "\n\n".join(text for text in texts if text)
    for wanted in self.components:
      if wanted in self.optional or _finite(values.get(wanted)):
        continue
      owner = parts[wanted.partition(".")[0]] if several else next(iter(parts.values()))
      if owner.components is None:
        return CandidateReward(None, owner.cause, owner.rationale)
      cause = "not_finite" if wanted in values else "missing"
      return CandidateReward(None, cause, f"no usable value of component {wanted!r}. {rationale}")
    return CandidateReward(values, rationale=rationale)

  def _without_failed_options(
    self, rewards: Mapping[int, CandidateReward]
  ) -> dict[int, CandidateReward]:
    valid = [r.components for r in rewards.values() if r.components is not None]
    out = {n for n in self.optional if not all(_finite(values.get(n)) for values in valid)}
    return {
      c: r
      if r.components is None
      else dataclasses.replace(
        r, components={name: v for name, v in r.components.items() if name not in out}
      )
      for c, r in rewards.items()
    }


class JudgeTable:
  """Implements `protocol.Judge`: hands each job to the judge that it names.

  Args:
    judges: judges by name.
  """

  def __init__(self, judges: Mapping[str, Judge]):
    self._judges = judges

  @property
  def judges(self) -> Mapping[str, Judge]:
    """Judges by name."""
    return self._judges

  def judge(self, jobs: Sequence[Job], videos: Mapping[int, Video]) -> list[Verdict]:
    """Answers jobs, in order; a judge gets its own together, and what it raises is its failure."""
    verdicts: dict[int, Verdict] = {}
    for name, judge in self._judges.items():
      mine = [place for place, job in enumerate(jobs) if job.judge == name]
      if mine:
        verdicts |= zip(mine, _answers(judge, [jobs[p] for p in mine], videos), strict=True)
    return [verdicts[place] for place in range(len(jobs))]


def _answers(judge: Judge, jobs: Sequence[Job], videos: Mapping[int, Video]) -> list[Verdict]:
  try:
    return judge.judge(jobs, videos)
  except Exception as error:  # one judge's failure must not cost the others' verdicts
    text = f"{type(error).__name__}: {error}"
    return [Verdict(None, "raised", text) for _ in jobs]


def _finite(value: float | None) -> bool:
  return value is not None and bool(np.isfinite(value))
