"""The policy protocol: what replay and rollout need of a chunk-by-chunk video model."""

from typing import Any, Protocol

from jaxtyping import Array, Float, Int

Params = Any
"""A pytree of network weights: frozen ones, or the adapter's."""

Cache = Any
"""The KV cache, a pytree value; nothing writes to it in place."""

Conditioning = Any
"""What a prompt became: a pytree of arrays."""


class Policy(Protocol):
  """An autoregressive video model with an adapter, for one candidate.

  The adapter is a tree of its own, so that gradients are taken over it alone.
  """

  def init_cache(self) -> Cache:
    """Gives the empty cache."""
    ...

  def velocity(
    self,
    adapter: Params,
    frozen: Params,
    x: Float[Array, "frames channels height width"],
    timestep: Float[Array, ""],
    conditioning: Conditioning,
    cache: Cache,
    start_frame: Int[Array, ""],
  ) -> Float[Array, "frames channels height width"]:
    """Predicts the velocity (noise minus clean) of one chunk."""
    ...

  def write_cache(
    self,
    adapter: Params,
    frozen: Params,
    clean: Float[Array, "frames channels height width"],
    conditioning: Conditioning,
    cache: Cache,
    start_frame: Int[Array, ""],
  ) -> Cache:
    """Adds a finished chunk: the clean pass, timestep 0 on the unchanged latents."""
    ...
