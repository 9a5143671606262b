"""The engine: a queue of requests, rows of a cache, and the compiled steps between them.

Requests come and go at any time. A round of the engine fills a chunk of the prompts that wait for
it, or else decodes a burst for all rows that can; whoever ends leaves its row to the next at once.
Prompts that begin alike are computed once: the second waits until the first has filled what they
share, and copies it.
"""

import collections
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from models.generate import steps
from models.generate.filling import chunk_of
from models.generate.places import Places
from models.generate.prefixes import Kept, track
from models.generate.request import EngineConfig, Finish, Request, Result
from models.generate.rows import Row, decoding_rows
from models.generate.sampling import Mode
from models.generate.visuals import VisualEncoder
from models.layers.dense import Tree
from models.qwen_vl.positions import place
from models.qwen_vl.presets import QwenVLConfig

DecodeText = Callable[[Sequence[int]], str]


class Engine:
  """Runs many requests on one model.

  Args:
    p: the model's parameters (`tree_of`), on whatever devices they are to stay.
    model: its sizes.
    config: the engine's.
    decode_text: token ids to text; needed for stop strings and for the text of results.
    mesh: devices over which the cache is cut; the parameters are cut by the caller.
    clock: seconds, for deadlines and the times of results.
  """

  def __init__(
    self,
    p: Tree,
    model: QwenVLConfig,
    config: EngineConfig,
    *,
    decode_text: DecodeText | None = None,
    mesh: Mesh | None = None,
    clock: Callable[[], float] = time.monotonic,
  ):
    self._p, self._model, self._config = p["text"], model, config
    self._decode_text, self._clock = decode_text, clock
    self._visuals = VisualEncoder(
      p["visual"], model.vision, config.feature_bytes, one_by_one=config.aligned
    )
    self._waiting: collections.deque[Row] = collections.deque()
    self._cancelled: set[int] = set()
    self._next_id = 0
    self.counts: collections.Counter[str] = collections.Counter()
    kind = self._p["embed"].dtype
    self._places = Places(model.text, config, kind, mesh, self.counts)

  @property
  def config(self) -> EngineConfig:
    """Its sizes."""
    return self._config

  @property
  def pending(self) -> int:
    """Requests that have no result yet."""
    return len(self._waiting) + self._places.busy

  @property
  def filling(self) -> bool:
    """Whether a request waits for a row or for the rest of its prompt."""
    return bool(self._waiting) or any(row.to_fill for _, row in self._places.taken())

  def wait(self) -> None:
    """Waits until the devices have done what was asked of them so far, for whoever takes times."""
    jax.block_until_ready(self._places.cache)

  def submit(self, request: Request) -> int:
    """Queues a request and gives its number.

    Raises:
      ValueError: when it cannot be run: too long, visuals and placeholders that do not fit, a
        stop string without `decode_text`.
    """
    prompt, limit = request.prompt, self._config.max_length
    length = len(prompt.ids)
    if length + 1 > limit:
      raise ValueError(f"the prompt has {length} tokens; max_length is {limit}, so shorten it.")
    if request.stop_strings and self._decode_text is None:
      raise ValueError("stop_strings are given; give the engine decode_text to look for them.")
    placed = place(self._model, prompt.ids, [visual.visual for visual in prompt.visuals])
    if placed.visual_rows[-1] >= 0:
      raise ValueError("the prompt ends in a visual; let text follow it.")
    total = min(request.max_total_tokens or limit, limit)
    now = self._clock()
    script = len(request.script) if request.script is not None else request.max_new_tokens
    row = Row(
      id=self._next_id,
      request=request,
      placed=placed,
      track=track(prompt.ids, placed, prompt.visuals, self._model.vision.merge),
      submitted_s=now,
      budget=min(request.max_new_tokens, script, total - length),
      deadline_s=None if request.deadline_s is None else now + request.deadline_s,
    )
    self._next_id += 1
    self._waiting.append(row)
    return row.id

  def cancel(self, number: int) -> None:
    """Ends a request before the next step; its result has what it got so far."""
    self._cancelled.add(number)

  def generate(self, requests: Sequence[Request]) -> list[Result]:
    """Runs requests to their ends and gives the results in their order.

    Others that were submitted before run along; their results are not given to anyone.
    """
    numbers = [self.submit(request) for request in requests]
    found: dict[int, Result] = {}
    while len(found) < len(numbers):
      found |= {result.id: result for result in self.step() if result.id in numbers}
    return [found[number] for number in numbers]

  def step(self) -> list[Result]:
    """One round; gives the requests that ended in it."""
    results = self._end_early()
    self._admit()
    if any(row.to_fill for _, row in self._places.taken()):
      self._prefill()
    elif self._places.busy:
      results += self._decode()
    return results

  # Ends before their time.

  def _end_early(self) -> list[Result]:
    now, results = self._clock(), []

    def reason(row: Row) -> Finish | None:
      if row.id in self._cancelled:
        return "cancelled"
      if row.deadline_s is not None and now >= row.deadline_s:
        return "deadline"
      return "budget" if row.budget < 1 else None

    for row in list(self._waiting):
      if (why := reason(row)) is not None:
        self._waiting.remove(row)
        results.append(self._result(row, why, None))
    for at, row in self._places.taken():
      if (why := reason(row)) is not None:
        results.append(self._leave(at, why))
    self._cancelled.clear()
    return results

  # Places.

  def _admit(self) -> None:
    """Gives rows to requests that wait, but to none whose beginning is just being computed."""
    admitted = []
    for row in list(self._waiting):
      if self._places.busy == self._config.slots:
        break
      if self._places.enter(row):
        self._waiting.remove(row)
        row.admitted_s = self._clock()
        admitted.append(row)
    self._places.shrink(keep_rows=bool(self._waiting))
    wanted = {
      row.id: row.request.prompt.visuals for row in admitted if row.needs_features(row.filled)
    }
    found = self._visuals.features([v for visuals in wanted.values() for v in visuals])
    for row in admitted:
      if row.id in wanted:
        parts = [found[visual.digest] for visual in wanted[row.id]]
        row.features = np.concatenate([part.tokens for part in parts])
        row.deep = np.concatenate([part.deep for part in parts], axis=1)

  # Work.

  def _prefill(self) -> None:
    """Fills a chunk of the prompts that lack most."""
    lacking = sorted(
      (pair for pair in self._places.taken() if pair[1].to_fill), key=lambda pair: -pair[1].to_fill
    )
    sizes = self._config.prefill_buckets
    places, rows = zip(*lacking[: sizes[-1]], strict=True)
    tokens = self._config.chunk_size(min(rows[0].to_fill, self._config.prefill_chunk))
    self._places.ensure_length(max(row.filled for row in rows) + tokens)
    chunk = chunk_of(
      rows,
      places,
      self._model,
      batch=next(s for s in sizes if s >= len(rows)),
      tokens=tokens,
      always_visual=self._config.aligned,
    )
    cache = self._places.cache
    self._places.cache = steps.prefill(self._p, self._model.text, cache, chunk)
    self.counts["prefill_calls"] += 1
    for row in rows:
      done = min(row.to_fill, tokens)
      if row.aligned == row.filled:
        row.aligned += done
      row.filled += done
      self.counts["prefill_tokens"] += done
      if not row.to_fill:
        row.features = row.deep = None

  def _decode(self) -> list[Result]:
    burst = self._config.burst
    self._places.ensure_length(max(row.filled for _, row in self._places.taken()) + burst)
    rows, script = decoding_rows(self._places.rows, burst)
    made, self._places.cache = steps.decode_burst(
      self._p,
      self._model.text,
      self._places.cache,
      rows,
      script,
      np.asarray(bool(self._waiting)),
      steps=burst,
      mode=self._mode(),
      vocab_limit=self._config.vocab_limit,
    )
    tokens, log_probs, counts, stopped, ran = (np.asarray(x) for x in made)
    self.counts["decode_steps"] += int(ran)
    self.counts["decoded_tokens"] += int(counts.sum())
    results = []
    for at, row in self._places.taken():
      count = int(counts[at])
      row.tokens += tokens[at, :count].tolist()
      row.log_probs += log_probs[at, :count].tolist()
      row.filled += count
      row.stopped = bool(stopped[at])
      if (why := self._ended(row, count)) is not None:
        results.append(self._leave(at, why))
    return results

  def _mode(self) -> Mode:
    asked = [row.request for _, row in self._places.taken()]
    drawing = [r for r in asked if r.temperature > 0 and r.script is None]
    if any(r.top_k or r.top_p < 1 for r in drawing):
      return "filtered"
    return "plain" if drawing else "greedy"

  def _ended(self, row: Row, new: int) -> Finish | None:
    request = row.request
    for count in range(len(row.tokens) - new + 1, len(row.tokens) + 1):
      if request.stop_strings and self._stop_at(row, count) is not None:
        cut = len(row.tokens) - count
        del row.tokens[count:], row.log_probs[count:]
        row.filled -= cut
        row.stopped = False
        return "stop_string"
    if row.stopped:
      return "stop"
    if len(row.tokens) < row.budget:
      return None
    if request.script is not None and row.budget == len(request.script):
      return "script"
    return "length" if row.budget == request.max_new_tokens else "budget"

  def _stop_at(self, row: Row, count: int) -> int | None:
    """Where in the text of the first `count` tokens the first stop string begins."""
    if self._decode_text is None:
      return None
    text = self._decode_text(row.tokens[:count])
    found = [at for stop in row.request.stop_strings if (at := text.find(stop)) >= 0]
    return min(found, default=None)

  # Ends.

  def _leave(self, at: int, why: Finish) -> Result:
    row = self._places.rows[at]
    assert row is not None
    kept = self._places.leave(at)
    return self._result(row, why, kept if row.request.keep else None)

  def _result(self, row: Row, why: Finish, kept: Kept | None) -> Result:
    now = self._clock()
    shown = row.tokens[:-1] if row.stopped and row.tokens else row.tokens
    text = self._decode_text(shown) if self._decode_text is not None else ""
    if why == "stop_string" and (cut := self._stop_at(row, len(row.tokens))) is not None:
      text = text[:cut]
    admitted = row.admitted_s or now
    return Result(
      id=row.id,
      tokens=np.asarray(row.tokens, np.int32),
      log_probs=np.asarray(row.log_probs, np.float32),
      text=text,
      finish=why,
      reused_tokens=row.reused,
      kept=kept,
      waited_s=admitted - row.submitted_s,
      took_s=now - admitted,
    )
