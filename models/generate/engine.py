"""The engine: a queue of requests, rows of a cache, and the compiled steps between them.

Requests come and go at any time. A round of the engine fills a chunk of the prompts that wait for
it, or else decodes a burst for all rows that can; whoever ends leaves its row to the next at once.
Prompts that begin alike are computed once: the second waits until the first has filled what they
share, and copies it.
"""

import collections
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from models.generate import steps
from models.generate.prefixes import Kept, PrefixStore, track
from models.generate.request import EngineConfig, Finish, Request, Result
from models.generate.rows import Row, decoding_rows
from models.generate.sampling import Mode
from models.generate.visuals import VisualEncoder
from models.layers.dense import Tree
from models.qwen_vl.cache import Cache, empty_cache
from models.qwen_vl.positions import place
from models.qwen_vl.presets import QwenVLConfig
from models.qwen_vl.sharding import cache_shardings

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
    self._decode_text, self._mesh, self._clock = decode_text, mesh, clock
    self._visuals = VisualEncoder(
      p["visual"], model.vision, config.feature_bytes, one_by_one=config.aligned
    )
    self._store = PrefixStore(config.prefix_bytes)
    self._waiting: collections.deque[Row] = collections.deque()
    self._rows: list[Row | None] = [None] * config.slot_buckets[0]
    self._cache = self._new_cache(len(self._rows), config.length_buckets[0])
    self._cancelled: set[int] = set()
    self._next_id = 0
    self.counts: collections.Counter[str] = collections.Counter()

  @property
  def pending(self) -> int:
    """Requests that have no result yet."""
    return len(self._waiting) + sum(row is not None for row in self._rows)

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
    if any(row is not None and row.to_fill for row in self._rows):
      self._prefill()
    elif any(row is not None for row in self._rows):
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
    for at, row in enumerate(self._rows):
      if row is not None and (why := reason(row)) is not None:
        results.append(self._leave(at, why))
    self._cancelled.clear()
    return results

  # Places.

  def _admit(self) -> None:
    """Gives rows to requests that wait, but to none whose beginning is just being computed."""
    admitted = []
    for row in list(self._waiting):
      busy = sum(other is not None for other in self._rows)
      if busy == self._config.slots:
        break
      reused, source = self._beginning(row)
      if reused is None:
        continue
      self._waiting.remove(row)
      row.admitted_s = self._clock()
      at = self._free_row()
      self._rows[at] = row
      if reused:
        self._copy(at, row, reused, source)
      admitted.append(row)
    self._shrink()
    wanted = {
      row.id: row.request.prompt.visuals for row in admitted if row.needs_features(row.filled)
    }
    found = self._visuals.features([v for visuals in wanted.values() for v in visuals])
    for row in admitted:
      if row.id in wanted:
        parts = [found[visual.digest] for visual in wanted[row.id]]
        row.features = np.concatenate([part.tokens for part in parts])
        row.deep = np.concatenate([part.deep for part in parts], axis=1)

  def _beginning(self, row: Row) -> tuple[int | None, Any]:
    """How much of the prompt is there already and where; None while another row is at it."""
    last = row.prompt_length - 1
    sources: list[tuple[int, int, Any]] = []  # usable now, common, where
    for at, other in enumerate(self._rows):
      if other is not None:
        common = min(other.track.common(row.track), last)
        ready = other.aligned if self._config.aligned else other.filled
        sources.append((min(common, ready), common, at))
    common, kept = self._store.best(row.track)
    if kept is not None:
      usable = min(common, last, kept.aligned if self._config.aligned else common)
      sources.append((usable, usable, kept))
    if row.request.after is not None:
      usable = min(row.request.after.track.common(row.track), last)
      if self._config.aligned:
        return usable, row.request.after  # always the same choice, whatever else is there
      sources.append((usable, usable, row.request.after))
    if not sources:
      return 0, None
    usable, _, source = max(sources, key=lambda s: s[0])
    promised = max(
      (common for _, common, at in sources if isinstance(at, int) and self._filling(at)),
      default=0,
    )
    chunk = self._config.prefill_chunk
    if self._config.aligned:
      usable, promised = usable // chunk * chunk, promised // chunk * chunk
    if promised >= usable + self._config.min_shared:
      return None, None
    return (usable, source) if usable >= self._config.min_shared else (0, None)

  def _filling(self, at: int) -> bool:
    row = self._rows[at]
    return row is not None and row.to_fill > 0

  def _copy(self, at: int, row: Row, reused: int, source: Kept | int) -> None:
    if isinstance(source, int):
      self._ensure_length(reused)
      length = min(self._bucket(reused), self._cache.length)
      taken = steps.take_row(self._cache, jnp.int32(source), length=length)
      origin = self._rows[source]
      aligned = origin.aligned if origin is not None else 0
    else:
      self._store.used(source)
      length = min(self._bucket(reused), source.cache.length)
      taken = steps.take_row(source.cache, jnp.int32(0), length=length)
      self._ensure_length(length)
      aligned = source.aligned
    self._cache = steps.put_row(self._cache, jnp.int32(at), taken)
    row.filled = row.reused = reused
    row.aligned = min(aligned, reused)
    self.counts["reused_tokens"] += reused

  def _free_row(self) -> int:
    for at, row in enumerate(self._rows):
      if row is None:
        return at
    at = len(self._rows)
    size = next(s for s in self._config.slot_buckets if s > at)
    self._rows += [None] * (size - at)
    self._resize(list(range(at)), size, self._cache.length)
    return at

  def _shrink(self) -> None:
    """Lets go of rows and length that nobody needs, with room to spare lest they return at once."""
    used = [at for at, row in enumerate(self._rows) if row is not None]
    sizes = self._config.slot_buckets
    size = next((s for s in sizes if s >= len(used)), sizes[-1])
    need = max([self._need(row) for row in self._rows if row is not None], default=0)
    length = min(self._bucket(need), self._cache.length)
    if self._waiting or size >= len(self._rows):
      used, size = list(range(len(self._rows))), len(self._rows)
    if 2 * length > self._cache.length:
      length = self._cache.length
    if size < len(self._rows) or length < self._cache.length:
      kept = [self._rows[at] for at in used]
      self._rows = [*kept, *[None] * (size - len(kept))]
      self._resize(used, size, length)

  def _need(self, row: Row) -> int:
    """Tokens of the cache that a row may reach in the next call, padding included."""
    if row.to_fill:
      chunk = self._chunk_size(min(row.to_fill, self._config.prefill_chunk))
      return row.filled + max(chunk, self._config.burst)
    return row.filled + self._config.burst

  def _ensure_length(self, need: int) -> None:
    if need > self._cache.length:
      self._resize(list(range(len(self._rows))), len(self._rows), self._bucket(need))

  def _bucket(self, need: int) -> int:
    return next(s for s in self._config.length_buckets if s >= need)

  def _chunk_size(self, tokens: int) -> int:
    return next(s for s in self._config.chunk_buckets if s >= tokens)

  def _resize(self, order: list[int], rows: int, length: int) -> None:
    self.counts["resizes"] += 1
    if not order:
      self._cache = self._new_cache(rows, length)
      return
    order_array = jnp.asarray(order, jnp.int32)
    self._cache = self._placed(steps.resize(self._cache, order_array, rows=rows, length=length))

  def _new_cache(self, rows: int, length: int) -> Cache:
    kind = self._p["embed"].dtype
    return self._placed(empty_cache(self._model.text, rows, length, kind))

  def _placed(self, cache: Cache) -> Cache:
    if self._mesh is None:
      return cache
    return jax.device_put(cache, cache_shardings(self._mesh, cache))

  # Work.

  def _prefill(self) -> None:
    """Fills a chunk of the prompts that lack most."""
    lacking = [at for at, row in enumerate(self._rows) if row is not None and row.to_fill]
    lacking.sort(key=lambda at: -self._to_fill(at))
    sizes = self._config.prefill_buckets
    lacking = lacking[: sizes[-1]]
    batch = next(s for s in sizes if s >= len(lacking))
    most = min(self._to_fill(lacking[0]), self._config.prefill_chunk)
    tokens = self._chunk_size(most)
    self._ensure_length(max(self._row(at).filled for at in lacking) + tokens)
    chunk = self._chunk([self._row(at) for at in lacking], lacking, batch, tokens)
    self._cache = steps.prefill(self._p, self._model.text, self._cache, chunk)
    self.counts["prefill_calls"] += 1
    for at in lacking:
      row = self._row(at)
      done = min(row.to_fill, tokens)
      if row.aligned == row.filled:
        row.aligned += done
      row.filled += done
      self.counts["prefill_tokens"] += done
      if not row.to_fill:
        row.features = row.deep = None

  def _row(self, at: int) -> Row:
    row = self._rows[at]
    assert row is not None
    return row

  def _to_fill(self, at: int) -> int:
    return self._row(at).to_fill

  def _chunk(self, rows: list[Row], at: list[int], batch: int, tokens: int) -> steps.Chunk:
    """The next chunk of each row; a batch that is not full repeats its first."""
    ids = np.zeros((batch, tokens), np.int32)
    positions = np.zeros((batch, 3, tokens), np.int32)
    visual = np.full((batch, tokens), -1, np.int32)
    dim, levels = self._model.text.dim, len(self._model.vision.deepstack)
    features = np.zeros((batch, tokens, dim), np.float32)
    deep = np.zeros((levels, batch, tokens, dim), np.float32)
    which = [*range(len(rows)), *[0] * (batch - len(rows))]
    for i, j in enumerate(which):
      row = rows[j]
      end = row.filled + min(row.to_fill, tokens)
      span = slice(row.filled, end)
      count = end - row.filled
      ids[i, :count] = row.request.prompt.ids[span]
      positions[i, :, :count] = row.placed.positions[:, span]
      visual[i, :count] = row.placed.visual_rows[span]
      if row.features is not None and row.deep is not None:
        seen = np.flatnonzero(visual[i] >= 0)
        features[i, seen] = row.features[visual[i, seen]]
        deep[:, i, seen] = row.deep[:, visual[i, seen]]
    has_visuals = bool((visual >= 0).any()) or self._config.aligned
    return steps.Chunk(
      jnp.asarray(ids),
      jnp.asarray(positions),
      jnp.asarray([at[j] for j in which], jnp.int32),
      jnp.asarray([rows[j].filled for j in which], jnp.int32),
      jnp.asarray(features) if has_visuals else None,
      jnp.asarray(visual >= 0) if has_visuals else None,
      jnp.asarray(deep) if has_visuals and levels else None,
    )

  def _decode(self) -> list[Result]:
    burst = self._config.burst
    self._ensure_length(max(row.filled for row in self._rows if row is not None) + burst)
    rows, script = decoding_rows(self._rows, burst)
    made, self._cache = steps.decode_burst(
      self._p,
      self._model.text,
      self._cache,
      rows,
      script,
      jnp.asarray(bool(self._waiting)),
      steps=burst,
      mode=self._mode(),
      vocab_limit=self._config.vocab_limit,
    )
    tokens, log_probs, counts, stopped, ran = (np.asarray(x) for x in made)
    self.counts["decode_steps"] += int(ran)
    self.counts["decoded_tokens"] += int(counts.sum())
    results = []
    for at, row in enumerate(self._rows):
      if row is None:
        continue
      count = int(counts[at])
      row.tokens += tokens[at, :count].tolist()
      row.log_probs += log_probs[at, :count].tolist()
      row.filled += count
      row.stopped = bool(stopped[at])
      if (why := self._ended(row, count)) is not None:
        results.append(self._leave(at, why))
    return results

  def _mode(self) -> Mode:
    asked = [row.request for row in self._rows if row is not None]
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
    row = self._row(at)
    self._rows[at] = None
    kept = None
    if row.request.keep or self._config.prefix_bytes:
      kept = self._keep(at, row)
      if kept is not None:
        self._store.add(kept)
    return self._result(row, why, kept if row.request.keep else None)

  def _keep(self, at: int, row: Row) -> Kept | None:
    if row.filled < self._config.min_shared and not row.request.keep:
      return None
    length = min(self._bucket(max(row.filled, 1)), self._cache.length)
    taken = steps.take_row(self._cache, jnp.int32(at), length=length)
    return Kept(row.sequence.first(row.filled), taken, row.aligned)

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
