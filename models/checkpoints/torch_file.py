"""Reads `.pt` and `.pth` files without torch, and without running what is in them.

Such a file is a zip archive: `NAME/data.pkl` describes the tensors, `NAME/data/KEY` holds the
elements of each storage, uncompressed, so that they can be mapped. Everything is checked against
the size of the file before anything is read.
"""

import io
import itertools
import pathlib
import struct
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from models.checkpoints.pickle_subset import RefusedPickle, Storage, TensorRecord, read_pickle
from models.checkpoints.stored import DTYPES, Checkpoint, StateDict, StoredTensor, map_file

ZIP_MAGIC = b"PK\x03\x04"
PICKLE_MAGIC = b"\x80"
MAX_ENTRIES = 100_000
MAX_PICKLE_BYTES = 16 << 20
MAX_DEPTH = 3  # dictionaries around a state dictionary, itself included
_MAX_DIRECTORY_BYTES = 32 << 20
_END_RECORD = struct.Struct("<4s4H2LH")  # the zip format's end of central directory
_LOCAL_HEADER_BYTES = 30
_OLD_PICKLES = 4  # magic number, protocol, machine, and then the saved object


def open_torch(path: pathlib.Path) -> Checkpoint:
  """Opens a file that `torch.save` wrote.

  Raises:
    ValueError: a file that is damaged, of the format before torch 1.6, compressed, or that would
      import or run something: that is named.
  """
  data = map_file(path)
  if bytes(data[:4]) != ZIP_MAGIC:
    _refuse_old(path, data)
  entries = _entries(path, data)
  tree = _tree(path, entries)
  tensors = {}
  parts, facts = {}, {}
  _collect(path, tree, "", parts, facts, [0])
  stored: dict[str, StateDict] = {}
  for part, records in parts.items():
    tensors = {name: _stored(path, record, entries, data) for name, record in records.items()}
    stored[part] = tensors
  if not stored:
    raise ValueError(f"{path} holds no tensors by name; name a file with a state dictionary.")
  return Checkpoint(str(path), "torch", stored, facts)


def _refuse_old(path: pathlib.Path, data: np.ndarray) -> None:
  """Ends with the reason why a file that is no zip archive is not read."""
  if bytes(data[:1]) == PICKLE_MAGIC:
    stream = io.BytesIO(bytes(data[:MAX_PICKLE_BYTES]))
    try:
      for _ in range(_OLD_PICKLES):
        read_pickle(stream)
    except RefusedPickle as error:
      raise ValueError(
        f"{path} {error}, so it is not read; fetch weights from their source."
      ) from (error)
    except ValueError:
      # Not damaged perhaps, but of no interest: the format is refused either way.
      pass
    raise ValueError(
      f"{path} is a pickle of the format before torch 1.6; load and save it again with a newer "
      "torch, or convert it to safetensors."
    )
  raise ValueError(f"{path} is no torch file: it does not begin as a zip archive does.")


def _entries(path: pathlib.Path, data: np.ndarray) -> dict[str, tuple[int, int]]:
  """Offset and size in bytes of every entry, by its name without the archive's own folder."""
  _check_directory(path, data)
  try:
    with zipfile.ZipFile(path) as archive:
      infos = archive.infolist()
      found = _checked(path, infos, data)
      pickles = [name for name in found if name.rpartition("/")[2] == "data.pkl"]
      if len(pickles) == 1:
        # Reads the entry once, only to have its checksum compared.
        if found[pickles[0]][1] > MAX_PICKLE_BYTES:
          raise ValueError(f"{path} has a pickle of more than {MAX_PICKLE_BYTES} bytes.")
        archive.read(pickles[0])
  except (zipfile.BadZipFile, NotImplementedError, OSError, RuntimeError, struct.error) as error:
    raise ValueError(
      f"{path} is damaged or truncated ({str(error) or type(error).__name__}); fetch it again."
    ) from error
  if len(pickles) != 1:
    raise ValueError(f"{path} is a zip archive but no torch file: it has no single data.pkl.")
  folder = pickles[0].removesuffix("data.pkl")
  if folder + "constants.pkl" in found:
    raise ValueError(f"{path} is a TorchScript archive, which holds code; use a state dictionary.")
  return {name.removeprefix(folder): at for name, at in found.items()}


def _check_directory(path: pathlib.Path, data: np.ndarray) -> None:
  """Refuses an archive whose list of entries alone would fill the memory."""
  tail = bytes(data[-(_END_RECORD.size + 0xFFFF) :])
  at = tail.rfind(b"PK\x05\x06")
  if at < 0 or len(tail) - at < _END_RECORD.size:
    raise ValueError(f"{path} is truncated: its list of entries is missing; fetch it again.")
  _, _, _, _, entries, size, _, _ = _END_RECORD.unpack_from(tail, at)
  locator = tail[at - 20 : at] if at >= 20 else b""
  if locator.startswith(b"PK\x06\x07"):
    where = struct.unpack_from("<Q", locator, 8)[0]
    record = bytes(data[where : where + 56])
    if len(record) < 56 or not record.startswith(b"PK\x06\x06"):
      raise ValueError(f"{path} is damaged: its list of entries is not where it says.")
    entries, size = struct.unpack_from("<QQ", record, 32)
  if entries > MAX_ENTRIES or size > _MAX_DIRECTORY_BYTES:
    raise ValueError(
      f"{path} lists {entries} entries in {size} bytes; weights have at most {MAX_ENTRIES}."
    )


