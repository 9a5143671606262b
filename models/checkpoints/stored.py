"""What every checkpoint reader gives: named tensors that stay in their file until they are read."""

import dataclasses
import mmap
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
from numpy.lib.stride_tricks import as_strided

# Types by the names that numpy (with ml_dtypes) gives them. Weights are of the first three; the
# others occur beside weights, and a reader must know their width.
DTYPES: Mapping[str, np.dtype] = {
  name: np.dtype(kind)
  for name, kind in (
    ("float32", np.float32),
    ("float16", np.float16),
    ("bfloat16", ml_dtypes.bfloat16),
    ("float64", np.float64),
    ("float8_e4m3fn", ml_dtypes.float8_e4m3fn),
    ("float8_e5m2", ml_dtypes.float8_e5m2),
    ("int64", np.int64),
    ("int32", np.int32),
    ("int16", np.int16),
    ("int8", np.int8),
    ("uint8", np.uint8),
    ("bool", np.bool_),
    ("complex64", np.complex64),
    ("complex128", np.complex128),
  )
}
WEIGHT_DTYPES = ("float32", "float16", "bfloat16")


@dataclasses.dataclass(frozen=True)
class StoredTensor:
  """One tensor of a file.

  Attributes:
    shape: its shape.
    dtype: name of its type, a key of `DTYPES`.
    data: the mapped file, all of its bytes.
    offset_bytes: where in it the first element lies.
    strides: elements to the next index of each axis; None where it lies in row-major order.
  """

  shape: tuple[int, ...]
  dtype: str
  data: np.ndarray
  offset_bytes: int
  strides: tuple[int, ...] | None = None

  @property
  def size(self) -> int:
    """How many elements it has."""
    return int(np.prod(self.shape, dtype=np.int64))

  @property
  def size_bytes(self) -> int:
    """How many bytes its elements take."""
    return self.size * DTYPES[self.dtype].itemsize

  def view(self) -> np.ndarray:
    """The tensor as a read-only view of the mapped file, which occupies no memory of its own."""
    dtype = DTYPES[self.dtype]
    if self.size == 0:
      return np.zeros(self.shape, dtype)
    if self.strides is None:
      flat = self.data[self.offset_bytes : self.offset_bytes + self.size_bytes]
      return flat.view(dtype).reshape(self.shape)
    reach = 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
    flat = self.data[self.offset_bytes : self.offset_bytes + reach * dtype.itemsize].view(dtype)
    strides = [s * dtype.itemsize for s in self.strides]
    return as_strided(flat, self.shape, strides, writeable=False)


StateDict = Mapping[str, StoredTensor]


@dataclasses.dataclass(frozen=True)
class Checkpoint:
  """A checkpoint that was opened: nothing of its tensors is in memory yet.

  Attributes:
    path: the file or folder.
    container: "safetensors", "sharded safetensors" or "torch".
    parts: its state dictionaries by name. A file that is one flat dictionary has the part "".
    facts: numbers, texts and flags that lie beside the tensors.
  """

  path: str
  container: str
  parts: Mapping[str, StateDict]
  facts: Mapping[str, Any]

  @property
  def size_bytes(self) -> int:
    """Bytes of all tensors."""
    return sum(t.size_bytes for part in self.parts.values() for t in part.values())


def map_file(path: pathlib.Path) -> np.ndarray:
  """The bytes of a file, mapped: pages come from the file and go back to it.

  Raises:
    ValueError: when it does not exist, is empty or cannot be read.
  """
  try:
    with path.open("rb") as file:
      if os.fstat(file.fileno()).st_size == 0:
        raise ValueError(f"{path} is empty; fetch it again.")
      return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
  except OSError as error:
    raise ValueError(f"{path} cannot be read ({error.strerror or error}).") from error
