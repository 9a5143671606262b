"""Whole runs through the real commands on a tiny random world."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

from sbjax.state.checkpoint import read_checkpoint
from tests import tiny_world

ROOT = pathlib.Path(__file__).parents[1]
SMALL = (
  "--config.total_steps=3",
  "--config.model.frames=9",
  "--config.runtime.chunk_blocks=1",
  "--config.rollout.prompts_per_step=2",
  "--config.rollout.group_size=2",
  "--config.lora.rank=2",
  "--config.lora.targets=('self_attn.q', 'ffn.0')",
  "--config.optim.learning_rate=0.01",
  "--config.eval.every=0",
  "--config.checkpoint.every=1",
  "--config.report.samples_every=2",
  "--config.report.samples=1",
)
INLINE = ("--config.runtime.executor=inline", "--config.runtime.reward_workers=0")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
  return tiny_world.make(tmp_path_factory.mktemp("world"))


def command(module, world, workdir, *arguments):
  flags = [f"--config.model.checkpoint={world}", f"--workdir={workdir}"]
  return [
    sys.executable,
    "-m",
    f"sbjax.{module}",
    f"--config={ROOT / 'configs' / 'quickstart.py'}",
    *(flags if module == "launch" else flags[:1]),
    *arguments,
  ]


def environment():
  # One device, as a user's machine has it; the tests' own processes have four.
  return {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}


def run(*words, timeout_s=280):
  return subprocess.run(
    words,
    cwd=ROOT,
    env=environment(),
    capture_output=True,
    text=True,
    timeout=timeout_s,
    check=False,
  )


@pytest.fixture(scope="module")
def finished(world, tmp_path_factory):
  """An undisturbed run."""
  workdir = tmp_path_factory.mktemp("runs") / "finished"
  done = run(*command("launch", world, workdir, *SMALL, *INLINE))
  assert done.returncode == 0, done.stderr
  return workdir, done.stdout


def state(workdir):
  return read_checkpoint(workdir / "checkpoints")


def metrics(workdir):
  lines = (workdir / "metrics.jsonl").read_text().splitlines()
  return [json.loads(line) for line in lines]


def test_a_run_writes_what_the_readme_says(finished):
  workdir, said = finished
  for name in (
    "config.json",
    "command.txt",
    "metrics.jsonl",
    "tensorboard",
    "samples/step_000002/samples.jsonl",
    "timeline",
    "checkpoints",
    "adapter.safetensors",
    "summary.json",
    "reward_curve.png",
  ):
    assert (workdir / name).exists(), name
    assert name.split("/")[0] in said or name in ("command.txt",), name
  assert list((workdir / "samples").rglob("*.mp4"))
  assert [m["training/global_step"] for m in metrics(workdir) if "actor/lr" in m] == [1, 2, 3]
  assert state(workdir).step == 3


def test_a_finished_workdir_is_not_overwritten(finished, world):
  workdir, _ = finished
  before = state(workdir).adapter
  done = run(*command("launch", world, workdir, *SMALL, *INLINE))
  assert done.returncode == 2
  assert len(done.stderr.strip().splitlines()) == 1
  assert "--config.resume=auto" in done.stderr
  np.testing.assert_array_equal(state(workdir).adapter, before)


def test_another_run_s_workdir_is_refused(finished, world):
  workdir, _ = finished
  words = command("launch", world, workdir, *SMALL, *INLINE, "--config.resume=auto")
  done = run(*words, "--config.seed=5")
  assert done.returncode == 2
  assert len(done.stderr.strip().splitlines()) == 1
  assert "seed" in done.stderr


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_run_ends_cleanly_and_continues_bit_equal(
  finished, world, tmp_path, signum, code
):
  workdir = tmp_path / "run"
  words = command("launch", world, workdir, *SMALL, *INLINE)
  process = subprocess.Popen(
    words, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
  )
  try:
    _wait_for(lambda: _steps_done(workdir) >= 1, process)
    process.send_signal(signum)
    _, err = process.communicate(timeout=120)
  finally:
    process.kill()
  assert process.returncode == code, err
  assert "Traceback" not in err
  assert 1 <= state(workdir).step <= 3

  done = run(*words, "--config.resume=auto")
  assert done.returncode == 0, done.stderr
  ours, theirs = state(workdir), state(finished[0])
  assert ours.step == theirs.step == 3
  np.testing.assert_array_equal(ours.adapter, theirs.adapter)
  np.testing.assert_array_equal(ours.ema, theirs.ema)
  assert [m["training/global_step"] for m in metrics(workdir) if "actor/lr" in m] == [1, 2, 3]


def test_adapters_are_compared_by_sample(finished, tmp_path):
  workdir, _ = finished
  done = run(
    sys.executable,
    "-m",
    "sbjax.sample",
    f"--checkpoint={workdir}",
    f"--out={tmp_path / 'out'}",
    "--num_prompts=2",
    "--seeds=1,2",
    "--videos=1",
  )
  assert done.returncode == 0, done.stderr
  stored = json.loads((tmp_path / "out" / "evaluation.json").read_text())
  assert stored["step"] == 3
  assert set(stored["values"]) == {"base", "online", "ema"}
  assert {"reward", "digit", "colour", "motion", "heldout"} <= set(stored["values"]["ema"])
  assert all(len(v) == 4 for v in stored["values"]["online"].values())
  assert stored["values"]["base"]["reward"] != stored["values"]["online"]["reward"]
  assert {p["adapter"] for p in stored["paired"]} == {"online", "ema"}
  assert list((tmp_path / "out").rglob("*.mp4"))
  assert "std. error" in done.stdout


def test_an_adapter_file_gives_the_online_adapter_s_videos(finished, world, tmp_path):
  workdir, _ = finished
  done = run(
    sys.executable,
    "-m",
    "sbjax.sample",
    f"--checkpoint={workdir}",
    f"--adapter={workdir / 'adapter.safetensors'}",
    "--adapters=online,adapter",
    f"--out={tmp_path / 'out'}",
    "--num_prompts=1",
    "--seeds=3",
    "--videos=0",
  )
  assert done.returncode == 0, done.stderr
  values = json.loads((tmp_path / "out" / "evaluation.json").read_text())["values"]
  assert values["online"] == values["adapter"]


def test_a_checkpoint_of_another_model_is_refused(finished, world, tmp_path):
  workdir, _ = finished
  words = command("sample", world, None, f"--checkpoint={workdir}", f"--out={tmp_path / 'out'}")
  done = run(*words, *SMALL, "--config.lora.rank=4")
  assert done.returncode == 2
  assert len(done.stderr.strip().splitlines()) == 1 and "rank" in done.stderr


def test_failing_rewards_are_counted_and_a_run_of_failures_ends(world, tmp_path):
  path = tmp_path / "reward.py"
  path.write_text(
    textwrap.dedent("""
      def some(video, prompt, seed):
        if seed % 4 == 0:
          raise RuntimeError("no answer")
        return float("nan") if seed % 4 == 1 else float(video.mean())

      def never(video, prompt, seed):
        raise RuntimeError("no answer at all")
    """)
  )
  reward = (
    "--config.reward.name=function",
    "--config.reward.components=('mean',)",
    "--config.reward.weights=(1.0,)",
    "--config.reward.retries=1",
  )
  some = (f"--config.reward.function={path}:some", "--config.reward.max_failed_frac=1.0")
  words = command("launch", world, tmp_path / "some", *SMALL, *INLINE, *reward, *some)
  done = run(*words, "--config.reward.max_skipped_in_row=100")
  assert done.returncode == 0, done.stderr
  steps = [m for m in metrics(tmp_path / "some") if "reward/failed" in m]
  assert sum(m["reward/failed"] for m in steps) > 0
  causes = {k.rsplit("/", 1)[1] for m in steps for k in m if k.startswith("reward/failed/")}
  assert causes <= {"raised", "not_finite"} and causes

  never = (f"--config.reward.function={path}:never", "--config.reward.max_skipped_in_row=2")
  done = run(*command("launch", world, tmp_path / "never", *SMALL, *INLINE, *reward, *never))
  assert done.returncode == 1
  assert len(done.stderr.strip().splitlines()) == 1
  assert "no answer at all" in done.stderr


def _steps_done(workdir):
  path = workdir / "metrics.jsonl"
  return path.read_text().count("actor/lr") if path.exists() else 0


def _wait_for(condition, process, timeout_s=280):
  end = time.monotonic() + timeout_s
  while not condition():
    assert process.poll() is None, process.communicate()
    assert time.monotonic() < end, "the run does not get on"
    time.sleep(0.1)
