"""Writes safetensors and torch files tensor by tensor, each whole or not at all."""

import contextlib
import dataclasses
import json
import os
import pathlib
import pickle
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import BinaryIO

import numpy as np

from models.checkpoints.load import Progress, all_finite
from models.checkpoints.stored import DTYPES

_SAFETENSORS_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_STORAGE_NAMES = {
  "float32": "FloatStorage",
  "float16": "HalfStorage",
  "bfloat16": "BFloat16Storage",
}
_ALIGNMENT_BYTES = 64
_ZIP64_BYTES = 1 << 31


@dataclasses.dataclass(frozen=True)
class NewTensor:
  """A tensor to be written.

  Attributes:
    name: its name in the file.
    shape: its shape.
    dtype: "float32", "float16" or "bfloat16".
    make: gives its values; called when its turn comes, so that one at a time is in memory.
    origin: what messages call it where that says more than its name.
  """

  name: str
  shape: tuple[int, ...]
  dtype: str
  make: Callable[[], np.ndarray]
  origin: str = ""

  @property
  def size_bytes(self) -> int:
    """How many bytes it takes."""
    return int(np.prod(self.shape, dtype=np.int64)) * DTYPES[self.dtype].itemsize

  def values(self) -> np.ndarray:
    """Its values in row-major order and in its type.

    Raises:
      ValueError: when they have another shape, or one is not finite in that type.
    """
    made = self.make()
    if made.shape != self.shape:
      raise ValueError(
        f"{self.name} has shape {list(made.shape)}, where {list(self.shape)} is due."
      )
    with np.errstate(over="ignore"):  # told by name
      array = np.ascontiguousarray(made).astype(DTYPES[self.dtype], copy=False)
    if not all_finite(array):
      named = self.origin or self.name
      raise ValueError(f"{named} has a value that is not finite in {self.dtype}.")
    return array


def write_safetensors(
  path: str | os.PathLike[str],
  tensors: Sequence[NewTensor],
  metadata: Mapping[str, str] | None = None,
  progress: Progress | None = None,
) -> None:
  """Writes one safetensors file.

  Args:
    path: the file; an older one stays until the new one is whole.
    tensors: in any order.
    metadata: texts beside them.
    progress: called with bytes done and bytes in all.

  Raises:
    ValueError: when a value is not finite.
    OSError: when the file cannot be written.
  """
  # Wide types first: with those, every tensor begins at a multiple of its element's width.
  ordered = sorted(tensors, key=lambda t: -DTYPES[t.dtype].itemsize)
  entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
  at = 0
  for tensor in ordered:
    entries[tensor.name] = {
      "dtype": _SAFETENSORS_NAMES[tensor.dtype],
      "shape": list(tensor.shape),
      "data_offsets": [at, at + tensor.size_bytes],
    }
    at += tensor.size_bytes
  header = json.dumps(entries, separators=(",", ":")).encode()
  header += b" " * (-len(header) % 8)
  done = 0
  with _whole(path) as file:
    file.write(struct.pack("<Q", len(header)) + header)
    for tensor in ordered:
      file.write(_bytes(tensor.values()))
      done += tensor.size_bytes
      if progress is not None:
        progress(done, at)


