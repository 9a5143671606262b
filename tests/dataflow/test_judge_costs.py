"""A judge's costs by frames, tokens and batch, and what a plan makes of them."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbjax.dataflow.costs import interpolate
from sbjax.dataflow.judge_costs import JudgeCosts, JudgePoint, JudgeRow, fit
from sbjax.dataflow.profile import read_profile
from tests.dataflow.test_profile import profile

SECONDS = st.floats(1e-6, 1e-1)
GRID = [(1, 0, 20, 8), (1, 4, 300, 8), (4, 4, 300, 32), (4, 1, 90, 8), (2, 0, 200, 16)]


def measured(costs, grid=GRID):
  return [
    JudgePoint(j, f, p, n, costs.prefill_s(j, f, p), costs.decode_s(j, n)) for j, f, p, n in grid
  ]


@given(st.builds(JudgeCosts, st.just(4), SECONDS, SECONDS, SECONDS, SECONDS, SECONDS))
def test_a_fit_finds_what_the_measurements_were_made_of(costs):
  found = fit(measured(costs), 4)
  for at in [(1, 0, 20, 8), (3, 2, 150, 64), (9, 8, 800, 500)]:
    assert found.judging_s(*at) == pytest.approx(costs.judging_s(*at), rel=1e-3)


def test_no_cost_is_negative_however_the_noise_falls():
  points = [
    JudgePoint(1, 0, 100, 10, 1.0, 1.0),
    JudgePoint(2, 0, 100, 10, 0.9, 0.8),
    JudgePoint(4, 0, 10, 10, 1.1, 0.9),
  ]
  found = fit(points, 4)
  assert min(found.call_s, found.frame_s, found.token_s, found.step_s, found.row_s) >= 0
  assert found.row_s == 0 and found.step_s == pytest.approx(0.09, rel=0.15)


@given(st.integers(1, 40), st.integers(1, 2000))
def test_batches_are_never_dearer_than_their_parts_and_slots_bound_the_gain(jobs, new):
  costs = JudgeCosts(8, 1e-3, 1e-3, 1e-5, 1e-2, 1e-3)
  one, many = (costs.judging_s(n, 4, 400, new) for n in (1, jobs))
  assert many <= jobs * one + 1e-9
  assert costs.decode_s(jobs, new) * 8 * costs.step_s >= 0.99 * jobs * new * costs.step_s**2
  assert interpolate(costs.table(40, 4, 400, new), jobs) == pytest.approx(many)


def test_long_answers_ask_for_larger_batches_than_long_prompts():
  costs = JudgeCosts(16, 0.0, 1e-2, 1e-3, 2e-2, 1e-3)

  def gain(prompt, new):
    return 16 * costs.judging_s(1, 0, prompt, new) / costs.judging_s(16, 0, prompt, new)

  assert gain(100, 2000) > 8 > 1.5 > gain(20_000, 10)


def test_a_profile_holds_them_and_tells_what_other_dialogues_would_cost(tmp_path):
  costs = JudgeCosts(4, 0.01, 0.02, 1e-4, 0.05, 0.001)
  rows = tuple(
    JudgeRow(**dataclasses.asdict(point), worker="reward", slots=4) for point in measured(costs)
  )
  profile().with_judges(rows).write(tmp_path / "p.json")
  read = read_profile(tmp_path / "p.json")
  assert read.judges == tuple(sorted(rows, key=lambda row: row.key))
  newer = dataclasses.replace(rows[0], decode_s=9.0)
  assert (
    newer in read.with_judges([newer]).judges
    and rows[0] not in read.merged(read.with_judges([newer])).judges
  )
  plain, other = read.costs(33, 64, 64), read.costs(33, 64, 64, dialogue=(4, 300, 1000))
  assert plain == profile().costs(33, 64, 64)
  assert other.by_kind["actor"] == plain.by_kind["actor"]  # no judge was measured there
  for jobs in (1, 3, 8):
    seconds = other.by_kind["reward"].judging_s(jobs)
    assert seconds == pytest.approx(costs.judging_s(jobs, 4, 300, 1000), rel=1e-3)
  with pytest.raises(ValueError, match="the profile has no judges"):
    profile().costs(33, 64, 64, dialogue=(4, 300, 1000))


@pytest.mark.parametrize(
  ("points", "says"),
  [
    ([], "at least two batch sizes"),
    ([(1, 0, 9, 4), (1, 0, 9, 8)], "at least two batch sizes"),
    ([(9, 0, 9, 4)], "at most as many as the 4 slots"),
    ([(0, 0, 9, 4)], "jobs is 0; it must be at least 1"),
  ],
)
def test_what_cannot_be_fitted_is_refused(points, says):
  with pytest.raises(ValueError, match=says):
    fit([JudgePoint(j, f, p, n, 1.0, 1.0) for j, f, p, n in points], 4)
