"""Streams the tensors of a file into arrays on devices, one at a time.

Beside the arrays themselves the memory holds one tensor, as one device or process needs it: tensors
are views of the mapped file, what a device holds of one is converted straight from there, and a
parameter stacked over layers is filled in place by a program that its buffer is donated to.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jaxtyping import Array

from models.checkpoints.fit import Fit, fit
from models.checkpoints.stored import StateDict, StoredTensor
from models.weights import Slot, TensorKey

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""

_SLAB_ELEMENTS = 4 << 20  # what is converted and checked at once
_ALIGNMENT_BYTES = 64  # what JAX needs to take over host memory on CPUs without copying it


def load_arrays(
  source: str,
  tensors: StateDict,
  table: Sequence[TensorKey],
  like: Mapping[str, Any],
  *,
  aliases: Mapping[str, str] | None = None,
  shardings: Mapping[str, Sharding] | None = None,
  progress: Progress | None = None,
) -> dict[str, Array]:
  """Arrays named as our parameters, in their types, from a file's tensors.

  Names, shapes and types are compared before the first tensor is read; nothing is returned unless
  all of it is well. Only what the devices of this process hold is read.

  Args:
    source: what messages call the file.
    tensors: its state dictionary.
    table: the key table of its layout.
    like: our parameters by path; each has the `shape` and `dtype` to load into.
    aliases: as in `fit`.
    shardings: by path; the default device where there are none.
    progress: called after each tensor.

  Raises:
    ValueError: when names are unknown or missing or a shape or type does not fit, all listed; or
      for a tensor with a value that is not finite.
  """
  found = fit(tensors, table, like, aliases or {})
  refuse_misfit(source, found)
  default = SingleDeviceSharding(jax.local_devices()[0])
  total = sum(tensors[name].size_bytes for name in found.places)
  done = 0
  arrays: dict[str, Array] = {}
  for name, slot in found.places.items():
    path, wanted = slot.key.path, like[slot.key.path]
    sharding = (shardings or {}).get(path, default)
    tensor = tensors[name]
    if slot.layer is None:
      arrays[path] = _placed(source, name, tensor, slot, wanted.dtype, sharding)
    else:
      if path not in arrays:
        arrays[path] = jnp.zeros(wanted.shape, wanted.dtype, device=sharding)
      layer = _placed(source, name, tensor, slot, wanted.dtype, _of_a_layer(sharding))
      # The donated stack must be gone from here when the program starts, and waiting for its end
      # keeps one tensor in memory rather than a queue of them.
      arrays[path] = jax.block_until_ready(
        _fill_layer(arrays.pop(path), layer, jnp.int32(slot.layer))
      )
    done += tensor.size_bytes
    if progress is not None:
      progress(done, total)
  _check_twins(source, tensors, found)
  return arrays


def refuse_misfit(source: str, found: Fit) -> None:
  """Raises with all names that do not fit, if any."""
  if found.count:
    raise ValueError(f"{source} does not fit the model; {found.text()}.")


@functools.partial(jax.jit, donate_argnums=0)
def _fill_layer(stack: Array, layer: Array, index: Array) -> Array:
  return jax.lax.dynamic_update_index_in_dim(stack, layer, index, 0)


def _of_a_layer(sharding: Sharding) -> Sharding:
  """The sharding of one layer of a stacked parameter.

  Raises:
    ValueError: when layers lie on different devices.
  """
  if not isinstance(sharding, NamedSharding):
    return sharding
  spec = tuple(sharding.spec)
  if spec and spec[0] is not None:
    raise ValueError(f"sharding cuts the layers over {spec[0]!r}; cut another axis of a parameter.")
  return NamedSharding(sharding.mesh, PartitionSpec(*spec[1:]))


def _placed(
  source: str, name: str, tensor: StoredTensor, slot: Slot, dtype: Any, sharding: Sharding
) -> Array:
  view = slot.key.transform.to_ours(tensor.view())
  read: dict[tuple, np.ndarray] = {}  # devices that hold the same share one copy

  def share(index: tuple[slice, ...] | None) -> np.ndarray:
    index = index or ()  # scalars have none
    key = tuple(s.indices(n) for s, n in zip(index, view.shape, strict=True))
    if key not in read:
      read[key] = _converted(view[index], np.dtype(dtype))
      if not all_finite(read[key]):
        raise ValueError(f"{name} of {source} has a value that is not finite in {np.dtype(dtype)}.")
    return read[key]

  return jax.make_array_from_callback(slot.shape, sharding, share)


def _converted(view: np.ndarray, dtype: np.dtype) -> np.ndarray:
  """A copy of the view in that type, made without another one in between."""
  raw = np.empty(view.size * dtype.itemsize + _ALIGNMENT_BYTES, np.uint8)
  start = -raw.ctypes.data % _ALIGNMENT_BYTES
  result = raw[start : start + view.size * dtype.itemsize].view(dtype).reshape(view.shape)
  with np.errstate(over="ignore"):  # an overflow becomes infinite, and is told by name
    np.copyto(result, view, casting="unsafe")
  return result


def all_finite(array: np.ndarray) -> bool:
  """Whether no element is NaN or infinite; looks at a piece at a time."""
  if array.ndim == 0 or array.size <= _SLAB_ELEMENTS:
    return bool(np.isfinite(array).all())
  rows = max(1, _SLAB_ELEMENTS * array.shape[0] // array.size)
  pieces = (array[i : i + rows] for i in range(0, array.shape[0], rows))
  return all(bool(np.isfinite(piece).all()) for piece in pieces)


def _check_twins(source: str, tensors: StateDict, found: Fit) -> None:
  for name, other in found.twins.items():
    a, b = tensors[name].view(), tensors[other].view()
    rows = max(1, _SLAB_ELEMENTS * len(a) // max(1, a.size))
    pieces = range(0, len(a), rows)
    if a.dtype != b.dtype or any((a[i : i + rows] != b[i : i + rows]).any() for i in pieces):
      raise ValueError(f"{source} has different values in {name} and {other}, which must be equal.")
