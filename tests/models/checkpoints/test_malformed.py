"""Broken and hostile checkpoints: each ends in one sentence that says what is wrong, at once, and
leaves nothing behind.
"""

import gc
import json
import os
import pathlib
import pickle
import struct
import time
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.checkpoints.convert import convert
from models.checkpoints.families import DIT
from models.checkpoints.lora import CONFIG_FILE, WEIGHTS_FILE, read_lora, write_lora
from models.checkpoints.wan import load_dit, load_umt5, load_vae
from models.layers.lora import LoRAConfig, init_lora
from models.wan.umt5 import UMT5Config
from models.wan.vae import VAEConfig
from tests.models.checkpoints.files import (
  BFLOAT16,
  CFG,
  dit_state,
  global_name,
  integer,
  patched,
  pickle_of,
  rezipped,
  save,
  save_index,
  save_shards,
  save_torch,
  text,
)

STATE = dit_state()
VAE = VAEConfig("tiny", base_dim=4, z_dim=4, dim_mult=(1, 2, 2, 2), num_res_blocks=1)
UMT5 = UMT5Config(10, 8, 8, 2, 4, 12, 2)
LIMIT_S = 5.0  # of processor time, so that a busy machine does not count

CASES = {}


def case(match: str):
  """Registers a function that writes a broken transformer checkpoint and gives its path."""

  def register(build):
    CASES[build.__name__] = (build, match)
    return build

  return register


def changed(**changes) -> dict[str, np.ndarray]:
  """The good tensors with some replaced (double underscores stand for dots), None dropping one."""
  renamed = {name.replace("__", "."): value for name, value in changes.items()}
  return {n: v for n, v in {**STATE, **renamed}.items() if v is not None}


class Code:
  """Pickles as a call."""

  def __init__(self, function, *arguments):
    self.call = (function, arguments)

  def __reduce__(self):
    return self.call


# Safetensors, one file.


@case("is empty")
def empty_file(folder):
  (folder / "a.safetensors").write_bytes(b"")
  return folder / "a.safetensors"


@case("cannot be read as a safetensors file")
def cut_in_the_header(folder):
  path = save(folder / "a.safetensors", STATE)
  path.write_bytes(path.read_bytes()[:300])
  return path


@case("cannot be read as a safetensors file")
def cut_in_the_data(folder):
  path = save(folder / "a.safetensors", STATE)
  path.write_bytes(path.read_bytes()[:-3])
  return path


@case("cannot be read as a safetensors file")
def longer_than_its_header_says(folder):
  path = save(folder / "a.safetensors", STATE)
  path.write_bytes(path.read_bytes() + b"\0" * 16)
  return path


@case("cannot be read as a safetensors file")
def header_of_an_exabyte(folder):
  path = save(folder / "a.safetensors", STATE)
  path.write_bytes(struct.pack("<Q", 1 << 60) + path.read_bytes()[8:])
  return path


@case("cannot be read as a safetensors file")
def header_that_is_no_json(folder):
  path = save(folder / "a.safetensors", STATE)
  return patched(path, b'"dtype"', b"'dtype'")


@case("cannot be read as a safetensors file")
def random_bytes(folder):
  (folder / "a.safetensors").write_bytes(np.random.default_rng(0).bytes(5000))
  return folder / "a.safetensors"


@case("cannot be read as a safetensors file")
def a_web_page(folder):
  (folder / "a.safetensors").write_text("<!DOCTYPE html><title>Access denied</title>" * 9)
  return folder / "a.safetensors"


@case("name twice|cannot be read as a safetensors file")
def a_name_twice_in_the_header(folder):
  path = save(folder / "a.safetensors", STATE)
  return patched(path, b'"blocks.0.cross_attn.k.bias"', b'"blocks.1.cross_attn.k.bias"')


@case("cannot be read as a safetensors file")
def tensors_in_one_place(folder):
  path = save(folder / "a.safetensors", STATE)
  length = struct.unpack("<Q", path.read_bytes()[:8])[0]
  header = json.loads(path.read_bytes()[8 : 8 + length])
  begin, end = header["blocks.1.norm3.bias"]["data_offsets"]
  old = f'"data_offsets":[{begin},{end}]'.encode()
  width = end - begin
  return patched(path, old, f'"data_offsets":[{begin - width},{end - width}]'.encode())


