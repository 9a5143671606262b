"""How long a step takes when every worker has its turns: a simulation made for being repeated.

It gives what `simulate.simulate` gives for such a plan, twenty times as fast, and nothing else: a
search on turns runs it thousands of times. Sums, foldings and the optimizer run as soon as their
worker is idle, before its next turn; nobody takes over another's turn.
"""

import heapq
import math
from collections.abc import Mapping, Sequence

from sbjax.dataflow.build import build_step
from sbjax.dataflow.costs import StepCosts
from sbjax.dataflow.graph import DRIVER_KINDS
from sbjax.dataflow.plan import Plan, StepShape, WorkerSlot, allowed_workers
from sbjax.dataflow.schemes import Scheme
from sbjax.dataflow.simulate import Interval

Turns = list[list[int]]
"""For each worker the numbers of its tasks, in turn."""

_DRIVER, _TURN, _FOLD, _REDUCE, _UPDATE = range(5)
_OTHERS = {"fold": _FOLD, "reduce": _REDUCE, "update": _UPDATE}


class Timetable:
  """The tasks of a step by number, with what each takes on each worker.

  Args:
    shape: the step's indices.
    scheme: the execution scheme; its bindings say who may take which turn.
    plan: which tasks there are. Its groups and order do not matter here.
    slots: the workers.
    costs: what tasks take.

  Attributes:
    workers: number of a turn's task -> numbers of the workers that may run it.
  """

  def __init__(
    self,
    shape: StepShape,
    scheme: Scheme,
    plan: Plan,
    slots: Sequence[WorkerSlot],
    costs: StepCosts,
  ):
    graph = build_step(shape, scheme, plan)
    tasks = self._tasks = list(graph.tasks.values())
    self._number = {task.id: i for i, task in enumerate(tasks)}
    self._slots = tuple(slots)
    self._waits = [len(task.needs) for task in tasks]
    self._dependents = [[self._number[d] for d in graph.dependents[t.id]] for t in tasks]
    self._role = [_DRIVER if t.kind in DRIVER_KINDS else _OTHERS.get(t.kind, _TURN) for t in tasks]
    self._update = [max(task.update, 0) for task in tasks]
    self._dispatch_s = costs.dispatch_s * costs.scale
    self._part_s = [costs.reduce_seconds(1, slot, shape) for slot in slots]
    self._push_s = [costs.push_seconds(slot) for slot in slots]
    self._seconds = [
      [self._dispatch_s + costs.seconds(task, slot, shape) for slot in slots]
      if role in (_TURN, _FOLD, _UPDATE)
      else []
      for task, role in zip(tasks, self._role, strict=True)
    ]
    replayed = ("replay", "forward", "backward")
    self._reads_adapter = [task.kind in replayed for task in tasks]
    makes = ("replay", "backward")
    self._parts = [len(t.blocks) if t.kind in makes or t.fused else 0 for t in tasks]
    # A part is folded where it was replayed, its task's last need.
    self._made_by = {
      i: self._number[task.needs[-1]] for i, task in enumerate(tasks) if task.kind == "fold"
    }
    may = {kind: allowed_workers(kind, "any", scheme, slots) for kind in scheme.bindings}
    self.workers: Mapping[int, tuple[int, ...]] = {
      i: tuple(w for w, slot in enumerate(slots) if slot.name in may[task.kind])
      for i, task in enumerate(tasks)
      if self._role[i] == _TURN
    }
    self._trainer = next((w for w, s in enumerate(slots) if s.group in ("actor", "both")), 0)
    self._updates = len(shape.updates)

  def kind(self, task: int) -> str:
    """What a task does."""
    return self._tasks[task].kind

  def turns(self, intervals: Sequence[Interval]) -> Turns:
    """The turns that a simulated step has taken."""
    worker = {slot.name: w for w, slot in enumerate(self._slots)}
    out: Turns = [[] for _ in self._slots]
    for interval in intervals:
      task = self._number[interval.task.id]
      if self._role[task] == _TURN:
        out[worker[interval.worker]].append(task)
    return out

  def schedule(self, turns: Turns) -> list[Interval]:
    """What each worker runs and when, sums included.

    Args:
      turns: every task of `workers` once, and none that wait for one another.
    """
    ran: list[tuple[int, int, float, float]] = []
    self.step_s(turns, ran=ran)
    return [Interval(self._tasks[t], self._slots[w].name, start, end) for t, w, start, end in ran]

  def step_s(
    self,
    turns: Turns,
    enough_s: float = math.inf,
    ran: list[tuple[int, int, float, float]] | None = None,
  ) -> float:
    """Seconds of a step; infinite where turns wait for one another, or beyond `enough_s`.

    Args:
      turns: every task of `workers` once.
      enough_s: a longer step need not be simulated to its end.
      ran: where given, gets (task, worker, start, end) of all that ran.
    """
    role, waits, dependents = self._role, self._waits[:], self._dependents
    workers = range(len(self._slots))
    place, idle = [0] * len(workers), [True] * len(workers)
    ready, left = bytearray(len(waits)), len(waits)
    soon: list[list[int]] = [[] for _ in workers]  # sums, foldings and updates of each worker
    held = [[0] * len(workers) for _ in range(self._updates)]
    ran_on, owed, version = {}, {}, [0] * len(workers)
    events: list[tuple[float, int, int, int]] = []
    number, now = 0, 0.0
    fresh = [task for task, count in enumerate(waits) if not count]
    done: list[int] = []
    while True:
      while fresh or done:
        while done:
          left -= 1
          for other in dependents[done.pop()]:
            waits[other] -= 1
            if not waits[other]:
              fresh.append(other)
        while fresh:
          task = fresh.pop()
          kind = role[task]
          if kind == _TURN:
            ready[task] = 1
          elif kind == _DRIVER:
            done.append(task)
          elif kind == _FOLD:
            soon[ran_on[self._made_by[task]]].append(task)
          elif kind == _UPDATE:
            soon[self._trainer].append(task)
          else:
            holders = [w for w in workers if held[self._update[task]][w]]
            owed[task] = len(holders)
            for w in holders:
              soon[w].append(task)
      if not left:
        return now + max(self._push_s)
      for w in workers:
        if not idle[w]:
          continue
        if soon[w]:
          task = soon[w].pop(0)
          if role[task] == _REDUCE:
            end = now + self._dispatch_s + self._part_s[w] * held[self._update[task]][w]
          else:
            end = now + self._seconds[task][w]
        else:
          mine, at = turns[w], place[w]
          if at == len(mine) or not ready[mine[at]]:
            continue
          task = mine[at]
          place[w] = at + 1
          end = now + self._seconds[task][w]
          if self._reads_adapter[task] and version[w] != self._update[task]:
            version[w] = self._update[task]
            end += self._push_s[w]
        idle[w] = False
        if ran is not None:
          ran.append((task, w, now, end))
        number += 1
        heapq.heappush(events, (end, number, task, w))
      if not events or events[0][0] > enough_s:
        return math.inf
      now = events[0][0]
      while events and events[0][0] == now:
        _, _, task, w = heapq.heappop(events)
        idle[w] = True
        if role[task] == _REDUCE:
          owed[task] -= 1
          if owed[task]:
            continue
        held[self._update[task]][w] += self._parts[task]
        ran_on[task] = w
        done.append(task)
