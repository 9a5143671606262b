"""Objectives as functions of scalars: early x late against autodiff, bounds, failures, goldens."""

import dataclasses
import json
import math
import pathlib

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from sbjax.algorithms.objectives import (
  OBJECTIVES,
  Clipped,
  DiffusionNFT,
  IdentityObjective,
  gradient,
  objective,
  value,
)
from sbjax.separation.objective import Batch

GOLDEN = json.loads((pathlib.Path(__file__).parents[1] / "golden/transitions.json").read_text())

FORMS = {
  "clipped": {"clip_low": 0.1, "clip_high": 0.2},
  "clipped dual": {"clip_low": 0.1, "clip_high": 0.2, "dual_clip": 1.5},
  "clipped two rewards": {"clip_low": 0.1, "clip_high": 0.2, "reward_weights": (1.0, 0.3)},
  "clipped kl": {"clip_low": 0.1, "clip_high": 0.2, "kl_coef": 0.5},
  "clipped unclamped": {"clip_low": 0.1, "clip_high": 0.2, "log_ratio_clamp": None},
  "clipped on policy": {"on_policy": True, "kl_coef": 0.5, "reward_weights": (1.0, 0.3)},
  "guard": {"clip_low": 0.1, "clip_high": 0.1},
  "dppo": {"kl_mask_threshold": 0.5},
  "gspo": {"steps": 3, "clip_low": 0.05, "clip_high": 0.05},
  "fpo": {"clip_low": 0.1, "clip_high": 0.2},
  "nft": {},
  "nft binary": {"adv_mode": "binary", "ref_kl_coef": 0.1},
  "nft positive_only": {"adv_mode": "positive_only", "mix_beta": 0.1},
  "nft negative_only": {"adv_mode": "negative_only"},
  "nft one_only": {"adv_mode": "one_only"},
  "kvpo": {},
  "kvpo no kl": {"kl_coef": 0.0},
}


def _make(form):
  return objective(form.split(" ")[0], **FORMS[form])


def _coefficients(made, batch):
  early = np.stack(
    [
      made.early(batch.channels[n], batch.old[n], batch.statistics[n])
      for n in range(len(batch.old))
    ]
  )
  units = batch.channels.shape[1]
  assert early.shape[1:] == (made.buffers(units), units, len(made.channels))
  return np.einsum("nbuj,nb->nuj", early, made.late(batch))


