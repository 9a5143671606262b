"""One loader and saver for safetensors files with official key names.

A model's file names and its own parameters are matched by a table of `TensorKey` records. Loading
reads tensor by tensor and refuses, in one error that lists all names, whatever does not fit.
"""

import dataclasses
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax.numpy as jnp
import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy, which safetensors then reads)
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

Model = TypeVar("Model", bound=nnx.Module)

# Parts of module paths that wrappers put into saved names; they carry no meaning.
WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


@dataclasses.dataclass(frozen=True)
class Transform:
  """How a tensor of the file becomes ours and back; both directions only move elements.

  Attributes:
    to_ours: from the file's array to the array of one layer of our parameter.
    to_official: the inverse.
  """

  to_ours: Callable[[np.ndarray], np.ndarray]
  to_official: Callable[[np.ndarray], np.ndarray]


def _same(x: np.ndarray) -> np.ndarray:
  return x


SAME = Transform(_same, _same)
TRANSPOSE = Transform(np.transpose, np.transpose)  # a torch Linear is [out, in], ours is [in, out]


@dataclasses.dataclass(frozen=True)
class TensorKey:
  """One line of a key table.

  Attributes:
    official: the file's key. With `{layer}` in it the line stands for one tensor per layer, which
      fill the leading axis of our parameter.
    path: our parameter, its attribute names joined by dots.
    transform: what lies between the two.
  """

  official: str
  path: str
  transform: Transform = SAME


@dataclasses.dataclass(frozen=True)
class Slot:
  """Where one tensor of the file goes.

  Attributes:
    key: the line of the table.
    layer: the layer of our parameter that it fills, None where it is all of it.
    shape: shape of what it fills, as we hold it.
  """

  key: TensorKey
  layer: int | None
  shape: tuple[int, ...]

  @property
  def official_shape(self) -> tuple[int, ...]:
    """Its shape in the file."""
    # A zero-stride array costs nothing, so the transform itself can tell the shape.
    return self.key.transform.to_official(np.broadcast_to(np.int8(0), self.shape)).shape


def clean_key(name: str) -> str:
  """The official key inside a saved name: wrapper parts go, and one leading `model.`."""
  for part in WRAPPERS:
    name = name.replace(part, "")
  return name.removeprefix("model.")


def read_tensors(
  path: str | os.PathLike,
  table: Sequence[TensorKey],
  like: Mapping[str, Any],
) -> dict[str, np.ndarray]:
  """Reads a file, or every `*.safetensors` of a folder, into arrays named as our parameters.

  Args:
    path: file or folder.
    table: the key table.
    like: our parameters by path; each has the `shape` and `dtype` to read into.

  Raises:
    ValueError: when the file is no whole safetensors file, or as `to_ours`.
  """
  return to_ours(str(path), _tensors(pathlib.Path(path)), table, like)


def to_ours(
  source: str,
  tensors: Iterable[tuple[str, np.ndarray]],
  table: Sequence[TensorKey],
  like: Mapping[str, Any],
) -> dict[str, np.ndarray]:
  """Arrays named as our parameters from tensors under official names, taken one at a time.

  Raises:
    ValueError: when names are unknown or missing, a shape does not fit or a value is not finite.
      All such names are listed; `source` is what the message calls the whole.
  """
  wanted_slots = slots(table, {name: tuple(array.shape) for name, array in like.items()})
  arrays = {key.path: np.empty(like[key.path].shape, like[key.path].dtype) for key in table}
  unknown, misshapen, bad, seen = [], [], [], set()
  for name, tensor in tensors:
    official = clean_key(name)
    slot = wanted_slots.get(official)
    if slot is None or official in seen:
      unknown.append(name)
      continue
    seen.add(official)
    wanted = slot.official_shape
    if tensor.shape != wanted:
      misshapen.append(f"{name} ({list(tensor.shape)}, needs {list(wanted)})")
      continue
    target = arrays[slot.key.path]
    value = slot.key.transform.to_ours(tensor).astype(target.dtype)
    if not np.isfinite(value.astype(np.float32)).all():
      bad.append(name)
    elif slot.layer is None:
      target[...] = value
    else:
      target[slot.layer] = value
  problems = {
    "missing": [name for name in wanted_slots if name not in seen],
    "unknown": unknown,
    "misshapen": misshapen,
    "not finite": bad,
  }
  told = [f"{kind}: {', '.join(names)}" for kind, names in problems.items() if names]
  if told:
    raise ValueError(f"{source} does not fit the model; {'; '.join(told)}.")
  return arrays


