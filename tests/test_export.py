"""The commands export and inspect, on the shipped world's own weights and on broken files."""

import json
import pathlib

import jax
import numpy as np
import pytest

from models.checkpoints.opening import open_checkpoint
from models.layers.lora import LoRAConfig, init_lora
from models.wan.presets import preset
from sbjax import export, inspect
from sbjax.state.adapter import load_adapter
from sbjax.state.portable import layout_for, read_tree, save_tree
from sbjax.worlds.digits.world import WEIGHTS

DIT = WEIGHTS / "dit.safetensors"
CONFIG = LoRAConfig(2, 6.0, ("self_attn.*", "ffn.0"))


@pytest.fixture
def adapter(tmp_path) -> pathlib.Path:
  """An adapter of a run."""
  tree = init_lora(CONFIG, preset("digits")[0], jax.random.key(0))
  arrays = {t: {x: np.asarray(a) + 0.01 for x, a in pair.items()} for t, pair in tree.items()}
  save_tree(tmp_path / "adapter.safetensors", arrays, CONFIG, "digits")
  return tmp_path / "adapter.safetensors"


def run(*arguments: object) -> int:
  return export.main([str(argument) for argument in arguments])


@pytest.mark.parametrize("layout", ["peft", "diffusers", "longlive"])
def test_an_adapter_goes_out_and_comes_back(adapter, tmp_path, layout, capsys):
  out, back = tmp_path / "out", tmp_path / "back.safetensors"
  assert run(f"--adapter={adapter}", f"--layout={layout}", f"--out={out}") == 0
  assert f"wrote {out}" in capsys.readouterr().out
  more = ("--layout=sbjax", "--preset=digits", "--alpha=6", f"--out={back}")
  assert run(f"--adapter={out}", *more) == 0
  layout_of_run = layout_for("digits", CONFIG)
  first, facts = load_adapter(adapter, layout_of_run)
  second, same = load_adapter(back, layout_of_run)
  np.testing.assert_array_equal(first, second)
  assert facts == same
  assert inspect.main([str(out), "--json"]) == 0
  found = json.loads(capsys.readouterr().out.split("\n", 1)[1])
  assert found["parts"][0]["layout"] == layout
  assert found["parts"][0]["presets"] == ["digits"]
  assert found["parts"][0]["settings"]["rank"] == 2


def test_weights_are_merged_and_converted(adapter, tmp_path, capsys):
  out = tmp_path / "merged"
  asked = (f"--base={DIT}", "--layout=diffusers", "--dtype=float32")
  assert run(*asked, f"--out={tmp_path / 'plain'}") == 0
  assert run(*asked, f"--adapter={adapter}", f"--out={out}") == 0
  capsys.readouterr()
  plain, merged = (open_checkpoint(f).parts[""] for f in (tmp_path / "plain", out))
  tree, config, model = read_tree(adapter)
  assert (config, model) == (LoRAConfig(2, 6.0, CONFIG.resolved), "digits")
  differing = {n for n in plain if (plain[n].view() != merged[n].view()).any()}
  assert len(differing) == 6 * 5
  a, b = (tree["ffn.0"][x][4] for x in "ab")
  name = "blocks.4.ffn.net.0.proj.weight"
  wanted = plain[name].view() + config.scale * (a @ b).T
  np.testing.assert_allclose(merged[name].view(), wanted, rtol=1e-6, atol=1e-7)
  assert inspect.main([str(out)]) == 0
  assert "Wan transformer, diffusers layout" in capsys.readouterr().out


def test_inspect_tells_of_the_world_s_files_and_of_a_run_s_adapter(adapter, capsys):
  for file, kind in (("dit", "Wan transformer"), ("vae", "Wan VAE"), ("text", "UMT5 encoder")):
    assert inspect.main([str(WEIGHTS / f"{file}.safetensors")]) == 0
    text = capsys.readouterr().out
    assert f"{kind}, official layout" in text
    assert "fits digits" in text
  assert inspect.main([str(adapter)]) == 0
  assert "adapter of a run" in capsys.readouterr().out


def test_inspect_of_what_cannot_be_used_is_one_and_a_reason(tmp_path, capsys):
  content = bytearray(DIT.read_bytes())
  content[-2:] = b"\x00\x7e"  # a float16 that is no number
  (tmp_path / "nan.safetensors").write_bytes(content)
  assert inspect.main([str(tmp_path / "nan.safetensors")]) == 1
  assert "values that are not finite: " in capsys.readouterr().out
  assert inspect.main([str(tmp_path / "nan.safetensors"), "--headers"]) == 0
  capsys.readouterr()
  (tmp_path / "cut.safetensors").write_bytes(content[:-5])
  assert inspect.main([str(tmp_path / "cut.safetensors"), "--json"]) == 1
  found = json.loads(capsys.readouterr().out)
  assert found["usable"] is False
  assert "cannot be read as a safetensors file" in found["reason"]
  assert inspect.main([str(tmp_path / "absent")]) == 1
  assert "does not exist" in capsys.readouterr().out


@pytest.mark.parametrize(
  ("arguments", "reason"),
  [
    (["--layout=peft", "--out=new"], "--adapter and --base are missing"),
    (["--adapter=ADAPTER", "--layout=peft", "--out=ADAPTER"], "which exists"),
    (["--adapter=ADAPTER", "--layout=kohya", "--out=new"], "layout is 'kohya'"),
    (["--adapter=ADAPTER", "--layout=peft", "--preset=wan", "--out=new"], "--preset is 'wan'"),
    (["--adapter=absent", "--layout=peft", "--out=new"], "does not exist"),
    (["--base=DIT", "--layout=peft", "--out=new"], "layout is 'peft'; a Wan transformer has"),
    (["--base=DIT", "--layout=official", "--preset=wan2.1", "--out=new"], "--preset is 'wan2.1'"),
    (["--base=VAE", "--adapter=ADAPTER", "--layout=official", "--out=new"], "--base is a Wan VAE"),
    (["--base=DIT", "--preset=self-forcing", "--layout=official", "--out=new"], "does not fit"),
  ],
)
def test_a_command_that_cannot_work_says_why_and_writes_nothing(
  adapter, tmp_path, capsys, monkeypatch, arguments, reason
):
  monkeypatch.chdir(tmp_path)
  places = {"ADAPTER": adapter, "DIT": DIT, "VAE": WEIGHTS / "vae.safetensors"}
  for word, path in places.items():
    arguments = [a.replace(word, str(path)) for a in arguments]
  assert run(*arguments) == 2
  error = capsys.readouterr().err
  assert reason in error
  assert len(error.splitlines()) == 1
  assert not (tmp_path / "new").exists()
