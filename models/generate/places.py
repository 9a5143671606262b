"""Rows of the cache: who has which, what a newcomer finds there, how large the cache is."""

import collections
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from models.generate import steps
from models.generate.prefixes import Kept, PrefixStore
from models.generate.request import EngineConfig
from models.generate.rows import Row
from models.qwen_vl.cache import Cache, empty_cache
from models.qwen_vl.presets import TextConfig
from models.qwen_vl.sharding import cache_shardings


class Places:
  """The cache and its rows, and what finished requests left behind.

  Args:
    model: the decoder's sizes.
    config: the engine's.
    dtype: of keys and values.
    mesh: devices over which the cache is cut; None: one.
    counts: where reused tokens and changes of size are counted.

  Attributes:
    rows: who has which row; None where nobody.
    cache: keys and values; whoever hands it to a compiled step puts the result back.
  """

  def __init__(
    self,
    model: TextConfig,
    config: EngineConfig,
    dtype: jnp.dtype,
    mesh: Mesh | None,
    counts: collections.Counter[str],
  ):
    self._model, self._config, self._dtype, self._mesh = model, config, dtype, mesh
    self._counts = counts
    self._store = PrefixStore(config.prefix_bytes)
    self.rows: list[Row | None] = [None] * config.slot_buckets[0]
    self.cache = self._new_cache(len(self.rows), config.length_buckets[0])

  def taken(self) -> Iterator[tuple[int, Row]]:
    """Rows in use, with their places."""
    return ((at, row) for at, row in enumerate(self.rows) if row is not None)

  @property
  def busy(self) -> int:
    """How many rows are in use."""
    return sum(row is not None for row in self.rows)

  def enter(self, row: Row) -> bool:
    """Gives a request a row and what is there of its prompt; False: better wait for a row.

    It waits while another row is computing a beginning that both share.
    """
    reused, source = self._beginning(row)
    if reused is None:
      return False
    at = self._free_row()
    self.rows[at] = row
    if reused and source is not None:
      self._copy(at, row, reused, source)
    return True

  def leave(self, at: int) -> Kept | None:
    """Frees a row; gives its keys and values where somebody may want them again."""
    row = self.rows[at]
    assert row is not None
    self.rows[at] = None
    asked = row.request.keep
    if not asked and (not self._config.prefix_bytes or row.filled < self._config.min_shared):
      return None
    length = min(self._bucket(max(row.filled, 1)), self.cache.length)
    taken = steps.take_row(self.cache, jnp.int32(at), length=length)
    kept = Kept(row.sequence.first(row.filled), taken, row.aligned)
    self._store.add(kept)
    return kept

  def ensure_length(self, need: int) -> None:
    """Makes the cache long enough for `need` tokens in every row."""
    if need > self.cache.length:
      self._resize(list(range(len(self.rows))), len(self.rows), self._bucket(need))

  def shrink(self, *, keep_rows: bool) -> None:
    """Lets go of rows and length that nobody needs, with room to spare lest they return at once.

    Args:
      keep_rows: whether somebody waits for rows that are free.
    """
    used = [at for at, _ in self.taken()]
    sizes = self._config.slot_buckets
    size = next((s for s in sizes if s >= len(used)), sizes[-1])
    need = max([self._need(row) for _, row in self.taken()], default=0)
    length = min(self._bucket(need), self.cache.length)
    if keep_rows or size >= len(self.rows):
      used, size = list(range(len(self.rows))), len(self.rows)
    if 2 * length > self.cache.length:
      length = self.cache.length
    if size < len(self.rows) or length < self.cache.length:
      kept = [self.rows[at] for at in used]
      self.rows = [*kept, *[None] * (size - len(kept))]
      self._resize(used, size, length)

  def _beginning(self, row: Row) -> tuple[int | None, Kept | int | None]:
    """How much of the prompt is there already and where; None while another row is at it."""
    last, aligned = row.prompt_length - 1, self._config.aligned
    sources: list[tuple[int, int, Kept | int]] = []  # usable now, common, where
    for at, other in self.taken():
      common = min(other.track.common(row.track), last)
      sources.append((min(common, other.aligned if aligned else other.filled), common, at))
    common, kept = self._store.best(row.track)
    if kept is not None:
      usable = min(common, last, kept.aligned if aligned else common)
      sources.append((usable, usable, kept))
    if row.request.after is not None:
      usable = min(row.request.after.track.common(row.track), last)
      if aligned:
        return usable, row.request.after  # always the same choice, whatever else is there
      sources.append((usable, usable, row.request.after))
    if not sources:
      return 0, None
    usable, _, source = max(sources, key=lambda s: s[0])
    filling = {at for at, other in self.taken() if other.to_fill}
    promised = max((common for _, common, where in sources if where in filling), default=0)
    if aligned:
      chunk = self._config.prefill_chunk
      usable, promised = usable // chunk * chunk, promised // chunk * chunk
    if promised >= usable + self._config.min_shared:
      return None, None
    return (usable, source) if usable >= self._config.min_shared else (0, None)

  def _copy(self, at: int, row: Row, reused: int, source: Kept | int) -> None:
    if isinstance(source, int):
      self.ensure_length(reused)
      length = min(self._bucket(reused), self.cache.length)
      taken = steps.take_row(self.cache, jnp.int32(source), length=length)
      origin = self.rows[source]
      aligned = origin.aligned if origin is not None else 0
    else:
      self._store.used(source)
      length = min(self._bucket(reused), source.cache.length)
      taken = steps.take_row(source.cache, jnp.int32(0), length=length)
      self.ensure_length(length)
      aligned = source.aligned
    self.cache = steps.put_row(self.cache, jnp.int32(at), taken)
    row.filled = row.reused = reused
    row.aligned = min(aligned, reused)
    self._counts["reused_tokens"] += reused

  def _free_row(self) -> int:
    for at, row in enumerate(self.rows):
      if row is None:
        return at
    at = len(self.rows)
    size = next(s for s in self._config.slot_buckets if s > at)
    self.rows += [None] * (size - at)
    self._resize(list(range(at)), size, self.cache.length)
    return at

  def _need(self, row: Row) -> int:
    """Tokens of the cache that a row may reach in the next call, padding included."""
    if row.to_fill:
      chunk = self._config.chunk_size(min(row.to_fill, self._config.prefill_chunk))
      return row.filled + max(chunk, self._config.burst)
    return row.filled + self._config.burst

  def _bucket(self, need: int) -> int:
    return next(s for s in self._config.length_buckets if s >= need)

  def _resize(self, order: list[int], rows: int, length: int) -> None:
    self._counts["resizes"] += 1
    if not order:
      self.cache = self._new_cache(rows, length)
      return
    order_array = jnp.asarray(order, jnp.int32)
    self.cache = self._placed(steps.resize(self.cache, order_array, rows=rows, length=length))

  def _new_cache(self, rows: int, length: int) -> Cache:
    return self._placed(empty_cache(self._model, rows, length, self._dtype))

  def _placed(self, cache: Cache) -> Cache:
    if self._mesh is None:
      return cache
    return jax.device_put(cache, cache_shardings(self._mesh, cache))