def to_official(
  arrays: Mapping[str, Any], table: Sequence[TensorKey]
) -> Iterator[tuple[str, np.ndarray]]:
  """Tensors under official names from arrays named as our parameters; the inverse of `to_ours`."""
  for key in table:
    array = np.asarray(arrays[key.path])
    if "{layer}" not in key.official:
      yield key.official, key.transform.to_official(array)
      continue
    for layer in range(array.shape[0]):
      yield key.official.format(layer=layer), key.transform.to_official(array[layer])


def load_safetensors(path: str | os.PathLike, model: Model, table: Sequence[TensorKey]) -> Model:
  """Fills `model` (in place, and returned) from a file; values take each parameter's own type.

  Raises:
    ValueError: as `read_tensors`.
  """
  arrays = read_tensors(path, table, parameters(model))
  fill(model, arrays)
  return model


def fill(model: nnx.Module, arrays: Mapping[str, Any]) -> None:
  """Assigns arrays to the parameters of those paths."""
  variables = _variables(model)
  for name, array in arrays.items():
    variables[name].set_value(jnp.asarray(array))


def save_safetensors(
  path: str | os.PathLike,
  model: nnx.Module,
  table: Sequence[TensorKey],
  dtype: Any = jnp.float32,
) -> None:
  """Writes `model` under the official names in `dtype`; the file appears whole or not at all.

  Raises:
    ValueError: when a value is not finite in `dtype`.
  """
  write_tensors(path, parameters(model), table, dtype)


def write_tensors(
  path: str | os.PathLike,
  arrays: Mapping[str, Any],
  table: Sequence[TensorKey],
  dtype: Any = jnp.float32,
) -> None:
  """Writes arrays named as our parameters under the official names; the inverse of `read_tensors`.

  Raises:
    ValueError: when a value is not finite in `dtype`.
  """
  tensors, bad = {}, []
  for name, value in to_official(arrays, table):
    with np.errstate(over="ignore"):  # reported below, by name
      tensors[name] = np.ascontiguousarray(value.astype(dtype))
    if not np.isfinite(tensors[name].astype(np.float32)).all():
      bad.append(name)
  if bad:
    raise ValueError(f"dtype is {np.dtype(dtype).name}; not finite in it: {', '.join(bad)}.")
  path = pathlib.Path(path)
  partial = path.with_name(path.name + ".partial")
  save_file(tensors, partial)
  os.replace(partial, path)


def parameters(model: nnx.Module) -> dict[str, Any]:
  """The model's parameter arrays by path: attribute names joined by dots."""
  return {name: variable.get_value() for name, variable in _variables(model).items()}


def _variables(model: nnx.Module) -> dict[str, nnx.Param]:
  flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
  # The flat state shares its variables with the model, so that assigning to them fills the model.
  return {".".join(str(part) for part in path): variable for path, variable in flat}


def slots(table: Sequence[TensorKey], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Slot]:
  """What every name of the file stands for, from the shapes of our parameters by path."""
  found = {}
  for key in table:
    shape = shapes[key.path]
    if "{layer}" not in key.official:
      found[key.official] = Slot(key, None, shape)
      continue
    for layer in range(shape[0]):
      found[key.official.format(layer=layer)] = Slot(key, layer, shape[1:])
  return found


def _tensors(path: pathlib.Path) -> Iterator[tuple[str, np.ndarray]]:
  files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
  if not files:
    raise ValueError(f"{path} holds no .safetensors file; name a file or a folder that has some.")
  for file in files:
    try:
      handle = safe_open(file, framework="numpy")
    except (SafetensorError, OSError) as error:
      raise ValueError(f"{file} cannot be read as a safetensors file ({error}).") from error
    with handle as opened:
      for name in opened.keys():  # noqa: SIM118  (the handle is no mapping)
        yield name, opened.get_tensor(name)
