"""Wire format: what travels between processes is plain numpy.

`jax.Array` and ml_dtypes arrays are pickled in-band and cost an order of magnitude more than numpy;
a bfloat16 array therefore travels as a uint16 view with a tag.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Tagged:
  """A bfloat16 array on the wire.

  Attributes:
    bits: its uint16 view.
  """

  bits: np.ndarray


def to_wire(value: Any) -> Any:
  """Gives a numpy array that pickles out of band, or a tagged view for bfloat16."""
  array = np.asarray(value)
  return Tagged(array.view(np.uint16)) if array.dtype == jnp.bfloat16 else array


def from_wire(value: Any) -> np.ndarray:
  """Takes `to_wire` back; the array may be read-only."""
  return value.bits.view(jnp.bfloat16) if isinstance(value, Tagged) else value


def size_bytes(value: Any) -> int:
  """Bytes of the arrays inside a value (dataclasses, tuples, lists and dicts are walked)."""
  if isinstance(value, np.ndarray):
    return value.nbytes
  if dataclasses.is_dataclass(value) and not isinstance(value, type):
    return sum(size_bytes(getattr(value, f.name)) for f in dataclasses.fields(value))
  if isinstance(value, dict):
    return sum(size_bytes(v) for v in value.values())
  if isinstance(value, tuple | list):
    return sum(size_bytes(v) for v in value)
  return 0
