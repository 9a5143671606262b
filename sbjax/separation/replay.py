"""Replay: a stored trajectory through the network again, for its channels and their gradients.

`replay_chunk` is the one jitted piece: merged replay, the two-pass baseline's forward and backward
halves, and a fused rollout are all made of it (StageBreaker §4.3). The KV cache is a constant: a
chunk's score depends on the adapter through the chunk's own pass only, in every mode alike.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from sbjax.separation.channels import ChannelFn, Point, Transition
from sbjax.separation.policy import Cache, Conditioning, Params, Policy


@dataclasses.dataclass(frozen=True)
class ChunkScores:
  """Scalars of one chunk.

  Attributes:
    channels: [steps, channels].
    statistics: [steps, statistics].
  """

  channels: Float[Array, "steps channels"]
  statistics: Float[Array, "steps statistics"]


jax.tree_util.register_dataclass(
  ChunkScores, data_fields=["channels", "statistics"], meta_fields=[]
)


@dataclasses.dataclass(frozen=True)
class ReplayFunctions:
  """The jitted pieces of a replay, compiled once per shape.

  Attributes:
    score_chunk: (adapter, frozen, cache, point, conditioning, start_frame) -> ChunkScores.
    replay_chunk: the same arguments -> (ChunkScores, gradients with leading [steps, channels]).
    folded_chunk: the same arguments and weights [steps, channels] -> (ChunkScores, one gradient).
    write_cache: (adapter, frozen, cache, clean, conditioning, start_frame) -> cache.
    init_cache: () -> cache.
  """

  score_chunk: Callable[..., ChunkScores]
  replay_chunk: Callable[..., tuple[ChunkScores, Params]]
  folded_chunk: Callable[..., tuple[ChunkScores, Params]]
  write_cache: Callable[..., Cache]
  init_cache: Callable[[], Cache]


def make_replay(
  policy: Policy,
  transition: Transition,
  channels: Sequence[ChannelFn],
  statistics: Sequence[ChannelFn] = (),
) -> ReplayFunctions:
  """Builds the jitted pieces for one policy, transition and set of channels.

  Args:
    policy: the video model.
    transition: gives mean, standard deviation and log-probability of a denoising step.
    channels: differentiated scalars, the score first.
    statistics: scalars without gradient.

  Returns:
    The pieces; each `Point` argument has a leading axis of trained denoising steps.
  """

  def scalars(adapter, frozen, cache, point, conditioning, start_frame):
    velocity = policy.velocity(
      adapter, frozen, point.x, point.timestep, conditioning, cache, start_frame
    )
    values = jnp.stack([fn(point, velocity, transition) for fn in channels])
    detached = jax.lax.stop_gradient(velocity)
    seen = [fn(point, detached, transition) for fn in statistics]
    return values, jnp.stack(seen) if seen else jnp.zeros((0,), values.dtype)

  def steps_of(fn, point):
    """Runs the trained steps one after the other: each needs the memory of one step only."""
    return jax.lax.map(fn, point)

  @jax.jit
  def score_chunk(adapter, frozen, cache, point, conditioning, start_frame):
    values, seen = steps_of(
      lambda p: scalars(adapter, frozen, cache, p, conditioning, start_frame), point
    )
    return ChunkScores(values, seen)

  def step_gradients(adapter, frozen, cache, point, conditioning, start_frame):
    run = functools.partial(
      scalars,
      frozen=frozen,
      cache=jax.lax.stop_gradient(cache),
      point=point,
      conditioning=conditioning,
      start_frame=start_frame,
    )
    if len(channels) == 1:
      # One channel needs one pullback, and value_and_grad never builds its basis.
      def score(a):
        values, seen = run(a)
        return values[0], (values, seen)

      (_, (values, seen)), gradient = jax.value_and_grad(score, has_aux=True)(adapter)
      return values, seen, jax.tree.map(lambda g: g[None], gradient)
    values, pullback, seen = jax.vjp(run, adapter, has_aux=True)
    basis = jnp.eye(len(channels), dtype=values.dtype)
    pulled = [pullback(basis[j])[0] for j in range(len(channels))]
    return values, seen, jax.tree.map(lambda *g: jnp.stack(g), *pulled)

  @jax.jit
  def replay_chunk(adapter, frozen, cache, point, conditioning, start_frame):
    values, seen, gradients = steps_of(
      lambda p: step_gradients(adapter, frozen, cache, p, conditioning, start_frame), point
    )
    return ChunkScores(values, seen), gradients

  @jax.jit
  def folded_chunk(adapter, frozen, cache, point, conditioning, start_frame, weights):
    cache = jax.lax.stop_gradient(cache)

    def step(total, scanned):
      p, w = scanned

      def weighted(a):
        values, seen = scalars(a, frozen, cache, p, conditioning, start_frame)
        # A weight of zero must not let a non-finite channel through (0 · inf).
        return jnp.sum(jnp.where(w == 0, 0.0, values) * w), (values, seen)

      (_, (values, seen)), gradient = jax.value_and_grad(weighted, has_aux=True)(adapter)
      return jax.tree.map(jnp.add, total, gradient), (values, seen)

    zeros = jax.tree.map(jnp.zeros_like, adapter)
    total, (values, seen) = jax.lax.scan(step, zeros, (point, weights))
    return ChunkScores(values, seen), total

  @jax.jit
  def write_cache(adapter, frozen, cache, clean, conditioning, start_frame):
    return jax.lax.stop_gradient(
      policy.write_cache(adapter, frozen, clean, conditioning, cache, start_frame)
    )

  return ReplayFunctions(
    score_chunk, replay_chunk, folded_chunk, write_cache, jax.jit(policy.init_cache)
  )


@dataclasses.dataclass(frozen=True)
class ReplayInputs:
  """One candidate, ready to be replayed.

  Attributes:
    points: per chunk, a `Point` with a leading axis of trained steps.
    clean: per chunk, the stored clean latents, on which the context is rebuilt.
    conditioning: the prompt.
    frames_per_chunk: latent frames of a chunk.
  """

  points: Sequence[Point]
  clean: Sequence[Float[Array, "frames channels height width"]]
  conditioning: Conditioning
  frames_per_chunk: int


def chunk_blocks(chunks: int, blocks: int) -> tuple[tuple[int, ...], ...]:
  """Cuts the chunks of a trajectory into its fixed folding blocks, in order.

  The cut depends on the two numbers only, never on who replays: sums that are taken block by block
  are the same for a whole and for a split replay.

  Args:
    chunks: number of chunks, at least 1.
    blocks: number of blocks; never more than there are chunks are made.
  """
  cut = np.array_split(np.arange(chunks), min(blocks, chunks))
  return tuple(tuple(int(c) for c in block) for block in cut)


def _walk(
  functions: ReplayFunctions, adapter: Params, frozen: Params, inputs: ReplayInputs, chunks
):
  """Yields (chunk, cache before it, start frame) and rebuilds the context between chunks."""
  cache = functions.init_cache()
  last = max(chunks)
  for chunk in range(last + 1):
    start = jnp.asarray(chunk * inputs.frames_per_chunk, jnp.int32)
    if chunk in chunks:
      yield chunk, cache, start
    if chunk < last:  # nobody attends to the last chunk's context
      cache = functions.write_cache(
        adapter, frozen, cache, inputs.clean[chunk], inputs.conditioning, start
      )


def score(
  functions: ReplayFunctions,
  adapter: Params,
  frozen: Params,
  inputs: ReplayInputs,
  chunks: Sequence[int],
) -> dict[int, ChunkScores]:
  """The two-pass baseline's first half: channels and statistics, no gradient."""
  return {
    chunk: functions.score_chunk(
      adapter, frozen, cache, inputs.points[chunk], inputs.conditioning, start
    )
    for chunk, cache, start in _walk(functions, adapter, frozen, inputs, chunks)
  }


