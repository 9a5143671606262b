"""How a judge is laid out over a mesh with the axes `fsdp` and `seq`.

Weights are cut over `fsdp` by outputs where a map widens or makes heads, and by inputs where it
narrows again, so that decoding a token moves activations between devices and never weights. A cache
is cut by heads over `fsdp` and by tokens over `seq`.
"""

from collections.abc import Mapping
from typing import Any

from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from models.qwen_vl.cache import Cache

# Maps whose inputs are what the cut ones before them gave.
NARROWING = ("o", "down", "proj", "fc2")


def parameter_spec(name: str, shape: tuple[int, ...], fsdp: int) -> P:
  """How one parameter is cut, by its path; an axis that does not divide stays whole."""
  if len(shape) != 2:
    return P()
  owner = name.split(".")[-2] if "." in name else name
  axis = 1 if owner in NARROWING else 0
  if shape[axis] % fsdp:
    return P()
  return P("fsdp", None) if axis == 0 else P(None, "fsdp")


def parameter_shardings(parameters: Mapping[str, Any], mesh: Mesh) -> dict[str, NamedSharding]:
  """A sharding for every parameter, by its path.

  Raises:
    ValueError: when the mesh lacks one of the two axes.
  """
  _check(mesh)
  fsdp = mesh.shape["fsdp"]
  return {
    name: NamedSharding(mesh, parameter_spec(name, tuple(array.shape), fsdp))
    for name, array in parameters.items()
  }


def cache_shardings(mesh: Mesh, cache: Cache) -> Cache:
  """The sharding of each of a cache's arrays; an axis that does not divide stays whole.

  Raises:
    ValueError: when the mesh lacks one of the two axes.
  """
  _check(mesh)
  heads = "fsdp" if cache.v[0].shape[1] % mesh.shape["fsdp"] == 0 else None
  tokens = "seq" if cache.length % mesh.shape["seq"] == 0 else None
  k, v = (
    NamedSharding(mesh, spec) for spec in (P(None, heads, None, tokens), P(None, heads, tokens))
  )
  return Cache(tuple(k for _ in cache.k), tuple(v for _ in cache.v))  # type: ignore[arg-type]


def _check(mesh: Mesh) -> None:
  if not {"fsdp", "seq"} <= set(mesh.axis_names):
    raise ValueError(f"mesh has the axes {mesh.axis_names}; it must have 'fsdp' and 'seq'.")
