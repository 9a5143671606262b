"""How a row chooses its next token: the likeliest, or one drawn by a stream of its own."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# What a compiled step has to be able to do: no row draws, rows draw, rows draw from the likeliest.
Mode = Literal["greedy", "plain", "filtered"]


class Sampling(NamedTuple):
  """Settings of each row.

  Attributes:
    seed: names the row's random stream.
    temperature: 0 takes the likeliest token.
    top_k: draws among that many likeliest tokens; 0 among all.
    top_p: draws among the likeliest tokens that hold this share of the probability; 1 among all.
  """

  seed: Int[Array, " rows"]
  temperature: Float[Array, " rows"]
  top_k: Int[Array, " rows"]
  top_p: Float[Array, " rows"]


def choose(
  logits: Float[Array, "rows vocab"],
  sampling: Sampling,
  drawn: Int[Array, " rows"],
  mode: Mode,
  vocab_limit: int | None = None,
) -> tuple[Int[Array, " rows"], Float[Array, " rows"]]:
  """The next token of each row, and its log-probability at temperature 1.

  A row's draw depends on its seed and on how many tokens it has drawn, on nothing else.

  Args:
    logits: of the next token.
    sampling: the rows' settings.
    drawn: tokens that each row has chosen so far.
    mode: what may be asked for; rows of temperature 0 take the likeliest in every mode.
    vocab_limit: tokens from here on are never chosen (rows of the table that stand for nothing).
  """
  if vocab_limit is not None:
    real = jnp.arange(logits.shape[1], dtype=jnp.int32) < vocab_limit
    logits = jnp.where(real[None], logits, -jnp.inf)
  token = _likeliest(logits)
  if mode != "greedy":
    scaled = logits / jnp.maximum(sampling.temperature, 1e-6)[:, None]
    if mode == "filtered":
      scaled = _filter(scaled, sampling)
    noise = jax.vmap(lambda seed, count: _gumbel(seed, count, logits.shape[1]))(
      sampling.seed, drawn
    )
    picked = _likeliest(scaled + noise)
    token = jnp.where(sampling.temperature > 0, picked, token)
  score = jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0]
  return token, score - jax.nn.logsumexp(logits, axis=-1)


def _likeliest(logits: Array) -> Array:
  """The first of the largest; as `argmax`, but of plain maxima, which are faster on CPUs."""
  largest = jnp.max(logits, axis=-1, keepdims=True)
  last = logits.shape[1] - 1
  at = jnp.where(logits == largest, jnp.arange(last + 1, dtype=jnp.int32)[None], last)
  return jnp.min(at, axis=-1)


def _gumbel(seed: Array, count: Array, size: int) -> Array:
  return jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), count), (size,))


def _filter(scaled: Array, sampling: Sampling) -> Array:
  """First the `top_k` likeliest, then of these the fewest that hold `top_p`; the rest is -inf."""
  falling = -jnp.sort(-scaled, axis=-1)
  size = scaled.shape[1]
  k = jnp.where(sampling.top_k > 0, sampling.top_k, size)[:, None]
  falling = jnp.where(jnp.arange(size, dtype=jnp.int32)[None] < k, falling, -jnp.inf)
  probability = jax.nn.softmax(falling, axis=-1)
  before = jnp.cumsum(probability, axis=-1) - probability
  # Rounding may leave `before` below one past the k-th, so the share alone does not tell.
  kept = (before < sampling.top_p[:, None]) & jnp.isfinite(falling)
  least = jnp.min(jnp.where(kept, falling, jnp.inf), axis=-1)
  return jnp.where(scaled >= least[:, None], scaled, -jnp.inf)