@case(r"of a type that no weight has: blocks\.0\.ffn\.0\.weight \(int8\)")
def quantised_weights(folder):
  wide = STATE["blocks.0.ffn.0.weight"]
  return save(folder / "a.safetensors", changed(blocks__0__ffn__0__weight=wide.astype(np.int8)))


@case(r"of a type that no weight has: .*\(float64\)")
def double_precision(folder):
  wide = {name: value.astype(np.float64) for name, value in STATE.items()}
  return save(folder / "a.safetensors", wide)


@case(r"^head\.head\.bias of .* has a value that is not finite")
def a_nan(folder):
  bias = STATE["head.head.bias"].copy()
  bias[3] = np.nan
  return save(folder / "a.safetensors", changed(head__head__bias=bias))


@case(r"^blocks\.2\.self_attn\.q\.weight of .* has a value that is not finite")
def an_infinity_in_a_stacked_tensor(folder):
  kernel = STATE["blocks.2.self_attn.q.weight"].astype(BFLOAT16)
  kernel[1, 1] = -np.inf
  return save(folder / "a.safetensors", changed(**{"blocks.2.self_attn.q.weight": kernel}))


@case(r"does not fit the model; missing: blocks\.1\.norm3\.bias\.$")
def a_missing_tensor(folder):
  return save(folder / "a.safetensors", changed(blocks__1__norm3__bias=None))


@case(r"missing: blocks\.2\.modulation, blocks\.2\.self_attn\.q\.weight")
def a_missing_block(folder):
  state = {n: v for n, v in STATE.items() if not n.startswith("blocks.2.")}
  return save(folder / "a.safetensors", state)


@case(r"does not fit the model; unknown: blocks\.0\.self_attn\.extra\.$")
def an_unknown_tensor(folder):
  state = changed(blocks__0__self_attn__extra=np.zeros(3, np.float32))
  return save(folder / "a.safetensors", state)


@case(r"unknown: .*blocks\.3\.modulation, ")
def one_block_too_many(folder):
  more = {n.replace("blocks.2.", "blocks.3."): v for n, v in STATE.items()}
  return save(folder / "a.safetensors", {**STATE, **more})


@case(r"tensors of no known model \(net\.")
def an_unknown_prefix(folder):
  return save(folder / "a.safetensors", {f"net.{name}": value for name, value in STATE.items()})


@case(r"misshapen: blocks\.0\.ffn\.0\.weight \(\[12, 20\], needs \[20, 12\]\)")
def a_transposed_kernel(folder):
  kernel = np.ascontiguousarray(STATE["blocks.0.ffn.0.weight"].T)
  return save(folder / "a.safetensors", changed(blocks__0__ffn__0__weight=kernel))


@case(r"misshapen: patch_embedding\.weight \(\[12, 24\], needs \[12, 6, 1, 2, 2\]\)")
def a_flattened_patch_embedding(folder):
  kernel = STATE["patch_embedding.weight"].reshape(12, 24)
  return save(folder / "a.safetensors", changed(patch_embedding__weight=kernel))


@case(r"misshapen: blocks\.\{0-2\}\.modulation \(\[6, 12\], needs \[1, 6, 12\]\)")
def modulation_without_its_axis(folder):
  state = {n: v[0] if n.endswith("modulation") else v for n, v in STATE.items()}
  return save(folder / "a.safetensors", state)


@case(r"unknown: model\._fsdp_wrapped_module\.head\.head\.bias|unknown: head\.head\.bias")
def a_tensor_under_two_wrapped_names(folder):
  state = {**STATE, "model._fsdp_wrapped_module.head.head.bias": STATE["head.head.bias"]}
  return save(folder / "a.safetensors", state)


