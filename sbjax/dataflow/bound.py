"""A lower bound of a scheme's step: no plan of the scheme can be faster.

With w a kind of worker, n_w how many there are, t_kw the seconds of task kind k there (dispatch
counts) and N_k how many such tasks there are, three relaxations hold of every plan:

* spread: work is divisible. For any weights y_w >= 0 with sum(n_w y_w) = 1,
  `T >= sum_w n_w y_w head_w + sum_k N_k min_w(y_w t_kw)`, where head_w is when w can start at all.
  This is weak duality of the linear program that shares work among unrelated machines; the best
  y gives its optimum. With equal workers it reads work / workers.
* whole tasks: equal tasks are not divisible. The least T for which
  `sum_w n_w floor((T - head_w) / t_kw) >= N_k`; where replays may be split at block borders, the
  load of a worker is a sum of blocks instead of a multiple of the whole.
* chains: generate, decode, judge, reduce, update; the last video is judged after it is decoded.

They join along the adapters, theta_0 at 0:
`theta_{m+1} >= max(theta_m + replays(m), judged(m), spread(all that update m needs)) + tail(m)`,
and the step ends when every worker has received the last adapter. Barriers of a stage scheme add
up their stages. A judge's work counts at the best rate among the batches that the scheme may form.
(StageBreaker §4.4 searches without a bound; these are textbook relaxations of makespan.)
"""

import bisect
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

from sbjax.dataflow.costs import StepCosts, WorkerCosts
from sbjax.dataflow.plan import StepShape, WorkerSlot, allowed_workers, scheme_batches
from sbjax.dataflow.relax import Item, Machine, Pool, spread, whole_tasks
from sbjax.dataflow.schemes import Scheme

_ROUNDING = 1.0 - 1e-9
"""Keeps rounding of sums on the side of the bound."""


def lower_bound(
  shape: StepShape,
  scheme: Scheme,
  slots: Sequence[WorkerSlot],
  costs: StepCosts,
  *,
  fused: int | None = None,
  known_s: float = math.inf,
) -> float:
  """Gives seconds that no plan of a scheme can beat; see the module for the formula.

  Args:
    shape: the step.
    scheme: its replay mode, barriers, bindings and what a plan may choose.
    slots: the workers; they may differ in kind.
    costs: what tasks take.
    fused: how many candidates fuse; None: as many as is best, where the scheme can.
    known_s: a plan's simulated seconds; batches of the judge that cannot be in a faster one do not
      count. The bound is at most this.

  Raises:
    ValueError: if the costs do not know a worker's kind.
  """
  if "fused" not in scheme.plan_space:
    fused = 0
  counts: Sequence[int | None] = (fused,)
  if fused is None and len(shape.updates[0]) <= _MOST_FUSED:
    # Fewer fused candidates leave more work, and more come later to their judge; each count has
    # its bound, and the least of them holds.
    counts = range(len(shape.updates[0]) + 1)
  made = _Bound(shape, scheme, slots, costs, known_s)
  least = min(made.step_s(count) for count in counts)
  if scheme.judge_batches == "device" and made.batches is not None:
    # Moving nothing it judges upon arrival; see `space.Space`.
    home = {kind: groups[:1] for kind, groups in scheme.bindings.items()}
    arrival = dataclasses.replace(scheme, bindings=home, judge_batches="job")
    least = min(least, _Bound(shape, arrival, slots, costs, known_s).step_s(0))
  return min(_ROUNDING * least, known_s)


_MOST_FUSED = 32
"""Above this many candidates of the first mini-batch their number is not enumerated; the number is
then free, and the bound a little lower."""


class Relaxed:
  """The bound's parts, for searches that bound a part of a scheme's plans.

  Takes what `lower_bound` takes; candidates do not fuse.
  """

  def __init__(
    self, shape: StepShape, scheme: Scheme, slots: Sequence[WorkerSlot], costs: StepCosts
  ):
    self._made = _Bound(shape, scheme, slots, costs, math.inf)

  def judged_s(self) -> tuple[list[float], float]:
    """When what each update waits for, and everything, can have been judged."""
    made = self._made
    each = [made._judged(made.needs(m)) for m in range(len(made.shape.updates))]
    return each, made._judged(made.everything())

  def judging_work_s(self) -> float:
    """Seconds of all judging on the workers that do it fastest."""
    items = self._made._judge_items(self._made.everything().jobs)
    return sum(item.amount * min(item.ways[0][0].values()) for item in items)

  def tail_s(self, update: int) -> float:
    """From an update's last gradient to its adapter."""
    return self._made._tail(update)

  def pass_s(self, update: int) -> float:
    """An update's replays on all workers that may do them."""
    return self._made._pass("replay", update, len(self._made.shape.updates[update]))

  def least_on(self, group: str, kind: str, update: int = 0) -> float:
    """Seconds of a task on the group's fastest workers; infinite where it may not run there."""
    times = self._made.times(kind, update)
    members = self._made.members
    return min((t for c, t in times.items() if members[c][0].group == group), default=math.inf)


