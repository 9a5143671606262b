"""The command on weights in the published layouts: LongLive's base, adapter and switches."""

import json
import pathlib

import imageio_ffmpeg
import pytest

from sbjax import sample
from tests import tiny_wan

RECIPE = str(pathlib.Path(__file__).parents[2] / "configs" / "longlive.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  folder = tiny_wan.make(tmp_path_factory.mktemp("wan"))
  tiny_wan.lora(folder / "lora.pt")
  return folder


def test_longlive_with_a_script_of_prompts(folder, tmp_path, capsys):
  """Six chunks in a window of four: the switch comes when frames have left it."""
  row = {
    "prompt": "a red cat runs",
    "switches": [{"frame": 14, "prompt": "a dog jumps over the cat"}],
  }
  prompts = tmp_path / "scripts.jsonl"
  prompts.write_text(json.dumps(row) + "\n")
  fields = tiny_wan.model_fields(folder) | {
    "sampler": "longlive-1.3b",
    "adapter": folder / "lora.pt",
    "adapter_alpha": 4.0,
    "frames": 69,
  }
  flags = [f"--config.model.{name}={value}" for name, value in fields.items()]
  words = ["--config.runtime.gpus_per_worker=0", f"--prompts={prompts}", f"--out={tmp_path / 'o'}"]
  assert sample.main(["sbjax.sample", f"--config={RECIPE}", *flags, *words]) == 0
  (line,) = (tmp_path / "o" / "videos.jsonl").read_text().splitlines()
  video = json.loads(line)
  assert video["prompt"] == "a red cat runs" and video["frames"] == 69
  assert video["switches"] == [{"frame": 15, "prompt": "a dog jumps over the cat"}]
  count, _ = imageio_ffmpeg.count_frames_and_secs(str(tmp_path / "o" / video["file"]))
  assert count == 69
  assert json.loads((tmp_path / "o" / "config.json").read_text())["model"]["frames"] == 69
  assert "1 videos" in capsys.readouterr().out
