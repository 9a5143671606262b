"""Broken transformers in safetensors files and folders of them."""

import json
import struct

import numpy as np

from models.checkpoints.lora import write_lora
from models.wan.umt5_keys import UMT5_KEYS
from models.wan.vae_keys import vae_keys
from tests.models.checkpoints.broken import LORA, LORA_CONFIG, STATE, VAE, changed, lister
from tests.models.checkpoints.files import (
  BFLOAT16,
  patched,
  save,
  save_index,
  save_shards,
)

CASES = {}
case = lister(CASES)


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
  names = {key.official: np.zeros(1, np.float32) for key in vae_keys(VAE)}
  return save(folder / "a.safetensors", names)


@case("holds a UMT5 encoder, and a Wan transformer is needed")
def a_text_encoder(folder):
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
