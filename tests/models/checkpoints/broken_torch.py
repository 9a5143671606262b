"""Broken and hostile transformers in torch files."""

import os
import pickle
import struct
import zipfile

import numpy as np

from tests.models.checkpoints.broken import STATE, lister
from tests.models.checkpoints.files import (
  global_name,
  integer,
  patched,
  pickle_of,
  rezipped,
  save_torch,
  text,
)

CASES = {}
case = lister(CASES)


class Code:
  """Pickles as a call."""

  def __init__(self, function, *arguments):
    self.call = (function, arguments)

  def __reduce__(self):
    return self.call


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