@case("holds a Wan VAE, and a Wan transformer is needed")
def a_vae(folder):
  from models.wan.vae_keys import vae_keys

  names = {key.official: np.zeros(1, np.float32) for key in vae_keys(VAE)}
  return save(folder / "a.safetensors", names)


@case("holds a UMT5 encoder, and a Wan transformer is needed")
def a_text_encoder(folder):
  from models.wan.umt5_keys import UMT5_KEYS

  names = [key.official.format(layer=i) for key in UMT5_KEYS for i in range(2)]
  return save(folder / "a.safetensors", dict.fromkeys(names, np.zeros(1, np.float32)))


@case("tensors of no known model")
def an_adapter(folder):
  write_lora(folder / "a.safetensors", LORA, LORA_CONFIG, "diffusers")
  return folder / "a.safetensors"


@case(r"missing: .*blocks\.\{0-2\}\.attn1\.to_q\.weight.*unknown: |missing: .*unknown: ")
def two_layouts_mixed(folder):
  state = {n.replace("self_attn.q", "attn1.to_q"): v for n, v in STATE.items()}
  return save(folder / "a.safetensors", state)


@case("tensors of no known model")
def no_tensors(folder):
  return save(folder / "a.safetensors", {})


# Folders of safetensors.


@case("names files that are not there: model-00002-of-00003")
def a_missing_shard(folder):
  save_shards(folder, STATE)[1].unlink()
  return folder


@case("missing are 3")
def a_missing_shard_without_index(folder):
  save_shards(folder, STATE)[2].unlink()
  (folder / "model.safetensors.index.json").unlink()
  return folder


@case("cannot be read as a safetensors file")
def a_cut_shard(folder):
  path = save_shards(folder, STATE)[1]
  path.write_bytes(path.read_bytes()[:-1])
  return folder


@case("is no file beside it")
def an_index_that_leads_out(folder):
  outside = save(folder / "secret.safetensors", STATE)
  (folder / "in").mkdir()
  save_index(folder / "in", dict.fromkeys(STATE, f"../{outside.name}"))
  return folder / "in"


@case("cannot be read as an index")
def an_index_that_is_no_json(folder):
  save_shards(folder, STATE)
  save_index(folder, "{")
  return folder


@case("cannot be read as an index")
def an_index_of_lists(folder):
  save_shards(folder, STATE)
  save_index(folder, [1, 2])
  return folder


@case("cannot be read as an index")
def an_index_nested_too_deep(folder):
  save_shards(folder, STATE)
  save_index(folder, "[" * 100_000)
  return folder


@case(r"lacks blocks\.9\.x")
def a_tensor_that_is_not_in_its_shard(folder):
  files = save_shards(folder, STATE)
  index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
  save_index(folder, {**index, "blocks.9.x": files[0].name})
  return folder


@case("has also")
def a_shard_with_more_than_the_index(folder):
  save_shards(folder, STATE)
  index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
  del index["head.head.bias"]
  save_index(folder, index)
  return folder


@case("which another file there has too")
def a_tensor_in_two_files(folder):
  save(folder / "a.safetensors", STATE)
  save(folder / "b.safetensors", {"head.head.bias": STATE["head.head.bias"]})
  return folder


@case("2 index files")
def two_indices(folder):
  save_shards(folder, STATE)
  save_index(folder, {})
  (folder / "other.safetensors.index.json").write_text("{}")
  return folder


@case(r"holds no \.safetensors file")
def an_empty_folder(folder):
  return folder


@case("does not exist")
def nothing_at_all(folder):
  return folder / "absent.pt"


# Torch files.


@case("would import and run 'posix.system'")
def code_in_a_torch_file(folder):
  path = save_torch(folder / "a.pt", generator=STATE)
  harm = pickle.dumps({"a": Code(os.system, f"touch {folder}/harm")}, protocol=2)
  return rezipped(path, {"data.pkl": harm})


@case("would import and run 'builtins.eval'")
def code_by_the_newer_opcode(folder):
  path = save_torch(folder / "a.pt", generator=STATE)
  harm = pickle.dumps({"a": Code(eval, f"open('{folder}/harm', 'w')")}, protocol=4)
  return rezipped(path, {"data.pkl": harm})