def _batch(made, seed, spread=0.3, candidates=6, units=3):
  rng = np.random.default_rng(seed)
  units = units if made.unit == "step" else 1
  shape = (candidates, units, len(made.channels))
  old = rng.normal(size=shape)
  columns = len(getattr(made, "reward_weights", (1.0,)))
  advantages = 3 * rng.normal(size=(candidates, columns))
  advantages[rng.random(candidates) < 0.2] = 0.0
  return Batch(
    channels=old + spread * rng.normal(size=shape),
    old=old,
    statistics=rng.uniform(0.1, 1.0, size=(candidates, units, len(made.statistics))),
    advantages=advantages,
    valid=rng.random(candidates) < 0.85,
    group=np.repeat([0, 1], [candidates // 2, candidates - candidates // 2]),
    normaliser=float(candidates * units),
  )


def test_every_objective_has_a_form_here():
  assert {form.split(" ")[0] for form in FORMS} == set(OBJECTIVES)


@pytest.mark.parametrize("form", FORMS)
@hypothesis.settings(max_examples=8, deadline=None)
@hypothesis.given(seed=st.integers(0, 2**31), spread=st.sampled_from([0.0, 1e-4, 0.2, 1.0, 30.0]))
def test_early_times_late_is_the_gradient_of_the_loss(form, seed, spread):
  made = _make(form)
  batch = _batch(made, seed, spread)
  truth = gradient(made.loss, batch)
  got = _coefficients(made, batch)
  # A softmax that is all but one-hot leaves differences of numbers of size 1 / Z.
  scale = max(np.abs(truth).max(), 1.0 / batch.normaliser)
  assert np.abs(got - truth).max() <= 1e-12 * scale
  assert (got[~batch.valid] == 0).all()
  assert np.isfinite(value(made.loss, batch))


@pytest.mark.parametrize("form", FORMS)
def test_early_weights_know_nothing_of_the_rewards(form):
  made = _make(form)
  batch = _batch(made, 0)
  other = dataclasses.replace(batch, advantages=-2 * batch.advantages)
  for n in range(6):
    args = (batch.channels[n], batch.old[n], batch.statistics[n])
    np.testing.assert_array_equal(made.early(*args), made.early(*args))
  assert not np.array_equal(made.late(batch), made.late(other))


@pytest.mark.parametrize("form", FORMS)
def test_a_failed_candidate_is_left_out_whatever_it_holds(form):
  made = _make(form)
  batch = dataclasses.replace(_batch(made, 3), valid=np.arange(6) != 2)
  poison = [np.array(v, copy=True) for v in (batch.channels, batch.old, batch.advantages)]
  for array in poison:
    array[2] = np.nan
  sick = dataclasses.replace(batch, channels=poison[0], old=poison[1], advantages=poison[2])
  np.testing.assert_array_equal(made.late(sick), made.late(batch))
  np.testing.assert_array_equal(gradient(made.loss, sick), gradient(made.loss, batch))
  assert value(made.loss, sick) == value(made.loss, batch)
  assert (made.late(sick)[2] == 0).all()
  assert made.metrics(sick) == made.metrics(batch)


@pytest.mark.parametrize("form", [f for f in FORMS if f.split()[0] not in ("nft", "kvpo")])
def test_tied_rewards_give_no_policy_gradient(form):
  made = _make(form)
  batch = _batch(made, 1)
  batch = dataclasses.replace(batch, advantages=np.zeros_like(batch.advantages))
  assert (_coefficients(made, batch)[..., 0] == 0).all()
  assert (gradient(made.loss, batch)[..., 0] == 0).all()


def _one_unit(log_ratio, advantage, made):
  shape = (1, 1, len(made.channels))
  return Batch(
    channels=np.full(shape, log_ratio),
    old=np.zeros(shape),
    statistics=np.ones((1, 1, len(made.statistics))),
    advantages=np.array([[advantage]]),
    valid=np.ones(1, bool),
    group=np.zeros(1, int),
    normaliser=1.0,
  )


@pytest.mark.parametrize("row", GOLDEN["clip"], ids=str)
def test_the_clip_matches_the_reference(row):
  advantage, ratio, loss, slope = row
  made = Clipped(clip_low=0.1, clip_high=0.2)
  batch = _one_unit(math.log(ratio), advantage, made)
  np.testing.assert_allclose(value(made.loss, batch), loss, rtol=1e-12, atol=1e-15)
  np.testing.assert_allclose(gradient(made.loss, batch)[0, 0, 0], slope, rtol=1e-12)
  np.testing.assert_allclose(_coefficients(made, batch)[0, 0, 0], slope, rtol=1e-12)


@pytest.mark.parametrize(
  ("log_ratio", "advantage"),
  [
    (math.log1p(0.2), 1.0),
    (math.log1p(-0.1), -1.0),
    (math.log(3.0), -1.0),
    (-20.0, 1.0),
  ],
)
def test_bounds_are_inclusive_to_the_last_bit(log_ratio, advantage):
  made = Clipped(clip_low=0.1, clip_high=0.2, dual_clip=3.0)
  outward = math.copysign(math.inf, log_ratio)
  full = -advantage * math.exp(log_ratio)
  for at, want in ((log_ratio, full), (math.nextafter(log_ratio, outward), 0.0)):
    batch = _one_unit(at, advantage, made)
    np.testing.assert_allclose(gradient(made.loss, batch)[0, 0, 0], want, rtol=1e-13)
    np.testing.assert_allclose(_coefficients(made, batch)[0, 0, 0], want, rtol=1e-13)


@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("log_ratio", [-1e4, -800.0, 800.0, 1e4])
@pytest.mark.parametrize("clamp", [20.0, None])
def test_absurd_ratios_never_make_nan(advantage, log_ratio, clamp):
  made = Clipped(clip_low=0.1, clip_high=0.2, dual_clip=3.0, log_ratio_clamp=clamp)
  batch = _one_unit(log_ratio, advantage, made)
  assert not np.isnan(gradient(made.loss, batch)).any()
  np.testing.assert_allclose(
    _coefficients(made, batch), gradient(made.loss, batch), rtol=1e-12, atol=1e-300
  )
  assert math.isfinite(value(made.loss, batch))


def test_a_dual_clip_only_bounds_negative_advantages():
  free, bound = (
    Clipped(clip_low=0.1, clip_high=0.2),
    Clipped(clip_low=0.1, clip_high=0.2, dual_clip=3.0),
  )
  batch = _one_unit(math.log(4.0), -1.0, free)
  np.testing.assert_allclose(value(free.loss, batch), 4.0)
  np.testing.assert_allclose(value(bound.loss, batch), 3.0)
  assert gradient(free.loss, batch)[0, 0, 0] != 0
  assert gradient(bound.loss, batch)[0, 0, 0] == 0


def test_rewards_of_opposite_sign_use_both_buffers_of_one_candidate():
  made = Clipped(clip_low=0.1, clip_high=0.2, reward_weights=(1.0, 0.5))
  batch = dataclasses.replace(_one_unit(0.5, 0.0, made), advantages=np.array([[1.0, -2.0]]))
  np.testing.assert_allclose(made.late(batch), [[-1.0, 1.0]])
  # The ratio is above the upper bound: only the negative reward still pulls.
  np.testing.assert_allclose(_coefficients(made, batch)[0, 0, 0], math.exp(0.5))


@pytest.mark.parametrize("safe", [True, False])
def test_kvpo_matches_the_reference(safe):
  want, made = GOLDEN[f"kvpo_objective_safe={safe}"], objective("kvpo")

  def column(key):
    return np.array(want[key])[:, None, None]

  batch = Batch(
    column("s"),
    column("s_old"),
    column("s_ref"),
    np.stack([want["A"], np.full(4, want["m2"])], axis=1),
    np.ones(4, bool),
    np.zeros(4, int),
    4.0,
  )
  # The reference adds 1e-10 inside a logarithm, hence 1e-8.
  np.testing.assert_allclose(value(made.loss, batch), want["loss"], atol=1e-8)
  np.testing.assert_allclose(made.late(batch)[:, 0], want["dL_ds"], atol=1e-8)
  np.testing.assert_allclose(gradient(made.loss, batch)[:, 0, 0], want["dL_ds"], atol=1e-8)
  metrics = made.metrics(batch)
  np.testing.assert_allclose(metrics["actor/ratio_mean"], np.mean(want["rho"]), rtol=1e-9)
  np.testing.assert_allclose(metrics["actor/kl_loss"], want["kl"], atol=1e-8)


def test_kvpo_groups_do_not_see_each_other_and_failed_branches_leave():
  made = objective("kvpo")
  both = dataclasses.replace(_batch(made, 5), valid=np.ones(6, bool))
  alone = Batch(*[getattr(both, f.name)[:3] for f in dataclasses.fields(Batch)[:6]], 6.0)
  np.testing.assert_allclose(made.late(both)[:3], made.late(alone), rtol=1e-13)
  without = Batch(*[getattr(both, f.name)[:2] for f in dataclasses.fields(Batch)[:6]], 6.0)
  failed = dataclasses.replace(alone, valid=np.array([True, True, False]))
  np.testing.assert_allclose(made.late(failed)[:2], made.late(without), rtol=1e-13)


def test_kvpo_refuses_a_safe_factor_that_differs_in_a_group():
  made = objective("kvpo")
  batch = dataclasses.replace(_batch(made, 5), valid=np.ones(6, bool))
  two = np.column_stack([batch.advantages[:, 0], np.arange(6)])
  with pytest.raises(ValueError, match="safe factors of group 0"):
    made.late(dataclasses.replace(batch, advantages=two))


def test_nft_weighs_the_two_losses_with_the_probability_and_its_complement():
  made = DiffusionNFT(mix_beta=0.5, adv_clip=5.0)
  batch = dataclasses.replace(_batch(made, 0), valid=np.ones(6, bool))
  batch = dataclasses.replace(batch, advantages=np.array([[-9.0], [-5], [0], [2.5], [5], [9]]))
  r = np.array([0, 0, 0.5, 0.75, 1, 1])
  late = made.late(batch) * batch.normaliser / 10.0  # of (L+ + L-) / 2 and (L+ - L-) / 2
  positive, negative = (late[:, 0] + late[:, 1]) / 2, (late[:, 0] - late[:, 1]) / 2
  np.testing.assert_allclose(positive, r, atol=1e-15)
  np.testing.assert_allclose(negative, 1 - r, atol=1e-15)


def test_nft_metrics_are_the_two_losses():
  made = DiffusionNFT()
  batch = dataclasses.replace(_batch(made, 0), valid=np.ones(6, bool))
  positive, negative = np.full((6, 3), 3.0), np.full((6, 3), 1.0)
  halves = np.stack([(positive + negative) / 2, (positive - negative) / 2], axis=-1)
  told = made.metrics(dataclasses.replace(batch, channels=halves))
  assert (told["actor/positive_loss"], told["actor/negative_loss"]) == (3.0, 1.0)


def test_dppo_masks_far_units_that_would_move_further():
  made = objective("dppo", kl_mask_threshold=0.5)
  for drift, log_ratio, advantage, counts in [
    (0.4, 0.3, 1.0, True),
    (0.5, 0.3, 1.0, False),
    (0.9, -0.3, 1.0, True),
    (0.9, -0.3, -1.0, False),
    (0.9, 0.3, -1.0, True),
  ]:
    batch = _one_unit(log_ratio, advantage, made)
    batch = dataclasses.replace(batch, statistics=np.full((1, 1, 1), drift))
    assert bool(_coefficients(made, batch)[0, 0, 0] != 0) is counts
    assert (value(made.loss, batch) != 0) is counts


def test_guard_weighs_a_unit_by_its_step_length_however_chunks_are_reduced():
  made = objective("guard", clip_low=0.1, clip_high=0.1)
  batch = _one_unit(0.0, 1.0, made)
  for chunks in (1, 3):
    summed = dataclasses.replace(batch, statistics=np.array([[[0.25 * chunks, chunks]]]))
    np.testing.assert_allclose(_coefficients(made, summed)[0, 0, 0], -4.0)


def test_gspo_takes_the_mean_of_the_steps():
  made = objective("gspo", steps=4, clip_low=0.1, clip_high=0.2)
  batch = _one_unit(0.4, 1.0, made)  # four steps of 0.1 each: inside, though exp(0.4) is not
  np.testing.assert_allclose(_coefficients(made, batch)[0, 0, 0], -math.exp(0.1) / 4)


def test_metrics_tell_the_ratios_and_the_share_that_is_cut():
  made = Clipped(clip_low=0.1, clip_high=0.2)
  log_ratios = np.array([0.5, 0.5, -0.5, -0.5, 0.0])
  batch = Batch(
    log_ratios[:, None, None],
    np.zeros((5, 1, 1)),
    np.zeros((5, 1, 0)),
    np.array([[1.0], [-1], [1], [-1], [1]]),
    np.ones(5, bool),
    np.zeros(5, int),
    5.0,
  )
  got = made.metrics(batch)
  np.testing.assert_allclose(got["actor/ratio_mean"], np.exp(log_ratios).mean())
  np.testing.assert_allclose(got["actor/ratio_std"], np.exp(log_ratios).std())
  assert got["actor/pg_clipfrac"] == pytest.approx(2 / 5)
  assert got["actor/pg_clipfrac_higher"] == pytest.approx(2 / 5)
  assert got["actor/pg_clipfrac_lower"] == pytest.approx(2 / 5)
  assert got["actor/ppo_kl"] == 0.0
  assert got["actor/approx_kl"] == pytest.approx(0.1)
  assert made.metrics(dataclasses.replace(batch, valid=np.zeros(5, bool))) == {}


def test_any_loss_separates_by_the_identity():
  source = Clipped(clip_low=0.1, clip_high=0.2, kl_coef=0.2)
  made = IdentityObjective(name="mine", loss_fn=source.loss, channels=source.channels)
  batch = _batch(source, 4)
  assert made.buffers(3) == 6
  np.testing.assert_allclose(
    _coefficients(made, batch), _coefficients(source, batch), rtol=1e-13, atol=1e-16
  )


@pytest.mark.parametrize(
  ("name", "settings", "words"),
  [
    ("ppo", {}, "objective is 'ppo'"),
    ("clipped", {"clip": 0.1}, "no setting 'clip'"),
    ("clipped", {"clip_low": 1.0}, "clip_low is 1.0"),
    ("clipped", {"clip_high": 0.0}, "clip_high is 0.0"),
    ("clipped", {"dual_clip": 1.0}, "dual_clip is 1.0"),
    ("clipped", {"reward_weights": [1.0, -1.0]}, "reward_weights is"),
    ("clipped", {"kl_coef": -1.0}, "kl_coef is -1.0"),
    ("gspo", {}, "needs 'steps'"),
    ("gspo", {"steps": 0}, "steps is 0"),
    ("nft", {"adv_mode": "some"}, "adv_mode is 'some'"),
    ("dppo", {"kl_mask_threshold": -1.0}, "kl_mask_threshold is -1.0"),
    ("kvpo", {"clip_low": 0.0}, "clip_low is 0.0"),
  ],
)
def test_settings_that_cannot_work_are_refused_in_one_sentence(name, settings, words):
  with pytest.raises(ValueError, match=words) as caught:
    objective(name, **settings)
  assert "\n" not in str(caught.value)


def test_the_number_of_reward_columns_must_fit():
  made = Clipped()
  batch = dataclasses.replace(_batch(made, 0), advantages=np.zeros((6, 2)))
  with pytest.raises(ValueError, match="reward_weights has 1 entries for 2"):
    made.late(batch)
