"""Advantages against the reference numbers, ties, failures, several rewards, best-of-N."""

import json
import pathlib

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
import pytest

from sbjax.algorithms.advantages import (
  AdvantageConfig,
  advantages,
  best_of,
  fuse_signals,
  safe_factors,
)

GOLDEN = json.loads((pathlib.Path(__file__).parents[1] / "golden/transitions.json").read_text())
REWARDS = np.array([[0.1, 0.4, 0.35, 0.8], [0.2, 0.2, 0.9, 0.3]]).reshape(8, 1)
GROUP = np.repeat([0, 1], 4)
ALL = np.ones(8, bool)


def _run(rewards, config, group=GROUP, valid=ALL, anchors=None):
  rewards = np.asarray(rewards, np.float64)
  return advantages(rewards.reshape(len(group), -1), valid, group, config, anchors)


@pytest.mark.parametrize(
  ("key", "config"),
  [
    ("dance_group", AdvantageConfig()),
    ("flowgrpo_globalstd", AdvantageConfig(std="global_population", eps=1e-4)),
    ("flowgrpo_groupstd", AdvantageConfig(std="group_population", eps=1e-4)),
    ("verl_globalstd_T2", AdvantageConfig(std="global_unbiased", eps=1e-4, std_repeats=2)),
    ("verl_groupstd_T2", AdvantageConfig(std="group_unbiased", eps=1e-4, std_repeats=2)),
  ],
)
def test_group_advantages_match_the_references(key, config):
  got = _run(REWARDS, config).values.reshape(2, 4)
  np.testing.assert_allclose(got, GOLDEN["adv"][key], rtol=1e-6, atol=1e-6)


def test_anchor_advantages_match_kvpo():
  want = GOLDEN["adv"]["kvpo_anchor"]
  config = AdvantageConfig(baseline="anchor", clip=2.5)
  anchors = np.full((4, 1), want["anchor"])
  got = _run(REWARDS[:4], config, GROUP[:4], ALL[:4], anchors).values[:, 0]
  np.testing.assert_allclose(got, want["adv"], rtol=1e-6)


def test_branches_that_tie_but_differ_from_the_anchor_keep_their_advantage():
  config = AdvantageConfig(baseline="anchor", clip=None)
  got = _run([0.5] * 4, config, GROUP[:4], ALL[:4], np.full((4, 1), 0.3)).values[:, 0]
  assert (got > 0).all()
  assert np.ptp(got) == 0
  tied = _run([0.3] * 4, config, GROUP[:4], ALL[:4], np.full((4, 1), 0.3)).values
  assert (tied == 0).all()


@pytest.mark.parametrize("size", [2, 8, 12, 16, 24])
@pytest.mark.parametrize("reward", [0.1, 0.3, 0.7])
@pytest.mark.parametrize("std", ["group_unbiased", "group_population", "global_unbiased", "none"])
def test_tied_groups_get_exactly_zero(size, reward, std):
  # Two groups, so that a global deviation is not zero.
  rewards = np.concatenate([np.full(size, reward), np.arange(size)])
  group = np.repeat([0, 1], size)
  got = _run(rewards, AdvantageConfig(std=std), group, np.ones(2 * size, bool))
  assert (got.values[:size] == 0).all()
  assert (got.values[size:] != 0).any()
  assert got.usable.all()


def test_near_ties_within_the_tolerance_count_as_ties():
  rewards = [0.5, 0.5 + 1e-9, 0.5, 0.5]
  loose = _run(rewards, AdvantageConfig(tie_tol=1e-8), GROUP[:4], ALL[:4])
  exact = _run(rewards, AdvantageConfig(), GROUP[:4], ALL[:4])
  assert (loose.values == 0).all()
  assert (exact.values != 0).all()


def test_a_pair_is_one_standard_apart_whatever_the_gap():
  group, valid = np.array([0, 0]), np.ones(2, bool)
  for gap in (1e-3, 1.0, 100.0):
    got = _run([0.0, gap], AdvantageConfig(eps=1e-12), group, valid).values[:, 0]
    np.testing.assert_allclose(got, [-np.sqrt(0.5), np.sqrt(0.5)], rtol=1e-6)