@case(r"would import and run 'torch\.hub\.load'")
def code_of_torch_itself(folder):
  path = save_torch(folder / "a.pt", generator=STATE)
  program = pickle.PROTO + b"\x02" + global_name("torch.hub", "load") + pickle.STOP
  return rezipped(path, {"data.pkl": program})


@case("would import and run 'argparse.Namespace'")
def an_object_beside_the_weights(folder):
  import argparse

  path = save_torch(folder / "a.pt", generator=STATE)
  return rezipped(path, {"data.pkl": pickle.dumps(argparse.Namespace(lr=1), protocol=2)})


@case("would import and run 'posix.system'")
def code_in_a_bare_pickle(folder):
  (folder / "a.pt").write_bytes(pickle.dumps(Code(os.system, f"touch {folder}/harm")))
  return folder / "a.pt"


@case("before torch 1.6")
def a_bare_pickle(folder):
  (folder / "a.pt").write_bytes(pickle.dumps({"a": [1, 2]}))
  return folder / "a.pt"


@case("is no torch file|cannot be read as a safetensors file")
def a_text_as_torch_file(folder):
  (folder / "a.pt").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\n")
  return folder / "a.pt"


@case("compressed entry")
def a_zip_bomb(folder):
  path = save_torch(folder / "a.pt", generator=STATE)
  return rezipped(path, {"data/0": b"\0" * 50_000_000}, zipfile.ZIP_DEFLATED)


@case("in the same place")
def entries_in_one_place(folder):
  path = save_torch(folder / "a.pt", generator=STATE)
  content = bytearray(path.read_bytes())
  first = content.find(b"PK\x01\x02")
  second = content.find(b"PK\x01\x02", first + 4)
  content[second + 42 : second + 46] = content[first + 42 : first + 46]
  path.write_bytes(content)
  return path


@case("lists .* entries")
def a_list_of_entries_without_end(folder):
  path = save_torch(folder / "a.pt", generator=STATE)
  content = path.read_bytes()
  at = content.rfind(b"PK\x05\x06")
  end = content[: at + 12] + struct.pack("<L", 0xFFFFFFF0) + content[at + 16 :]
  path.write_bytes(end)
  return path


@case("encrypted entry|damaged")
def an_encrypted_entry(folder):
  path = save_torch(folder / "a.pt", generator=STATE)
  content = bytearray(path.read_bytes())
  content[content.find(b"PK\x01\x02") + 8] |= 1
  path.write_bytes(content)
  return path


@case("truncated")
def a_cut_torch_file(folder):
  path = save_torch(folder / "a.pt", generator=STATE)
  path.write_bytes(path.read_bytes()[:-100])
  return path


@case("truncated|damaged")
def a_torch_file_without_its_middle(folder):
  path = save_torch(folder / "a.pt", generator=STATE)
  content = path.read_bytes()
  path.write_bytes(content[:2000] + content[4000:])
  return path


@case("has 8 bytes in the entry 'data/0'")
def a_storage_of_another_size(folder):
  path = save_torch(folder / "a.pt", generator=STATE)
  return rezipped(path, {"data/0": b"\0" * 8})


@case("lacks the entry 'data/5'")
def a_missing_storage(folder):
  return rezipped(save_torch(folder / "a.pt", generator=STATE), {"data/5": None})


@case("reaches past its storage")
def a_tensor_larger_than_its_storage(folder):
  path = save_torch(folder / "a.pt", generator=STATE)
  size = STATE["patch_embedding.weight"].size
  program = pickle_of(path).replace(text("cpu") + integer(size), text("cpu") + integer(size - 1), 1)
  return rezipped(path, {"data.pkl": program, "data/0": b"\0" * 4 * (size - 1)})


