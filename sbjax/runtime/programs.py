"""A worker's jitted functions with the shapes of their arguments, and no array behind them.

What the planner of memory and the benchmarks compile is what a worker runs: the same functions,
built from the same recipe. Nothing here allocates weights.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models.layers.lora import lora_shapes
from models.wan.dit import CausalWanDiT
from models.wan.vae import WanVAE
from sbjax.dataflow.memory_models import DecodeSizes
from sbjax.policy import TextConditioning, WanPolicy
from sbjax.rollout import make_rollout
from sbjax.runtime.recipe import Recipe
from sbjax.separation.channels import Point
from sbjax.separation.replay import make_replay
from sbjax.worlds.decoding import to_bytes

KINDS = ("generate", "write", "forward", "replay", "folded", "fused")
"""One chunk each: rollout, clean pass, scores, scores and gradients, one weighted gradient, rollout
with its gradient."""


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
  """A jitted function and what it is called with.

  Attributes:
    function: what `jax.jit` gave.
    arguments: pytrees of `jax.ShapeDtypeStruct`.
    options: static arguments by name.
  """

  function: Callable[..., Any]
  arguments: tuple[Any, ...]
  options: dict[str, Any]

  def lower(self) -> Any:
    """The lowered program."""
    return self.function.lower(*self.arguments, **self.options)  # type: ignore[attr-defined]


def programs(
  recipe: Recipe, param_dtype: Any, kinds: tuple[str, ...] = KINDS
) -> dict[str, Program]:
  """Gives the programs of one chunk of one candidate, by kind.

  Args:
    recipe: the run's recipe.
    param_dtype: of the frozen weights.
    kinds: which of `KINDS`; `fused` is left out where the objective cannot fuse.
  """
  dit = nnx.eval_shape(lambda: CausalWanDiT(recipe.dit, rngs=nnx.Rngs(0), param_dtype=param_dtype))
  graphdef, frozen = nnx.split(dit)
  policy = WanPolicy(graphdef, recipe.dit, recipe.sampler, recipe.lora.scale)
  objective, shape = recipe.objective, recipe.geometry.chunk_shape
  named = objective.functions
  channels = [named[name] for name in objective.channels]
  statistics = [named[name] for name in objective.statistics]
  rollout = make_rollout(
    policy, recipe.transition, recipe.schedule, channels[0], shape, objective.points
  )
  replay = make_replay(policy, recipe.transition, channels, statistics)

  def array(*sizes: int, dtype: Any = jnp.float32) -> Any:
    return jax.ShapeDtypeStruct(sizes, dtype)

  adapter = {
    target: {name: array(*sizes) for name, sizes in pair.items()}
    for target, pair in lora_shapes(recipe.lora, recipe.dit).items()
  }
  extra = recipe.dit.in_dim - recipe.dit.out_dim
  conditioning = TextConditioning(
    array(recipe.dit.text_len, recipe.dit.dim), array(extra, *shape[2:])
  )
  cache = jax.eval_shape(policy.init_cache)
  number, seed = array(dtype=jnp.int32), array(dtype=jnp.uint32)
  steps = recipe.trained
  vector, stack = array(steps), array(steps, *shape)
  point = Point(
    x=stack,
    timestep=vector,
    sigma=vector,
    sigma_next=vector,
    target=stack,
    anchor=stack,
    reference=stack,
  )
  models = (adapter, frozen, cache)
  made = (*models, conditioning, number, number, seed, seed)
  at = (*models, point, conditioning, number)
  weights = array(steps, len(channels))
  known = {
    "generate": Program(rollout.generate_chunk, made, {}),
    "write": Program(replay.write_cache, (*models, array(*shape), conditioning, number), {}),
    "forward": Program(replay.score_chunk, at, {}),
    "replay": Program(replay.replay_chunk, at, {}),
    "folded": Program(replay.folded_chunk, (*at, weights), {}),
  }
  if rollout.fused_chunk is not None:
    stochastic = array(recipe.schedule.stochastic)
    trained = tuple(range(steps))
    known["fused"] = Program(rollout.fused_chunk, (*made, stochastic), {"trained": trained})
  return {kind: known[kind] for kind in kinds if kind in known}


def decode_program(sizes: DecodeSizes) -> Program:
  """A call of a streamed decoder to bytes of video."""
  kind = jnp.bfloat16 if sizes.value_bytes == 2 else jnp.float32
  vae = nnx.eval_shape(lambda: WanVAE(sizes.vae, rngs=nnx.Rngs(0), dtype=kind, param_dtype=kind))
  graphdef, state = nnx.split(vae)

  @jax.jit
  def decode(state: Any, latents: jax.Array, cache: Any) -> Any:
    model = nnx.merge(graphdef, state)
    step = model.decode_first if sizes.starts else model.decode_next
    pixels, after = step(latents, cache)
    return to_bytes(pixels[0]), after

  shape = (1, sizes.frames, sizes.vae.z_dim, sizes.height, sizes.width)
  latents = jax.ShapeDtypeStruct(shape, jnp.float32)
  cache = jax.eval_shape(
    lambda s: nnx.merge(graphdef, s).init_decoder_cache(1, sizes.height, sizes.width), state
  )
  return Program(decode, (state, latents, cache), {})


def working_bytes(recipe: Recipe, param_dtype: Any, kind: str) -> int:
  """What the compiler says a program allocates beside its arguments and results, per device."""
  made = programs(recipe, jnp.dtype(param_dtype), (kind,))[kind]
  return made.lower().compile().memory_analysis().temp_size_in_bytes
