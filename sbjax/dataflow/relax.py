"""Relaxations of makespan scheduling that a lower bound is made of: divisible work, equal tasks."""

import dataclasses
import math
from collections.abc import Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class Pool:
  """Classes of equal workers.

  Attributes:
    counts: workers of each class.
  """

  counts: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Machine:
  """A class of equal workers as one kind of task sees it.

  Attributes:
    count: workers.
    head_s: when they can start.
    unit_s: seconds of one task, or of one unit of a task.
  """

  count: int
  head_s: float
  unit_s: float


class Item:
  """Divisible work that may be done in one of several ways.

  Args:
    amount: how many tasks.
    *ways: each way is a chain of parts, class -> seconds; the cheapest way counts.
  """

  def __init__(self, amount: float, *ways: Sequence[Mapping[int, float]]):
    self.amount = amount
    self.ways = tuple(tuple(way) for way in ways)

  def priced(self, prices: Sequence[float]) -> float:
    """The least of prices times seconds."""
    return self.amount * min(
      sum(min(prices[c] * s for c, s in part.items()) for part in way) for way in self.ways
    )


def spread(pool: Pool, items: Sequence[Item], heads: Sequence[float]) -> float:
  """Seconds until divisible work can be done on unrelated workers that start at their heads.

  Any prices give a valid bound (see `bound`); shares are moved between two classes at a time while
  that raises it, which is the optimum for up to two classes and one way each.

  Args:
    pool: the classes.
    items: the work.
    heads: seconds at which each class can start.
  """
  items = [item for item in items if item.amount > 0]
  shares = [n / sum(pool.counts) for n in pool.counts]

  def value(shares: Sequence[float]) -> float:
    prices = [share / n for share, n in zip(shares, pool.counts, strict=True)]
    return sum(s * h for s, h in zip(shares, heads, strict=True)) + sum(
      item.priced(prices) for item in items
    )

  best = value(shares)
  classes = range(len(pool.counts))
  pairs = [(a, b) for a in classes for b in classes if a < b]
  for _ in range(1 if len(pairs) <= 1 else 3):
    for a, b in pairs:
      both = shares[a] + shares[b]
      for part in _kinks(items, pool, a, b):
        moved = list(shares)
        moved[a], moved[b] = part * both, (1.0 - part) * both
        raised = value(moved)
        if raised > best:
          shares, best = moved, raised
  return best


def _kinks(items: Sequence[Item], pool: Pool, a: int, b: int) -> list[float]:
  """Shares of class a, of what a and b have together, at which some part is as dear on both.

  The bound is concave and linear between them, so one of them, or an end, is the best.
  """
  out = {0.0, 1.0}
  for item in items:
    for way in item.ways:
      for part in way:
        if part.get(a, 0.0) > 0 and part.get(b, 0.0) > 0:
          dear = part[b] * pool.counts[a]
          out.add(dear / (dear + part[a] * pool.counts[b]))
  return sorted(out)


def whole_tasks(machines: Sequence[Machine], count: int, sizes: Sequence[int] = (1,)) -> float:
  """Seconds until equal tasks that cannot be divided, or only into given sizes, can be done.

  Args:
    machines: who may do them.
    count: units of all tasks together.
    sizes: units of the pieces that a task may be cut into.
  """
  if count <= 0:
    return 0.0
  limit = max(sizes) ** 2
  table = _sums(sizes, limit)
  step = math.gcd(*sizes)

  def fits(seconds: float) -> bool:
    total = 0
    for machine in machines:
      left = seconds - machine.head_s
      if left < 0:
        continue
      if machine.unit_s <= 0:
        return True
      units = int(min(left / machine.unit_s + 1e-9, count))
      load = table[units] if units < limit else units // step * step
      total += machine.count * load
    return total >= count

  low, high = 0.0, max(m.head_s + (count + max(sizes)) * m.unit_s for m in machines)
  for _ in range(64):
    middle = (low + high) / 2
    if fits(middle):
      high = middle
    else:
      low = middle
  # Somebody does the largest piece.
  return max(low, min(m.head_s + max(sizes) * m.unit_s for m in machines))


def _sums(sizes: Sequence[int], limit: int) -> list[int]:
  """For each number below a limit the largest sum of sizes that does not exceed it."""
  out, reached = [0] * (limit + 1), {0}
  for number in range(1, limit + 1):
    if any(number - size in reached for size in sizes):
      reached.add(number)
    out[number] = number if number in reached else out[number - 1]
  return out
