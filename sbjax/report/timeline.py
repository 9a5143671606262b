"""The step timeline: who did what when, as a trace for Perfetto and as numbers."""

import json
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sbjax import files
from sbjax.report import waiting
from sbjax.runtime.records import Span

_GROUPS = ("actor", "both", "reward")  # order of display; others follow by name


def workers(spans: Iterable[Span]) -> tuple[tuple[str, str], ...]:
  """Gives (group, worker) pairs in order of display: actors first, `actor-2` before `actor-10`.

  Args:
    spans: any spans.

  Returns:
    Each pair once.
  """
  return tuple(sorted({(s.group, s.worker) for s in spans}, key=lambda pair: _order(*pair)))


def trace(spans: Sequence[Span], *, scheme: str, emulated: bool = False) -> dict[str, Any]:
  """Converts spans into the Chrome trace-event format, which Perfetto and chrome://tracing open.

  One process a group, one thread a worker, one complete event a task, its time in microseconds
  since the first span.

  Args:
    spans: executed tasks, in any order.
    scheme: the scheme's name.
    emulated: True where workers only waited as long as a profile says.

  Returns:
    The JSON object.
  """
  origin_s = min((s.start_s for s in spans), default=0.0)
  groups = list(dict.fromkeys(group for group, _ in workers(spans)))
  threads = {pair: number for number, pair in enumerate(workers(spans), 1)}
  events: list[dict[str, Any]] = []
  for number, group in enumerate(groups, 1):
    events.append(_meta("process_name", number, 0, {"name": f"{group} workers"}))
    events.append(_meta("process_sort_index", number, 0, {"sort_index": number}))
  for (group, worker), number in threads.items():
    pid = groups.index(group) + 1
    events.append(_meta("thread_name", pid, number, {"name": worker}))
    events.append(_meta("thread_sort_index", pid, number, {"sort_index": number}))
  for span in sorted(spans, key=lambda s: (s.start_s, s.worker)):
    events.append(
      {
        "name": span.task,
        "cat": span.kind,
        "ph": "X",
        "ts": round((span.start_s - origin_s) * 1e6, 3),
        "dur": round((span.end_s - span.start_s) * 1e6, 3),
        "pid": groups.index(span.group) + 1,
        "tid": threads[span.group, span.worker],
        "args": {
          "kind": span.kind,
          "step": span.step,
          "candidate": span.candidate,
          "minibatch": span.minibatch,
          "failed": span.failed,
        },
      }
    )
  return {
    "traceEvents": events,
    "displayTimeUnit": "ms",
    "otherData": {"scheme": scheme, "emulated": emulated},
  }


def write_trace(
  path: str | os.PathLike[str], spans: Sequence[Span], *, scheme: str, emulated: bool = False
) -> None:
  """Writes `trace` as a file, atomically.

  Raises:
    OutputError: where it cannot be written.
  """
  files.atomic_write(path, json.dumps(trace(spans, scheme=scheme, emulated=emulated)) + "\n")


def utilisation(spans: Sequence[Span], step_s: float | None = None) -> dict[str, float]:
  """Gives the share of a step in which each group's workers were busy.

  Args:
    spans: the step's tasks.
    step_s: the step's length; None: from the first start to the last end.

  Returns:
    Group -> busy time of its workers / (workers x step), 0 to 1; overlapping tasks of one worker
    count once.
  """
  length_s = _length_s(spans) if step_s is None else step_s
  by_worker: dict[tuple[str, str], list[Span]] = {}
  for span in spans:
    by_worker.setdefault((span.group, span.worker), []).append(span)
  shares: dict[str, list[float]] = {}
  for group, worker in workers(spans):
    busy = waiting.union((s.start_s, s.end_s) for s in by_worker[group, worker])
    busy_s = sum(end - start for start, end in busy)
    shares.setdefault(group, []).append(busy_s / length_s if length_s > 0 else 0.0)
  return {group: statistics.fmean(values) for group, values in shares.items()}


def span_metrics(
  spans: Sequence[Span],
  *,
  step_s: float | None = None,
  devices: int | None = None,
  waits: Mapping[str, Sequence[waiting.Window]] | None = None,
) -> dict[str, float]:
  """Derives a step's timing metrics from its spans; docs/metrics.md defines the keys.

  Args:
    spans: the step's tasks.
    step_s: first generate submitted to last adapter acknowledged; None: from the spans.
    devices: all devices, the reward group's included, for the throughput; None: leave it out.
    waits: worker -> windows in which it waits for a reward; None: leave their share out.

  Returns:
    `timing_s/…`, `timing_task_ms/…` and `perf/…` by key.
  """
  length_s = _length_s(spans) if step_s is None else step_s
  metrics = {"timing_s/step": length_s}
  for kind in sorted({s.kind for s in spans}):
    mine = [s.end_s - s.start_s for s in spans if s.kind == kind and not s.failed]
    if mine:
      metrics[f"timing_s/{kind}"] = sum(mine)
      metrics[f"timing_task_ms/{kind}"] = 1e3 * statistics.median(mine)
  for group, share in utilisation(spans, length_s).items():
    metrics[f"perf/utilisation/{group}"] = share
  if waits is not None:
    metrics["perf/wait_for_reward_frac"] = waiting.wait_frac(waits, spans, length_s)
  metrics["perf/lost_tasks"] = float(sum(s.failed for s in spans))
  if devices is not None and length_s > 0:
    made = sum(s.kind == "generate" and not s.failed for s in spans)
    metrics["perf/throughput"] = made / (devices * length_s)
  return metrics


def _length_s(spans: Sequence[Span]) -> float:
  if not spans:
    return 0.0
  return max(s.end_s for s in spans) - min(s.start_s for s in spans)


def _order(group: str, worker: str) -> tuple[int, str, str, int]:
  rank = _GROUPS.index(group) if group in _GROUPS else len(_GROUPS)
  stem, _, number = worker.rpartition("-")
  return (rank, group, stem, int(number)) if number.isdigit() else (rank, group, worker, -1)


def _meta(name: str, pid: int, tid: int, args: dict[str, Any]) -> dict[str, Any]:
  return {"name": name, "ph": "M", "pid": pid, "tid": tid, "args": args}