def write_shards(
  folder: str | os.PathLike[str],
  stem: str,
  tensors: Sequence[NewTensor],
  max_shard_bytes: int,
  metadata: Mapping[str, str] | None = None,
  progress: Progress | None = None,
) -> list[pathlib.Path]:
  """Writes safetensors files of at most that size, with their index; a single one without.

  Args:
    folder: made where it does not exist.
    stem: start of the file names, such as "diffusion_pytorch_model".
    tensors: in the order in which they fill the shards.
    max_shard_bytes: a larger tensor is a shard of its own.
    metadata: texts beside the tensors, in each shard.
    progress: called with bytes done and bytes in all.

  Returns:
    The files with tensors.

  Raises:
    ValueError: as `write_safetensors`; no shard stays.
    OSError: as `write_safetensors`.
  """
  folder = pathlib.Path(folder)
  shards = split_shards(tensors, max_shard_bytes)
  if len(shards) == 1:
    path = folder / f"{stem}.safetensors"
    write_safetensors(path, shards[0], metadata, progress)
    return [path]
  total = sum(t.size_bytes for t in tensors)
  names = [f"{stem}-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
  index = {
    "metadata": {"total_size": total},
    "weight_map": {t.name: n for n, shard in zip(names, shards, strict=True) for t in shard},
  }
  done, written = 0, []
  try:
    for name, shard in zip(names, shards, strict=True):
      report = None if progress is None else _offset(progress, done, total)
      write_safetensors(folder / name, shard, metadata, report)
      written.append(folder / name)
      done += sum(t.size_bytes for t in shard)
    # The index last: without it a reader sees that the folder is not finished.
    with _whole(folder / f"{stem}.safetensors.index.json") as file:
      file.write(json.dumps(index, indent=2).encode())
  except BaseException:
    for path in written:
      path.unlink()
    raise
  return written


def split_shards(tensors: Sequence[NewTensor], max_shard_bytes: int) -> list[list[NewTensor]]:
  """The tensors of each shard, in their order, filled up to that size."""
  shards: list[list[NewTensor]] = [[]]
  used = 0
  for tensor in tensors:
    if shards[-1] and used + tensor.size_bytes > max_shard_bytes:
      shards.append([])
      used = 0
    shards[-1].append(tensor)
    used += tensor.size_bytes
  return shards


def write_torch(
  path: str | os.PathLike[str],
  parts: Mapping[str, Sequence[NewTensor]],
  progress: Progress | None = None,
) -> None:
  """Writes a file that `torch.load(weights_only=True)` reads: a dictionary of state dictionaries.

  Args:
    path: the file; an older one stays until the new one is whole.
    parts: tensors by the name of their state dictionary.
    progress: called with bytes done and bytes in all.

  Raises:
    ValueError: when a value is not finite.
    OSError: when the file cannot be written.
  """
  tensors = [tensor for part in parts.values() for tensor in part]
  total, done = sum(t.size_bytes for t in tensors), 0
  with _whole(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
    _entry(archive, "data.pkl", _pickled(parts))
    _entry(archive, "byteorder", b"little")
    for key, tensor in enumerate(tensors):
      _entry(archive, f"data/{key}", _bytes(tensor.values()))
      done += tensor.size_bytes
      if progress is not None:
        progress(done, total)
    _entry(archive, "version", b"3\n")


def _offset(progress: Progress, before: int, total: int) -> Progress:
  return lambda done, _: progress(before + done, total)


def _bytes(array: np.ndarray) -> memoryview:
  return array.reshape(-1).view(np.uint8).data


def _entry(archive: zipfile.ZipFile, name: str, content: bytes | memoryview) -> None:
  info = zipfile.ZipInfo(f"archive/{name}")  # without a time, so that equal weights are equal files
  large = len(content) >= _ZIP64_BYTES
  # Readers map the elements, so they begin at a round address: a filler field in the header.
  at = archive.start_dir + 30 + len(info.filename) + (20 if large else 0) + 4
  filler = -at % _ALIGNMENT_BYTES
  info.extra = struct.pack("<2H", 0x4246, filler) + b"Z" * filler
  with archive.open(info, "w", force_zip64=large) as entry:
    entry.write(content)


def _pickled(parts: Mapping[str, Sequence[NewTensor]]) -> bytes:
  """The description that torch expects, opcode by opcode."""
  key = 0
  out = [pickle.PROTO, b"\x02", pickle.EMPTY_DICT, pickle.MARK]
  for part, tensors in parts.items():
    out += [_text(part), pickle.EMPTY_DICT, pickle.MARK]
    for tensor in tensors:
      out += [_text(tensor.name), _tensor_program(tensor, key)]
      key += 1
    out += [pickle.SETITEMS]
  return b"".join([*out, pickle.SETITEMS, pickle.STOP])


def _tensor_program(tensor: NewTensor, key: int) -> bytes:
  elements = tensor.size_bytes // DTYPES[tensor.dtype].itemsize
  strides, step = [], 1
  for n in reversed(tensor.shape):
    strides.insert(0, step)
    step *= n
  storage = [_text("storage"), _named("torch", _STORAGE_NAMES[tensor.dtype]), _text(str(key))]
  storage += [_text("cpu"), _integer(elements)]
  hooks = _named("collections", "OrderedDict") + pickle.EMPTY_TUPLE + pickle.REDUCE
  arguments = [
    _tuple(storage) + pickle.BINPERSID,
    _integer(0),
    _tuple([_integer(n) for n in tensor.shape]),
    _tuple([_integer(n) for n in strides]),
    pickle.NEWFALSE,
    hooks,
  ]
  return _named("torch._utils", "_rebuild_tensor_v2") + _tuple(arguments) + pickle.REDUCE


def _text(value: str) -> bytes:
  encoded = value.encode()
  return pickle.BINUNICODE + struct.pack("<I", len(encoded)) + encoded


def _named(module: str, name: str) -> bytes:
  return pickle.GLOBAL + f"{module}\n{name}\n".encode()


def _integer(value: int) -> bytes:
  encoded = pickle.encode_long(value)
  return pickle.LONG1 + bytes([len(encoded)]) + encoded


def _tuple(items: Sequence[bytes]) -> bytes:
  return pickle.MARK + b"".join(items) + pickle.TUPLE


@contextlib.contextmanager
def _whole(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
  """A file to write to that takes its name when all went well, and goes away otherwise."""
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
  try:
    with partial.open("wb") as file:
      yield file
      file.flush()
      os.fsync(file.fileno())
    partial.replace(path)
  finally:
    partial.unlink(missing_ok=True)
