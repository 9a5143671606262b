"""Gives a plan its turns, and searches on them: which worker runs which task, and when.

`space` moves tasks by count, which leaves the order of each worker to a rule. Here single tasks
change places: another turn, another worker, two tasks exchanged. Accepting is by simulated
annealing (Kirkpatrick et al., 1983), from the schedule that the rule has made.
"""

import dataclasses
import math
import random
from collections.abc import Sequence

from sbjax.dataflow.costs import StepCosts
from sbjax.dataflow.plan import Plan, StepShape, Turn, WorkerSlot, allowed_workers
from sbjax.dataflow.schemes import Scheme
from sbjax.dataflow.simulate import Interval
from sbjax.dataflow.timetable import Timetable, Turns

_HEAT = 2e-3
"""Share of the step by which a worse schedule is accepted at first."""

_REACH = 4
"""Turns by which a task moves at most, its relative place kept."""


def planned_turns(
  plan: Plan, scheme: Scheme, slots: Sequence[WorkerSlot], intervals: Sequence[Interval]
) -> Plan:
  """The plan whose workers take turns, sums included, as they did in a simulated step.

  Args:
    plan: any plan.
    scheme: its scheme.
    slots: the workers.
    intervals: what each worker ran, and when.
  """
  turns: dict[str, list[Turn]] = {slot.name: [] for slot in slots}
  groups = dict(plan.groups)
  for one in intervals:
    name, kind = one.task.id, one.task.kind
    turns[one.worker].append(Turn(name, one.end_s - one.start_s, one.end_s))
    # A task that its group keeps from the worker that ran it is anybody's.
    allowed = kind not in scheme.bindings or one.worker in allowed_workers(
      kind, groups.get(name), scheme, slots
    )
    if not allowed:
      groups[name] = "any"
  fixed = {worker: tuple(mine) for worker, mine in turns.items()}
  return dataclasses.replace(plan, groups=groups, turns=fixed)


def polished(
  plan: Plan,
  shape: StepShape,
  scheme: Scheme,
  slots: Sequence[WorkerSlot],
  costs: StepCosts,
  intervals: Sequence[Interval],
  *,
  tries: int,
  keep_roles: bool = False,
) -> Plan:
  """Searches better turns, from those of a simulated step.

  Args:
    plan: the plan that was simulated; who judges what, fuses and splits stays.
    shape: the step.
    scheme: the execution scheme.
    slots: the workers.
    costs: what tasks take.
    intervals: the simulated step.
    tries: schedules to try.
    keep_roles: True where a group may not take over a kind of task that it has none of now.

  Returns:
    The plan with the best turns found; `simulated_s` is what they take.
  """
  table = Timetable(shape, scheme, plan, slots, costs)
  start = table.turns(intervals)
  workers = dict(table.workers)
  if keep_roles:
    roles = {(slots[w].group, table.kind(t)) for w, mine in enumerate(start) for t in mine}
    workers = {
      t: tuple(w for w in allowed if (slots[w].group, table.kind(t)) in roles)
      for t, allowed in workers.items()
    }
  turns, step_s = _annealed(table, start, workers, tries)
  found = planned_turns(plan, scheme, slots, table.schedule(turns))
  return dataclasses.replace(found, simulated_s=step_s)


def _annealed(
  table: Timetable, start: Turns, workers: dict[int, tuple[int, ...]], tries: int
) -> tuple[Turns, float]:
  draw = random.Random(0)
  turns, current_s = start, table.step_s(start)
  best, best_s = turns, current_s
  tasks = list(workers)
  for number in range(tries):
    moved = _moved([list(mine) for mine in turns], tasks, workers, draw)
    heat_s = _HEAT * best_s * (1.0 - number / tries)
    # Drawn beforehand: what is longer than this would not be accepted, and need not be finished.
    limit_s = current_s - heat_s * math.log(1.0 - draw.random())
    took_s = table.step_s(moved, limit_s)
    if took_s <= limit_s:
      turns, current_s = moved, took_s
      if took_s < best_s:
        best, best_s = moved, took_s
  return best, best_s


def _moved(
  turns: Turns, tasks: Sequence[int], workers: dict[int, tuple[int, ...]], draw: random.Random
) -> Turns:
  """Changes one or two tasks' places."""
  task = draw.choice(tasks)
  here = next(w for w, mine in enumerate(turns) if task in mine)
  at = turns[here].index(task)
  if draw.random() < 0.7:
    there = draw.choice(workers[task])
    del turns[here][at]
    near = round(at * len(turns[there]) / max(len(turns[here]), 1))
    turns[there].insert(max(near + draw.randint(-_REACH, _REACH), 0), task)
    return turns
  other = draw.choice(tasks)
  there = next(w for w, mine in enumerate(turns) if other in mine)
  if here in workers[other] and there in workers[task]:
    turns[there][turns[there].index(other)] = task
    turns[here][at] = other
  return turns
