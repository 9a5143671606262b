"""A judge behind HTTP that answers 500 for a long time, in the middle of a real run.

    python -m benchmarks.outage [--outage_s=600] [--workdir=DIR]

Starts a chat-completions server on 127.0.0.1 that prefers the brighter video, and
`python -m sbjax.launch` on the world with that judge, a group of four a step. After three steps
the server answers every request with status 500 for `--outage_s`, then as before. The run goes on
until three more steps have been judged.

Prints for each phase its steps, the longest of them beside the deadline of its judging, failures by
cause, and how often the adapter was changed. Exit code 1 unless every step of the outage ended in
time with its failures counted by cause and without an update, training went on afterwards, and no
process is left.
"""

import argparse
import base64
import contextlib
import dataclasses
import http.server
import io
import json
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time

import imageio.v3 as iio
import numpy as np

from benchmarks import processes
from sbjax.report.console import Progress
from sbjax.report.writers import read_jsonl

AROUND = 3
"""Steps before the outage and judged steps after it."""

TIMEOUT_S = 20.0
"""What a judgement may take with all its attempts and waits."""

ROOM_S = 30.0
"""A step's other work, and workers that share two cores with the server."""

START_S = 900.0
GROUP = 4


class Judge(http.server.ThreadingHTTPServer):
  """Says which of two videos is brighter, or status 500 while it is out of order."""

  daemon_threads = True
  block_on_close = False

  def __init__(self):
    super().__init__(("127.0.0.1", 0), _Handler)
    self.out_of_order = False
    self.refused = 0


class _Handler(http.server.BaseHTTPRequestHandler):
  def do_POST(self) -> None:
    assert isinstance(self.server, Judge)
    body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
    if self.server.out_of_order:
      self.server.refused += 1
      status, content = 500, b"out of memory"
    else:
      choice = {"message": {"role": "assistant", "content": brighter(body)}}
      status = 200
      content = json.dumps({"choices": [choice | {"finish_reason": "stop"}]}).encode()
    with contextlib.suppress(OSError):  # who asked may have run out of time
      self.send_response(status)
      self.send_header("Content-Length", str(len(content)))
      self.end_headers()
      self.wfile.write(content)

  def log_message(self, format: str, *args) -> None:
    pass


def brighter(body: dict) -> str:
  """UnifiedReward-Flex's answer about a request's two videos."""
  content = body["messages"][0]["content"]
  urls = [part["image_url"]["url"] for part in content if part["type"] != "text"]
  means = [iio.imread(io.BytesIO(base64.b64decode(url.split(",")[1]))).mean() for url in urls]
  first, second = np.split(np.array(means), 2)
  winner = "Video 1" if first.mean() > second.mean() else "Video 2"
  categories = [{"cat_winner": winner}]
  return json.dumps({"categories": categories, "reason": "brightness", "winner": winner})


def command(workdir: pathlib.Path, url: str) -> list[str]:
  """The run."""
  config = {
    "rollout.prompts_per_step": 1,
    "rollout.group_size": GROUP,
    "algorithm.minibatches": 1,
    "reward.name": "unified_reward_flex",
    "reward.components": "('overall', 'dimensions')",
    "reward.weights": "(0.3, 0.7)",
    "reward.retries": 0,
    "reward.timeout_s": TIMEOUT_S + 10.0,
    "reward.max_skipped_in_row": 100_000,
    "reward.judge.mode": "pairwise_all",
    "reward.judge.endpoints": f"('{url}',)",
    "reward.judge.model": "brighter",
    "reward.judge.total_timeout_s": TIMEOUT_S,
    "reward.judge.attempts": 5,
    "reward.judge.backoff_s": 1.0,
    "eval.every": 0,
    "total_steps": 100_000,
  }
  options = [f"--config.{name}={value}" for name, value in config.items()]
  base = [sys.executable, "-m", "sbjax.launch", "--config=configs/quickstart.py"]
  return [*base, f"--workdir={workdir}", *options]


