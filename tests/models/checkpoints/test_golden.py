"""Values recorded from a PyTorch rollout, with the weights taken through published layouts."""

import dataclasses
import pathlib

import numpy as np
import pytest

from models.checkpoints.convert import convert
from models.checkpoints.families import DIT
from models.checkpoints.opening import open_checkpoint
from sbjax.verification.causal import replay_rollout
from sbjax.verification.recording import read_recording
from tests.models.checkpoints.files import save_torch

GOLDEN = pathlib.Path(__file__).parents[2] / "golden"


@pytest.mark.parametrize("case", ["causal_wan_window_sink", "causal_wan_global"])
def test_a_recorded_rollout_passes_with_weights_from_published_files(tmp_path, case):
  recording = read_recording(GOLDEN / f"{case}.npz")
  saved = {f"model.{name}": value for name, value in recording.parameters.items()}
  published = save_torch(tmp_path / "self_forcing.pt", generator_ema=saved, critic=saved)
  convert(published, tmp_path / "diffusers", DIT, recording.dit, "diffusers")
  convert(tmp_path / "diffusers", tmp_path / "official", DIT, recording.dit, "official")
  tensors = open_checkpoint(tmp_path / "official").parts[""]
  assert tensors.keys() == recording.parameters.keys()
  # Gradients are left out: they would compile another program for the same weights.
  others = ("param/", "grad/")
  arrays = {n: v for n, v in recording.arrays.items() if not n.startswith(others)}
  arrays |= {f"param/{name}": np.array(tensor.view()) for name, tensor in tensors.items()}
  checks = replay_rollout(dataclasses.replace(recording, arrays=arrays))
  assert len(checks) > 5
  assert all(check.passed for check in checks)
