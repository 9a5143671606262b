"""The banner and the progress lines, under a clock of the test's own."""

import io
import time

from sbjax.report import console
from sbjax.runtime.records import StepResult


class Clock:
  def __init__(self):
    self.now_s = 0.0

  def __call__(self):
    return self.now_s


class Terminal(io.StringIO):
  def isatty(self):
    return True


def result(step, step_s=10.0, **more):
  metrics = {"timing_s/step": step_s, "critic/rewards/mean": 0.625, "actor/pg_clipfrac": 0.125}
  return StepResult(step, metrics | more, (), ())


def description(**changes):
  fields = {
    "workdir": "/runs/a",
    "algorithm": "dance_grpo",
    "scheme": "stagebreaker",
    "executor": "ray",
    "seed": 0,
    "first_step": 1,
    "total_steps": 60,
    "devices": (console.DeviceRow("actor-0", "actor", "1 x cpu", "policy, decoder"),),
    "models": (console.ModelRow("policy", "Wan causal DiT", 1_234_567),),
    "video": "33 frames of 64 x 64 px",
    "chunks": 3,
    "chunk_tokens": 48,
    "denoising_steps": 4,
    "trained_steps": 4,
    "prompts_per_step": 4,
    "group_size": 6,
    "minibatches": 2,
    "epochs": 1,
    "lora_layers": 40,
    "lora_targets": ("self_attn.q", "ffn.0"),
    "lora_parameters": 50_000,
    "lora_rank": 8,
    "lora_alpha": 16.0,
    "outputs": {"metrics": "/runs/a/metrics.jsonl"},
  }
  return console.RunDescription(**(fields | changes))


def test_banner_does_the_arithmetic():
  text = console.banner(description(notes=("2 workers share 2 cores",)))
  assert "4 prompts x 6 candidates = 24; 2 mini-batches of 12 x 1 epochs = 2 updates" in text
  assert "1.23 M parameters" in text
  assert "on 40 linears (self_attn.q, ffn.0), 50 k parameters trained" in text
  assert "actor-0 (actor): 1 x cpu; policy, decoder" in text
  assert "metrics: /runs/a/metrics.jsonl" in text
  assert "2 workers share 2 cores" in text
  assert "resumed" not in text
  assert "steps 21 to 60, resumed after step 20" in console.banner(description(first_step=21))


TOTALS = {"generate": 24, "decode": 24, "replay": 24}


def test_step_line_counts_and_foresees():
  clock, stream = Clock(), io.StringIO()
  progress = console.StepProgress(4, stream=stream, clock=clock, every_s=5.0)
  progress.begin(1, TOTALS)
  clock.now_s = 2.0
  progress.advance("generate", 12)
  assert stream.getvalue() == ""  # too early for a log
  progress.advance("advantage")  # not a kind that was announced
  progress.advance("decode", 11.5)
  clock.now_s = 6.0
  progress.advance("decode", 0.5)
  # A third of the tasks in 6 s: 12 s to go in this step, three more steps of 18 s.
  assert stream.getvalue() == (
    "step 1/4  generated 12/24  decoded 12/24  replayed 0/24  step ETA 12.0 s  run ETA 1:06\n"
  )
  clock.now_s = 10.0
  progress.end(result(1))
  assert stream.getvalue().splitlines()[-1] == (
    "step 1/4  reward 0.6250  clipfrac 0.125  10.0 s  run ETA 30.0 s"
  )
  # From the second step on, the time of the steps before counts.
  progress.begin(2, TOTALS)
  clock.now_s = 16.0
  progress.advance("generate")
  assert stream.getvalue().splitlines()[-1].endswith("step ETA 4.0 s  run ETA 24.0 s")


def test_step_line_always_ends_and_shows_failures():
  clock, stream = Clock(), io.StringIO()
  progress = console.StepProgress(1, stream=stream, clock=clock)
  progress.begin(1, TOTALS)
  progress.end(result(1, **{"reward/failed": 2.0, "training/skipped_updates": 1.0}))
  line = stream.getvalue()
  assert "2 rewards failed  1 updates skipped" in line
  assert "ETA" not in line  # it was the last step


def test_terminal_rewrites_one_line_within_its_width(monkeypatch):
  monkeypatch.setenv("COLUMNS", "40")
  clock, stream = Clock(), Terminal()
  progress = console.StepProgress(2, stream=stream, clock=clock)
  progress.begin(1, TOTALS)
  for _ in range(3):
    clock.now_s += 1.0
    progress.advance("generate")
  assert "generated 3/24" in stream.getvalue()
  assert "\n" not in stream.getvalue()
  assert all(len(line) <= 39 for line in stream.getvalue().split("\r"))
  progress.end(result(1))
  assert stream.getvalue().count("\n") == 1


def test_short_work_is_silent_and_long_work_is_not():
  clock, stream = Clock(), io.StringIO()
  with console.Progress("warm-up", 3, stream=stream, clock=clock, every_s=1.0) as progress:
    clock.now_s = 1.0
    progress.advance("generate")
  assert stream.getvalue() == ""
  with console.Progress("warm-up", 3, stream=stream, clock=clock, every_s=1.0) as progress:
    clock.now_s = 4.0
    progress.advance("generate")
    clock.now_s = 5.0
  assert stream.getvalue() == "warm-up 1/3  generate  ETA 6.0 s\nwarm-up 1/3  4.0 s\n"


def test_work_may_say_its_size_later():
  clock, stream = Clock(), io.StringIO()
  with console.Progress("evaluation", stream=stream, clock=clock, every_s=1.0) as progress:
    for done in (1, 2):
      clock.now_s += 3.0
      progress.at(done, 4)
  assert stream.getvalue() == (
    "evaluation 1/4  ETA 9.0 s\nevaluation 2/4  ETA 6.0 s\nevaluation 2/4  6.0 s\n"
  )


def test_numbers_for_people():
  assert [console.duration(s) for s in (8.44, 59.9, 185, 7385)] == [
    "8.4 s",
    "59.9 s",
    "3:05",
    "2:03:05",
  ]
  assert [console.count(n) for n in (12, 4300, 1.3e9)] == ["12", "4.3 k", "1.3 G"]


def test_default_stream_is_the_current_standard_output(capsys):
  progress = console.StepProgress(1, clock=time.monotonic)
  progress.begin(1, {})
  progress.end(result(1))
  assert capsys.readouterr().out.startswith("step 1/1")
