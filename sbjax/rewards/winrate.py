"""From pairwise verdicts to a reward per candidate: win rates, overall and by dimension.

Source: the pairwise preference reward of Pref-GRPO and UnifiedReward-Flex (arXiv 2602.02380); the
rule for pairs without a usable answer is ours.
"""

import dataclasses
from collections.abc import Mapping, Sequence

DIGITS = 3


@dataclasses.dataclass(frozen=True)
class PairOutcome:
  """What one comparison said, from the side of the video that was shown first.

  Attributes:
    first: position of the video that was shown first.
    second: position of the other one.
    overall: 1 the first is better, 0 the second is, 0.5 a tie; None where the pair is left out.
    dimensions: the same by dimension, in the judge's order; those that its answer had.
  """

  first: int
  second: int
  overall: float | None
  dimensions: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class WinRates:
  """Win rates of one candidate.

  Attributes:
    pairs: comparisons that it took part in.
    valid: of these, those that were not left out.
    overall: points won / valid comparisons; None where there is none.
    dimensions: dimension -> points won / comparisons whose answer had it; only those that were
      seen.
    mean: weighted mean over the dimensions that were seen; None where none was.
  """

  pairs: int
  valid: int
  overall: float | None
  dimensions: Mapping[str, float]
  mean: float | None

  @property
  def enough(self) -> bool:
    """Whether at least half of its comparisons, and one at all, can be used."""
    return self.valid > 0 and 2 * self.valid >= self.pairs


def dimension_weights(
  outcomes: Sequence[PairOutcome], weights: Sequence[float] = ()
) -> dict[str, float]:
  """Gives every dimension its weight, in the order in which dimensions first appear.

  Weights belong to places in that order and not to names, as in the reference; 1 where there are
  more dimensions than weights.
  """
  names = dict.fromkeys(name for outcome in outcomes for name in outcome.dimensions)
  return {
    name: float(weights[place]) if place < len(weights) else 1.0 for place, name in enumerate(names)
  }


def win_rates(
  count: int,
  outcomes: Sequence[PairOutcome],
  weights: Sequence[float] = (),
  digits: int | None = DIGITS,
) -> list[WinRates]:
  """Gives the win rates of `count` candidates that were compared with each other.

  Args:
    count: how many candidates there are.
    outcomes: the comparisons, in the order of the jobs.
    weights: weights of the dimensions, as `dimension_weights` takes them.
    digits: decimals of `overall` and `mean`, as in the reference, so that equal records are exact
      ties; None does not round. A dimension's rate is never rounded.
  """
  weight_of = dimension_weights(outcomes, weights)
  return [_rates_of(member, outcomes, weight_of, digits) for member in range(count)]


def _rates_of(
  member: int,
  outcomes: Sequence[PairOutcome],
  weight_of: Mapping[str, float],
  digits: int | None,
) -> WinRates:
  mine = [o for o in outcomes if member in (o.first, o.second)]
  points: list[float] = []
  by_dimension: dict[str, list[float]] = {name: [] for name in weight_of}
  for outcome in mine:
    if outcome.overall is None:
      continue
    points.append(_side(outcome, member, outcome.overall))
    for name, value in outcome.dimensions.items():
      by_dimension[name].append(_side(outcome, member, value))
  rates = {name: sum(won) / len(won) for name, won in by_dimension.items() if won}
  total = sum(weight_of[name] for name in rates)
  mean = sum(weight_of[name] * rate for name, rate in rates.items()) / total if total else None
  return WinRates(
    pairs=len(mine),
    valid=len(points),
    overall=_rounded(sum(points) / len(points), digits) if points else None,
    dimensions=rates,
    mean=None if mean is None else _rounded(mean, digits),
  )


def combined(
  rates: WinRates,
  overall_weight: float,
  mean_weight: float,
  *,
  shadowed_by: float | None = None,
) -> float | None:
  """Gives a candidate's scalar: the weighted mean of its overall rate and its dimensions' mean.

  Args:
    rates: its win rates.
    overall_weight: weight of the overall rate.
    mean_weight: weight of the dimensions' mean.
    shadowed_by: replaces `mean_weight`. The reference's loop over dimensions re-uses the name of
      that weight, so that its formula sees the weight of the last dimension; None: as intended.

  Returns:
    The overall rate alone where no dimension was seen; None where there is no rate.
  """
  weight = mean_weight if shadowed_by is None else shadowed_by
  if rates.overall is None or rates.mean is None or weight <= 0:
    return rates.overall
  return (overall_weight * rates.overall + weight * rates.mean) / (overall_weight + weight)


def _side(outcome: PairOutcome, member: int, value: float) -> float:
  """A value from the side of one of the two."""
  return value if outcome.first == member else 1.0 - value


def _rounded(value: float, digits: int | None) -> float:
  return value if digits is None else round(value, digits)