@case("reaches past its storage")
def a_tensor_that_repeats_one_element(folder):
  path = save_torch(folder / "a.pt", generator={"a": np.zeros((4, 5), np.float32)})
  huge = pickle.MARK + integer(1 << 40) + integer(1 << 20) + pickle.TUPLE
  none = pickle.MARK + integer(0) + integer(0) + pickle.TUPLE
  program = pickle_of(path)
  program = program.replace(pickle.MARK + integer(4) + integer(5) + pickle.TUPLE, huge)
  return rezipped(
    path,
    {"data.pkl": program.replace(pickle.MARK + integer(5) + integer(1) + pickle.TUPLE, none)},
  )


@case("unknown shape")
def a_negative_stride(folder):
  path = save_torch(folder / "a.pt", generator={"a": np.zeros((4, 5), np.float32)})
  old = pickle.MARK + integer(5) + integer(1) + pickle.TUPLE
  new = pickle.MARK + integer(-5) + integer(1) + pickle.TUPLE
  return rezipped(path, {"data.pkl": pickle_of(path).replace(old, new)})


@case(r"would import and run 'torch\._utils\._rebuild_qtensor'")
def a_quantised_tensor(folder):
  path = save_torch(folder / "a.pt", generator=STATE)
  program = pickle_of(path).replace(b"_rebuild_tensor_v2", b"_rebuild_qtensor")
  return rezipped(path, {"data.pkl": program})


@case("would import and run 'torch.QInt8Storage'")
def a_storage_of_unknown_type(folder):
  path = save_torch(folder / "a.pt", generator=STATE)
  return rezipped(path, {"data.pkl": pickle_of(path).replace(b"FloatStorage", b"QInt8Storage")})


@case(r"of a type that no weight has: .*\(int32\)")
def integers_in_a_torch_file(folder):
  path = save_torch(folder / "a.pt", generator=STATE)
  return rezipped(path, {"data.pkl": pickle_of(path).replace(b"FloatStorage", b"IntStorage")})


@case("dictionary key of type tuple")
def a_key_that_takes_for_ever_to_hash(folder):
  nested = pickle.EMPTY_TUPLE
  for i in range(60):
    nested += pickle.BINPUT + bytes([i]) + pickle.BINGET + bytes([i]) + pickle.TUPLE2
  program = pickle.EMPTY_DICT + pickle.MARK + nested + pickle.NONE + pickle.SETITEMS + pickle.STOP
  return rezipped(save_torch(folder / "a.pt", generator=STATE), {"data.pkl": program})


@case("describes more than")
def a_small_pickle_of_a_large_tree(folder):
  tree = {}
  for _ in range(3):
    tree = {str(i): tree for i in range(400)}
  program = pickle.dumps(tree, protocol=2)
  return rezipped(save_torch(folder / "a.pt", generator=STATE), {"data.pkl": program})


@case("pickle without an end|damaged pickle")
def a_cut_pickle(folder):
  path = save_torch(folder / "a.pt", generator=STATE)
  return rezipped(path, {"data.pkl": pickle_of(path)[:-40]})


@case("damaged pickle")
def a_pickle_that_pops_too_much(folder):
  path = save_torch(folder / "a.pt", generator=STATE)
  return rezipped(path, {"data.pkl": pickle.POP * 3 + pickle.STOP})


@case("uses the pickle opcode")
def a_pickle_of_a_persistent_text(folder):
  path = save_torch(folder / "a.pt", generator=STATE)
  return rezipped(path, {"data.pkl": b"Psomewhere\n" + pickle.STOP})


@case("more than .* bytes|more than .* opcodes")
def a_pickle_of_a_million_zeros(folder):
  path = save_torch(folder / "a.pt", generator=STATE)
  return rezipped(path, {"data.pkl": pickle.NONE * (17 << 20) + pickle.STOP})


@case("damaged or truncated")
def a_pickle_with_a_wrong_checksum(folder):
  path = save_torch(folder / "a.pt", generator=STATE)
  return patched(path, b"head.head.bias", b"head.head.bixs")


@case("no single data.pkl")
def a_zip_archive_of_something_else(folder):
  with zipfile.ZipFile(folder / "a.pt", "w") as archive:
    archive.writestr("readme.txt", "nothing")
  return folder / "a.pt"


