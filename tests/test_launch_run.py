"""Whole runs through the real commands, Ray and all, on a tiny random world."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import uuid

import numpy as np
import pytest

from sbjax.state.checkpoint_read import read_checkpoint
from tests import tiny_world

ROOT = pathlib.Path(__file__).parents[1]
SMALL = (
  "--config.total_steps=2",
  "--config.model.frames=9",
  "--config.runtime.chunk_blocks=1",
  "--config.rollout.prompts_per_step=2",
  "--config.rollout.group_size=2",
  "--config.lora.rank=2",
  "--config.lora.targets=('self_attn.q', 'ffn.0')",
  "--config.optim.learning_rate=0.01",
  "--config.eval.every=0",
  "--config.checkpoint.every=1",
  "--config.report.samples_every=1",
  "--config.report.samples=1",
)


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


def environment(mark=""):
  # One device, as a user's machine has it; the tests' own processes have four.
  return {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"SBJAX_TEST_MARK": mark}


def run(*words, timeout_s=900):
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
  done = run(*command("launch", world, workdir, *SMALL))
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
    "samples/step_000001/samples.jsonl",
    "timeline",
    "logs",
    "checkpoints",
    "adapter.safetensors",
    "summary.json",
    "reward_curve.png",
  ):
    assert (workdir / name).exists(), name
    assert name.split("/")[0] in said or name in ("command.txt", "logs"), name
  assert list((workdir / "samples").rglob("*.mp4"))
  assert [m["training/global_step"] for m in metrics(workdir) if "actor/lr" in m] == [1, 2]
  assert state(workdir).step == 2


def test_a_finished_workdir_is_not_overwritten(finished, world):
  workdir, _ = finished
  before = state(workdir).adapter
  done = run(*command("launch", world, workdir, *SMALL))
  assert done.returncode == 2
  assert len(done.stderr.strip().splitlines()) == 1
  assert "--config.resume=auto" in done.stderr
  np.testing.assert_array_equal(state(workdir).adapter, before)


def test_another_run_s_workdir_is_refused(finished, world):
  workdir, _ = finished
  words = command("launch", world, workdir, *SMALL, "--config.resume=auto")
  done = run(*words, "--config.seed=5")
  assert done.returncode == 2
  assert len(done.stderr.strip().splitlines()) == 1
  assert "seed" in done.stderr


def test_a_stopped_run_ends_its_children_and_continues_bit_equal(finished, world, tmp_path):
  workdir, mark = tmp_path / "run", uuid.uuid4().hex
  words = command("launch", world, workdir, *SMALL)
  process = subprocess.Popen(
    words,
    cwd=ROOT,
    env=environment(mark),
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )
  try:
    _wait_for(lambda: _steps_done(workdir) >= 1, process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=300)
  finally:
    process.kill()
  assert process.returncode == 143, err
  assert "Traceback" not in err
  assert state(workdir).step >= 1
  end = time.monotonic() + 60
  while _alive(mark) and time.monotonic() < end:
    time.sleep(0.2)
  assert not _alive(mark)

  done = run(*words, "--config.resume=auto", "--config.runtime.reward_workers=0")
  assert done.returncode == 0, done.stderr
  ours, theirs = state(workdir), state(finished[0])
  assert ours.step == theirs.step == 2
  np.testing.assert_array_equal(ours.adapter, theirs.adapter)
  np.testing.assert_array_equal(ours.ema, theirs.ema)
  assert [m["training/global_step"] for m in metrics(workdir) if "actor/lr" in m] == [1, 2]


def test_adapters_are_compared_by_sample(finished, tmp_path):
  workdir, _ = finished
  done = run(
    sys.executable,
    "-m",
    "sbjax.sample",
    f"--checkpoint={workdir}",
    f"--adapter={workdir / 'adapter.safetensors'}",
    f"--out={tmp_path / 'out'}",
    "--num_prompts=2",
    "--seeds=1,2",
    "--videos=1",
  )
  assert done.returncode == 0, done.stderr
  stored = json.loads((tmp_path / "out" / "evaluation.json").read_text())
  assert stored["step"] == 2
  values = stored["values"]
  assert list(values) == ["base", "online", "ema", "adapter"]
  assert {"reward", "digit", "colour", "motion", "heldout"} <= set(values["ema"])
  assert all(len(v) == 4 for v in values["online"].values())
  assert values["base"]["reward"] != values["online"]["reward"]
  # The run's final adapter file holds what its last checkpoint holds.
  assert values["adapter"] == values["online"]
  assert {p["adapter"] for p in stored["paired"]} == {"online", "ema", "adapter"}
  assert list((tmp_path / "out").rglob("*.mp4"))
  assert "std. error" in done.stdout


def test_a_checkpoint_of_another_model_is_refused(finished, world, tmp_path):
  workdir, _ = finished
  words = command("sample", world, None, f"--checkpoint={workdir}", f"--out={tmp_path / 'out'}")
  done = run(*words, *SMALL, "--config.lora.rank=4")
  assert done.returncode == 2
  assert len(done.stderr.strip().splitlines()) == 1 and "another model" in done.stderr


def _steps_done(workdir):
  path = workdir / "metrics.jsonl"
  return path.read_text().count("actor/lr") if path.exists() else 0


def _wait_for(condition, process, timeout_s=900):
  end = time.monotonic() + timeout_s
  while not condition():
    assert process.poll() is None, process.communicate()
    assert time.monotonic() < end, "the run does not get on"
    time.sleep(0.1)


def _alive(mark):
  """Ids of processes that were started with this mark in their environment."""
  found = []
  for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
    try:
      if f"SBJAX_TEST_MARK={mark}".encode() in path.read_bytes():
        found.append(path.parent.name)
    except OSError:  # it ended meanwhile, or is another user's
      continue
  return found