def _fold_blocks(
  functions: ReplayFunctions,
  adapter: Params,
  frozen: Params,
  inputs: ReplayInputs,
  blocks: Sequence[Sequence[int]],
  visit: Callable[[Params | None, int, Cache, jax.Array], tuple[ChunkScores, Params]],
) -> tuple[dict[int, ChunkScores], list[Params]]:
  """Visits the blocks' chunks in order.

  `visit` takes a block's gradient so far (None before its first chunk), the chunk, the cache before
  it and its start frame, and gives the chunk's scores and the block's new gradient.
  """
  block_of = {c: i for i, block in enumerate(blocks) for c in block}
  scores: dict[int, ChunkScores] = {}
  totals: list[Params] = [None] * len(blocks)
  for chunk, cache, start in _walk(functions, adapter, frozen, inputs, list(block_of)):
    block = block_of[chunk]
    scores[chunk], totals[block] = visit(totals[block], chunk, cache, start)
  return scores, totals


def replay(
  functions: ReplayFunctions,
  adapter: Params,
  frozen: Params,
  inputs: ReplayInputs,
  blocks: Sequence[Sequence[int]],
  reduce_weights: Float[np.ndarray, "chunks units steps"],
) -> tuple[dict[int, ChunkScores], list[Params]]:
  """Merged replay: channels and one gradient per unit and channel, each chunk visited once.

  Args:
    functions: the jitted pieces.
    adapter: LoRA weights, the version that is being trained.
    frozen: the network's other weights.
    inputs: the candidate.
    blocks: the folding blocks to replay, each a run of chunks.
    reduce_weights: how a chunk's steps add up to units.

  Returns:
    Scores per chunk, and per block the gradients with leading axes [units, channels], summed over
    the block's chunks in order.
  """

  def visit(total, chunk, cache, start):
    scores, steps = functions.replay_chunk(
      adapter, frozen, cache, inputs.points[chunk], inputs.conditioning, start
    )
    return scores, add_units(total, steps, jnp.asarray(reduce_weights[chunk], jnp.float32))

  return _fold_blocks(functions, adapter, frozen, inputs, blocks, visit)


