"""Loader and saver: round trips, and refusals that name what does not fit."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from models.layers.lora import LoRAConfig
from models.wan.dit import CausalWanDiT
from models.wan.presets import DiTConfig
from models.wan.weights import DIT_KEYS, lora_keys
from models.weights import TensorKey, clean_key, load_safetensors, save_safetensors

CFG = DiTConfig("tiny", 12, 20, 2, 3, in_dim=6, out_dim=4, text_dim=5, text_len=4, freq_dim=8)


def _model(seed: int = 0, **kwargs) -> CausalWanDiT:
  return CausalWanDiT(CFG, rngs=nnx.Rngs(seed), **kwargs)


def _flat(model: nnx.Module) -> dict:
  return {str(path): np.asarray(v[...]) for path, v in nnx.to_flat_state(nnx.state(model))}


@pytest.fixture
def saved(tmp_path):
  path = tmp_path / "dit.safetensors"
  save_safetensors(path, _model(), DIT_KEYS)
  return path


def test_a_saved_model_loads_bit_equal(saved):
  loaded = load_safetensors(saved, _model(seed=1), DIT_KEYS)
  for name, array in _flat(_model()).items():
    np.testing.assert_array_equal(_flat(loaded)[name], array, err_msg=name)


def test_file_holds_the_official_names_and_shapes(saved):
  tensors = load_file(saved)
  assert len(tensors) == 3 * 27 + 15  # per block, and outside the blocks
  assert tensors["patch_embedding.weight"].shape == (12, 6, 1, 2, 2)
  assert tensors["blocks.2.ffn.0.weight"].shape == (20, 12)
  assert tensors["blocks.1.modulation"].shape == (1, 6, 12)
  assert tensors["head.modulation"].shape == (1, 2, 12)
  assert tensors["head.head.weight"].shape == (16, 12)


def test_the_1_3b_table_names_825_tensors_and_600_of_a_lora():
  per_layer = sum("{layer}" in key.official for key in DIT_KEYS)
  assert per_layer * 30 + len(DIT_KEYS) - per_layer == 825
  assert len(lora_keys(LoRAConfig())) * 30 == 600


def test_half_precision_files_load_into_float32(tmp_path):
  for dtype in (jnp.float16, jnp.bfloat16):
    path = tmp_path / "half.safetensors"
    save_safetensors(path, _model(), DIT_KEYS, dtype)
    loaded = load_safetensors(path, _model(seed=1), DIT_KEYS)
    for name, array in _flat(_model()).items():
      assert _flat(loaded)[name].dtype == np.float32
      np.testing.assert_allclose(_flat(loaded)[name], array.astype(dtype).astype(np.float32))


def test_a_bfloat16_model_takes_its_own_type(saved):
  loaded = load_safetensors(saved, _model(seed=1, param_dtype=jnp.bfloat16), DIT_KEYS)
  assert loaded.head.kernel[...].dtype == jnp.bfloat16


def test_wrapped_names_are_understood(saved, tmp_path):
  wrapped = {
    "model." + k.replace("blocks.1.", "blocks.1._fsdp_wrapped_module."): v
    for k, v in load_file(saved).items()
  }
  save_file(wrapped, tmp_path / "wrapped.safetensors")
  load_safetensors(tmp_path / "wrapped.safetensors", _model(seed=1), DIT_KEYS)
  assert clean_key("model._orig_mod.blocks.0.norm3.bias") == "blocks.0.norm3.bias"


def test_a_folder_of_shards_loads(saved, tmp_path):
  tensors = load_file(saved)
  names = sorted(tensors)
  folder = tmp_path / "shards"
  folder.mkdir()
  for i in range(2):
    save_file({n: tensors[n] for n in names[i::2]}, folder / f"part-{i}.safetensors")
  loaded = load_safetensors(folder, _model(seed=1), DIT_KEYS)
  np.testing.assert_array_equal(
    loaded.blocks.ffn.down.kernel[...], _model().blocks.ffn.down.kernel[...]
  )


def test_everything_that_does_not_fit_is_listed_in_one_sentence(saved, tmp_path):
  tensors = load_file(saved)
  del tensors["blocks.1.norm3.bias"], tensors["head.head.bias"]
  tensors["blocks.7.norm3.bias"] = np.zeros(12, np.float32)
  tensors["time_embedding.0.weight"] = np.zeros((12, 9), np.float32)
  tensors["blocks.0.self_attn.q.bias"] = np.full(12, np.nan, np.float32)
  save_file(tensors, tmp_path / "bad.safetensors")
  with pytest.raises(ValueError) as error:
    load_safetensors(tmp_path / "bad.safetensors", _model(), DIT_KEYS)
  message = str(error.value)
  assert "missing: blocks.1.norm3.bias, head.head.bias" in message
  assert "unknown: blocks.7.norm3.bias" in message
  assert "misshapen: time_embedding.0.weight ([12, 9], needs [12, 8])" in message
  assert "not finite: blocks.0.self_attn.q.bias" in message


def test_a_refused_file_leaves_the_model_alone(saved, tmp_path):
  tensors = load_file(saved)
  del tensors["head.head.bias"]
  save_file(tensors, tmp_path / "bad.safetensors")
  model = _model(seed=1)
  with pytest.raises(ValueError, match=r"head\.head\.bias"):
    load_safetensors(tmp_path / "bad.safetensors", model, DIT_KEYS)
  for name, array in _flat(_model(seed=1)).items():
    np.testing.assert_array_equal(_flat(model)[name], array, err_msg=name)


@pytest.mark.parametrize("keep", [5, 200, -3])
def test_truncated_files_are_refused(saved, tmp_path, keep):
  path = tmp_path / "cut.safetensors"
  path.write_bytes(saved.read_bytes()[:keep])
  with pytest.raises(ValueError, match="cannot be read as a safetensors file"):
    load_safetensors(path, _model(), DIT_KEYS)


def test_absent_files_and_empty_folders_are_refused(tmp_path):
  with pytest.raises(ValueError, match="cannot be read"):
    load_safetensors(tmp_path / "absent.safetensors", _model(), DIT_KEYS)
  with pytest.raises(ValueError, match=r"holds no \.safetensors file"):
    load_safetensors(tmp_path, _model(), DIT_KEYS)


def test_values_that_overflow_the_file_type_are_refused(tmp_path):
  model = _model()
  model.head.bias[...] = jnp.full_like(model.head.bias[...], 1e6)
  with pytest.raises(ValueError, match=r"dtype is float16; .*head\.head\.bias"):
    save_safetensors(tmp_path / "x.safetensors", model, DIT_KEYS, jnp.float16)
  assert not (tmp_path / "x.safetensors").exists()


def test_the_table_covers_every_parameter():
  paths = {".".join(str(p) for p in path) for path, _ in nnx.to_flat_state(nnx.state(_model()))}
  assert paths == {key.path for key in DIT_KEYS}
  assert TensorKey("a", "b").transform.to_ours(np.ones(2)).shape == (2,)
