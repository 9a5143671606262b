"""A reward from comparisons: every candidate with every other, or each with one fixed opponent.

Source: StageBreaker scores groups with pairwise judges; Pref-GRPO turns all pairs of a group into
win rates. The fixed opponent makes one job a candidate, which is ready as soon as its own video is.
"""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np

from sbjax.rewards.protocol import CandidateReward, Group, Job, Verdict
from sbjax.rewards.winrate import PairOutcome, WinRates, win_rates

Unparsable = Literal["fail", "tie"]


@dataclasses.dataclass(frozen=True)
class PairwiseReward:
  """Implements `protocol.Reward`.

  Components: `overall`, the rate of comparisons won (a tie is half a win); the same by dimension
  under the judge's names, where its answers had them; `dimensions`, the mean over those, which is
  `overall` where there is none.

  Attributes:
    anchored: each candidate meets the group's anchor only; else every candidate meets every other.
      A group whose anchor is given meets it in either case.
    unparsable: an answer that cannot be parsed leaves its pair out (`fail`) or is a tie in the
      overall rate, as in the reference (`tie`). Other failures leave their pair out always.
    swap_orders: ask each pair in both orders, so that a judge's leaning to one place cancels.
  """

  anchored: bool = False
  unparsable: Unparsable = "fail"
  swap_orders: bool = False

  @property
  def needs_anchor(self) -> bool:
    """Whether every group of a step needs a further video to compare with."""
    return self.anchored

  @property
  def compares(self) -> bool:
    """A video is judged beside another one."""
    return True

  def jobs(self, group: Group) -> tuple[Job, ...]:
    """All pairs i < j, i shown first; or every candidate before the anchor.

    Raises:
      ValueError: if the group has no anchor and the reward needs one.
    """
    if self.anchored and group.anchor is None:
      raise ValueError(f"group {group.index} has no anchor; 'pairwise_anchor' needs one")
    seeds = dict(zip(group.candidates, group.seeds, strict=True))
    if group.anchor is not None:
      pairs = [(c, group.anchor) for c in group.candidates if c != group.anchor]
    else:
      members = group.candidates
      pairs = [(a, b) for place, a in enumerate(members) for b in members[place + 1 :]]
    jobs = []
    for pair in pairs:
      orders = (pair, pair[::-1]) if self.swap_orders else (pair,)
      jobs += [Job(order, group.prompt, _seed(order, seeds), ("overall",)) for order in orders]
    return tuple(jobs)

  def aggregate(
    self, group: Group, jobs: Sequence[Job], verdicts: Sequence[Verdict]
  ) -> dict[int, CandidateReward]:
    """Win rates; a candidate with under half of its pairs valid, or none, has no reward.

    A candidate that is its group's own anchor ties with itself by definition.
    """
    members = [*group.candidates]
    if group.anchor is not None and group.anchor not in members:
      members.append(group.anchor)
    place = {c: i for i, c in enumerate(members)}
    outcomes = [
      self._outcome(place[job.candidates[0]], place[job.candidates[1]], verdict)
      for job, verdict in zip(jobs, verdicts, strict=True)
    ]
    rates = win_rates(len(members), outcomes)
    dimensions = dict.fromkeys(name for o in outcomes for name in o.dimensions)
    rewards = {}
    for c in group.candidates:
      mine = [(j, v) for j, v in zip(jobs, verdicts, strict=True) if c in j.candidates]
      if c == group.anchor:
        even = dict.fromkeys(("overall", "dimensions", *dimensions), 0.5)
        rewards[c] = CandidateReward(even, rationale="compared with itself")
      else:
        rewards[c] = _reward(c, rates[place[c]], mine)
    return rewards

  def _outcome(self, first: int, second: int, verdict: Verdict) -> PairOutcome:
    if verdict.components is None:
      tie = self.unparsable == "tie" and verdict.cause == "unparsable"
      return PairOutcome(first, second, 0.5 if tie else None)
    values = dict(verdict.components)
    return PairOutcome(first, second, values.pop("overall"), values)


def _reward(
  candidate: int, rates: WinRates, mine: Sequence[tuple[Job, Verdict]]
) -> CandidateReward:
  texts = [f"{_title(candidate, job)}:\n{verdict.rationale}" for job, verdict in mine]
  rationale = "\n\n".join(texts)
  if not rates.enough or rates.overall is None:
    causes = collections.Counter(v.cause for _, v in mine if v.components is None)
    cause = causes.most_common(1)[0][0] if causes else "no_opponent"
    text = f"{rates.valid} of {rates.pairs} comparisons can be used. {rationale}"
    return CandidateReward(None, cause, text)
  mean = rates.overall if rates.mean is None else rates.mean
  values = {"overall": rates.overall, "dimensions": mean, **rates.dimensions}
  return CandidateReward(values, rationale=rationale)


def _title(candidate: int, job: Job) -> str:
  first, second = job.candidates
  opponent = second if candidate == first else first
  return f"shown {'first' if candidate == first else 'second'}, against {opponent}"


def _seed(order: tuple[int, ...], seeds: dict[int, int]) -> int:
  """A stream of the pair's own, which depends on the two videos and their order only."""
  names = [seeds.get(candidate, 0) for candidate in order]
  return int(np.random.SeedSequence(names).generate_state(1, np.uint32)[0])