def replay_folded(
  functions: ReplayFunctions,
  adapter: Params,
  frozen: Params,
  inputs: ReplayInputs,
  blocks: Sequence[Sequence[int]],
  weights: Float[np.ndarray, "chunks steps channels"],
) -> tuple[dict[int, ChunkScores], list[Params]]:
  """Replay with weights that are known beforehand: the two-pass baseline's second half.

  Args:
    functions: the jitted pieces.
    adapter: LoRA weights, the version that is being trained.
    frozen: the network's other weights.
    inputs: the candidate.
    blocks: the folding blocks to replay.
    weights: the weight of each chunk's, step's and channel's gradient.

  Returns:
    Scores per chunk, and one folded gradient per block.
  """

  def visit(total, chunk, cache, start):
    scores, folded = functions.folded_chunk(
      adapter,
      frozen,
      cache,
      inputs.points[chunk],
      inputs.conditioning,
      start,
      jnp.asarray(weights[chunk], jnp.float32),
    )
    return scores, folded if total is None else add_trees(total, folded)

  return _fold_blocks(functions, adapter, frozen, inputs, blocks, visit)


@jax.jit
def add_trees(total: Params, addend: Params) -> Params:
  """Adds two gradients leaf by leaf."""
  return jax.tree.map(jnp.add, total, addend)


def add_units(total: Params | None, steps: Params, weights: Float[Array, "units steps"]) -> Params:
  """Adds one chunk's step gradients [steps, channels, ...] to the units' [units, channels, ...]."""
  return _first_units(steps, weights) if total is None else _more_units(total, steps, weights)


def _units(steps: Params, weights: Float[Array, "units steps"]) -> Params:
  def leaf(g):
    out = [
      sum(weights[u, k].astype(g.dtype) * g[k] for k in range(g.shape[0]))
      for u in range(weights.shape[0])
    ]
    return jnp.stack(out)

  return jax.tree.map(leaf, steps)


_first_units = jax.jit(_units)


@jax.jit
def _more_units(total: Params, steps: Params, weights: Float[Array, "units steps"]) -> Params:
  return jax.tree.map(jnp.add, total, _units(steps, weights))


def unit_weights(
  unit: str, chunk_reduce: str, chunks: int, steps: int
) -> Float[np.ndarray, "chunks units steps"]:
  """How (chunk, step) scalars add up to units, as weights.

  Args:
    unit: `step` (each trained denoising step carries a ratio) or `candidate` (one ratio).
    chunk_reduce: `sum` over chunks (StageBreaker eq. 4) or `mean` (a whole video's mean, as
      DanceGRPO takes it).
    chunks: number of chunks, all of one size.
    steps: trained denoising steps.

  Raises:
    ValueError: for an unknown word.
  """
  if chunk_reduce not in ("sum", "mean"):
    raise ValueError(f"chunk_reduce={chunk_reduce!r} is not known; 'sum' and 'mean' are")
  if unit not in ("step", "candidate"):
    raise ValueError(f"unit={unit!r} is not known; 'step' and 'candidate' are")
  weight = 1.0 if chunk_reduce == "sum" else 1.0 / chunks
  table = np.eye(steps) if unit == "step" else np.ones((1, steps))
  return np.broadcast_to(weight * table, (chunks, *table.shape)).copy()


def units_of(
  scalars: Float[np.ndarray, "chunks steps channels"],
  weights: Float[np.ndarray, "chunks units steps"],
) -> Float[np.ndarray, "units channels"]:
  """Adds up (chunk, step) scalars to units in float64."""
  return np.einsum("cuk,ckj->uj", weights, np.asarray(scalars, np.float64))
