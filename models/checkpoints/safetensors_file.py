"""Reads safetensors, one file or the shards of a folder, as mapped tensors.

The safetensors library checks a file's header against the file; where tensors lie is then taken
from the same header, because the library's numpy interface would copy each tensor into memory.
"""

import json
import pathlib
import re
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from models.checkpoints.stored import Checkpoint, StoredTensor, map_file

_DTYPES = {
  "F32": "float32",
  "F16": "float16",
  "BF16": "bfloat16",
  "F64": "float64",
  "F8_E4M3": "float8_e4m3fn",
  "F8_E5M2": "float8_e5m2",
  "I64": "int64",
  "I32": "int32",
  "I16": "int16",
  "I8": "int8",
  "U8": "uint8",
  "BOOL": "bool",
}
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.safetensors$")


def open_safetensors(path: pathlib.Path) -> Checkpoint:
  """Opens one file.

  Raises:
    ValueError: when it is no whole safetensors file, or has a type that has no use here.
  """
  tensors, facts = _read(path)
  return Checkpoint(str(path), "safetensors", {"": tensors}, facts)


def open_shards(path: pathlib.Path) -> Checkpoint:
  """Opens a folder of safetensors files, or the index file of one.

  With an index (`*.safetensors.index.json`) exactly its files and tensors are taken. Without, all
  files are, and numbered ones must be complete.

  Raises:
    ValueError: for a missing shard, a tensor that is not where the index says or twice, and as
      `open_safetensors`.
  """
  if path.is_dir():
    indices = sorted(path.glob("*.safetensors.index.json"))
    if len(indices) > 1:
      raise ValueError(f"{path} has {len(indices)} index files; name one of them.")
    if not indices:
      return _without_index(path)
    index = indices[0]
  else:
    index = path
  wanted = _index(index)
  tensors: dict[str, StoredTensor] = {}
  facts: dict[str, Any] = {}
  by_file: dict[str, set[str]] = {}
  for name, file in wanted.items():
    by_file.setdefault(file, set()).add(name)
  missing = sorted(file for file in by_file if not (index.parent / file).is_file())
  if missing:
    raise ValueError(f"{index} names files that are not there: {', '.join(missing)}; fetch them.")
  for file, names in sorted(by_file.items()):
    found, _ = _read(index.parent / file)
    lacking = sorted(names - found.keys())
    surplus = sorted(found.keys() - names)
    if lacking or surplus:
      what = f"lacks {', '.join(lacking)}" if lacking else f"has also {', '.join(surplus)}"
      raise ValueError(f"{index.parent / file} {what}, unlike its index says; fetch both again.")
    tensors.update(found)
  return Checkpoint(str(path), "sharded safetensors", {"": tensors}, facts)


def _without_index(folder: pathlib.Path) -> Checkpoint:
  files = sorted(folder.glob("*.safetensors"))
  if not files:
    raise ValueError(f"{folder} holds no .safetensors file; name a file or a folder that has some.")
  numbered = [match for file in files if (match := _SHARD.search(file.name))]
  if numbered:
    total = {int(match[2]) for match in numbered}
    present = {int(match[1]) for match in numbered}
    absent = sorted(set(range(1, max(total) + 1)) - present)
    if absent or len(total) > 1 or len(numbered) < len(files):
      raise ValueError(
        f"{folder} has {len(files)} files where {max(total)} shards are numbered; missing are "
        f"{', '.join(map(str, absent)) or 'none, so remove the others'}."
      )
  tensors: dict[str, StoredTensor] = {}
  facts: dict[str, Any] = {}
  for file in files:
    found, facts = _read(file)
    twice = sorted(found.keys() & tensors.keys())
    if twice:
      raise ValueError(f"{file} has {', '.join(twice)}, which another file there has too.")
    tensors.update(found)
  kind = "sharded safetensors" if len(files) > 1 else "safetensors"
  return Checkpoint(str(folder), kind, {"": tensors}, facts if len(files) == 1 else {})


def _index(path: pathlib.Path) -> dict[str, str]:
  try:
    wanted = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    pairs = list(wanted.items())
  except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
    raise ValueError(f"{path} cannot be read as an index of shards ({error}).") from error
  for name, file in pairs:
    # A name with a folder in it could lead anywhere.
    if not isinstance(file, str) or pathlib.PurePath(file).name != file:
      raise ValueError(f"{path} puts {name} into {file!r}, which is no file beside it.")
  if not pairs:
    raise ValueError(f"{path} names no tensors.")
  return wanted


def _read(path: pathlib.Path) -> tuple[dict[str, StoredTensor], dict[str, Any]]:
  data = map_file(path)
  try:
    with safe_open(path, framework="numpy"):
      pass
  except (SafetensorError, OSError) as error:
    raise ValueError(f"{path} cannot be read as a safetensors file ({error}).") from error
  length = int(np.frombuffer(data[:8].tobytes(), "<u8")[0])
  header = json.loads(data[8 : 8 + length].tobytes(), object_pairs_hook=_once(path))
  facts = header.pop("__metadata__", None) or {}
  tensors = {}
  for name, entry in header.items():
    dtype = _DTYPES.get(entry["dtype"])
    if dtype is None:
      raise ValueError(f"{path} has {name} in {entry['dtype']}, a type that is not known here.")
    offset = 8 + length + entry["data_offsets"][0]
    tensors[name] = StoredTensor(tuple(entry["shape"]), dtype, data, offset)
  return tensors, facts


def _once(path: pathlib.Path):
  def build(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
      raise ValueError(f"{path} has a tensor name twice in its header.")
    return result

  return build
