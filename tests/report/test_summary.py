"""The summary of a run and its reward curve, from the run's own files."""

import json

import imageio.v3 as iio
import pytest

from sbjax.report import summary

FACTS = summary.RunFacts(
  steps=12,
  candidates_per_step=24,
  seed=3,
  scheme="stagebreaker",
  wall_s=61.25,
  chunk_tokens=48,
  minibatches=2,
  outputs={"metrics": "/runs/a/metrics.jsonl"},
  next="Look at reward_curve.png.",
  shares_of_colocated_step={"generate": 0.4, "decode": 0.1, "judge": 0.2, "replay": 0.3},
)


def rows(count=12):
  lines = []
  for step in range(1, count + 1):
    lines.append(
      {
        "step": step,
        "timing_s/step": float(step),
        "timing_task_ms/replay": 50.0 + step,
        "critic/rewards/mean": step / 10,
        "reward/digit": step / 20,
        "reward/failed": 1.0 if step == 2 else 0.0,
        "reward/failed/timeout": 1.0 if step == 2 else 0.0,
        "actor/pg_clipfrac/m1": 0.25 if step > 1 else None,
        "training/skipped_updates": 0.0,
      }
    )
  return [*lines, {"step": count, "val/online/reward": 0.7}]


EVALUATIONS = [
  {
    "step": 12,
    "mean": {"base": {"reward": 0.5}, "online": {"reward": 0.7}},
    "paired": [{"adapter": "online", "component": "reward", "standard_error": 0.01}],
    "values": {"base": {"reward": [0.5, 0.5]}},
  }
]


def write(path, lines):
  path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_summary_of_a_run(tmp_path):
  write(tmp_path / "metrics.jsonl", rows())
  write(tmp_path / "evaluation.jsonl", EVALUATIONS)
  summary.write_summary(
    tmp_path / "summary.json", FACTS, tmp_path / "metrics.jsonl", tmp_path / "evaluation.jsonl"
  )
  data = json.loads((tmp_path / "summary.json").read_text())
  assert data["step_s"]["median"] == 6.5
  assert data["task_ms"] == {"replay": 56.5}
  assert data["clipfrac_second_minibatch"] == 0.25
  assert list(data["components"]) == ["digit"]  # `failed` is no component
  assert data["components"]["digit"]["first"] == pytest.approx(0.15)
  assert data["components"]["digit"]["last"] == pytest.approx(0.5)
  assert data["failed_rewards"] == 1.0
  assert data["evaluation"]["paired"] == EVALUATIONS[0]["paired"]
  assert "values" not in data["evaluation"]
  assert data["shares_of_colocated_step"]["judge"] == 0.2
  for key in ("steps", "candidates_per_step", "seed", "scheme", "wall_s", "chunk_tokens"):
    assert data[key] == getattr(FACTS, key)
  assert data["outputs"] == {"metrics": "/runs/a/metrics.jsonl"}
  assert data["next"] == "Look at reward_curve.png."


def test_summary_of_a_run_that_made_no_step(tmp_path):
  data = summary.write_summary(
    tmp_path / "summary.json", FACTS, tmp_path / "none.jsonl", tmp_path / "none.jsonl"
  )
  assert data["step_s"] is None
  assert data["evaluation"] is None
  assert json.loads((tmp_path / "summary.json").read_text()) == data


def test_lines_of_a_step_are_merged():
  merged = summary.by_step(rows())
  assert list(merged) == list(range(1, 13))
  assert merged[12]["val/online/reward"] == 0.7
  assert merged[12]["reward/digit"] == 0.6


@pytest.mark.parametrize("lines", [rows(), rows(1), []])
def test_curve_is_drawn(tmp_path, lines):
  summary.write_reward_curve(tmp_path / "c.png", lines, EVALUATIONS, "a run")
  assert iio.imread(tmp_path / "c.png").std() > 5
