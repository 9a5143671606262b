"""Profiles: there and back, interpolation, merging, and what a file may not say."""

import dataclasses
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbjax.dataflow.costs import StepCosts, WorkerCosts
from sbjax.dataflow.profile import FIXED, Profile, Row, profile_of_costs, read_profile

COSTS = WorkerCosts(
  generate_s=1.0,
  fused_s=0.5,
  decode_s=0.4,
  judge_s=((1, 0.2), (2, 0.3), (8, 0.6)),
  forward_s=0.3,
  backward_s=0.9,
  replay_s=1.0,
  reference_s=0.35,
  prefix_s=0.05,
  fold_s=0.01,
  reduce_s=0.02,
  update_s=0.03,
  push_s=0.04,
)


def profile(costs=COSTS, frames=33, **fields):
  step = StepCosts({"actor": costs, "reward": costs}, dispatch_s=0.001)
  devices = {"actor": "cpu", "reward": "cpu"}
  made = profile_of_costs(step, frames, 64, 64, config="c", devices=devices)
  return dataclasses.replace(made, **fields)


def test_costs_come_back(tmp_path):
  profile().write(tmp_path / "p.json")
  read = read_profile(tmp_path / "p.json")
  assert read == profile()
  costs = read.costs(33, 64, 64, scale=0.5)
  assert costs.dispatch_s == 0.001 and costs.scale == 0.5
  for worker in ("actor", "reward", "both"):
    found = dataclasses.asdict(costs.by_kind[worker])
    meant = dataclasses.asdict(COSTS)
    assert dict(found.pop("judge_s")) == pytest.approx(dict(meant.pop("judge_s")))
    assert found == pytest.approx(meant)


def test_a_device_that_cannot_judge():
  lame = dataclasses.replace(COSTS, judge_s=((1, math.inf),))
  step = StepCosts({"actor": lame, "reward": COSTS})
  made = profile_of_costs(step, 33, 64, 64, config="c", devices={})
  by_kind = made.costs(33, 64, 64).by_kind
  assert math.isinf(by_kind["actor"].judging_s(1))
  assert by_kind["both"].judging_s(8) == pytest.approx(0.6)


@given(st.integers(1, 200))
def test_one_length_is_scaled_in_proportion(frames):
  costs = profile().costs(frames, 64, 64).by_kind["actor"]
  assert costs.generate_s == pytest.approx(frames / 33)
  assert costs.judging_s(8) == pytest.approx(0.6 * frames / 33)
  for kind in ("prefix", "fold", "reduce", "update", "push"):
    assert kind in FIXED
    assert getattr(costs, f"{kind}_s") == getattr(COSTS, f"{kind}_s")


@given(st.integers(33, 81), st.floats(1.0, 4.0))
def test_two_lengths_are_joined_by_a_line(frames, growth):
  longer = dataclasses.replace(COSTS, generate_s=growth, forward_s=0.3 * growth)
  both = profile().with_rows(profile(longer, 81).rows)
  share = (frames - 33) / 48
  costs = both.costs(frames, 64, 64).by_kind["actor"]
  assert costs.generate_s == pytest.approx(1.0 + share * (growth - 1.0))
  assert costs.forward_s == pytest.approx(0.3 * (1.0 + share * (growth - 1.0)))
  assert costs.decode_s == pytest.approx(0.4)


def test_resolution_scales_with_the_area():
  assert profile().costs(33, 64, 128).by_kind["actor"].decode_s == pytest.approx(0.8)


def test_newer_measurements_replace():
  old, new = profile(), profile(dataclasses.replace(COSTS, decode_s=2.0))
  merged = old.merged(new)
  assert merged.costs(33, 64, 64).by_kind["actor"].decode_s == 2.0
  assert len(merged.rows) == len(old.rows)
  with pytest.raises(ValueError, match="config is 'd' but"):
    old.merged(profile(config="d"))
  with pytest.raises(ValueError, match=r"devices\.actor is 'cpu' but this run has 'gpu'"):
    old.check("c", {"actor": "gpu"})
  old.check("c", {"both": "gpu"})


def body(tmp_path):
  profile().write(tmp_path / "p.json")
  return json.loads((tmp_path / "p.json").read_text())


def without(key):
  def change(read):
    del read[key]

  return change


def in_row(**fields):
  def change(read):
    read["rows"][0].update(fields)

  return change


@pytest.mark.parametrize(
  ("change", "said"),
  [
    (without("config"), "config is missing"),
    (lambda read: read.update(format=2), "format is 2"),
    (lambda read: read.update(extra=1), "extra is not a field"),
    (lambda read: read.update(rows=[3]), "3 stands where fields"),
    (lambda read: read.update(devices={"actor": 3}), "devices must map"),
    (lambda read: read["rows"].append(read["rows"][0]), "twice"),
    (in_row(seconds=-1.0), "seconds of at least 0"),
    (in_row(seconds=math.nan), "seconds of at least 0"),
    (in_row(seconds=True), "seconds is True"),
    (in_row(frames=0), "at least 1"),
    (in_row(frames=3.5), "frames is 3.5"),
    (in_row(kind="sleep"), "rows.kind is 'sleep'"),
    (lambda read: read["rows"][0].pop("batch"), "batch is missing"),
  ],
)
def test_a_file_that_cannot_be_one_is_refused(tmp_path, change, said):
  read = body(tmp_path)
  change(read)
  (tmp_path / "p.json").write_text(json.dumps(read))
  with pytest.raises(ValueError, match=said) as caught:
    read_profile(tmp_path / "p.json")
  assert "\n" not in str(caught.value)


def test_other_files_are_refused(tmp_path):
  with pytest.raises(ValueError, match="cannot be read"):
    read_profile(tmp_path / "none.json")
  (tmp_path / "p.json").write_text("{")
  with pytest.raises(ValueError, match=r"p\.json"):
    read_profile(tmp_path / "p.json")


def test_a_kind_that_nobody_measured_is_named():
  rows = tuple(row for row in profile().rows if row.kind != "decode")
  with pytest.raises(ValueError, match="no row of kind 'decode'"):
    Profile(rows, "c", {}).costs(33, 64, 64)
  assert Row("decode", "actor", 33, 64, 64, 1.0).key[0] == "decode"
