"""Opens `.npz` files of recorded values: named arrays, never code."""

import pathlib
import re
import zipfile
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import UInt8


def names(path: pathlib.Path) -> list[str]:
  """The keys of a file.

  Raises:
    ValueError: when it is no `.npz` file.
  """
  with _open(path) as archive:
    return list(archive.files)


def read(path: pathlib.Path, known: Sequence[str]) -> dict[str, np.ndarray]:
  """All arrays of a file, whose keys must match one of the patterns in `known`.

  Raises:
    ValueError: when it is damaged, has a key that is not known or a value that is not finite.
  """
  with _open(path) as archive:
    for key in archive.files:
      if not any(re.fullmatch(pattern, key) for pattern in known):
        raise ValueError(f"{path} has a key {key!r} that is not known.")
    try:
      arrays = {key: archive[key] for key in archive.files}
    except (ValueError, OSError, zipfile.BadZipFile, EOFError) as error:
      raise ValueError(f"{path} cannot be read as a whole .npz file ({error}).") from error
  for key, array in arrays.items():
    if array.dtype.kind not in "iuf" or not np.isfinite(array).all():
      raise ValueError(f"{path} has a value in {key} that is no finite number.")
  return arrays


def need(path: pathlib.Path, arrays: dict[str, np.ndarray], key: str, rank: int) -> np.ndarray:
  """One array that must be there, with that many axes.

  Raises:
    ValueError: when it is missing or has another number of axes.
  """
  if key not in arrays:
    raise ValueError(f"{path} lacks the key {key!r}.")
  if arrays[key].ndim != rank:
    raise ValueError(f"{path} has {key} of shape {arrays[key].shape}; it must have {rank} axes.")
  return arrays[key]


def sample_picture(height: int, width: int) -> UInt8[np.ndarray, "height width 3"]:
  """The picture that pre-processing was recorded on: two waves and a ramp, one a colour."""
  y, x = np.mgrid[:height, :width].astype(np.float64)
  red = 127.5 + 127.5 * np.sin(0.11 * x + 0.07 * y)
  green = 127.5 + 127.5 * np.cos(0.045 * x - 0.13 * y)
  blue = (7 * x + 13 * y) % 256
  return np.clip(np.stack([red, green, blue], axis=-1), 0, 255).astype(np.uint8)


def _open(path: pathlib.Path) -> Any:
  try:
    archive = np.load(path, allow_pickle=False)
  except (ValueError, OSError, zipfile.BadZipFile, EOFError) as error:
    raise ValueError(f"{path} cannot be read as an .npz file ({error}).") from error
  if not isinstance(archive, np.lib.npyio.NpzFile):
    raise ValueError(f"{path} holds a single array; use an .npz file of named arrays.")
  return archive
