"""A request on its way: what the engine knows of it between two compiled steps."""

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Float

from models.generate.prefixes import Track
from models.generate.request import Request
from models.generate.sampling import Sampling
from models.generate.steps import Rows
from models.qwen_vl.positions import Placed

_WHOLE = ("token", "length", "position", "left", "drawn")


@dataclasses.dataclass(eq=False)
class Row:
  """A request, waiting or at work; the one mutable record of the engine.

  Attributes:
    id: its number.
    request: what was asked for.
    placed: positions of the prompt.
    track: what other prompts are compared with; the prompt only.
    submitted_s: time of submission.
    budget: tokens that it may get.
    deadline_s: time at which it ends, or None.
    admitted_s: time at which it got a place.
    filled: tokens whose keys and values are in the cache.
    aligned: how many of them are those of aligned chunks.
    reused: how many of them were copied.
    features, deep: visual features of the prompt, while it is being filled.
    tokens, log_probs: the continuation so far.
    stopped: whether its last token is a stop token.
  """

  id: int
  request: Request
  placed: Placed
  track: Track
  submitted_s: float
  budget: int
  deadline_s: float | None
  admitted_s: float = 0.0
  filled: int = 0
  aligned: int = 0
  reused: int = 0
  features: Float[np.ndarray, "rows dim"] | None = None
  deep: Float[np.ndarray, "levels rows dim"] | None = None
  tokens: list[int] = dataclasses.field(default_factory=list)
  log_probs: list[float] = dataclasses.field(default_factory=list)
  stopped: bool = False

  @property
  def prompt_length(self) -> int:
    """Tokens of the prompt."""
    return len(self.request.prompt.ids)

  @property
  def to_fill(self) -> int:
    """Tokens of the prompt that are not in the cache and must be before decoding."""
    return max(self.prompt_length - 1 - self.filled, 0)

  @property
  def sequence(self) -> Track:
    """Prompt and continuation."""
    return self.track.extended(np.asarray(self.tokens, np.int64), self.placed.next_position)

  def needs_features(self, reused: int) -> bool:
    """Whether a visual token remains to be computed after `reused` tokens."""
    return bool((self.placed.visual_rows[reused:] >= 0).any())


def decoding_rows(rows: list[Row | None], steps: int) -> tuple[Rows, Any]:
  """The compiled step's view of the rows, and the script of the next steps."""
  count = len(rows)
  width = max([1, *(len(row.request.stop_ids) for row in rows if row)])
  whole = {name: np.zeros(count, np.int32) for name in _WHOLE}
  flags = {name: np.zeros(count, bool) for name in ("active", "scripted")}
  stops = np.full((count, _power(width)), -1, np.int32)
  seed, top_k = np.zeros(count, np.uint32), np.zeros(count, np.int32)
  temperature, top_p = np.zeros(count, np.float32), np.ones(count, np.float32)
  script = np.zeros((count, steps), np.int32)
  for i, row in enumerate(rows):
    if row is None:
      continue
    whole["length"][i] = row.filled
    if row.to_fill:
      continue
    request, got = row.request, len(row.tokens)
    whole["token"][i] = row.tokens[-1] if got else request.prompt.ids[-1]
    whole["position"][i] = row.placed.next_position + got - 1
    flags["active"][i] = True
    whole["left"][i] = row.budget - got
    whole["drawn"][i] = got
    stops[i, : len(request.stop_ids)] = request.stop_ids
    seed[i] = request.seed
    temperature[i] = request.temperature
    top_k[i] = request.top_k
    top_p[i] = request.top_p
    if request.script is not None:
      flags["scripted"][i] = True
      stops[i] = -1
      given = request.script[got : got + steps]
      script[i, : len(given)] = given
  # Left on the host: a compiled call takes arrays of the host faster than each can be moved there.
  drawing: Any = (seed, temperature, top_k, top_p)
  given: Any = {**whole, **flags, "stops": stops}
  return Rows(**given, sampling=Sampling(*drawing)), script


def _power(count: int) -> int:
  return 1 << (count - 1).bit_length()
