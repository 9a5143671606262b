"""The step timeline: trace, shares of time, picture."""

import json

import imageio.v3 as iio
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbjax.report import timeline, timeline_plot
from sbjax.runtime.records import Span


def span(worker, kind, start_s, end_s, **more):
  fields = {"group": worker.partition("-")[0], "task": f"{kind}/x", "step": 3} | more
  return Span(worker=worker, kind=kind, start_s=start_s, end_s=end_s, **fields)


STEP = (
  span("actor-0", "generate", 100.0, 104.0, candidate=0, minibatch=0),
  span("actor-1", "generate", 100.0, 102.0, candidate=1, minibatch=1),
  span("reward-0", "decode", 104.0, 105.0, candidate=0),
  span("reward-0", "judge", 105.0, 108.0),
  span("actor-0", "replay", 106.0, 107.0, candidate=0, minibatch=0, failed=True),
  span("actor-1", "replay", 108.0, 110.0, candidate=0, minibatch=0),
)


def test_trace_has_a_process_a_group_and_a_thread_a_worker(tmp_path):
  timeline.write_trace(tmp_path / "t.json", STEP, scheme="stagebreaker")
  data = json.loads((tmp_path / "t.json").read_text())
  events = data["traceEvents"]
  names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] in ("thread_name",)}
  assert sorted(names.values()) == ["actor-0", "actor-1", "reward-0"]
  processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
  assert processes == {1: "actor workers", 2: "reward workers"}
  tasks = [e for e in events if e["ph"] == "X"]
  assert len(tasks) == len(STEP)
  for event in tasks:
    assert set(event) == {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"}
    assert (event["pid"], event["tid"]) in names
  judge = next(e for e in tasks if e["cat"] == "judge")
  assert (judge["ts"], judge["dur"]) == (5e6, 3e6)  # microseconds since the first task
  assert names[judge["pid"], judge["tid"]] == "reward-0"
  assert sum(e["args"]["failed"] for e in tasks) == 1
  assert data["otherData"] == {"scheme": "stagebreaker", "emulated": False}


def test_workers_are_ordered_as_people_count():
  spans = [span(f"actor-{i}", "generate", 0, 1) for i in (10, 2, 0)] + [
    span("reward-0", "judge", 0, 1)
  ]
  assert [w for _, w in timeline.workers(spans)] == ["actor-0", "actor-2", "actor-10", "reward-0"]


def test_utilisation_counts_overlap_once():
  shares = timeline.utilisation(STEP)
  assert shares == pytest.approx({"actor": (0.5 + 0.4) / 2, "reward": 0.4})
  doubled = timeline.utilisation([*STEP, span("reward-0", "judge", 105.5, 107.0)])
  assert doubled["reward"] == pytest.approx(0.4)
  assert timeline.utilisation(STEP, step_s=20.0)["reward"] == pytest.approx(0.2)
  assert timeline.utilisation([]) == {}


def test_metrics_of_a_step():
  assert "perf/wait_for_reward_frac" not in timeline.span_metrics(STEP)
  waits = {"actor-0": [(104.0, 106.0)], "reward-0": [(108.0, 110.0)]}
  metrics = timeline.span_metrics(STEP, step_s=12.5, devices=3, waits=waits)
  assert metrics["perf/wait_for_reward_frac"] == pytest.approx(2.0 / (2 * 12.5))
  assert metrics["timing_s/step"] == 12.5
  assert metrics["timing_s/generate"] == pytest.approx(6.0)
  assert metrics["timing_s/replay"] == pytest.approx(2.0)  # the lost attempt is left out
  assert metrics["timing_task_ms/replay"] == pytest.approx(2000.0)
  assert metrics["timing_task_ms/generate"] == pytest.approx(3000.0)
  assert metrics["perf/utilisation/reward"] == pytest.approx(4 / 12.5)
  assert metrics["perf/throughput"] == pytest.approx(2 / (3 * 12.5))
  assert metrics["perf/lost_tasks"] == 1.0


SPANS = st.lists(
  st.builds(
    lambda w, k, a, d: span(w, k, a, a + d),
    st.sampled_from(["actor-0", "actor-1", "reward-0", "both-3"]),
    st.sampled_from(["generate", "judge", "replay"]),
    st.floats(0, 50),
    st.floats(0, 10),
  ),
  max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(SPANS)
def test_shares_are_shares_and_the_trace_loses_nothing(spans):
  assert all(0 <= share <= 1 + 1e-9 for share in timeline.utilisation(spans).values())
  tasks = [e for e in timeline.trace(spans, scheme="x")["traceEvents"] if e["ph"] == "X"]
  assert sorted(e["dur"] for e in tasks) == pytest.approx(
    sorted(1e6 * (s.end_s - s.start_s) for s in spans), abs=1e-2
  )


@pytest.mark.parametrize("emulated", [False, True])
def test_picture_shows_tasks_in_their_colours(tmp_path, emulated):
  path = tmp_path / "t.png"
  timeline_plot.write_timeline(path, STEP, scheme="stagebreaker", step=3, emulated=emulated)
  pixels = iio.imread(path)[..., :3].reshape(-1, 3)
  assert pixels.std() > 10
  for colour in ("4878a8", "eda33b", "5b9f57"):  # generate, judge, replay
    wanted = np.array([int(colour[i : i + 2], 16) for i in (0, 2, 4)])
    assert (np.abs(pixels.astype(int) - wanted).max(axis=1) < 3).sum() > 1000
  assert [p.name for p in tmp_path.iterdir()] == ["t.png"]


def test_a_step_without_tasks_is_refused(tmp_path):
  with pytest.raises(ValueError, match="step 3 has no spans"):
    timeline_plot.write_timeline(tmp_path / "t.png", (), scheme="x", step=3)
