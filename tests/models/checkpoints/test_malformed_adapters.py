"""Broken adapters, and settings that mean something else than what is read."""

import json
import pathlib

import numpy as np
import pytest

from models.checkpoints.lora import CONFIG_FILE, WEIGHTS_FILE, read_lora, write_lora
from tests.models.checkpoints.broken import LORA, LORA_CONFIG
from tests.models.checkpoints.files import CFG, save


def _peft(folder: pathlib.Path) -> pathlib.Path:
  write_lora(folder / "peft", LORA, LORA_CONFIG, "peft")
  return folder / "peft"


def _weights(folder: pathlib.Path) -> dict[str, np.ndarray]:
  from safetensors.numpy import load_file

  return load_file(folder / WEIGHTS_FILE)


def _settings(folder: pathlib.Path, **changes) -> None:
  settings = json.loads((folder / CONFIG_FILE).read_text())
  (folder / CONFIG_FILE).write_text(json.dumps({**settings, **changes}))


Q = "base_model.model.blocks.0.attn1.to_q"


@pytest.mark.parametrize(
  ("weights", "match"),
  [
    ({f"{Q}.lora_B.weight": None}, rf"missing: {Q}\.lora_B\.weight"),
    ({f"{Q}.lora_A.weight": np.zeros((3, 12), np.float32)}, r"has ranks \[2, 3\]"),
    ({f"{Q}.lora_A.weight": np.zeros((2, 13), np.float32)}, r"misshapen: .*\[2, 13\]"),
    ({f"{Q}.lora_A.weight": np.zeros((2, 12), np.int32)}, "of a type that no weight has"),
    ({f"{Q}.lora_A.weight": np.full((2, 12), np.nan, np.float32)}, "not finite"),
    ({f"{Q}.lora_magnitude_vector": np.zeros(12, np.float32)}, "no adapter .*lora_magnitude"),
    ({"base_model.model.blocks.3.attn1.to_q.lora_A.weight": np.zeros((2, 12), np.float32)}, "unk"),
    ({"base_model.model.blocks.0.self_attn.q.lora_A.weight": np.zeros((2, 12), np.float32)}, "mix"),
  ],
)
def test_broken_adapter_weights_are_refused(tmp_path, weights, match):
  folder = _peft(tmp_path)
  state = {n: v for n, v in {**_weights(folder), **weights}.items() if v is not None}
  save(folder / WEIGHTS_FILE, state)
  with pytest.raises(ValueError, match=match):
    read_lora(folder, CFG)


@pytest.mark.parametrize(
  ("settings", "match"),
  [
    ({"r": 8}, "has rank 2 where its settings say 8"),
    ({"use_dora": True}, "use_dora True, which is not supported"),
    ({"use_rslora": True}, "use_rslora True"),
    ({"rank_pattern": {"to_q": 8}}, "rank_pattern"),
    ({"bias": "all"}, "bias 'all'"),
    ({"lora_alpha": "much"}, "settings that cannot be read"),
  ],
)
def test_adapter_settings_that_mean_something_else_are_refused(tmp_path, settings, match):
  folder = _peft(tmp_path)
  _settings(folder, **settings)
  with pytest.raises(ValueError, match=match):
    read_lora(folder, CFG)


def test_alpha_must_be_known_and_agree(tmp_path):
  write_lora(tmp_path / "l.pt", LORA, LORA_CONFIG, "longlive")
  with pytest.raises(ValueError, match="does not say its alpha"):
    read_lora(tmp_path / "l.pt", CFG)
  with pytest.raises(ValueError, match=r"alpha is 2\.0; .* was trained with 4\.0"):
    read_lora(_peft(tmp_path), CFG, alpha=2.0)
  with pytest.raises(ValueError, match="layout is 'kohya'"):
    write_lora(tmp_path / "k", LORA, LORA_CONFIG, "kohya")