@case("TorchScript")
def a_torchscript_archive(folder):
  path = save_torch(folder / "a.pt", generator=STATE)
  return rezipped(path, {"constants.pkl": b"\x80\x02).", "code/a.py": b"pass"})


@case("byte order b'big'")
def another_byte_order(folder):
  return rezipped(save_torch(folder / "a.pt", generator=STATE), {"byteorder": b"big"})


@case("holds no tensors by name")
def a_torch_file_of_numbers(folder):
  path = save_torch(folder / "a.pt", generator=STATE)
  return rezipped(path, {"data.pkl": pickle.dumps({"step": 3, "loss": [0.1]}, protocol=2)})


@case("'generator', 'generator_ema'; name the part")
def two_generators(folder):
  return save_torch(folder / "a.pt", generator=STATE, generator_ema=STATE, critic=STATE)


@case("no part that is a Wan transformer: 'critic', 'optimizer'")
def a_critic_only(folder):
  return save_torch(folder / "a.pt", critic=STATE, optimizer={"exp_avg": np.zeros(3, np.float32)})


@case(r"unknown: model\.model\.head\.head\.bias|tensors of no known model")
def a_prefix_twice(folder):
  return save_torch(folder / "a.pt", generator={f"model.model.{n}": v for n, v in STATE.items()})


@case(r"^model\.head\.head\.bias of .* has a value that is not finite")
def a_nan_in_a_torch_file(folder):
  state = {f"model.{n}": v for n, v in STATE.items()}
  path = save_torch(folder / "a.pt", generator=state)
  bias = STATE["head.head.bias"].tobytes()
  content = path.read_bytes()
  at = content.find(bias)
  path.write_bytes(content[:at] + struct.pack("<f", np.nan) + content[at + 4 :])
  return path


@pytest.mark.parametrize("name", CASES)
def test_a_broken_transformer_is_refused(tmp_path, name):
  build, match = CASES[name]
  path = build(tmp_path)
  before = sorted(p for p in tmp_path.rglob("*"))
  alive = len(jax.live_arrays())
  start_s = time.process_time()
  with pytest.raises(ValueError, match=match) as error:
    load_dit(path, CFG)
  assert time.process_time() - start_s < LIMIT_S
  assert "\n" not in str(error.value)
  # A command says the same, and writes nothing.
  with pytest.raises(ValueError, match=match):
    convert(path, tmp_path / "out", DIT, CFG, "diffusers", max_shard_bytes=20_000)
  assert not list((tmp_path / "out").rglob("*"))
  assert [p for p in sorted(tmp_path.rglob("*")) if p.name != "out"] == before
  assert not (tmp_path / "harm").exists()
  del error
  gc.collect()
  assert len(jax.live_arrays()) == alive


def test_there_are_fifty_of_them():
  assert len(CASES) >= 50


def test_a_value_that_overflows_the_type_is_refused(tmp_path):
  kernel = STATE["head.head.bias"] * 1e9
  path = save(tmp_path / "a.safetensors", changed(head__head__bias=kernel))
  load_dit(path, CFG)
  with pytest.raises(ValueError, match=r"head\.head\.bias of .* not finite in float16"):
    load_dit(path, CFG, param_dtype=jnp.float16)


def test_an_unknown_part_is_refused(tmp_path):
  path = save_torch(tmp_path / "a.pt", generator=STATE)
  with pytest.raises(ValueError, match="has no part 'ema'; it has 'generator'"):
    load_dit(path, CFG, part="ema")


def test_a_transformer_is_no_vae_and_no_text_encoder(tmp_path):
  path = save(tmp_path / "a.safetensors", STATE)
  with pytest.raises(ValueError, match="holds a Wan transformer, and a Wan VAE is needed"):
    load_vae(path, VAE)
  with pytest.raises(ValueError, match="holds a Wan transformer, and a UMT5 encoder is needed"):
    load_umt5(path, UMT5)


# Adapters.

LORA_CONFIG = LoRAConfig(2, 4.0, ("self_attn.*", "ffn.2"))
LORA = init_lora(LORA_CONFIG, CFG, nnx.Rngs(0).params())


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
