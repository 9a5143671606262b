"""When a step's videos can have been judged at the earliest."""

import bisect
import math
from collections.abc import Callable, Mapping, Sequence

from sbjax.dataflow.costs import StepCosts, WorkerCosts
from sbjax.dataflow.plan import StepShape, WorkerSlot
from sbjax.dataflow.relax import Item, Machine, spread, whole_tasks
from sbjax.dataflow.schemes import Scheme
from sbjax.dataflow.workload import Needs, Workload


class Judging(Workload):
  """The judge's part of the bound.

  Args:
    shape: the step.
    scheme: where a plan forms the batches, every batch that it may form counts.
    slots: the workers.
    costs: what tasks take.
    known_s: batches that no step of this length can hold do not count.
  """

  def __init__(
    self,
    shape: StepShape,
    scheme: Scheme,
    slots: Sequence[WorkerSlot],
    costs: StepCosts,
    known_s: float = math.inf,
  ):
    super().__init__(shape, scheme, slots, costs)
    self.fused: int | None = 0
    self._table: list[float] = []
    self.largest = len(shape.jobs)
    if self.batches is None and shape.jobs:
      self.largest = self._largest(known_s)
    self.rates = self._rates() if self.batches is None else {}

  def judge_times(self, jobs: int) -> Mapping[int, float]:
    """Seconds of one judge task of so many jobs, per class."""
    return {c: self.taken(self.by_class[c].judging_s(jobs)) for c in self.allowed["judge"]}

  def least_judge_times(self, jobs: int) -> Mapping[int, float]:
    """Seconds that a worker takes to judge so many jobs at least, in whatever batches."""
    return {c: self._least_judge(self.by_class[c], jobs) for c in self.allowed["judge"]}

  def _least_judge(self, costs: WorkerCosts, jobs: int) -> float:
    # A line below every batch's time: the least fixed part, and the best rate beyond it. Measured
    # times need not rise.
    sizes = _corner_sizes(costs, self.largest)
    times = {size: self.taken(costs.judging_s(size)) for size in sizes}
    if jobs <= self.largest:
      alone = self.taken(costs.judging_s(jobs))
      alone = min([alone, *(t for size, t in times.items() if size > jobs)])
    else:
      alone = math.inf
    # Several batches, the smallest of which is at least as long as the shortest batch.
    rate = min(t / size for size, t in times.items())
    shortest = min(times.values())
    slopes = [(t - shortest) / (size - 1) for size, t in times.items() if size > 1]
    slope = max(min([rate, *slopes]), 0.0)
    several = max(rate * jobs, 2 * shortest + slope * (jobs - 2)) if jobs > 1 else math.inf
    return min(alone, several)

  def _largest(self, known_s: float) -> int:
    """The largest batch that a plan of at most `known_s` can have."""
    if math.isinf(known_s):
      return len(self.shape.jobs)
    size, left = 0, len(self.shape.jobs)
    while size < left:
      middle = (size + left + 1) // 2
      times = self.judge_times(middle)
      ends = self.made(self._videos_of(middle))[1] + min(times.values())
      if ends <= known_s:
        size = middle
      else:
        left = middle - 1
    return max(size, 1)

  def _videos_of(self, jobs: int) -> int:
    """The least number of videos that so many jobs need."""
    if all(len(job) == 1 for job in self.shape.jobs):
      return min(jobs, len({job[0] for job in self.shape.jobs}))
    own = [[c for c in job if c >= 0] for job in self.shape.jobs]
    if all(len(mine) == 1 for mine in own) and len({mine[0] for mine in own}) == len(own):
      return jobs + min(len(job) - 1 for job in self.shape.jobs)
    return max(max((len(job) for job in self.shape.jobs), default=0), 1)

  def judged_s(self, needs: Needs) -> float:
    """When everything needed can have been judged."""
    if not needs.jobs:
      return 0.0
    _, decoded = self.made(needs.videos)
    videos = [len(self.shape.jobs[job]) for job in needs.jobs]
    if self.batches is not None:
      mine = [b for b in self.batches if needs.jobs & set(b)]
      videos = [len({c for job in b for c in self.shape.jobs[job]}) for b in mine]
    _, first = self.made(min(videos))
    judged = max(self.judging_s(needs.jobs, first, decoded), self._mixed(needs))
    if self.batches is None:
      jobs = len(needs.jobs)
      judged = max(judged, self._in_turn(jobs, lambda n: self.made(self._videos_of(n))[1]))
      if self.fused:
        fusing, decode = self.fusing(), self.least("decode")
        machines = [Machine(self.pool.counts[c], 0.0, t) for c, t in fusing.items()]
        # Where a job judges one candidate, so many jobs wait for them; else one at least.
        single = all(sum(c >= 0 for c in job) == 1 for job in self.shape.jobs)
        if {c for job in self.shape.jobs for c in job} >= set(self.shape.updates[0]):
          late = self._in_turn(
            self.fused if single else 1, lambda n: whole_tasks(machines, n) + decode
          )
          judged = max(judged, late)
    return judged

  def _in_turn(self, jobs: int, ready: Callable[[int], float]) -> float:
    """Jobs whose videos come late are judged late, and some judge gets its share of them.

    Args:
      jobs: how many.
      ready: when so many of them can be ready.
    """
    judges = sum(self.pool.counts[c] for c in self.allowed["judge"])
    out = 0.0
    for early in sorted({jobs * k // 8 for k in range(8)}):
      share = math.ceil((jobs - early) / judges)
      out = max(out, ready(early + 1) + min(self.least_judge_times(share).values()))
    return out

  def judging_s(self, jobs: frozenset[int], first: float, last: float = 0.0) -> float:
    """When jobs can have been judged.

    Args:
      jobs: the jobs.
      first: when the first videos that a judge task needs are there.
      last: when the last ones are.
    """
    counts = self.pool.counts
    judges = self.allowed["judge"]
    if self.batches is not None:
      sizes = [len(b) for b in self.batches if jobs & set(b)]
      times = {size: self.judge_times(size) for size in set(sizes)}
      items = [Item(sizes.count(size), (took,)) for size, took in times.items()]
      shortest = {c: min(took[c] for took in times.values()) for c in judges}
      # Every task is at least as long as the shortest, and the longest has to be done.
      machines = [Machine(counts[c], first, shortest[c]) for c in judges]
      return max(
        last + min(shortest.values()),
        first + max(min(took.values()) for took in times.values()),
        spread(self.pool, items, tuple(first for _ in self.members)),
        whole_tasks(machines, len(sizes)),
      )
    # The last video is judged in a batch of some size; the larger that is, the later its end, and
    # the smaller, the more is left for the others.
    rates, best = self.rates, math.inf
    size = 1
    while size <= len(jobs):
      most = min(size + size // 16, len(jobs))
      took = self.least_judge_times(size)
      ending = last + min(took.values())
      if ending >= best:
        break
      items = [Item(1, (took,)), Item(len(jobs) - most, (rates,))]
      heads = tuple(first for _ in self.members)
      shared = max(spread(self.pool, items, heads), self._packed(size, len(jobs) - most, first))
      best = min(best, max(ending, shared))
      size = most + 1
    return best

  def _packed(self, last: int, jobs: int, first: float) -> float:
    """When judges that start at `first` can have done whole jobs, one of them the last task too."""
    table = self._judge_table()
    count = sum(self.pool.counts[c] for c in self.allowed["judge"])
    took = table[last]

    def fits(seconds: float) -> bool:
      fewer = bisect.bisect_right(table, seconds - took) - 1
      return fewer >= 0 and fewer + (count - 1) * (bisect.bisect_right(table, seconds) - 1) >= jobs

    # The answer is some table entry, with or without the last task.
    ends = sorted({*table, *(took + t for t in table)})
    return first + ends[bisect.bisect_left(ends, True, key=fits)]

  def _judge_table(self) -> list[float]:
    """The least seconds in which one judge does 0, 1, 2, ... jobs; never falling."""
    if not self._table:
      out = [0.0]
      for jobs in range(1, len(self.shape.jobs) + 1):
        out.append(max(out[-1], min(self.least_judge_times(jobs).values())))
      self._table = out
    return self._table

  def _rates(self) -> Mapping[int, float]:
    """Seconds of a job in the best batch, per kind of worker."""
    out = {}
    for c in self.allowed["judge"]:
      sizes = _corner_sizes(self.by_class[c], self.largest)
      out[c] = min(self.taken(self.by_class[c].judging_s(size)) / size for size in sizes)
    return out

  def judge_items(self, jobs: frozenset[int]) -> list[Item]:
    """Some jobs as divisible work: a scheme's batches, or jobs at the best rate."""
    if self.batches is None:
      return [Item(len(jobs), (self.rates,))]
    sizes: dict[int, int] = {}
    for batch in self.batches:
      if jobs & set(batch):
        sizes[len(batch)] = sizes.get(len(batch), 0) + 1
    return [Item(count, (self.judge_times(size),)) for size, count in sizes.items()]

  def judging_work_s(self) -> float:
    """Seconds of all judging on the workers that do it fastest."""
    items = self.judge_items(self.everything().jobs)
    return sum(item.amount * min(item.ways[0][0].values()) for item in items)

  def _mixed(self, needs: Needs) -> float:
    """Divisible work until everything needed is judged."""
    items = [
      Item(needs.videos, (self.times("generate"),)),
      Item(needs.videos, (self.times("decode"),)),
      *self.judge_items(needs.jobs),
    ]
    return spread(self.pool, items, self.heads())


def _corner_sizes(costs: WorkerCosts, most: int) -> list[int]:
  """Batch sizes among which the best rate is: a table's entries and the ends, for between two
  entries seconds per job rise or fall throughout."""
  sizes = {1, max(most, 1)} | {size for size, _ in costs.judge_s if 1 <= size <= most}
  return sorted(sizes)