@pytest.mark.parametrize("std", ["group_unbiased", "global_population"])
def test_a_failed_member_is_as_if_it_were_absent(std):
  valid = ALL.copy()
  valid[2] = False
  rewards = REWARDS.copy()
  rewards[2] = np.nan
  got = _run(rewards, AdvantageConfig(std=std), valid=valid)
  without = _run(np.delete(REWARDS, 2), AdvantageConfig(std=std), np.delete(GROUP, 2), ALL[:7])
  assert got.values[2] == 0
  assert not got.usable[2]
  np.testing.assert_array_equal(np.delete(got.values, 2), without.values[:, 0])


def test_a_group_with_one_valid_member_is_dropped():
  valid = np.array([True, False, False, False, True, True, True, True])
  got = _run(REWARDS, AdvantageConfig(std="global_unbiased"), valid=valid)
  assert not got.usable[:4].any()
  assert (got.values[:4] == 0).all()
  alone = _run(REWARDS[4:], AdvantageConfig(std="global_unbiased"), GROUP[4:], ALL[4:])
  np.testing.assert_array_equal(got.values[4:], alone.values)


def test_a_singleton_group_gets_zero():
  got = _run([0.7], AdvantageConfig(), np.array([3]), np.ones(1, bool))
  assert got.values[0, 0] == 0
  assert not got.usable[0]


def test_a_failed_anchor_drops_its_group():
  anchors = np.where(GROUP == 0, np.nan, 0.1)[:, None]
  got = _run(REWARDS, AdvantageConfig(baseline="anchor"), anchors=anchors)
  assert not got.usable[:4].any()
  assert got.usable[4:].all()


TWO = np.array([[0, 3], [1, 1], [2, 2], [4, 0], [1, 5], [0, 4], [3, 9], [2, 2]], float)


def test_several_rewards_combine_as_asked():
  weights = (1.0, 0.5)
  single = [_run(TWO[:, m], AdvantageConfig(clip=None)).values[:, 0] for m in range(2)]
  summed = _run(TWO, AdvantageConfig(clip=None, weights=weights)).values[:, 0]
  np.testing.assert_allclose(summed, single[0] + 0.5 * single[1], rtol=1e-12)
  raw = _run(TWO, AdvantageConfig(clip=None, combine="raw_sum", weights=weights)).values[:, 0]
  whole = _run(TWO @ np.array(weights), AdvantageConfig(clip=None)).values[:, 0]
  np.testing.assert_allclose(raw, whole, rtol=1e-12)
  apart = _run(TWO, AdvantageConfig(clip=None, combine="separate_loss", weights=weights)).values
  np.testing.assert_array_equal(apart, np.stack(single, axis=1))
  gdpo = _run(TWO, AdvantageConfig(clip=None, combine="gdpo", weights=weights)).values[:, 0]
  np.testing.assert_allclose(gdpo, summed / (np.std(summed, ddof=1) + 1e-8), rtol=1e-9, atol=1e-12)
  assert abs(np.std(gdpo, ddof=1) - 1) < 1e-7


def test_gdpo_leaves_a_tied_group_at_zero():
  rewards = np.concatenate([np.full(4, 0.7), [0.1, 0.2, 0.3, 0.9]])
  got = _run(rewards, AdvantageConfig(combine="gdpo")).values[:, 0]
  assert (got[:4] == 0).all()


def test_best_of_keeps_both_ends_and_uses_the_whole_groups_advantages():
  full = _run(REWARDS, AdvantageConfig())
  got = _run(REWARDS, AdvantageConfig(best_of=2))
  np.testing.assert_array_equal(got.values, full.values)
  # Group 0: 0.1 is worst, 0.8 best. Group 1: 0.2 twice, the first counts as worst; 0.9 is best.
  np.testing.assert_array_equal(np.flatnonzero(got.trained), [0, 3, 4, 6])
  assert got.usable.all()


