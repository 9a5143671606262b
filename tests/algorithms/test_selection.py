"""Step subsets and mini-batches: functions of the seed, equal for all, groups whole."""

import collections

import hypothesis
import hypothesis.strategies as st
import pytest

from sbjax.algorithms.selection import minibatches, trained_steps, updates

GROUPS = [tuple(range(4 * g, 4 * g + 4)) for g in range(4)]


def _steps(text, stochastic, candidate=0, group=0, step=0, seed=0):
  return trained_steps(text, stochastic, seed=seed, step=step, candidate=candidate, group=group)


def test_all_takes_every_stochastic_step():
  assert _steps("all", 3) == (0, 1, 2)


@hypothesis.settings(max_examples=50, deadline=None)
@hypothesis.given(st.integers(1, 20), st.floats(0.05, 1.0), st.integers(0, 99), st.integers(0, 99))
def test_a_fraction_is_as_large_for_every_candidate(stochastic, fraction, candidate, step):
  hypothesis.assume(int(stochastic * fraction) >= 1)
  got = _steps(f"fraction:{fraction!r}", stochastic, candidate=candidate, step=step)
  assert len(got) == int(stochastic * fraction)
  assert list(got) == sorted(set(got))
  assert set(got) <= set(range(stochastic))


def test_fractions_differ_between_candidates_and_cover_all_steps():
  drawn = [_steps("fraction:0.6", 15, candidate=c) for c in range(200)]
  assert len(drawn[0]) == 9  # DanceGRPO's Flux recipe: 16 steps, 0.6
  assert len(set(drawn)) > 150
  counts = collections.Counter(k for steps in drawn for k in steps)
  assert set(counts) == set(range(15))
  assert min(counts.values()) > 80  # 120 expected each


def test_a_window_is_shared_within_a_group_and_moves_between_steps():
  for group in range(5):
    assert len({_steps("window:2", 9, candidate=c, group=group) for c in range(8)}) == 1
  windows = {_steps("window:2", 9, group=g, step=s) for g in range(10) for s in range(20)}
  assert windows == {(k, k + 1) for k in range(8)}


def test_draws_depend_on_the_name_only():
  first = _steps("fraction:0.5", 10, candidate=3, step=7, seed=1)
  _steps("fraction:0.5", 10, candidate=4, step=7, seed=1)
  assert _steps("fraction:0.5", 10, candidate=3, step=7, seed=1) == first
  others = {_steps("fraction:0.5", 10, candidate=3, step=7, seed=s) for s in range(20)}
  assert len(others) > 10
  # A fixed value: a run resumed on another machine must draw the same.
  assert _steps("fraction:0.5", 6, candidate=2, step=5, seed=11) == FIXED_FRACTION
  assert _steps("window:2", 6, group=1, step=5, seed=11) == FIXED_WINDOW


FIXED_FRACTION = (0, 4, 5)
FIXED_WINDOW = (2, 3)


@pytest.mark.parametrize(
  "text",
  ["none", "fraction:0", "fraction:1.5", "fraction:nan", "window:0", "window:4", "fraction:x"],
)
def test_subsets_that_cannot_work_are_refused(text):
  with pytest.raises(ValueError, match="train_steps is"):
    _steps(text, 3)


def test_group_major_keeps_groups_whole():
  cut = minibatches(GROUPS, 2, "group_major")
  assert cut == (tuple(range(8)), tuple(range(8, 16)))
  with pytest.raises(ValueError, match="minibatches is 3"):
    minibatches(GROUPS, 3, "group_major")
  with pytest.raises(ValueError, match="minibatches is 8"):
    minibatches(GROUPS, 8, "group_major")


def test_the_reference_order_takes_a_slice_of_every_group():
  cut = minibatches(GROUPS, 2, "reference")
  assert cut[0] == (0, 1, 4, 5, 8, 9, 12, 13)
  assert cut[1] == (2, 3, 6, 7, 10, 11, 14, 15)
  with pytest.raises(ValueError, match="minibatches is 3"):
    minibatches(GROUPS, 3, "reference")


@pytest.mark.parametrize("order", ["group_major", "reference"])
def test_every_epoch_uses_every_candidate_once(order):
  got = updates(GROUPS, 2, 3, order, seed=0, step=4)
  assert len(got) == 6
  for epoch in range(3):
    assert sorted(c for part in got[2 * epoch : 2 * epoch + 2] for c in part) == list(range(16))
  assert got[:2] == minibatches(GROUPS, 2, order)
  assert got == updates(GROUPS, 2, 3, order, seed=0, step=4)


def test_later_epochs_are_shuffled_by_the_seed():
  seen = {updates(GROUPS, 2, 2, "group_major", seed=0, step=s)[2:] for s in range(30)}
  assert len(seen) > 3
  with pytest.raises(ValueError, match="epochs is 0"):
    updates(GROUPS, 2, 0, "group_major", seed=0, step=0)