@dataclasses.dataclass(frozen=True)
class _Needs:
  """What an update waits for, itself and all before it.

  Attributes:
    trained: candidates whose trajectories, and references, are read.
    videos: how many generations and decodes, of candidates and of further videos, are needed.
    jobs: to be judged.
  """

  trained: int
  videos: int
  jobs: frozenset[int]


class _Bound:
  def __init__(self, shape, scheme, slots, costs, known_s):
    self.shape: StepShape = shape
    self.scheme: Scheme = scheme
    self.costs: StepCosts = costs
    self.fused: int | None = 0
    self._table: list[float] = []
    self.split = "split_replays" in scheme.plan_space
    keys: dict[tuple[str, str], list[WorkerSlot]] = {}
    for slot in slots:
      keys.setdefault((slot.group, slot.kind), []).append(slot)
    self.members = tuple(keys.values())
    self.pool = Pool(tuple(len(m) for m in self.members))
    self.by_class = tuple(costs.of(m[0]) for m in self.members)
    self.allowed = {
      kind: self._classes(kind, slots) for kind in (*scheme.bindings, "reduce", "update")
    }
    self.trainer = next(
      (i for i, m in enumerate(self.members) if m[0].group in ("actor", "both")), 0
    )
    free = "judge_batching" in scheme.plan_space
    self.batches = None if free else scheme_batches(scheme, shape, slots)
    self.largest = len(shape.jobs)
    if free and shape.jobs:
      self.largest = self._largest(known_s)
    self.rates = self._rates() if free else {}

  def _classes(self, kind: str, slots: Sequence[WorkerSlot]) -> tuple[int, ...]:
    if kind in ("reduce", "update"):
      return tuple(range(len(self.members)))
    names = set(allowed_workers(kind, "any", self.scheme, slots))
    return tuple(i for i, m in enumerate(self.members) if m[0].name in names)

  # Seconds of a task, dispatch counted.

  def _taken(self, seconds: float) -> float:
    return self.costs.scale * (self.costs.dispatch_s + seconds)

  def times(self, kind: str, update: int = 0) -> Mapping[int, float]:
    return {c: self._taken(_seconds(self.by_class[c], kind, update)) for c in self.allowed[kind]}

  def least(self, kind: str, update: int = 0) -> float:
    return min(self.times(kind, update).values())

  def judge_times(self, jobs: int) -> Mapping[int, float]:
    return {c: self._taken(self.by_class[c].judging_s(jobs)) for c in self.allowed["judge"]}

  def least_judge_times(self, jobs: int) -> Mapping[int, float]:
    """Seconds that a worker takes to judge so many jobs at least, in whatever batches."""
    return {c: self._least_judge(self.by_class[c], jobs) for c in self.allowed["judge"]}

  def _least_judge(self, costs: WorkerCosts, jobs: int) -> float:
    # A line below every batch's time: the least fixed part, and the best rate beyond it. Measured
    # times need not rise.
    sizes = _corner_sizes(costs, self.largest)
    times = {size: self._taken(costs.judging_s(size)) for size in sizes}
    if jobs <= self.largest:
      alone = self._taken(costs.judging_s(jobs))
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
      ends = self._made(self._videos_of(middle))[1] + min(times.values())
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

  def push_s(self, index: int) -> float:
    return self.costs.scale * self.by_class[index].push_s

  # Who waits for what.

  def needs(self, upto: int) -> _Needs:
    """What update `upto` and those before it need."""
    shape = self.shape
    trained = {c for update in shape.updates[: upto + 1] for c in update}
    scope = set(range(shape.candidates))
    if shape.advantage_scope != "step":
      # A mini-batch's advantages need whole groups, as far as its members reach.
      scope = {c for group in shape.groups if trained & set(group) for c in group}
    jobs = frozenset(i for i, job in enumerate(shape.jobs) if scope & set(job))
    return self._closure(frozenset(trained), jobs)

  def everything(self) -> _Needs:
    every = frozenset(range(self.shape.candidates))
    return self._closure(every, frozenset(range(len(self.shape.jobs))))

  def _closure(self, trained: frozenset[int], jobs: frozenset[int]) -> _Needs:
    if self.batches is not None:
      # A batch that holds a needed job is judged whole.
      jobs = frozenset(j for batch in self.batches if jobs & set(batch) for j in batch)
    seen = {c for job in jobs for c in self.shape.jobs[job]}
    return _Needs(len(trained), len(trained | seen), jobs)

  # The step.

  def step_s(self, fused: int | None) -> float:
    """The bound of a whole step; `fused` is how many candidates fuse, None: any number."""
    self.fused = fused
    staged = bool(self.scheme.stages)
    start = self._stages() if staged else 0.0
    theta = start
    judged = [
      0.0 if staged else self._judged(self.needs(m)) for m in range(len(self.shape.updates))
    ]
    for m in range(len(self.shape.updates)):
      needed = max(self._gradients(m, theta, judged[m]), judged[m], self._flow(m, start))
      theta = needed + self._tail(m)
    end = max(theta, self._all(start))
    return end + max(self.push_s(c) for c in range(len(self.members)))

  def _stages(self) -> float:
    """When the last stage, training, can start."""
    total = 0.0
    every = self.everything()
    for kinds in self.scheme.stages[:-1]:
      if len(kinds) > 1:
        total += self._judged(every)
      elif kinds == ("judge",):
        total += self._judging(every.jobs, 0.0)
      else:
        total += self._whole(kinds[0], every.videos)
    return total

  def _whole(self, kind: str, count: int, update: int = 0) -> float:
    times = self.times(kind, update)
    machines = [Machine(self.pool.counts[c], 0.0, t) for c, t in times.items()]
    return whole_tasks(machines, count)

  def _made(self, videos: int) -> tuple[float, float]:
    """When so many trajectories, and their videos, can exist."""
    made = self._whole("generate", videos)
    items = [Item(videos, (self.times("generate"),)), Item(videos, (self.times("decode"),))]
    return made, max(made + self.least("decode"), spread(self.pool, items, self._heads()))

  def _heads(self) -> tuple[float, ...]:
    """When a worker that does not generate can start at all."""
    first = self.least("generate")
    makers = self.allowed["generate"]
    return tuple(0.0 if c in makers else first for c in range(len(self.members)))

  def _judged(self, needs: _Needs) -> float:
    """When everything needed can have been judged."""
    if not needs.jobs:
      return 0.0
    _, decoded = self._made(needs.videos)
    videos = [len(self.shape.jobs[job]) for job in needs.jobs]
    if self.batches is not None:
      mine = [b for b in self.batches if needs.jobs & set(b)]
      videos = [len({c for job in b for c in self.shape.jobs[job]}) for b in mine]
    _, first = self._made(min(videos))
    judged = max(self._judging(needs.jobs, first, decoded), self._mixed(needs))
    if self.batches is None:
      jobs = len(needs.jobs)
      judged = max(judged, self._in_turn(jobs, lambda n: self._made(self._videos_of(n))[1]))
      if self.fused:
        fusing, decode = self._fusing(), self.least("decode")
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

  def _fusing(self) -> Mapping[int, float]:
    """Seconds of a generation that takes its candidate's gradient."""
    times = self.times("generate")
    return {c: t + self.costs.scale * self.by_class[c].fused_s for c, t in times.items()}

  def _judging(self, jobs: frozenset[int], first: float, last: float = 0.0) -> float:
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
      out[c] = min(self._taken(self.by_class[c].judging_s(size)) / size for size in sizes)
    return out

  def _judge_items(self, jobs: frozenset[int]) -> list[Item]:
    if self.batches is None:
      return [Item(len(jobs), (self.rates,))]
    sizes: dict[int, int] = {}
    for batch in self.batches:
      if jobs & set(batch):
        sizes[len(batch)] = sizes.get(len(batch), 0) + 1
    return [Item(count, (self.judge_times(size),)) for size, count in sizes.items()]

  def _mixed(self, needs: _Needs) -> float:
    """Divisible work until everything needed is judged."""
    items = [
      Item(needs.videos, (self.times("generate"),)),
      Item(needs.videos, (self.times("decode"),)),
      *self._judge_items(needs.jobs),
    ]
    return spread(self.pool, items, self._heads())

  def _gradient_items(self, upto: int) -> list[Item]:
    items = []
    for m, members in enumerate(self.shape.updates[: upto + 1]):
      if self.scheme.forward_first:
        items.append(Item(len(members), (self.times("forward"),)))
        items.append(Item(len(members), (self.times("backward", m),)))
      elif m or self.fused == 0:
        items.append(Item(len(members), (self.times("replay", m),)))
      if m < upto:
        items.append(Item(len(members), (self._reducing(),)))
    return items

  def _reducing(self) -> Mapping[int, float]:
    return {c: self.costs.scale * self.by_class[c].reduce_s for c in self.allowed["reduce"]}

  def _making_items(self, needs: _Needs, upto: int) -> list[Item]:
    """Generations, with the first update's gradients where they may fuse."""
    generate = self.times("generate")
    if self.fused == 0 or self.scheme.forward_first:
      return [Item(needs.videos, (generate,))]
    members = len(self.shape.updates[0])
    fusing = self._fusing()
    apart = (generate, self.times("replay"))
    if self.fused is None:
      return [
        Item(needs.videos - members, (generate,)),
        Item(members, apart, (fusing,)),
      ]
    return [
      Item(needs.videos - members, (generate,)),
      Item(members - self.fused, apart),
      Item(self.fused, (fusing,)),
    ]

  def _flow(self, m: int, start: float) -> float:
    """Divisible work of all that update m needs, without its sums."""
    return self._work(self.needs(m), m, start)

  def _all(self, start: float) -> float:
    return self._work(self.everything(), len(self.shape.updates) - 1, start)

  def _work(self, needs: _Needs, upto: int, start: float) -> float:
    items = self._gradient_items(upto)
    if self.shape.reference:
      items.append(Item(needs.trained, (self.times("reference"),)))
    if self.scheme.stages:
      return spread(self.pool, items, tuple(start for _ in self.members))
    items += self._making_items(needs, upto)
    items.append(Item(needs.videos, (self.times("decode"),)))
    items += self._judge_items(needs.jobs)
    return spread(self.pool, items, self._heads())

  def _gradients(self, m: int, theta: float, judged: float) -> float:
    """When an update's gradients can be there, its adapter being there at theta."""
    members = len(self.shape.updates[m])
    if self.scheme.forward_first:
      if m == 0 and not self.scheme.stages:
        theta = self.least("generate")
      scored = theta + self._pass("forward", m, members)
      waits = judged if self.scheme.replay_mode == "two_pass" else 0.0
      return max(scored, waits) + self._pass("backward", m, members)
    if m == 0 and not self.scheme.stages:
      # A trajectory comes first, and its reference; the gradient may come with it.
      theta = self.least("generate")
      if self.shape.reference:
        theta += self.least("reference")
      if self.fused != 0:
        members = 0 if self.fused is None else members - self.fused
    return theta + self._pass("replay", m, members)

  def _pass(self, kind: str, m: int, members: int) -> float:
    """One pass of every member over the workers that may do it; each receives the adapter first."""
    times = self.times(kind, m)
    heads = {c: 0.0 if m == 0 or kind == "backward" else self.push_s(c) for c in times}
    counts = self.pool.counts
    if kind == "replay" and self.split:
      # A part's time is at least its share of the whole's.
      chunks = sum(self.shape.block_chunks)
      machines = [Machine(counts[c], heads[c], t / chunks) for c, t in times.items()]
      return whole_tasks(machines, members * chunks, self.shape.block_chunks)
    return whole_tasks([Machine(counts[c], heads[c], t) for c, t in times.items()], members)

  def _tail(self, m: int) -> float:
    """The sums and the optimizer, behind the last gradient."""
    sums = spread(
      self.pool,
      [Item(len(self.shape.updates[m]), (self._reducing(),))],
      tuple(0.0 for _ in self.members),
    )
    dispatch = self.costs.scale * self.costs.dispatch_s
    return sums + dispatch + self._taken(self._trainer_update_s())

  def _trainer_update_s(self) -> float:
    return self.by_class[self.trainer].update_s


def _seconds(costs: WorkerCosts, kind: str, update: int) -> float:
  if kind == "replay":
    return costs.replay_s if update else costs.backward_s
  if kind == "backward":
    return max(costs.backward_s, costs.replay_s) if update else costs.backward_s
  return {
    "generate": costs.generate_s,
    "decode": costs.decode_s,
    "reference": costs.reference_s,
    "forward": costs.forward_s,
  }[kind]


def _corner_sizes(costs: WorkerCosts, most: int) -> list[int]:
  """Batch sizes among which the best rate is: a table's entries and the ends, for between two
  entries seconds per job rise or fall throughout."""
  sizes = {1, max(most, 1)} | {size for size, _ in costs.judge_s if 1 <= size <= most}
  return sorted(sizes)