def _checked(
  path: pathlib.Path, infos: list[zipfile.ZipInfo], data: np.ndarray
) -> dict[str, tuple[int, int]]:
  """Offsets and sizes, after all of them were found to lie apart from each other in the file."""
  found, spans = {}, []
  for info in infos:
    name = info.filename
    if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
      raise ValueError(
        f"{path} has the compressed entry {name!r} ({info.compress_size} bytes for "
        f"{info.file_size}); torch stores without compression."
      )
    if info.flag_bits & 1:
      raise ValueError(f"{path} has the encrypted entry {name!r}; torch does not encrypt.")
    if name in found:
      raise ValueError(f"{path} has the entry {name!r} twice.")
    header = bytes(data[info.header_offset : info.header_offset + _LOCAL_HEADER_BYTES])
    if len(header) < _LOCAL_HEADER_BYTES or not header.startswith(ZIP_MAGIC):
      raise ValueError(f"{path} is damaged: the entry {name!r} is not where the list says.")
    begin = info.header_offset + _LOCAL_HEADER_BYTES + sum(struct.unpack_from("<2H", header, 26))
    end = begin + info.file_size
    if end > data.size:
      raise ValueError(f"{path} is truncated: the entry {name!r} reaches past its end.")
    found[name] = (begin, info.file_size)
    spans.append((info.header_offset, end, name))
  spans.sort()
  for (_, end, name), (begin, _, other) in itertools.pairwise(spans):
    if begin < end:
      raise ValueError(f"{path} has the entries {name!r} and {other!r} in the same place.")
  return found


def _tree(path: pathlib.Path, entries: Mapping[str, tuple[int, int]]) -> Any:
  with path.open("rb") as file:
    if "byteorder" in entries:
      file.seek(entries["byteorder"][0])
      order = file.read(min(entries["byteorder"][1], 16))
      if order != b"little":
        raise ValueError(f"{path} was written with byte order {order!r}; use a little-endian one.")
    at, size = entries["data.pkl"]
    file.seek(at)
    content = file.read(size)
  try:
    return read_pickle(io.BytesIO(content))
  except RefusedPickle as error:
    raise ValueError(f"{path} {error}, so it is not read; fetch weights from their source.") from (
      error
    )
  except ValueError as error:
    raise ValueError(f"{path} {error}; fetch it again.") from error


def _collect(
  path: pathlib.Path,
  tree: Any,
  name: str,
  parts: dict[str, dict[str, TensorRecord]],
  facts: dict[str, Any],
  visited: list[int],
) -> None:
  """Finds the dictionaries of tensors in the tree, by their keys joined with slashes."""
  if not isinstance(tree, dict):
    return
  visited[0] += len(tree)
  if visited[0] > MAX_ENTRIES:  # dictionaries may be shared, so a small pickle can be a large tree
    raise ValueError(f"{path} describes more than {MAX_ENTRIES} things; weights have fewer.")
  for key, value in tree.items():
    full = f"{name}/{key}" if name else str(key)
    if isinstance(value, TensorRecord):
      if isinstance(key, str):
        parts.setdefault(name, {})[key] = value
    elif isinstance(value, dict) and full.count("/") < MAX_DEPTH - 1:
      _collect(path, value, full, parts, facts, visited)
    elif isinstance(value, str | int | float) and not name:
      facts[full] = value


def _stored(
  path: pathlib.Path,
  record: TensorRecord,
  entries: Mapping[str, tuple[int, int]],
  data: np.ndarray,
) -> StoredTensor:
  storage: Storage = record.storage
  entry = f"data/{storage.key}"
  if entry not in entries:
    raise ValueError(f"{path} lacks the entry {entry!r} that its tensors lie in; fetch it again.")
  begin, size = entries[entry]
  width = DTYPES[storage.dtype].itemsize
  if size != storage.size * width:
    raise ValueError(
      f"{path} has {size} bytes in the entry {entry!r}, where {storage.size} elements of "
      f"{storage.dtype} need {storage.size * width}; fetch it again."
    )
  dense = record.strides == tuple(_dense_strides(record.shape))
  return StoredTensor(
    shape=record.shape,
    dtype=storage.dtype,
    data=data,
    offset_bytes=begin + record.offset * width,
    strides=None if dense else record.strides,
  )


def _dense_strides(shape: tuple[int, ...]) -> Iterator[int]:
  step = 1
  strides = []
  for n in reversed(shape):
    strides.append(step)
    step *= n
  yield from reversed(strides)
