"""Recorded groups of pairwise replies: replayed exactly, and refused where they are not known."""

import json
import pathlib

import pytest

from sbjax import verify

CASES = pathlib.Path(__file__).parents[1] / "golden" / "winrate_cases.json"


def changed(tmp_path, change):
  cases = json.loads(CASES.read_text())
  change(cases)
  path = tmp_path / "winrate_cases.json"
  path.write_text(json.dumps(cases))
  return path


def test_the_recorded_groups_are_reproduced_exactly(capsys):
  assert verify.main([str(CASES)]) == 0
  out = capsys.readouterr().out
  assert "reward, weight shadowed" in out and "6 quantities, 0 beyond tolerance" in out
  assert out.count("0.00e+00  tolerance 0.00e+00") == 6


@pytest.mark.parametrize(
  ("change", "quantity"),
  [
    (lambda c: c[0]["dims"]["overall_reward"].__setitem__(0, 0.601), "overall rate"),
    (lambda c: c[1]["dims"]["dim_mean_reward"].__setitem__(2, 0.0), "mean of dimensions"),
    (lambda c: c[4]["dims"]["dim_rate_flags"].__setitem__(2, True), "dimension seen"),
    (lambda c: c[2]["dims"]["B"].__setitem__(1, 0.5), "rate by dimension"),
    (lambda c: c[3]["reward_shadow_bug"].__setitem__(0, 0.686155), "reward, weight shadowed"),
    (lambda c: c[3]["dims"].__setitem__("D", [0.0, 0.0, 0.0]), "names of dimensions"),
  ],
)
def test_a_wrong_number_is_beyond_tolerance(tmp_path, capsys, change, quantity):
  assert verify.main([str(changed(tmp_path, change))]) == 1
  lines = [line for line in capsys.readouterr().out.splitlines() if "BEYOND" in line]
  assert [line.strip().startswith(quantity) for line in lines] == [True]


@pytest.mark.parametrize(
  ("change", "words"),
  [
    (lambda c: c[0].update(extra=1), "fields missing or not known (extra)"),
    (lambda c: c[5].pop("dims"), "case 5 has fields missing or not known (dims)"),
    (lambda c: c.append(3), "case 12 has fields missing or not known (no object)"),
    (lambda c: c[0]["responses"][0].update(first_index=6), "names a candidate"),
    (lambda c: c[0]["responses"][0].pop("model_output"), "'model_output'"),
    (lambda c: c[0]["dims"].pop("overall_reward"), "'overall_reward'"),
  ],
)
def test_cases_that_are_not_known_are_refused(tmp_path, capsys, change, words):
  assert verify.main([str(changed(tmp_path, change))]) == 2
  message = capsys.readouterr().err
  assert words in message and message.count("\n") == 1
