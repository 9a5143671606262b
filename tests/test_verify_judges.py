"""`python -m sbjax.verify` on recorded judges and their pre-processing."""

import pathlib
import re

import numpy as np
import pytest

from sbjax import verify

GOLDEN = pathlib.Path(__file__).parent / "golden"
JUDGES = pathlib.Path(__file__).parents[2] / "shared" / "golden" / "vlm"


def _arrays(path):
  with np.load(path, allow_pickle=False) as archive:
    return {key: archive[key] for key in archive.files}


def _beyond(capsys):
  return [x.split()[0] for x in capsys.readouterr().out.splitlines() if "BEYOND" in x]


@pytest.mark.parametrize(
  ("name", "key", "step"),
  [
    ("preproc_hps", "480x832_hw", 1),
    ("preproc_hps", "300x200_br16_inside", 0.001),
    ("preproc_qwen", "q3_60x100_grid", 1),
    ("preproc_qwen", "q25_240x416_rowstd", 0.001),
  ],
)
def test_pre_processing_passes_and_a_wrong_number_does_not(tmp_path, capsys, name, key, step):
  arrays = _arrays(GOLDEN / f"{name}.io.npz")
  kept = {k: v for k, v in arrays.items() if k.split("_")[:-1] == key.split("_")[:-1]} | {
    key: arrays[key]
  }
  np.savez(tmp_path / "case.npz", **kept)
  assert verify.main([str(tmp_path)]) == 0
  kept[key] = kept[key] + np.asarray(step, kept[key].dtype)
  np.savez(tmp_path / "case.npz", **kept)
  capsys.readouterr()
  assert verify.main([str(tmp_path)]) == 1
  assert _beyond(capsys) == [key]


@pytest.fixture
def judges(tmp_path):
  """Copies of recorded judges by name."""
  if not JUDGES.is_dir():
    pytest.skip(f"needs the recorded judges in {JUDGES}")

  def copy(name):
    for ending in (".io.npz", ".safetensors", ".config.json"):
      source = JUDGES / (name + ending)
      if source.exists():
        (tmp_path / source.name).write_bytes(source.read_bytes())
    return tmp_path / f"{name}.io.npz"

  return copy


@pytest.mark.parametrize("name", ["tiny_qwen2_5_vl", "tiny_qwen3_vl", "tiny_open_clip"])
def test_recorded_judges_pass_and_a_wrong_number_does_not(judges, capsys, name):
  path = judges(name)
  result = "score" if name == "tiny_open_clip" else "logits"
  arrays = _arrays(path)
  assert verify.main([str(path)]) == 0
  assert "0 beyond tolerance" in capsys.readouterr().out
  arrays[result].flat[1] += 0.01
  np.savez(path, **arrays)
  assert verify.main([str(path)]) == 1
  assert _beyond(capsys) == [result]


@pytest.mark.parametrize(
  ("change", "told"),
  [
    ({"surprise": np.ones(2)}, "has a key 'surprise' that is not known"),
    ({"logits": None}, "holds no recorded rollout|has no key 'meta'"),
    ({"image_grid_thw": np.array([[1, 10, 12]])}, "the grids ask for"),
    ({"pixel_values": np.full((140, 1176), np.nan)}, "is no finite number"),
  ],
)
def test_recordings_that_do_not_fit_are_refused_in_one_sentence(judges, capsys, change, told):
  path = judges("tiny_qwen2_5_vl")
  arrays = _arrays(path) | change
  np.savez(path, **{k: v for k, v in arrays.items() if v is not None})
  assert verify.main([str(path)]) == 2
  said = capsys.readouterr().err
  assert said.count("\n") == 1
  assert re.search(told, said), said


def test_a_judge_without_its_weights_is_refused(judges, capsys):
  path = judges("tiny_qwen3_vl")
  path.with_name("tiny_qwen3_vl.safetensors").unlink()
  assert verify.main([str(path)]) == 2
  assert "cannot be read as a safetensors file" in capsys.readouterr().err