def test_best_of_gives_the_odd_one_to_the_top_and_skips_failures():
  values = np.array([5.0, 1.0, 4.0, 2.0, 3.0])
  usable, group = np.ones(5, bool), np.zeros(5, int)
  np.testing.assert_array_equal(np.flatnonzero(best_of(values, usable, group, 3)), [0, 1, 2])
  usable[0] = False
  np.testing.assert_array_equal(np.flatnonzero(best_of(values, usable, group, 2)), [1, 2])
  np.testing.assert_array_equal(best_of(values, usable, group, 0), usable)


def test_advantages_are_clipped_last():
  rewards = np.concatenate([np.zeros(63), [1.0]])
  group, valid = np.zeros(64, int), np.ones(64, bool)
  free = _run(rewards, AdvantageConfig(clip=None), group, valid).values[:, 0]
  got = _run(rewards, AdvantageConfig(clip=5.0), group, valid).values[:, 0]
  assert free[-1] > 5
  np.testing.assert_array_equal(got, np.clip(free, -5, 5))


def test_kvpo_fuses_signals_by_their_spread_and_knows_unsafe_groups():
  signals = np.array([[1.0, 10.0], [3.0, 30.0], [2.0, 2.0], [2.0, 4.0]])
  group, usable = np.array([0, 0, 1, 1]), np.ones(4, bool)
  got = fuse_signals(signals, usable, group, (1.0, 0.5), clip=None)
  # Group 1's first signal has no spread and is added as it is.
  np.testing.assert_allclose(got, [1 + 0.5, 3 + 1.5, 2 + 1.0, 2 + 2.0])
  np.testing.assert_array_equal(
    fuse_signals(signals, usable, group, (1.0, 0.5)), np.minimum(got, 2.5)
  )
  anchors = np.array([[2.0, 40.0], [2.0, 40.0], [2.0, 4.0], [2.0, 4.0]])
  np.testing.assert_array_equal(safe_factors(signals, anchors, usable, group), [1, 1, 0.5, 0.5])


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
  hnp.arrays(np.float64, (12, 1), elements=st.floats(-100, 100, width=32)),
  st.floats(-50, 50),
  st.floats(0.1, 10),
  st.permutations(range(12)),
)
def test_advantages_ignore_shift_scale_and_order(rewards, shift, scale, order):
  rewards = np.round(rewards, 2)
  config = AdvantageConfig(eps=1e-12, clip=None, tie_tol=1e-6)
  group, valid = np.repeat([0, 1, 2], 4), np.ones(12, bool)
  base = _run(rewards, config, group, valid).values
  moved = _run(rewards * scale + shift, config, group, valid).values
  np.testing.assert_allclose(moved, base, rtol=1e-5, atol=1e-5)
  order = np.array(order)
  shuffled = _run(rewards[order], config, group[order], valid).values
  np.testing.assert_allclose(shuffled, base[order], rtol=1e-9, atol=1e-9)
  for g in range(3):
    assert abs(base[group == g].sum()) < 1e-9


@pytest.mark.parametrize(
  ("settings", "words"),
  [
    ({"std": "iqr"}, "std is 'iqr'"),
    ({"eps": 0.0}, "eps is 0.0"),
    ({"best_of": 1}, "best_of is 1"),
    ({"combine": "max"}, "combine is 'max'"),
    ({"weights": ()}, r"weights is \(\)"),
  ],
)
def test_settings_that_cannot_work_are_refused(settings, words):
  with pytest.raises(ValueError, match=words):
    AdvantageConfig(**settings)


def test_wrong_inputs_are_refused():
  with pytest.raises(ValueError, match="weights has 1 entries"):
    advantages(TWO, ALL, GROUP, AdvantageConfig())
  with pytest.raises(ValueError, match="anchors are missing"):
    _run(REWARDS, AdvantageConfig(baseline="anchor"))
  with pytest.raises(ValueError, match="non-finite"):
    _run(np.where(REWARDS > 0.85, np.nan, REWARDS), AdvantageConfig())
