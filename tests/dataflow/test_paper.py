"""The paper's setting: how costs scale, which steps exist, and the grid."""

import dataclasses

import pytest

from benchmarks import paper_fit
from sbjax.dataflow.grid import Cell, all_schemes, cells, plan_cell, without
from sbjax.dataflow.paper import PaperCosts, paper_costs, paper_shape
from sbjax.dataflow.schemes import scheme


def actor(**kwargs):
  return paper_costs(PaperCosts(), **kwargs).by_kind["actor"]


def test_the_reference_costs_what_the_parameters_say():
  made = actor()
  assert (made.generate_s, made.decode_s) == pytest.approx((0.7, 0.3))
  assert made.backward_s == pytest.approx(PaperCosts().backward_s)
  assert made.judging_s(1) == pytest.approx(PaperCosts().judges["vr_thinker"].seconds(1, 21))


def test_the_numbers_are_the_fitted_ones():
  ours, fitted = PaperCosts(), paper_fit.fit().costs
  for name in ("forward_s", "backward_s", "fused_s", "colocated_judging"):
    assert getattr(ours, name) == pytest.approx(getattr(fitted, name), rel=1e-3), name
  for name, curve in ours.judges.items():
    assert curve.seconds(5, 33) == pytest.approx(fitted.judges[name].seconds(5, 33), rel=1e-3)


def test_longer_videos_cost_more_than_their_length_and_local_attention_does_not():
  assert actor(frames=42).generate_s > 2.0 * actor().generate_s
  assert actor(frames=42).decode_s == pytest.approx(2.0 * actor().decode_s)
  local = [actor(frames=f, algorithm="kvpo").generate_s for f in (21, 42)]
  assert local[1] == pytest.approx(2.0 * local[0])
  # Only KVPO's window is replayed, whatever the length.
  replayed = [actor(frames=f, algorithm="kvpo").replay_s for f in (21, 42)]
  assert replayed[1] == pytest.approx(replayed[0])


def test_a_batch_of_the_judge_is_cheaper_than_its_jobs_alone():
  made = actor()
  assert made.judging_s(1) < made.judging_s(12) < 12 * made.judging_s(1)


def test_smaller_videos_and_larger_models():
  assert actor(resolution="360p").generate_s < 0.6 * actor().generate_s
  assert actor(model="5B").generate_s == pytest.approx(2.5 * actor().generate_s)
  assert actor(model="5B").decode_s == actor().decode_s


@pytest.mark.parametrize(
  ("kwargs", "message"),
  [
    ({"frames": 20}, "multiple of 3"),
    ({"judge": "nobody"}, "judge='nobody' is not known; use one of unified_reward_flex"),
    ({"resolution": "8k"}, "resolution='8k'"),
    ({"model": "70B"}, "model='70B'"),
  ],
)
def test_unknown_settings_are_refused(kwargs, message):
  with pytest.raises(ValueError, match=message):
    actor(**kwargs)


def test_groups_do_not_straddle_mini_batches():
  shape = paper_shape(24, 3)
  assert {len(group) for group in shape.groups} == {8}
  for update in shape.updates:
    assert all(set(g) <= set(update) or not set(g) & set(update) for g in shape.groups)
  anchored = paper_shape(12, 2, 33, "kvpo")
  assert anchored.reference and anchored.anchors == (-1, -2)
  assert anchored.block_chunks == (2, 2)
  with pytest.raises(ValueError, match="minibatches=4 do not divide 6 candidates"):
    paper_shape(6, 4)
  with pytest.raises(ValueError, match="groups of one"):
    paper_shape(6, 6)


def test_the_grid_has_every_cell_and_says_which_cannot_exist():
  every = list(cells())
  assert len(every) == 2 * 2 * 3 * 3 * 4
  missing = []
  for cell in every:
    try:
      cell.shape()
    except ValueError:
      missing.append((cell.candidates, cell.minibatches))
  assert set(missing) == {(6, 4)} and len(missing) == 12


def test_a_cell_plans_every_scheme_and_kvpo_does_not_fuse():
  cell = Cell("kvpo", "vr_thinker", 33, 6, 2)
  plans = {s.name: plan_cell(cell, s, PaperCosts(), budget_s=0.05) for s in all_schemes()}
  assert len(plans) == 7 and not plans["sbjax"].fused
  assert all(plan.gap is not None and plan.gap >= 0 for plan in plans.values())


def test_a_choice_can_be_taken_from_a_scheme():
  unsplit = without(scheme("sbjax"), "split_replays")
  cell = Cell("dancegrpo", "vr_thinker", 21, 6, 3)
  assert not plan_cell(cell, unsplit, PaperCosts(), budget_s=0.05).splits
  with pytest.raises(ValueError, match="does not choose"):
    without(scheme("stagebreaker"), "fused")


def test_numbers_of_a_fit_become_plain_floats():
  import numpy as np

  fitted = dataclasses.replace(PaperCosts(), forward_s=np.float64(0.3))
  made = paper_costs(fitted).by_kind["actor"]
  assert type(made.forward_s) is float and type(made.backward_s) is float
