"""Paired statistics of evaluations, and the files that an evaluation leaves."""

import json
import math

import imageio.v3 as iio
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbjax.report import evaluation, writers
from sbjax.runtime.records import CandidateRecord, EvalResult

VALUES = st.floats(-10, 10)


def test_statistic_by_hand():
  s = evaluation.paired_statistic(
    "online", "digit", np.array([1.0, 2.0, 4.0, 9.0]), np.array([0.0, 2.0, 2.0, np.nan])
  )
  # Differences 1, 0, 2: mean 1, variance 1 (n - 1), standard error 1 / sqrt 3.
  assert s.videos == 3
  assert (s.difference, s.base_mean) == (1.0, pytest.approx(4 / 3))
  assert s.mean == pytest.approx(7 / 3)
  assert s.standard_error == pytest.approx(1 / math.sqrt(3))
  assert s.z == pytest.approx(math.sqrt(3))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(VALUES, VALUES), min_size=2, max_size=20), st.floats(-3, 3))
def test_statistic_ignores_what_both_share(pairs, shift):
  values, base = np.array(pairs).T
  noise = shift * np.arange(len(pairs))  # difficulty of the prompts: it must cancel
  plain = evaluation.paired_statistic("a", "c", values, base)
  shifted = evaluation.paired_statistic("a", "c", values + noise, base + noise)
  assert shifted.difference == pytest.approx(plain.difference, abs=1e-9)
  assert shifted.standard_error == pytest.approx(plain.standard_error, abs=1e-9)
  differences = [v - b for v, b in pairs]
  mean = sum(differences) / len(differences)
  variance = sum((d - mean) ** 2 for d in differences) / (len(differences) - 1)
  assert plain.standard_error == pytest.approx(math.sqrt(variance / len(differences)), abs=1e-9)


def test_edges():
  same = evaluation.paired_statistic("a", "c", np.ones(3), np.ones(3))
  assert (same.difference, same.z) == (0.0, 0.0)
  surer = evaluation.paired_statistic("a", "c", np.ones(3), np.zeros(3))
  assert surer.z == math.inf
  one = evaluation.paired_statistic("a", "c", np.ones(1), np.zeros(1))
  assert math.isnan(one.standard_error)
  none = evaluation.paired_statistic("a", "c", np.full(2, np.nan), np.zeros(2))
  assert none.videos == 0 and math.isnan(none.difference)
  with pytest.raises(ValueError, match="evaluate both on the same videos"):
    evaluation.paired_statistic("a", "c", np.ones(3), np.ones(2))


def record(index, value):
  frames = np.full((3, 16, 16, 3), 40 * index, np.uint8)
  reward = None if math.isnan(value) else value
  return CandidateRecord(index, f"a red {index}", 7, reward, {}, "", frames)


def result(step=30, shift=0.5):
  base = np.array([0.1, 0.4, 0.2, 0.3])
  online = base + shift + np.array([0.0, 0.1, -0.1, 0.0])
  online[3] = np.nan
  columns = {"base": base, "online": online}
  return EvalResult(
    step=step,
    scores={a: {"digit": v, "heldout": v / 2, "reward": v} for a, v in columns.items()},
    records={a: tuple(record(i, x) for i, x in enumerate(v)) for a, v in columns.items()},
  )


def test_table_and_metrics():
  text = evaluation.table(result())
  assert text.splitlines()[0] == (
    "evaluation after step 30: 4 videos, differences paired with base"
  )
  rows = [line.split() for line in text.splitlines()[2:]]
  assert [r[:2] for r in rows[:2]] == [["reward", "base"], ["reward", "online"]]
  assert rows[1][3:6] == ["+0.5000", "0.0577", "+8.66"]
  assert "(3 valid pairs)" in text
  metrics = evaluation.scalars(result())
  assert metrics["val/base/reward"] == pytest.approx(0.25)
  assert metrics["val/online/digit/difference"] == pytest.approx(0.5)
  assert "val/base/digit/z" not in metrics


def test_without_a_base_nothing_is_compared():
  alone = EvalResult(1, {"online": {"reward": np.ones(2)}}, {"online": ()})
  assert evaluation.statistics(alone) == ()
  assert "online" in evaluation.table(alone)


def test_files_of_an_evaluation(tmp_path):
  folder = evaluation.write_evaluation(tmp_path, result(), fps=8, cap=2)
  assert {p.name for p in folder.iterdir()} == {
    *("table.txt", "means.png", "videos.jsonl", "00.mp4", "01.mp4"),
  }
  frame = next(iter(iio.imiter(folder / "01.mp4", plugin="FFMPEG")))
  assert frame.shape == (64 + 20, 2 * 64 + 4, 3)  # base and online side by side under labels
  lines = [json.loads(line) for line in (folder / "videos.jsonl").read_text().splitlines()]
  assert lines[1]["prompt"] == "a red 1" and lines[1]["file"] == "01.mp4"
  assert lines[1]["adapters"]["online"]["reward"] == pytest.approx(1.0)
  (row,) = writers.read_jsonl(tmp_path / "evaluation.jsonl")
  assert row["values"]["online"]["digit"][3] is None
  assert row["paired"][0]["component"] == "reward"
  assert iio.imread(folder / "means.png").std() > 10


def test_a_repeated_evaluation_replaces_its_line(tmp_path):
  for step, shift in ((10, 0.1), (20, 0.2), (30, 0.3), (20, 0.4)):
    evaluation.write_evaluation(tmp_path, result(step, shift), fps=8, cap=0)
  rows = writers.read_jsonl(tmp_path / "evaluation.jsonl")
  assert [r["step"] for r in rows] == [10, 20]
  assert rows[1]["paired"][0]["difference"] == pytest.approx(0.4)
