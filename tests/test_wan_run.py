"""A run on weights in the published layouts: one recipe, trained, resumed, sampled."""

import json
import pathlib
import shutil

import numpy as np
import pytest

from sbjax import launch, sample
from sbjax.state.checkpoint_read import read_checkpoint
from sbjax.worlds.wan import embeddings
from tests import tiny_wan

RECIPE = str(pathlib.Path(__file__).parents[1] / "configs" / "self_forcing.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return tiny_wan.make(tmp_path_factory.mktemp("wan"))


@pytest.fixture(scope="module")
def finished(folder, tmp_path_factory):
  """Two steps of the recipe."""
  workdir = tmp_path_factory.mktemp("runs") / "finished"
  assert train(folder, workdir) == 0
  return workdir


def train(folder, workdir, *more):
  words = [f"--config={RECIPE}", *tiny_wan.flags(folder), f"--workdir={workdir}", *more]
  return launch.main(["sbjax.launch", *words])


def never(*arguments, **names):
  raise AssertionError("the text encoder was loaded")


def test_a_recipe_trains_on_the_user_s_files(finished):
  lines = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
  steps = [line for line in lines if "actor/lr" in line]
  assert [s["training/global_step"] for s in steps] == [1, 2]
  assert all(s["actor/grad_norm"] > 0 and s["check/logp_diff_rollout_replay"] < 1e-5 for s in steps)
  state = read_checkpoint(finished / "checkpoints")
  assert state.step == 2 and np.abs(state.adapter).max() > 0


@pytest.mark.parametrize("left", [0, 1])
def test_a_run_that_was_cut_off_continues_bit_equal_without_the_text_encoder(
  folder, finished, tmp_path, monkeypatch, left
):
  workdir = tmp_path / "cut"
  shutil.copytree(finished, workdir)
  for step in range(left + 1, 3):  # the start has a checkpoint as well
    shutil.rmtree(workdir / "checkpoints" / str(step))
  # What the first run embedded is there for this one.
  monkeypatch.setattr(embeddings, "load_umt5", never)
  assert train(folder, workdir, "--config.resume=auto") == 0
  ours, theirs = (read_checkpoint(path / "checkpoints") for path in (workdir, finished))
  assert ours.step == theirs.step == 2
  np.testing.assert_array_equal(ours.adapter, theirs.adapter)
  np.testing.assert_array_equal(ours.ema, theirs.ema)


def test_a_run_is_sampled_with_prompts_of_one_s_own(folder, finished, tmp_path, monkeypatch):
  loads = []
  load = embeddings.load_umt5
  monkeypatch.setattr(embeddings, "load_umt5", lambda *a, **k: (loads.append(1), load(*a, **k))[1])
  prompts = tmp_path / "mine.jsonl"
  prompts.write_text('{"prompt": "a blue cat sleeps"}\n{"prompt": "a red dog runs on grass"}\n')
  words = [f"--checkpoint={finished}", f"--prompts={prompts}", "--seeds=1", "--videos=1"]
  assert (
    sample.main(["sbjax.sample", *words, "--adapters=base,online", f"--out={tmp_path / 'out'}"])
    == 0
  )
  stored = json.loads((tmp_path / "out" / "evaluation.json").read_text())
  assert stored["prompts"] == ["a blue cat sleeps", "a red dog runs on grass"]
  assert stored["values"]["base"]["score"] != stored["values"]["online"]["score"]
  assert list((tmp_path / "out").rglob("*.mp4"))
  assert loads == [1]  # once for both


def test_a_recipe_without_weights_is_refused(capsys, tmp_path):
  words = [f"--config={RECIPE}", f"--workdir={tmp_path / 'run'}"]
  assert launch.main(["sbjax.launch", *words]) == 2
  said = capsys.readouterr().err.strip()
  assert said.startswith(
    "sbjax: model.checkpoint is ''; model 'self-forcing' needs the transformer"
  )
  assert "\n" not in said and not (tmp_path / "run").exists()
