"""The judgements of the benchmarks: what counts as made again without need, and as growth."""

import json
import sys

import pytest

from benchmarks import kills, memory
from sbjax.runtime.records import Span


def span(kind, task, worker, start_s, end_s, failed=False):
  return Span(worker, "actor", kind, task, 1, start_s, end_s, failed=failed)


KILL = kills.Kill("actor-0", 5.0, 1, "generate/c9")


@pytest.mark.parametrize(
  ("spans", "needed"),
  [
    # Buffers died with the worker.
    ([("replay", "actor-0", 1.0, 2.0), ("replay", "reward-0", 6.0, 7.0)], [True]),
    # A trajectory is in the object store: it was there still.
    ([("decode", "actor-0", 1.0, 2.0), ("decode", "reward-0", 6.0, 7.0)], [False]),
    # The buffers were on a worker that lived.
    ([("replay", "reward-0", 1.0, 2.0), ("replay", "actor-0", 6.0, 7.0)], [False]),
    # A sum had taken the buffers before the kill.
    (
      [
        ("replay", "actor-0", 1.0, 2.0),
        ("reduce", "actor-0", 3.0, 4.0),
        ("replay", "reward-0", 6.0, 7.0),
      ],
      [False],
    ),
    # The second run began before the kill.
    ([("replay", "actor-0", 1.0, 2.0), ("replay", "reward-0", 3.0, 4.0)], [False]),
  ],
)
def test_made_again(spans, needed):
  runs = [span(kind, f"{kind}/c1", *rest) for kind, *rest in spans]
  assert [again.needed for again in kills.made_again(runs, [KILL])] == needed


def test_lost_attempts_and_sums_of_several_workers_are_not_made_again():
  runs = [
    span("decode", "decode/c1", "actor-0", 1.0, 5.0, failed=True),
    span("decode", "decode/c1", "reward-0", 6.0, 7.0),
    span("reduce", "reduce/u0", "actor-0", 8.0, 9.0),
    span("reduce", "reduce/u0", "reward-0", 8.0, 9.0),
  ]
  assert kills.made_again(runs, [KILL]) == []


@pytest.mark.parametrize(("growth", "code"), [(0.019, 0), (0.021, 1)])
def test_memory_growth(tmp_path, monkeypatch, capsys, growth, code):
  rows = [
    {"step": s, memory.PROCESS + "actor-0": 1e8 * (1 + growth * (s >= 25)), memory.STORE: 5e6 + s}
    for s in range(1, 40)
  ]
  rows[0][memory.STORE] = 1.0  # what happens before the tenth step does not count
  (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  monkeypatch.setattr(sys, "argv", ["memory", str(tmp_path)])
  assert memory.main() == code
  said = capsys.readouterr().out
  assert f"{growth:.2%}" in said and ("none" in said) == (code == 0)


def test_memory_needs_twenty_steps_after_the_tenth(tmp_path, monkeypatch):
  rows = [{"step": s, memory.STORE: 1.0} for s in range(1, 25)]
  (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  monkeypatch.setattr(sys, "argv", ["memory", str(tmp_path)])
  assert memory.main() == 1
