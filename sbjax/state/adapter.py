"""Adapters as files: one flat buffer in memory, named tensors in a safetensors file."""

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import safetensors
import safetensors.numpy
from jaxtyping import Float

from sbjax import files

_FORMAT = "sbjax-adapter-1"


@dataclasses.dataclass(frozen=True)
class AdapterLayout:
  """Names and shapes of the tensors that lie one after the other in a flat buffer.

  Attributes:
    names: tensor names, in the buffer's order.
    shapes: their shapes; each tensor lies in row-major order.
  """

  names: tuple[str, ...]
  shapes: tuple[tuple[int, ...], ...]

  @property
  def size(self) -> int:
    """How many numbers the buffer holds."""
    return sum(math.prod(shape) for shape in self.shapes)

  def split(self, flat: Float[np.ndarray, " parameters"]) -> dict[str, np.ndarray]:
    """Gives the named tensors as views into the buffer.

    Raises:
      ValueError: where the buffer has another size.
    """
    if flat.shape != (self.size,):
      raise ValueError(f"an adapter has shape {flat.shape}; this model's has ({self.size},)")
    ends = np.cumsum([math.prod(shape) for shape in self.shapes])
    parts = np.split(flat, ends[:-1])
    return {
      name: part.reshape(shape)
      for name, part, shape in zip(self.names, parts, self.shapes, strict=True)
    }

  def join(self, tensors: Mapping[str, np.ndarray]) -> Float[np.ndarray, " parameters"]:
    """Lays named tensors out as one float32 buffer: the inverse of `split`.

    Raises:
      ValueError: where a name is missing or unknown, or a shape differs.
    """
    unknown = sorted(tensors.keys() - set(self.names))
    missing = sorted(set(self.names) - tensors.keys())
    if unknown or missing:
      name, what = (missing[0], "lacks") if missing else (unknown[0], "has")
      raise ValueError(
        f"the adapter {what} the tensor {name}; use one of the same model and LoRA targets"
      )
    for name, shape in zip(self.names, self.shapes, strict=True):
      if tuple(tensors[name].shape) != shape:
        raise ValueError(
          f"the adapter's tensor {name} has shape {tuple(tensors[name].shape)} where this model "
          f"has {shape}; use one of the same model and LoRA rank"
        )
    return np.concatenate([np.ravel(tensors[name]).astype(np.float32) for name in self.names])


def layout_of(tree: Any) -> AdapterLayout:
  """Derives the layout of `jax.flatten_util.ravel_pytree` from a tree of arrays or shapes.

  Args:
    tree: the LoRA tree: nested dictionaries of arrays or `jax.ShapeDtypeStruct`.

  Returns:
    Names joined by dots along the path, in JAX's order of leaves.
  """
  leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
  return AdapterLayout(
    names=tuple(jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves),
    shapes=tuple(tuple(leaf.shape) for _, leaf in leaves),
  )


def save_adapter(
  path: str | os.PathLike[str],
  flat: Float[np.ndarray, " parameters"],
  layout: AdapterLayout,
  facts: Mapping[str, Any],
) -> None:
  """Writes an adapter as float32 safetensors, atomically.

  Args:
    path: the file.
    flat: the adapter.
    layout: its tensors.
    facts: JSON values to keep beside them: model, rank, alpha, targets, step.

  Raises:
    ValueError: where the buffer has another size or holds a NaN or an infinity.
    OutputError: where the file cannot be written.
  """
  flat = np.asarray(flat, np.float32)
  tensors = layout.split(flat)
  _check_finite(flat, f"{os.fspath(path)} is not written")
  metadata = {"format": _FORMAT, "facts": json.dumps(dict(facts))}
  files.atomic_write(path, safetensors.numpy.save(tensors, metadata=metadata))


def load_adapter(
  path: str | os.PathLike[str],
  layout: AdapterLayout,
  expected: Mapping[str, Any] | None = None,
) -> tuple[Float[np.ndarray, " parameters"], dict[str, Any]]:
  """Reads an adapter that `save_adapter` wrote.

  Args:
    path: the file.
    layout: the tensors that this model has.
    expected: facts that must agree where given (model, rank, alpha, targets).

  Returns:
    The float32 buffer, and all facts of the file.

  Raises:
    ValueError: where the file is missing, no such file, truncated, of another model, or holds a
      NaN or an infinity.
  """
  facts, tensors = _read(pathlib.Path(path))
  for name, value in json.loads(json.dumps(dict(expected or {}))).items():
    if facts.get(name) != value:
      raise ValueError(
        f"adapter {path} is of another model: {name} is {facts.get(name)!r} there and {value!r} "
        "here; use its config or another adapter"
      )
  try:
    flat = layout.join(tensors)
  except ValueError as error:
    raise ValueError(f"adapter {path} does not fit: {error}") from error
  _check_finite(flat, f"adapter {path} cannot be used")
  return flat, facts


def adapter_facts(path: str | os.PathLike[str]) -> dict[str, Any]:
  """Reads what an adapter file says of itself: model, rank, alpha, targets, step.

  Raises:
    ValueError: as `load_adapter`.
  """
  return _read(pathlib.Path(path))[0]


def _read(path: pathlib.Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
  if not path.is_file():
    raise ValueError(f"adapter {path} does not exist; name an adapter.safetensors of a run")
  try:
    with safetensors.safe_open(path, framework="np") as file:
      metadata = file.metadata() or {}
      tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
  except (safetensors.SafetensorError, OSError, TypeError, ValueError) as error:
    raise ValueError(
      f"adapter {path} is truncated or no safetensors file ({error}); restore it from its run"
    ) from error
  if metadata.get("format") != _FORMAT:
    raise ValueError(f"adapter {path} was not written by sbjax; name an adapter of a run")
  return json.loads(metadata["facts"]), tensors


def _check_finite(flat: np.ndarray, consequence: str) -> None:
  bad = int(flat.size - np.isfinite(flat).sum())
  if bad:
    raise ValueError(f"{consequence}: {bad} of its {flat.size} numbers are not finite")
