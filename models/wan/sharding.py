"""How a Wan transformer is laid out over a mesh with the axes `fsdp` and `seq`.

Kernels and adapters are cut over `fsdp`, tokens over `seq`. There is no global mesh: a module is
given one or none, and without one nothing here does anything.
"""

from typing import Any, TypeVar

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

Tree = TypeVar("Tree")

TOKENS = P(None, "seq", None)  # [batch, tokens, dim]
CACHE = P(None, None, None, "seq", None)  # [layers, batch, heads, slots, head_dim]


def kernel_spec(shape: tuple[int, ...], fsdp: int) -> P:
  """Cuts the larger of the last two axes over `fsdp`: of a kernel, its wider side.

  An axis that does not divide stays whole.
  """
  if len(shape) < 2:
    return P()
  axis = len(shape) - 1 if shape[-1] >= shape[-2] else len(shape) - 2
  if shape[axis] % fsdp:
    return P()
  return P(*(["fsdp" if i == axis else None for i in range(len(shape))]))


def parameter_shardings(tree: Tree, mesh: Mesh) -> Tree:
  """A sharding for every array of a parameter or adapter tree.

  Raises:
    ValueError: when the mesh lacks one of the two axes.
  """
  check_mesh(mesh)
  fsdp = mesh.shape["fsdp"]

  def of(leaf: Any) -> NamedSharding:
    return NamedSharding(mesh, kernel_spec(leaf.shape, fsdp))

  return jax.tree.map(of, tree)


def cache_sharding(mesh: Mesh) -> NamedSharding:
  """The sharding of a cache's keys and values: slots over `seq`."""
  check_mesh(mesh)
  return NamedSharding(mesh, CACHE)


def replicated(mesh: Mesh) -> NamedSharding:
  """The sharding of everything small: latents, timesteps, text, indices."""
  return NamedSharding(mesh, P())


def constrain_tokens(
  tokens: Float[Array, "batch tokens dim"], mesh: Mesh | None
) -> Float[Array, "batch tokens dim"]:
  """Keeps the residual stream cut over `seq`; without a mesh, or with one row, leaves it alone."""
  if mesh is None or mesh.shape["seq"] == 1 or tokens.shape[1] % mesh.shape["seq"]:
    return tokens
  return jax.lax.with_sharding_constraint(tokens, NamedSharding(mesh, TOKENS))


def check_mesh(mesh: Mesh) -> None:
  """Refuses a mesh without the two axes.

  Raises:
    ValueError: naming the axes that it has.
  """
  if not {"fsdp", "seq"} <= set(mesh.axis_names):
    raise ValueError(f"mesh has the axes {mesh.axis_names}; it must have 'fsdp' and 'seq'.")
