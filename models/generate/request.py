"""What is asked of the engine, what it answers, and how it is set up."""

import dataclasses
from typing import Literal

import numpy as np
from jaxtyping import Float, Int

from models.generate.prefixes import Kept
from models.qwen_vl.chat import Prompt

# Why a request ended: a stop token, a stop string, its budget of new tokens, its budget of all
# tokens, the end of its script, its deadline, or `Engine.cancel`.
Finish = Literal["stop", "stop_string", "length", "budget", "script", "deadline", "cancelled"]


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
  """One continuation of a prompt.

  Attributes:
    prompt: the whole text so far, earlier rounds included; must end in a token that is text.
    max_new_tokens: budget of this continuation.
    max_total_tokens: budget of prompt and continuation together; None for the engine's.
    temperature: 0 takes the likeliest token.
    top_k, top_p: see `Sampling`.
    seed: names the random stream; 0 to 2³²−1.
    stop_ids: tokens that end it; the one that did is part of the result's tokens.
    stop_strings: texts that end it; the engine then needs `decode_text`.
    script: tokens to take instead of the model's own. Every step is computed all the same.
    after: what an earlier request kept; its common beginning with the prompt is not computed anew.
    keep: whether the result keeps its keys and values for a later round.
    deadline_s: seconds after submission at which the request ends with what it has.
  """

  prompt: Prompt
  max_new_tokens: int
  max_total_tokens: int | None = None
  temperature: float = 0.0
  top_k: int = 0
  top_p: float = 1.0
  seed: int = 0
  stop_ids: tuple[int, ...] = ()
  stop_strings: tuple[str, ...] = ()
  script: tuple[int, ...] | None = None
  after: Kept | None = None
  keep: bool = False
  deadline_s: float | None = None

  def __post_init__(self):
    """Refuses settings that cannot work."""
    if self.max_new_tokens < 1:
      raise ValueError(f"max_new_tokens is {self.max_new_tokens}; it must be at least 1.")
    if self.temperature < 0:
      raise ValueError(f"temperature is {self.temperature}; it must be 0 or more.")
    if self.top_k < 0:
      raise ValueError(f"top_k is {self.top_k}; use 0 for all tokens, or how many.")
    if not 0 < self.top_p <= 1:
      raise ValueError(f"top_p is {self.top_p}; it must be above 0 and at most 1.")
    if not 0 <= self.seed < 2**32:
      raise ValueError(f"seed is {self.seed}; it must be 0 to {2**32 - 1}.")
    if self.script is not None and not self.script:
      raise ValueError("script is empty; give at least one token, or None.")
    if len(self.prompt.ids) == 0:
      raise ValueError("prompt has no tokens; give at least one.")
    if "" in self.stop_strings:
      raise ValueError("stop_strings has an empty text, which would stop at once; leave it out.")


@dataclasses.dataclass(frozen=True, eq=False)
class Result:
  """What became of a request.

  Attributes:
    id: the number that `submit` gave.
    tokens: the continuation; a stop token is its last, a stop string ends in or with its last.
    log_probs: of the tokens, at temperature 1.
    text: the continuation without stop token and stop string; empty without `decode_text`.
    finish: why it ended.
    reused_tokens: tokens of the prompt whose keys and values were there already.
    kept: for a later round, where asked for.
    waited_s, took_s: from submission to a place in the batch, and from there to the end.
  """

  id: int
  tokens: Int[np.ndarray, " new"]
  log_probs: Float[np.ndarray, " new"]
  text: str
  finish: Finish
  reused_tokens: int = 0
  kept: Kept | None = None
  waited_s: float = 0.0
  took_s: float = 0.0


def _doubling(first: int, last: int) -> tuple[int, ...]:
  sizes = []
  while first < last:
    sizes.append(first)
    first *= 2
  return (*sizes, last)


@dataclasses.dataclass(frozen=True)
class EngineConfig:
  """Sizes of the engine. Every combination of buckets that occurs is compiled once.

  Attributes:
    slots: requests that decode at once.
    max_length: tokens of a request, prompt and continuation.
    burst: decoding steps between two looks at the queue.
    prefill_chunk: tokens of a prompt that are computed at once.
    slot_buckets, length_buckets: rows and tokens that the cache grows to.
    prefill_buckets, chunk_buckets: prompts and tokens of a prefill call.
    min_shared: a common beginning of fewer tokens is not worth copying.
    prefix_bytes: keys and values of finished requests that stay for later ones.
    feature_bytes: visual features that stay for later requests.
    vocab_limit: tokens from here on are never chosen.
    aligned: whether prompts are cut at multiples of the chunk only, so that what a prompt gives
      does not depend, to the last bit, on how much of it was there already.
  """

  slots: int = 16
  max_length: int = 4096
  burst: int = 16
  prefill_chunk: int = 256
  slot_buckets: tuple[int, ...] = ()
  length_buckets: tuple[int, ...] = ()
  prefill_buckets: tuple[int, ...] = (1, 2, 4)
  chunk_buckets: tuple[int, ...] = ()
  min_shared: int = 16
  prefix_bytes: int = 256 * 2**20
  feature_bytes: int = 256 * 2**20
  vocab_limit: int | None = None
  aligned: bool = False

  def __post_init__(self):
    """Fills in buckets that double, and refuses what cannot work."""
    for field in ("slots", "max_length", "burst", "prefill_chunk", "min_shared"):
      if getattr(self, field) < 1:
        raise ValueError(f"{field} is {getattr(self, field)}; it must be at least 1.")
    filled = {
      "slot_buckets": _doubling(1, self.slots),
      "length_buckets": _doubling(128, self.max_length + self.prefill_chunk + self.burst),
      "chunk_buckets": _doubling(16, self.prefill_chunk),
    }
    for field, sizes in filled.items():
      if not getattr(self, field):
        object.__setattr__(self, field, sizes)
    for field, least in (
      ("slot_buckets", self.slots),
      ("length_buckets", self.max_length + max(self.burst, self.prefill_chunk)),
      ("chunk_buckets", self.prefill_chunk),
      ("prefill_buckets", 1),
    ):
      sizes = getattr(self, field)
      if list(sizes) != sorted(set(sizes)) or sizes[-1] < least:
        raise ValueError(f"{field} is {sizes}; it must rise to at least {least}.")

  def chunk_size(self, tokens: int) -> int:
    """The bucket of a prefill call for so many tokens of a prompt."""
    return next(s for s in self.chunk_buckets if s >= tokens)


def exact_config(slots: int, max_length: int, prefill_chunk: int = 256, **more) -> EngineConfig:
  """Sizes under which a request's logits do not depend, to the last bit, on any other request.

  Every call has the same shapes whatever the load, so a lone request costs as much as a full batch.
  """
  return EngineConfig(
    slots=slots,
    max_length=max_length,
    prefill_chunk=prefill_chunk,
    slot_buckets=(slots,),
    length_buckets=(max_length + max(prefill_chunk, more.get("burst", 16)),),
    prefill_buckets=(1,),
    chunk_buckets=(prefill_chunk,),
    aligned=True,
    **more,
  )
