"""Searches the plan of a step: simulate, move, simulate."""

import dataclasses
import itertools
import math
import random
from collections.abc import Iterator, Sequence

from sbjax.dataflow.bound import lower_bound
from sbjax.dataflow.costs import StepCosts
from sbjax.dataflow.memory import Memory, shortfall
from sbjax.dataflow.plan import Plan, StepShape, WorkerSlot
from sbjax.dataflow.polish import planned_turns, polished
from sbjax.dataflow.prune import Branches
from sbjax.dataflow.schemes import Scheme
from sbjax.dataflow.simulate import Simulated, simulate
from sbjax.dataflow.space import Knob, Point, Space, space

_TASKS_PER_S = 45_000
"""Simulated tasks that one second of the budget stands for. A search counts simulations, never the
clock, so that equal inputs give equal plans on every machine."""

_TURNS_PER_S = 400_000
"""The same of a search on turns, whose simulation is simpler."""

_MOST_TURNS = 600
"""Tasks of a step beyond which a plan has no turns: many tasks even out what one is late."""

_POLISHED = (16, 4)
"""How many plans have their turns searched on: all of these, then the best of them once more."""

_IDLE = 100
"""Disturbed copies in a row that lead to nothing new before a search ends."""

_CLOSE = 1e-3
"""A plan within this share of its bound is not searched further."""


def search(
  shape: StepShape,
  scheme: Scheme,
  slots: Sequence[WorkerSlot],
  costs: StepCosts,
  *,
  budget_s: float = 1.0,
  memory: Memory | None = None,
  fused: int | None = None,
) -> Plan:
  """Gives the best plan found, simulated, with its lower bound.

  Args:
    shape: the step.
    scheme: says what may be chosen; a scheme that leaves no choice has one plan.
    slots: the workers.
    costs: what tasks take.
    budget_s: roughly the seconds that the search may take; it sets a number of simulations.
    memory: bytes that models and buffers take; plans that do not fit the workers are left out.
      None: nothing is refused.
    fused: how many candidates fuse; None: the search decides.

  Returns:
    A plan whose `searched` is `exhaustive` where every plan of the space was simulated,
    `branch_and_bound` where those that were not cannot be faster, `local` where only neighbours of
    the best ones were, `fixed` where there is one plan. A plan that gives turns is `local`, unless
    it is as good as its bound.

  Raises:
    ValueError: if no plan fits the workers' memory, or costs lack a kind of worker.
  """
  if fused is not None and "fused" not in scheme.plan_space:
    fused = None
  offload = memory is not None and memory.may_offload
  where = space(shape, scheme, slots, fused, offload=offload)
  run = _Search(where, costs, memory, budget_s)
  plan = run.run(lower_bound(shape, scheme, slots, costs, fused=fused))
  if "order" in scheme.plan_space and run.tasks <= _MOST_TURNS:
    plan = run.with_turns(plan)
  # What the plan takes rules out judge batches that no faster one has, which lifts the bound.
  assert plan.simulated_s is not None
  bound_s = lower_bound(shape, scheme, slots, costs, fused=fused, known_s=plan.simulated_s)
  return dataclasses.replace(plan, bound_s=bound_s)