@dataclasses.dataclass(frozen=True)
class Phase:
  """The steps of one phase: their metrics."""

  name: str
  rows: list[dict]

  def causes(self) -> dict[str, int]:
    """Failures by cause."""
    out: dict[str, int] = {}
    for row in self.rows:
      for key, value in row.items():
        if key.startswith("reward/failed/"):
          out[key.rpartition("/")[2]] = out.get(key.rpartition("/")[2], 0) + int(value)
    return {cause: count for cause, count in sorted(out.items()) if count}

  def total(self, key: str) -> float:
    """A metric summed over the steps."""
    return sum(row.get(key, 0.0) for row in self.rows)

  def line(self) -> str:
    """The phase in words."""
    longest = max((row["timing_s/step"] for row in self.rows), default=0.0)
    return (
      f"{self.name:<8} {len(self.rows):4d} steps, longest {longest:6.1f} s, failed "
      f"{self.total('reward/failed'):.0f} {self.causes()}, "
      f"updates skipped {self.total('training/skipped_updates'):.0f}"
    )


def main() -> int:
  """Runs the benchmark."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--outage_s", type=float, default=600.0)
  parser.add_argument("--workdir", type=pathlib.Path, help="default: a new folder")
  given = parser.parse_args()
  workdir = given.workdir or pathlib.Path(tempfile.mkdtemp(prefix="sbjax-outage-")) / "run"
  mark = processes.mark()
  server = Judge()
  threading.Thread(target=server.serve_forever, daemon=True).start()
  url = f"http://127.0.0.1:{server.server_port}/v1"
  log = workdir.with_name(workdir.name + ".log")
  log.parent.mkdir(parents=True, exist_ok=True)
  with open(log, "wb") as out:
    print(f"run in {workdir}, its output in {log}", flush=True)
    run = subprocess.Popen(command(workdir, url), stdout=out, stderr=subprocess.STDOUT)
    try:
      phases = _phases(run, server, workdir / "metrics.jsonl", given.outage_s)
    finally:
      run.send_signal(signal.SIGINT)
      try:
        run.wait(60)
      except subprocess.TimeoutExpired:
        run.kill()
        run.wait()
      server.shutdown()
      server.server_close()
  return report(phases, server.refused, processes.wait_until_gone(mark))


def _phases(
  run: subprocess.Popen, server: Judge, metrics: pathlib.Path, outage_s: float
) -> list[Phase]:
  def rows() -> list[dict]:
    found = read_jsonl(metrics) if metrics.is_file() else []
    return [row for row in found if "timing_s/step" in row]

  def wait(what: str, timeout_s: float, done) -> None:
    end_s = time.monotonic() + timeout_s
    while not done():
      if run.poll() is not None:
        raise RuntimeError(f"the run ended with {run.returncode} while waiting for {what}")
      if time.monotonic() > end_s:
        raise RuntimeError(f"no {what} within {timeout_s:.0f} s")
      time.sleep(0.2)

  wait("first steps", START_S, lambda: len(rows()) >= AROUND)
  before = len(rows())
  server.out_of_order = True
  with Progress("outage, s", round(outage_s)) as progress:
    for _ in range(round(outage_s)):
      time.sleep(1.0)
      progress.advance()
  server.out_of_order = False
  during = len(rows())

  def judged() -> list[dict]:
    return [row for row in rows()[during:] if not row["reward/failed"]]

  wait("judged steps after the outage", START_S, lambda: len(judged()) >= AROUND)
  every = rows()
  # The step that was under way when a phase ended belongs to neither.
  return [
    Phase("before", every[:before]),
    Phase("outage", every[before + 1 : during]),
    Phase("between", [*every[before : before + 1], *every[during : during + 1]]),
    Phase("after", every[during + 1 :]),
  ]


def report(phases: list[Phase], refused: int, left: list[str]) -> int:
  """Prints the phases; gives the exit code."""
  for phase in phases:
    print(phase.line())
  print(f"{refused} requests were answered with status 500; a judgement may take {TIMEOUT_S:g} s")
  print(f"processes left: {left or 'none'}")
  before, outage, _, after = phases
  limit_s = TIMEOUT_S + ROOM_S
  ok = bool(outage.rows) and max(row["timing_s/step"] for row in outage.rows) <= limit_s
  ok &= all(row["reward/failed"] > 0 for row in outage.rows)
  ok &= sum(outage.causes().values()) == outage.total("reward/failed")
  ok &= outage.total("training/skipped_updates") == len(outage.rows)
  ok &= not before.total("reward/failed")
  ok &= after.total("training/skipped_updates") < len(after.rows)
  return 0 if ok and not left else 1


if __name__ == "__main__":
  sys.exit(main())
