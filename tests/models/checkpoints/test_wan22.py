"""Files of Wan2.2 and LongLive 2.0: both layouts, the merged generator, what is refused."""

import dataclasses

import numpy as np
import pytest

from models.checkpoints.convert import convert
from models.checkpoints.describe import describe
from models.checkpoints.families import DIT, VAE
from models.checkpoints.identify import identify
from models.checkpoints.opening import open_checkpoint
from models.checkpoints.sizes import vae_sizes
from models.checkpoints.stored import StateDict, StoredTensor
from models.checkpoints.wan import load_dit, load_vae
from models.wan.vae_keys import vae_keys
from models.weights import parameters, slots, to_official
from tests.models.checkpoints.files import CFG, dit_state, save, save_torch
from tests.models.wan22_files import RESIDUAL, random_vae

PUBLISHED = [  # family, layout, preset, tensors, parameters
  (VAE, "official", "wan2.2", 196, 704_688_668),
  (VAE, "diffusers", "wan2.2", 196, 704_688_668),
  (DIT, "official", "longlive-2.0-5b", 825, 4_999_787_712),
  (DIT, "diffusers", "wan2.2-ti2v-5b", 825, 4_999_787_712),
]


def _headers(family, layout: str, preset: str) -> StateDict:
  """Names and shapes of the full size; the elements would take gigabytes and are not there."""
  config = family.presets[preset]
  shapes = {name: array.shape for name, array in family.like(config).items()}
  table = slots(family.layout(layout).table(config), shapes)
  nothing = np.zeros(0, np.uint8)
  return {n: StoredTensor(s.official_shape, "bfloat16", nothing, 0) for n, s in table.items()}


@pytest.mark.parametrize(("family", "layout", "preset", "count", "elements"), PUBLISHED)
def test_published_files_are_recognised(family, layout, preset, count, elements):
  tensors = _headers(family, layout, preset)
  found = identify(tensors)
  assert found is not None
  assert (found.family, found.layout.name) == (family, layout)
  assert preset in found.presets
  assert (len(tensors), sum(t.size for t in tensors.values())) == (count, elements)


def _values(path) -> dict[str, np.ndarray]:
  (tensors,) = open_checkpoint(path).parts.values()
  return {name: np.array(tensor.view()) for name, tensor in tensors.items()}


def test_the_autoencoder_goes_through_both_layouts_bit_by_bit(tmp_path):
  wanted = parameters(random_vae(RESIDUAL))
  state = dict(to_official(wanted, vae_keys(RESIDUAL)))
  state = {name: np.ascontiguousarray(value) for name, value in state.items()}
  published = save_torch(tmp_path / "Wan2.2_VAE.pth", **{"": state})
  convert(published, tmp_path / "diffusers", VAE, RESIDUAL, "diffusers")
  convert(tmp_path / "diffusers", tmp_path / "official", VAE, RESIDUAL, "official")
  back = _values(tmp_path / "official")
  assert back.keys() == state.keys()
  assert "decoder.up_blocks.0.upsampler.time_conv.weight" in _values(tmp_path / "diffusers")
  for name, value in state.items():
    np.testing.assert_array_equal(back[name], value, err_msg=name)
  sizes = dataclasses.asdict(vae_sizes(published, name=RESIDUAL.name))
  assert sizes == dataclasses.asdict(RESIDUAL)
  for path in (published, tmp_path / "diffusers"):
    loaded = parameters(load_vae(path, RESIDUAL))
    for name, array in wanted.items():
      np.testing.assert_array_equal(loaded[name], array, err_msg=name)


def test_a_merged_generator_loads_beside_what_else_the_file_holds(tmp_path):
  state = {f"model.{name}": value for name, value in dit_state().items()}
  path = save_torch(tmp_path / "model_bf16.pt", generator=state)
  loaded = parameters(load_dit(path, CFG))
  np.testing.assert_array_equal(loaded["head.kernel"], state["model.head.head.weight"].T)


def test_four_bit_weights_are_refused_by_name(tmp_path):
  state = {f"model.{name}": value for name, value in dit_state().items()}
  name = "model.blocks.0.ffn.0"
  values = state.pop(f"{name}.weight").view(np.uint8)
  state[f"{name}.quantized_weight_values"] = values
  path = save(tmp_path / "model_4o6.safetensors", state)
  reason = f"quantised weights ({name}.quantized_weight_values), which are not read"
  assert reason in (describe(path).reason or "")
  with pytest.raises(ValueError, match="use the bfloat16 file"):
    load_dit(path, CFG)
