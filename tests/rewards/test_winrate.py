"""Win rates: invariants, the reference's rules, and what happens to pairs without an answer."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbjax.rewards.pairwise import PairwiseReward
from sbjax.rewards.protocol import Group, Verdict
from sbjax.rewards.winrate import PairOutcome, combined, dimension_weights, win_rates

POINTS = st.sampled_from([0.0, 0.5, 1.0])


def all_pairs(count):
  return list(itertools.combinations(range(count), 2))


@st.composite
def groups(draw):
  count = draw(st.integers(2, 7))
  dimensions = st.dictionaries(st.sampled_from("ABC"), POINTS)
  outcomes = [PairOutcome(i, j, draw(POINTS), draw(dimensions)) for i, j in all_pairs(count)]
  return count, outcomes


@given(groups())
def test_overall_rates_average_one_half_and_lie_between_0_and_1(group):
  count, outcomes = group
  rates = win_rates(count, outcomes, digits=None)
  assert sum(r.overall for r in rates) == pytest.approx(count / 2, abs=1e-12)
  for rate in rates:
    assert rate.pairs == rate.valid == count - 1
    assert all(0.0 <= value <= 1.0 for value in rate.dimensions.values())
    reward = combined(rate, 0.3, 0.7)
    assert 0.0 <= reward <= 1.0
    if rate.mean is None:
      assert reward == rate.overall


@given(groups())
def test_who_is_shown_first_changes_nothing(group):
  count, outcomes = group
  swapped = [
    PairOutcome(o.second, o.first, 1.0 - o.overall, {n: 1.0 - v for n, v in o.dimensions.items()})
    for o in outcomes
  ]
  assert win_rates(count, outcomes) == win_rates(count, swapped)


def test_the_worked_example():
  outcomes = [PairOutcome(0, 1, 1.0), PairOutcome(0, 2, 0.5), PairOutcome(1, 2, 0.0)]
  assert [r.overall for r in win_rates(3, outcomes)] == [0.75, 0.0, 0.75]


def test_weights_go_by_the_order_of_first_appearance_and_are_padded_with_one():
  outcomes = [
    PairOutcome(0, 1, 0.5, {"B": 1.0}),
    PairOutcome(0, 2, 0.5, {"A": 0.0, "C": 1.0}),
  ]
  assert dimension_weights(outcomes, (1.0, 0.5)) == {"B": 1.0, "A": 0.5, "C": 1.0}
  rates = win_rates(3, outcomes, (1.0, 0.5), digits=None)
  assert rates[0].mean == pytest.approx((1.0 + 0.0 + 1.0) / 2.5)
  assert rates[2].mean == pytest.approx(0.5 / 1.5)  # it never saw B


def test_the_shadowed_weight_is_the_last_dimensions():
  rates = win_rates(2, [PairOutcome(0, 1, 1.0, {"A": 0.0})])
  assert combined(rates[0], 0.3, 0.7) == pytest.approx(0.3)
  assert combined(rates[0], 0.3, 0.7, shadowed_by=1.0) == pytest.approx(0.3 / 1.3)


GROUP = Group(0, "a red seven", (4, 5, 6), (11, 12, 13))
WIN = Verdict({"overall": 1.0, "alignment": 1.0}, rationale="the first is sharper")
BAD = Verdict(None, "unparsable", "prose")
LOST = Verdict(None, "timeout", "no answer within 1 s")


def judged(reward, *verdicts, group=GROUP):
  return reward.aggregate(group, reward.jobs(group), verdicts)


def test_jobs_are_all_pairs_in_order_with_streams_of_their_own():
  jobs = PairwiseReward().jobs(GROUP)
  assert [job.candidates for job in jobs] == [(4, 5), (4, 6), (5, 6)]
  assert len({job.seed for job in jobs}) == 3
  assert jobs == PairwiseReward().jobs(GROUP)
  both = PairwiseReward(swap_orders=True).jobs(GROUP)
  assert [job.candidates for job in both[:2]] == [(4, 5), (5, 4)]
  assert len({job.seed for job in both}) == 6


def test_an_anchor_gives_one_job_a_candidate_and_earns_nothing():
  reward = PairwiseReward(anchored=True)
  with pytest.raises(ValueError, match="has no anchor"):
    reward.jobs(GROUP)
  group = Group(0, "p", (4, 5), (11, 12), anchor=-1)
  assert [job.candidates for job in reward.jobs(group)] == [(4, -1), (5, -1)]
  rewards = judged(reward, WIN, Verdict({"overall": 0.0}), group=group)
  assert {c: r.components["overall"] for c, r in rewards.items()} == {4: 1.0, 5: 0.0}
  own = Group(0, "p", (4,), (11,), anchor=4)
  assert judged(reward, group=own)[4].components == {"overall": 0.5, "dimensions": 0.5}


def test_an_unparsable_pair_is_left_out_or_a_tie():
  rewards = judged(PairwiseReward(), BAD, WIN, WIN)
  # 4: one of two is valid, which is half; its one valid pair is won.
  assert rewards[4].components == {"overall": 1.0, "dimensions": 1.0, "alignment": 1.0}
  assert rewards[5].components["overall"] == 1.0
  tie = judged(PairwiseReward(unparsable="tie"), BAD, WIN, WIN)
  assert [tie[c].components["overall"] for c in (4, 5, 6)] == [0.75, 0.75, 0.0]
  assert tie[4].components["alignment"] == 1.0  # the tie says nothing about dimensions


def test_a_candidate_with_under_half_of_its_pairs_fails_with_the_commonest_cause():
  rewards = judged(PairwiseReward(unparsable="tie"), LOST, LOST, WIN)
  assert rewards[4].components is None
  assert rewards[4].cause == "timeout"
  assert "0 of 2 comparisons" in rewards[4].rationale
  assert rewards[5].components["overall"] == 1.0
  assert rewards[6].components["overall"] == 0.0


def test_without_dimensions_their_mean_is_the_overall_rate_and_rationales_are_kept():
  rewards = judged(PairwiseReward(), *[Verdict({"overall": 1.0}, rationale="sharper")] * 3)
  assert rewards[5].components == {"overall": 0.5, "dimensions": 0.5}
  assert "shown second, against 4:\nsharper" in rewards[5].rationale
  assert "shown first, against 6:\nsharper" in rewards[5].rationale


def test_swapped_orders_cancel_a_leaning_to_the_first_place():
  reward = PairwiseReward(swap_orders=True)
  rewards = judged(reward, *[Verdict({"overall": 1.0})] * 6)
  assert [r.components["overall"] for r in rewards.values()] == [0.5, 0.5, 0.5]
