"""The compiled steps of the engine: filling the cache, decoding a burst, moving rows.

Prefill computes keys and values of all tokens of a prompt but the last; the last one is the first
that decoding reads. So prefill needs no logits, and a prompt that is already cached needs none of
it.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from models.generate.sampling import Mode, Sampling, choose
from models.layers.dense import Tree
from models.qwen_vl.cache import Cache, Extend, Keys, attend, empty_cache, fit, merge
from models.qwen_vl.presets import TextConfig
from models.qwen_vl.text import decode, embed_tokens, logits


class Chunk(NamedTuple):
  """Tokens that are added to rows of the cache.

  Attributes:
    ids: tokens; padding stands at the end and may be anything.
    positions: as the decoder takes them.
    rows: the cache row of each.
    start: tokens that each row already holds.
    features: what stands in place of embeddings, or None where no token is visual.
    is_visual: which tokens they replace.
    deep: deepstack levels, zero where not visual; None where there are none.
  """

  ids: Int[Array, "batch tokens"]
  positions: Int[Array, "batch 3 tokens"]
  rows: Int[Array, " batch"]
  start: Int[Array, " batch"]
  features: Float[Array, "batch tokens dim"] | None = None
  is_visual: Bool[Array, "batch tokens"] | None = None
  deep: Float[Array, "levels batch tokens dim"] | None = None


class Rows(NamedTuple):
  """Where each row of the cache stands.

  Attributes:
    token: the last token, which the cache does not hold yet.
    length: tokens that the cache holds.
    position: of `token`.
    active: which rows decode.
    left: tokens that the row may still get.
    drawn: tokens that it got.
    scripted: whether its tokens are given.
    stops: tokens that end it, -1 where there are fewer.
    sampling: how it chooses.
  """

  token: Int[Array, " rows"]
  length: Int[Array, " rows"]
  position: Int[Array, " rows"]
  active: Bool[Array, " rows"]
  left: Int[Array, " rows"]
  drawn: Int[Array, " rows"]
  scripted: Bool[Array, " rows"]
  stops: Int[Array, "rows stops"]
  sampling: Sampling


class Burst(NamedTuple):
  """What a burst of decoding gives.

  Attributes:
    tokens: new tokens of each row.
    log_probs: theirs, at temperature 1.
    count: how many of them are real.
    stopped: whether the last one is a stop token.
    steps: decoding steps that were run.
  """

  tokens: Int[Array, "rows steps"]
  log_probs: Float[Array, "rows steps"]
  count: Int[Array, " rows"]
  stopped: Bool[Array, " rows"]
  steps: Int[Array, ""]


@functools.partial(jax.jit, static_argnames=("config",), donate_argnames=("cache",))
def prefill(p: Tree, config: TextConfig, cache: Cache, chunk: Chunk) -> Cache:
  """The cache with a chunk's keys and values in it.

  Args:
    p: the decoder's parameters.
    config: its sizes.
    cache: given up to the result.
    chunk: must fit, padding included: start and tokens up to the cache's length.
  """
  x = embed_tokens(p, chunk.ids)
  if chunk.features is not None and chunk.is_visual is not None:
    x = jnp.where(chunk.is_visual[:, :, None], chunk.features.astype(x.dtype), x)
  extend = Extend(cache, chunk.start, chunk.rows)
  decode(p, config, x, chunk.positions, extend, chunk.deep)
  return extend.cache


@functools.partial(
  jax.jit,
  static_argnames=("config", "steps", "mode", "vocab_limit"),
  donate_argnames=("cache",),
)
def decode_burst(
  p: Tree,
  config: TextConfig,
  cache: Cache,
  rows: Rows,
  script: Int[Array, "rows steps"],
  yield_early: Bool[Array, ""],
  *,
  steps: int,
  mode: Mode,
  vocab_limit: int | None = None,
) -> tuple[Burst, Cache]:
  """Up to `steps` tokens for every active row.

  New keys and values stand in a small buffer of their own during the burst, at one place for all
  rows, so that a step writes a slice and never scatters; they join the cache at the end.

  Args:
    p: the decoder's parameters.
    config: its sizes.
    cache: given up to the result; must have room for `steps` more tokens in every row in use.
    rows: where the rows stand.
    script: tokens of scripted rows.
    yield_early: whether to come back as soon as one row ends, so that its place can be taken.
    steps: of a burst at most.
    mode: what choosing has to be able to do.
    vocab_limit: see `choose`.
  """
  count = rows.token.shape[0]
  kind = cache.v[0].dtype
  stage = empty_cache(config, count, steps, kind)
  held = jnp.arange(cache.length, dtype=jnp.int32)[None, None] < rows.length[:, None, None]
  first = _Loop(
    step=jnp.zeros((), jnp.int32),
    token=rows.token,
    active=rows.active,
    left=rows.left,
    stage=stage,
    burst=Burst(
      jnp.zeros((count, steps), jnp.int32),
      jnp.zeros((count, steps), jnp.float32),
      jnp.zeros((count,), jnp.int32),
      jnp.zeros((count,), bool),
      jnp.zeros((), jnp.int32),
    ),
  )

  def goes_on(loop: _Loop) -> Array:
    ended = jnp.any(rows.active & ~loop.active)
    return (loop.step < steps) & jnp.any(loop.active) & ~(yield_early & ended)

  def body(loop: _Loop) -> _Loop:
    j = loop.step
    new_k, new_v = list(loop.stage.k), list(loop.stage.v)
    staged = jnp.broadcast_to(jnp.arange(steps, dtype=jnp.int32) <= j, (count, 1, steps))

    def mix(layer: int, q: Array, k: Array, v: Array) -> Array:
      column = k.swapaxes(2, 3).astype(kind)
      new_k[layer] = jax.lax.dynamic_update_slice_in_dim(new_k[layer], column, j, axis=3)
      new_v[layer] = jax.lax.dynamic_update_slice_in_dim(new_v[layer], v.astype(kind), j, axis=2)
      past = Keys(cache.k[layer], cache.v[layer], held)
      return attend(q, [past, Keys(new_k[layer], new_v[layer], staged)])

    x = embed_tokens(p, loop.token)[:, None]
    at = jnp.broadcast_to((rows.position + j)[:, None, None], (count, 3, 1))
    hidden = decode(p, config, x, at, mix)
    scores = logits(p, config, hidden[:, :, 0])
    token, log_prob = choose(scores, rows.sampling, rows.drawn + j, mode, vocab_limit)
    given = jax.lax.dynamic_index_in_dim(script, j, axis=1, keepdims=False)
    token = jnp.where(rows.scripted, given, token)
    log_prob = jnp.where(rows.scripted, _log_prob(scores, token), log_prob)
    token = jnp.where(loop.active, token, loop.token)
    stopped = loop.active & jnp.any(token[:, None] == rows.stops, axis=1)
    left = loop.left - loop.active.astype(jnp.int32)
    burst = Burst(
      _put(loop.burst.tokens, token, j),
      _put(loop.burst.log_probs, log_prob, j),
      loop.burst.count + loop.active.astype(jnp.int32),
      loop.burst.stopped | stopped,
      j + 1,
    )
    active = loop.active & ~stopped & (left > 0)
    return _Loop(j + 1, token, active, left, Cache(tuple(new_k), tuple(new_v)), burst)

  last = jax.lax.while_loop(goes_on, body, first)
  every = jnp.arange(count, dtype=jnp.int32)
  return last.burst, merge(cache, last.stage, every, rows.length)


class _Loop(NamedTuple):
  step: Array
  token: Array
  active: Array
  left: Array
  stage: Cache
  burst: Burst


def _put(store: Array, column: Array, j: Array) -> Array:
  return jax.lax.dynamic_update_slice_in_dim(store, column[:, None], j, axis=1)


def _log_prob(scores: Array, token: Array) -> Array:
  picked = jnp.take_along_axis(scores, token[:, None], axis=1)[:, 0]
  return picked - jax.nn.logsumexp(scores, axis=-1)


@functools.partial(jax.jit, static_argnames=("rows", "length"))
def resize(cache: Cache, order: Int[Array, " kept"], *, rows: int, length: int) -> Cache:
  """A cache of another size: row i is the old row `order[i]`; what is new is zero."""
  return fit(cache, order, rows, length)


@functools.partial(jax.jit, static_argnames=("length",))
def take_row(cache: Cache, row: Int[Array, ""], *, length: int) -> Cache:
  """The first `length` tokens of a row, as a cache of one row."""
  return fit(cache, row[None], 1, length)


@functools.partial(jax.jit, donate_argnames=("cache",))
def put_row(cache: Cache, row: Int[Array, ""], taken: Cache) -> Cache:
  """The cache with a taken row at the beginning of another row."""
  return merge(cache, taken, row[None], jnp.zeros((1,), jnp.int32))
