"""Weights and adapters through every layout, bit by bit; placement; memory; what inspect sees."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh

from models.checkpoints import lora as lora_files
from models.checkpoints.convert import convert
from models.checkpoints.describe import describe
from models.checkpoints.families import DIT, FAMILIES, UMT5, VAE
from models.checkpoints.fit import ranges
from models.checkpoints.identify import identify
from models.checkpoints.opening import open_checkpoint
from models.checkpoints.stored import StoredTensor
from models.checkpoints.wan import load_dit, load_umt5, load_vae
from models.checkpoints.write import NewTensor, write_shards
from models.layers.lora import TARGETS, LoRAConfig, init_lora, lora_shapes, merge_lora
from models.wan.sharding import kernel_spec
from models.wan.umt5 import UMT5Config
from models.wan.vae import VAEConfig
from models.weights import parameters, slots
from tests.models.checkpoints.files import (
  BFLOAT16,
  CFG,
  dit_state,
  new_tensors,
  save,
  save_shards,
  save_torch,
)

VAE_TINY = VAEConfig("tiny", base_dim=4, z_dim=4, dim_mult=(1, 2, 2, 2), num_res_blocks=1)
UMT5_TINY = UMT5Config(10, 8, 8, 2, 4, 12, 2)
CONFIGS = {DIT: CFG, VAE: VAE_TINY, UMT5: UMT5_TINY}
PUBLISHED = [  # family, layout, preset, tensors in the published files
  (DIT, "official", "wan2.1-1.3b", 825),
  (DIT, "diffusers", "wan2.1-1.3b", 825),
  (DIT, "official", "wan2.1-14b", 1095),
  (DIT, "official", "wan2.2-ti2v-5b", 825),
  (VAE, "official", "wan2.1", 194),
  (VAE, "diffusers", "wan2.1", 194),
  (UMT5, "official", "umt5-xxl", 242),
  (UMT5, "huggingface", "umt5-xxl", 242),
]
PARAMETERS = {
  "wan2.1-1.3b": 1_418_996_800,
  "wan2.2-ti2v-5b": 4_999_787_712,
  "umt5-xxl": 5_680_910_336,
}


def _official(family) -> dict[str, np.ndarray]:
  """Random tensors of a tiny model under official names, in bfloat16 and float32 by turns."""
  like = family.like(CONFIGS[family])
  found = slots(family.layouts[0].table(CONFIGS[family]), {n: a.shape for n, a in like.items()})
  random = np.random.default_rng(0)
  return {
    name: random.standard_normal(slot.official_shape).astype((np.float32, BFLOAT16)[i % 2])
    for i, (name, slot) in enumerate(found.items())
  }


def _bits(path: pathlib.Path) -> dict[str, tuple]:
  (tensors,) = open_checkpoint(path).parts.values()
  return {
    n: (t.dtype, t.shape, np.ascontiguousarray(t.view()).tobytes()) for n, t in tensors.items()
  }


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_there_and_back_keeps_every_bit(tmp_path, family):
  config = CONFIGS[family]
  first = save(tmp_path / "a.safetensors", _official(family))
  for layout in family.layouts[1:]:
    convert(first, tmp_path / "b", family, config, layout.name, max_shard_bytes=2000)
    convert(tmp_path / "b", tmp_path / "c", family, config, family.layouts[0].name)
    there, back = _bits(tmp_path / "b"), _bits(tmp_path / "c")
    assert back == _bits(first)
    assert there.keys() != back.keys()
    assert sorted(there.values()) == sorted(back.values())
    assert len(list((tmp_path / "b").glob("*.safetensors"))) >= 3


@pytest.mark.parametrize(
  ("family", "load"),
  [(DIT, load_dit), (VAE, load_vae), (UMT5, load_umt5)],
  ids=lambda v: str(v)[:9],
)
def test_all_containers_load_to_the_same_arrays(tmp_path, family, load):
  config, state = CONFIGS[family], _official(family)
  one = save(tmp_path / "a.safetensors", state)
  save_shards(tmp_path / "shards", state)
  other = family.layouts[1].name
  convert(one, tmp_path / "renamed", family, config, other)
  paths = [tmp_path / "shards", tmp_path / "renamed"]
  paths.append(save_torch(tmp_path / "a.pth", **{"": state}))
  wanted = parameters(load(one, config))
  for path in paths:
    for name, array in parameters(load(path, config)).items():
      np.testing.assert_array_equal(array, wanted[name], err_msg=f"{path} {name}")


@pytest.mark.parametrize(("family", "layout", "preset", "count"), PUBLISHED)
def test_published_files_are_recognised(family, layout, preset, count):
  """By names and shapes of the full sizes; the elements would take gigabytes and are not there."""
  config = family.presets[preset]
  shapes = {n: a.shape for n, a in family.like(config).items()}
  table = slots(family.layout(layout).table(config), shapes)
  nothing = np.zeros(0, np.uint8)
  tensors = {n: StoredTensor(s.official_shape, "bfloat16", nothing, 0) for n, s in table.items()}
  found = identify(tensors)
  assert found is not None
  assert (found.family, found.layout.name) == (family, layout)
  assert preset in found.presets
  assert len(tensors) == count
  elements = sum(tensor.size for tensor in tensors.values())
  assert elements == PARAMETERS.get(preset, elements)


def test_a_part_is_chosen_by_name_or_because_it_is_the_only_one(tmp_path):
  first, second = dit_state(1), dit_state(2)
  wrapped = {f"model.{n.replace('blocks.1', 'blocks.1._orig_mod')}": v for n, v in second.items()}
  both = save_torch(tmp_path / "a.pt", generator=first, generator_ema=wrapped, critic=first)
  ema = parameters(load_dit(both, CFG, part="generator_ema"))
  np.testing.assert_array_equal(ema["head.kernel"], second["head.head.weight"].T)
  only = save_torch(tmp_path / "b.pt", generator=first, critic=second)
  loaded = parameters(load_dit(only, CFG))
  np.testing.assert_array_equal(loaded["head.kernel"], first["head.head.weight"].T)


def test_a_repeated_table_must_be_equal(tmp_path):
  convert(
    save(tmp_path / "a.safetensors", _official(UMT5)),
    tmp_path / "b",
    UMT5,
    UMT5_TINY,
    "huggingface",
  )
  (tensors,) = open_checkpoint(tmp_path / "b").parts.values()
  state = {n: np.ascontiguousarray(t.view()) for n, t in tensors.items()}
  state["encoder.embed_tokens.weight"] = state["shared.weight"].copy()
  wanted = parameters(load_umt5(tmp_path / "b", UMT5_TINY))["token_embedding"]
  tied = load_umt5(save(tmp_path / "tied.safetensors", state), UMT5_TINY)
  np.testing.assert_array_equal(parameters(tied)["token_embedding"], wanted)
  state["encoder.embed_tokens.weight"][3, 3] += 1
  with pytest.raises(ValueError, match=r"different values in .*embed_tokens"):
    load_umt5(save(tmp_path / "untied.safetensors", state), UMT5_TINY)
  del state["shared.weight"]
  load_umt5(save(tmp_path / "other.safetensors", state), UMT5_TINY)


def test_each_device_holds_its_share(tmp_path):
  path = save(tmp_path / "a.safetensors", dit_state())
  mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("fsdp", "seq"))
  cut, whole = (
    parameters(load_dit(path, CFG, param_dtype="bfloat16", mesh=m)) for m in (mesh, None)
  )
  for name, array in cut.items():
    assert array.sharding.spec == kernel_spec(array.shape, 2), name
    np.testing.assert_array_equal(array, whole[name])
  assert cut["head.bias"].dtype == jnp.bfloat16
  assert cut["blocks.ffn.up.kernel"].addressable_shards[0].data.shape == (3, 12, 10)


def test_merging_into_a_file_is_merging_into_the_model(tmp_path):
  path = save(tmp_path / "a.safetensors", dit_state())
  config = LoRAConfig(2, 3.0, ("*attn.[qo]", "ffn.*"))
  lora = jax.tree.map(lambda a: a + 0.1, init_lora(config, CFG, nnx.Rngs(0).params()))
  convert(path, tmp_path / "b", DIT, CFG, "diffusers", lora=lora, lora_scale=config.scale)
  graphdef, state = nnx.split(load_dit(path, CFG))
  wanted = parameters(nnx.merge(graphdef, merge_lora(state, lora, config.scale)))
  merged = parameters(load_dit(tmp_path / "b", CFG))
  for name, array in merged.items():
    np.testing.assert_allclose(array, wanted[name], rtol=1e-6, atol=1e-7, err_msg=name)
  assert (
    jnp.abs(
      merged["blocks.ffn.up.kernel"] - parameters(load_dit(path, CFG))["blocks.ffn.up.kernel"]
    ).max()
    > 0.01
  )


@settings(max_examples=6, deadline=None)
@given(
  layout=st.sampled_from(lora_files.LAYOUTS),
  rank=st.sampled_from([1, 3]),
  alpha=st.sampled_from([0.5, 1.0, 16.0]),
  targets=st.lists(st.sampled_from(TARGETS), min_size=1, max_size=10, unique=True),
)
def test_adapters_keep_every_bit(tmp_path_factory, layout, rank, alpha, targets):
  path = tmp_path_factory.mktemp("lora") / "a"
  config = LoRAConfig(rank, alpha, tuple(targets))
  random = np.random.default_rng(rank)
  lora = {
    target: {x: random.standard_normal(shape).astype(np.float32) for x, shape in pair.items()}
    for target, pair in lora_shapes(config, CFG).items()
  }
  lora_files.write_lora(path, lora, config, layout)
  back, found = lora_files.read_lora(path, CFG, alpha=alpha)
  assert (found.rank, found.alpha, found.resolved) == (rank, alpha, config.resolved)
  for target, pair in lora.items():
    for letter, array in pair.items():
      np.testing.assert_array_equal(back[target][letter], array)


def test_equal_weights_are_equal_files(tmp_path):
  for name in "ab":
    save_torch(tmp_path / f"{name}.pt", generator=dit_state())
  assert (tmp_path / "a.pt").read_bytes() == (tmp_path / "b.pt").read_bytes()


def test_shards_that_failed_leave_nothing(tmp_path):
  def late() -> np.ndarray:
    raise ValueError("no more")

  tensors = [*new_tensors({"a": np.ones(9, np.float32)}), NewTensor("b", (9,), "float32", late)]
  with pytest.raises(ValueError, match="no more"):
    write_shards(tmp_path, "model", tensors, 40)
  assert not list(tmp_path.iterdir())


def test_inspection_tells_parts_problems_and_values(tmp_path):
  state = dit_state()
  bad = {**state, "head.head.bias": np.full(16, np.nan, np.float32)}
  found = describe(
    save_torch(tmp_path / "a.pt", generator=state, other={"x": state["head.head.bias"]})
  )
  generator, other = found.parts
  assert (generator.kind, generator.layout, generator.tensors) == (
    "Wan transformer",
    "official",
    96,
  )
  assert generator.presets == ()  # it is of no published size
  assert "closest is digits" in (generator.reason or "")
  assert "blocks.{3-5}.modulation" in (generator.reason or "")
  assert (other.kind, other.reason) == ("unknown", "tensors of no known model (x)")
  assert found.reason is not None
  assert describe(save(tmp_path / "b.safetensors", bad)).parts[0].dtypes == ("float32",)


def test_equal_names_of_many_layers_are_written_once():
  names = [f"blocks.{i}.norm3.bias" for i in (0, 1, 2, 7)] + ["head.bias", "blocks.4.q"]
  assert ranges(names) == ["blocks.{0-2,7}.norm3.bias", "head.bias", "blocks.4.q"]
