"""Small checkpoints to be broken, and the tools to break them."""

import json
import pathlib
import pickle
import struct
import zipfile
from collections.abc import Mapping

import ml_dtypes
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from models.checkpoints.stored import DTYPES
from models.checkpoints.write import NewTensor, write_torch
from models.wan.dit import CausalWanDiT
from models.wan.presets import DiTConfig
from models.wan.weights import DIT_KEYS
from models.weights import parameters, to_official

CFG = DiTConfig("tiny", 12, 20, 2, 3, in_dim=6, out_dim=4, text_dim=5, text_len=4, freq_dim=8)

State = dict[str, np.ndarray]


def dit_state(seed: int = 0) -> State:
  """A tiny transformer's tensors under official names, all of them random."""
  shapes = parameters(nnx.eval_shape(lambda: CausalWanDiT(CFG, rngs=nnx.Rngs(0))))
  random = np.random.default_rng(seed)
  ours = {
    name: 0.1 * random.standard_normal(array.shape).astype(np.float32)
    for name, array in shapes.items()
  }
  return {name: np.ascontiguousarray(array) for name, array in to_official(ours, DIT_KEYS)}


def save(path: pathlib.Path, state: Mapping[str, np.ndarray]) -> pathlib.Path:
  path.parent.mkdir(parents=True, exist_ok=True)
  save_file(dict(state), path)
  return path


def new_tensors(state: Mapping[str, np.ndarray]) -> list[NewTensor]:
  names = {dtype: name for name, dtype in DTYPES.items()}
  return [NewTensor(n, a.shape, names[a.dtype], lambda a=a: a) for n, a in state.items()]


def save_torch(path: pathlib.Path, **parts: Mapping[str, np.ndarray]) -> pathlib.Path:
  write_torch(path, {name: new_tensors(state) for name, state in parts.items()})
  return path


def save_index(folder: pathlib.Path, weight_map: object) -> None:
  text = weight_map if isinstance(weight_map, str) else json.dumps({"weight_map": weight_map})
  (folder / "model.safetensors.index.json").write_text(text)


def save_shards(folder: pathlib.Path, state: State, count: int = 3) -> list[pathlib.Path]:
  """Numbered shards with an index."""
  weight_map, files = {}, []
  for i in range(count):
    part = {name: state[name] for name in sorted(state)[i::count]}
    file = save(folder / f"model-{i + 1:05}-of-{count:05}.safetensors", part)
    weight_map.update(dict.fromkeys(part, file.name))
    files.append(file)
  save_index(folder, weight_map)
  return files


def patched(path: pathlib.Path, old: bytes, new: bytes, count: int = 1) -> pathlib.Path:
  """Replaces the first `count` places of `old`, which must be there."""
  content = path.read_bytes()
  assert old in content
  path.write_bytes(content.replace(old, new, count))
  return path


def rezipped(
  path: pathlib.Path,
  changes: Mapping[str, bytes | None],
  compression: int = zipfile.ZIP_STORED,
) -> pathlib.Path:
  """Writes a torch file anew with other entries; None drops one. Names are without the folder."""
  with zipfile.ZipFile(path) as archive:
    entries = {i.filename.removeprefix("archive/"): archive.read(i) for i in archive.infolist()}
  entries.update({name: content for name, content in changes.items() if content is not None})
  with zipfile.ZipFile(path, "w", compression) as archive:
    for name, content in entries.items():
      if changes.get(name, content) is not None:
        archive.writestr(f"archive/{name}", content)
  return path


def pickle_of(path: pathlib.Path) -> bytes:
  with zipfile.ZipFile(path) as archive:
    return archive.read("archive/data.pkl")


def integer(value: int) -> bytes:
  encoded = pickle.encode_long(value)
  return pickle.LONG1 + bytes([len(encoded)]) + encoded


def text(value: str) -> bytes:
  return pickle.BINUNICODE + struct.pack("<I", len(value.encode())) + value.encode()


def global_name(module: str, name: str) -> bytes:
  return pickle.GLOBAL + f"{module}\n{name}\n".encode()


BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