class _Search:
  def __init__(self, where: Space, costs: StepCosts, memory: Memory | None, budget_s: float):
    self.space, self.costs, self.memory = where, costs, memory
    self.seen: dict[Point, float] = {}
    self.refusals: list[tuple[int, str]] = []
    shape = where.shape
    tasks = shape.candidates * (2 + shape.reference) + len(shape.jobs)
    tasks += sum(map(len, shape.updates)) * (2 if where.scheme.forward_first else 1)
    self.tasks = tasks
    self.limit = max(int(budget_s * _TASKS_PER_S / tasks), 4)
    self.tries = int(budget_s * _TURNS_PER_S / tasks)

  @property
  def spent(self) -> bool:
    return len(self.seen) >= self.limit

  def seconds(self, point: Point) -> float:
    """Simulated seconds of a point; infinite where it does not fit."""
    point = self.space.canonical(point)
    if point not in self.seen:
      self.seen[point] = self.simulated(self.space.plan(point)).step_s
    return self.seen[point]

  def simulated(self, plan: Plan) -> Simulated:
    """A simulated plan; it takes forever where it does not fit."""
    where = self.space
    ran = simulate(where.shape, where.scheme, plan, where.slots, self.costs)
    if self.memory is not None:
      given = (where.shape, where.scheme, plan, where.slots, ran.intervals, self.memory)
      lack, why = shortfall(*given)
      if lack:
        self.refusals.append((lack, why))
        return dataclasses.replace(ran, step_s=math.inf)
    return ran

  def with_turns(self, plan: Plan) -> Plan:
    """The best of the best points of several kinds, each with turns that were searched on."""
    best, best_s = self.in_turns(plan)
    if (plan.gap is not None and plan.gap <= _CLOSE) or plan.offload:
      return best
    plans = [
      dataclasses.replace(self.space.plan(point), bound_s=plan.bound_s) for point in self.distinct()
    ]
    for count in _POLISHED:
      tries = self.tries // (len(_POLISHED) * min(count, len(plans)))
      found = [self.polished(plan, tries) for plan in plans[:count]]
      plans = sorted(found + plans[count:], key=lambda p: p.simulated_s or 0.0)
    for plan in plans:
      assert plan.simulated_s is not None
      if plan.simulated_s < best_s * (1.0 - _CLOSE):
        found, found_s = self.in_turns(plan)  # it may not fit the workers' memory
        if found_s < best_s:
          best, best_s = found, found_s
    return dataclasses.replace(best, searched="local")  # nobody sees the space of turns whole

  def polished(self, plan: Plan, tries: int) -> Plan:
    """The plan with turns that were searched on from those of its own simulation."""
    where = self.space
    return polished(
      plan,
      where.shape,
      where.scheme,
      where.slots,
      self.costs,
      self.simulated(plan).intervals,
      tries=tries,
      keep_roles=self.memory is not None,
    )

  def in_turns(self, plan: Plan) -> tuple[Plan, float]:
    """The plan with the turns of its own simulation, and what it takes with them."""
    where = self.space
    plan = planned_turns(plan, where.scheme, where.slots, self.simulated(plan).intervals)
    took_s = self.simulated(plan).step_s
    return dataclasses.replace(plan, simulated_s=took_s), took_s

  def distinct(self) -> list[Point]:
    """The best points, of those with as many tasks of every size only the best one."""
    found: dict[tuple, Point] = {}
    for point in sorted(self.seen, key=lambda p: (self.seen[p], p)):
      if math.isinf(self.seen[point]):
        break
      plan = self.space.plan(point)
      sizes = tuple(sorted(map(len, plan.judge_batches)))
      found.setdefault((sizes, len(plan.fused), len(plan.splits)), point)
      if len(found) == _POLISHED[0] or plan.offload:
        break
    return list(found.values())

  def run(self, bound_s: float) -> Plan:
    if not self.space.knobs:
      searched = "fixed"
      self.seconds(())
    elif self.space.size <= self.limit:
      searched = "exhaustive"
      for point in itertools.product(*(range(len(k.values)) for k in self.space.knobs)):
        self.seconds(point)
    else:
      searched = "local"
      provable, whole = self.space.scheme.judging_first, self.limit
      # A good plan first: it is what branches are cut by.
      self.limit = whole // 4 if provable else whole
      self.climb(bound_s * (1.0 + _CLOSE))
      self.limit = whole
      if provable and self.prove():
        searched = "branch_and_bound"
    # Of equally fast plans the first point: it moves the least.
    point = min(self.seen, key=lambda p: (self.seen[p], p))
    if math.isinf(self.seen[point]):
      if not self.refusals:
        raise ValueError("a task of every plan takes forever; measure its time, or add a worker")
      raise ValueError(min(self.refusals)[1])
    plan = self.space.plan(point)
    return dataclasses.replace(
      plan, simulated_s=self.seen[point], bound_s=bound_s, searched=searched
    )

  def prove(self) -> bool:
    """Simulates every plan whose branch may hold a better one; False where that is too many."""
    branches = Branches(self.space, self.costs)
    knobs, home = self.space.knobs, (0,) * len(self.space.knobs)
    best, steps = min(self.seconds(home), min(self.seen.values())), 0
    stack: list[Point] = [()]
    while stack:
      point = stack.pop()
      steps += 1
      if steps > 4 * self.limit or (self.spent and len(point) == len(knobs)):
        return False
      chosen = {k.name: k.values[i] for k, i in zip(knobs, point, strict=False)}
      if branches.least_s(chosen) >= best:
        continue
      if len(point) < len(knobs):
        stack += [(*point, i) for i in reversed(range(len(knobs[len(point)].values)))]
      else:
        best = min(best, self.seconds(point))
    return True

  def climb(self, enough_s: float) -> None:
    """Iterated local search: climb from the best start, then from disturbed copies of the best."""
    draw = random.Random(0)
    starts = sorted(self.starts(), key=lambda p: (self.seconds(p), p))
    best = starts[0]
    for start in starts[:3]:
      best = min(best, self.climbed(start, enough_s), key=lambda p: (self.seconds(p), p))
    idle = 0
    # Several points may have one plan, so a space can be used up before the budget is.
    while not self.spent and self.seconds(best) > enough_s and idle < _IDLE:
      known, point = len(self.seen), list(best)
      for knob in draw.sample(range(len(point)), min(draw.randint(1, 4), len(point))):
        point[knob] = draw.randrange(len(self.space.knobs[knob].values))
      found = self.climbed(tuple(point), enough_s)
      if self.seconds(found) <= self.seconds(best):
        best = found
      idle = idle + 1 if len(self.seen) == known else 0

  def climbed(self, best: Point, enough_s: float) -> Point:
    """The end of a climb that takes every better neighbour."""
    improved = True
    while improved and self.seconds(best) > enough_s:
      improved = False
      for knob in range(len(best)):
        for point in self.neighbours(best, knob):
          if self.spent:
            return best
          if self.seconds(point) < self.seconds(best):
            best, improved = point, True
    return best

  def neighbours(self, point: Point, knob: int) -> Iterator[Point]:
    """Points that differ in one knob."""
    count, at = len(self.space.knobs[knob].values), point[knob]
    if self.space.knobs[knob].ordered:
      steps = [s for e in range(count.bit_length()) for s in (1 << e, -(1 << e))]
      places = [at + step for step in steps if 0 <= at + step < count]
    else:
      places = [i for i in range(count) if i != at]
    for place in places:
      yield (*point[:knob], place, *point[knob + 1 :])

  def starts(self) -> list[Point]:
    """Coarse points: everything at home, everything moved, and combinations between."""
    rewards = sum(slot.group == "reward" for slot in self.space.slots)
    choices = [_coarse(knob, rewards) for knob in self.space.knobs]
    # The replays of all updates move, and are split, together.
    names = [knob.name.partition("/")[0] for knob in self.space.knobs]
    kinds = list(dict.fromkeys(names))
    levels = [
      max(len(c) for n, c in zip(names, choices, strict=True) if n == kind) for kind in kinds
    ]
    points = []
    for made in itertools.product(*map(range, levels)):
      level = dict(zip(kinds, made, strict=True))
      points.append(
        tuple(c[min(level[n], len(c) - 1)] for n, c in zip(names, choices, strict=True))
      )
    points = list(dict.fromkeys(points))
    # The first is the plan that moves nothing; of the others a draw, where there are many.
    rest = random.Random(1).sample(points[1:], len(points) - 1)
    return points[:1] + rest[: max(self.limit // 3, 3)]


def _coarse(knob: Knob, rewards: int) -> tuple[int, ...]:
  """A few indices of a knob that differ much; the first moves nothing."""
  last = len(knob.values) - 1
  if knob.name == "decodes":
    home = knob.values.index(0)
    return home, (home + last) // 2, last
  if knob.name == "generations":
    home = knob.values.index(0)
    return home, min(home + rewards, last), last
  if knob.name == "judge_tasks":
    home = knob.values.index(rewards) if rewards in knob.values else 0
    return home, 0, last
  if knob.name == "judge_late":
    return (0,)
  if not knob.ordered:
    return tuple(range(last + 1))
  if knob.name.startswith("replays"):
    return 0, last // 4, last
  return 0, last
