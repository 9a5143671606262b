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
up their stages. A judge's work counts at the best rate among the batches that the scheme may form,
and in whole jobs: whatever the size of the batch that holds the last video, the other jobs are
packed beside it. Where candidates may fuse, the bound is the least over how many do.
(StageBreaker §4.4 searches without a bound; these are textbook relaxations of makespan.)
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from sbjax.dataflow.costs import StepCosts
from sbjax.dataflow.judging_bound import Judging
from sbjax.dataflow.plan import StepShape, WorkerSlot
from sbjax.dataflow.relax import Item, Machine, spread, whole_tasks
from sbjax.dataflow.schemes import Scheme
from sbjax.dataflow.workload import Needs

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
  made = Bound(shape, scheme, slots, costs, known_s)
  least = min(made.step_s(count) for count in counts)
  if scheme.judge_batches == "device" and made.batches is not None:
    # Moving nothing it judges upon arrival; see `space.Space`.
    home = {kind: groups[:1] for kind, groups in scheme.bindings.items()}
    arrival = dataclasses.replace(scheme, bindings=home, judge_batches="job")
    least = min(least, Bound(shape, arrival, slots, costs, known_s).step_s(0))
  return min(_ROUNDING * least, known_s)


_MOST_FUSED = 32
"""Above this many candidates of the first mini-batch their number is not enumerated; the number is
then free, and the bound a little lower."""


class Bound(Judging):
  """The bound's parts; takes what `lower_bound` takes."""

  def step_s(self, fused: int | None) -> float:
    """The bound of a whole step; `fused` is how many candidates fuse, None: any number."""
    self.fused = fused
    staged = bool(self.scheme.stages)
    start = self._stages() if staged else 0.0
    theta = start
    judged = [
      0.0 if staged else self.judged_s(self.needs(m)) for m in range(len(self.shape.updates))
    ]
    for m in range(len(self.shape.updates)):
      needed = max(self._gradients(m, theta, judged[m]), judged[m], self._flow(m, start))
      theta = needed + self.tail_s(m)
    end = max(theta, self._all(start))
    return end + max(self.push_s(c) for c in range(len(self.members)))

  def _stages(self) -> float:
    """When the last stage, training, can start."""
    total = 0.0
    every = self.everything()
    for kinds in self.scheme.stages[:-1]:
      if len(kinds) > 1:
        total += self.judged_s(every)
      elif "judge" in kinds:
        total += self.judging_s(every.jobs, 0.0)
      else:
        total += sum(self.whole(kind, every.videos) for kind in kinds)
    return total

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

  def _making_items(self, needs: Needs, upto: int) -> list[Item]:
    """Generations, with the first update's gradients where they may fuse."""
    generate = self.times("generate")
    if self.fused == 0 or self.scheme.forward_first:
      return [Item(needs.videos, (generate,))]
    members = len(self.shape.updates[0])
    fusing = self.fusing()
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

  def _work(self, needs: Needs, upto: int, start: float) -> float:
    items = self._gradient_items(upto)
    if self.shape.reference:
      items.append(Item(needs.trained, (self.times("reference"),)))
    if self.scheme.stages:
      return spread(self.pool, items, tuple(start for _ in self.members))
    items += self._making_items(needs, upto)
    items.append(Item(needs.videos, (self.times("decode"),)))
    items += self.judge_items(needs.jobs)
    return spread(self.pool, items, self.heads())

  def _gradients(self, m: int, theta: float, judged: float) -> float:
    """When an update's gradients can be there, its adapter being there at theta."""
    members = len(self.shape.updates[m])
    if self.scheme.forward_first:
      if m == 0 and not self.scheme.stages:
        theta = self.least("generate")
      scored = theta + self.pass_s("forward", m, members)
      waits = judged if self.scheme.replay_mode == "two_pass" else 0.0
      return max(scored, waits) + self.pass_s("backward", m, members)
    if m == 0 and not self.scheme.stages:
      # A trajectory comes first, and its reference; the gradient may come with it.
      theta = self.least("generate")
      if self.shape.reference:
        theta += self.least("reference")
      if self.fused != 0:
        members = 0 if self.fused is None else members - self.fused
    return theta + self.pass_s("replay", m, members)

  def pass_s(self, kind: str, m: int, members: int) -> float:
    """One pass of every member over the workers that may do it; each receives the adapter first."""
    times = self.times(kind, m)
    heads = {c: 0.0 if m == 0 or kind == "backward" else self.push_s(c) for c in times}
    counts = self.pool.counts
    if kind == "replay" and "split_replays" in self.scheme.plan_space:
      # A part's time is at least its share of the whole's.
      chunks = sum(self.shape.block_chunks)
      machines = [Machine(counts[c], heads[c], t / chunks) for c, t in times.items()]
      return whole_tasks(machines, members * chunks, self.shape.block_chunks)
    return whole_tasks([Machine(counts[c], heads[c], t) for c, t in times.items()], members)

  def least_on(self, group: str, kind: str, update: int = 0) -> float:
    """Seconds of a task on the group's fastest workers; infinite where it may not run there."""
    times = self.times(kind, update)
    return min((t for c, t in times.items() if self.members[c][0].group == group), default=math.inf)

  def tail_s(self, m: int) -> float:
    """The sums and the optimizer, behind the last gradient."""
    sums = spread(
      self.pool,
      [Item(len(self.shape.updates[m]), (self._reducing(),))],
      tuple(0.0 for _ in self.members),
    )
    dispatch = self.costs.scale * self.costs.dispatch_s
    trainer = next((i for i, m in enumerate(self.members) if m[0].group in ("actor", "both")), 0)
    return sums + dispatch + self.taken(self.by_class[trainer].update_s)
