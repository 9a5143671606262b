"""Discrete-event simulation of a step under a plan. No JAX, no clock, no randomness."""

import dataclasses
import heapq
from collections.abc import Sequence

from sbjax.dataflow.build import build_step
from sbjax.dataflow.costs import StepCosts
from sbjax.dataflow.graph import DRIVER_KINDS, StepGraph, Task
from sbjax.dataflow.holders import Holders
from sbjax.dataflow.plan import Plan, StepShape, WorkerSlot, allowed_workers
from sbjax.dataflow.schemes import Scheme
from sbjax.dataflow.turns import queue_of


@dataclasses.dataclass(frozen=True)
class Interval:
  """One simulated task on one worker.

  Attributes:
    task: what ran.
    worker: where.
    start_s: when it was started.
    end_s: when its result was there.
  """

  task: Task
  worker: str
  start_s: float
  end_s: float


@dataclasses.dataclass(frozen=True)
class Simulated:
  """A simulated step.

  Attributes:
    step_s: first generation to last adapter received.
    intervals: every task, in order of start.
    updates_s: when each update's adapter existed.
  """

  step_s: float
  intervals: tuple[Interval, ...]
  updates_s: tuple[float, ...]


def simulate(
  shape: StepShape,
  scheme: Scheme,
  plan: Plan,
  slots: Sequence[WorkerSlot],
  costs: StepCosts,
  graph: StepGraph | None = None,
) -> Simulated:
  """Runs a step's graph on simulated workers, by the driver's own rule for what starts where.

  Args:
    shape: the step's indices.
    scheme: the execution scheme.
    plan: who runs what.
    slots: the workers.
    costs: what tasks take.
    graph: the graph to run; None: the one that shape, scheme and plan give.

  Raises:
    ValueError: if a task has no worker, or the costs do not know a worker's kind.
  """
  run = _Run(shape, scheme, plan, slots, costs, graph or build_step(shape, scheme, plan))
  return run.run()


class _Run:
  def __init__(self, shape, scheme, plan, slots, costs, graph):
    self.shape, self.scheme, self.plan, self.costs, self.graph = shape, scheme, plan, costs, graph
    self.slots = {slot.name: slot for slot in slots}
    self.trainers = tuple(slot.name for slot in slots if slot.group in ("actor", "both"))
    self.holders = Holders(shape, scheme, plan)
    self.now = 0.0
    self.queue = queue_of(graph, self.workers, plan.order, plan.turns, lambda: self.now)
    self.allowed: dict[tuple[str, str | None], tuple[str, ...]] = {}
    self.versions = dict.fromkeys(self.slots, 0)
    self.awake: dict[str, bool] = {}
    self.events: list[tuple[float, int, Task, str, tuple]] = []
    self.number = 0
    self.summing: dict[str, dict[str, tuple]] = {}
    self.intervals: list[Interval] = []
    self.updates_s: list[float] = []

  def workers(self, task: Task) -> tuple[str, ...]:
    if task.kind == "update":
      return self.trainers[:1]
    if task.kind == "fold":
      return (self.holders.of(task.update, (task.candidates[0], task.blocks[0])),)
    key = (task.kind, self.plan.groups.get(task.id))
    if key not in self.allowed:
      self.allowed[key] = allowed_workers(*key, self.scheme, tuple(self.slots.values()))
      if not self.allowed[key]:
        raise ValueError(f"no worker may run {task.id}; scheme {self.scheme.name} needs one")
    return self.allowed[key]

  def run(self) -> Simulated:
    for name in self.slots:
      self.queue.free(name)
    while self.graph.is_active():
      self.take_ready()
      while (pair := self.queue.pop(self.may_start)) is not None:
        self.start(*pair)
      if not self.events:
        if not self.graph.is_active():
          break
        raise ValueError(f"no worker can run what is left of the step under {self.scheme.name}")
      self.now = self.events[0][0]
      while self.events and self.events[0][0] == self.now:
        self.end(*heapq.heappop(self.events)[2:])
    # A step has ended when every worker has received the last adapter.
    last = max((self.costs.push_seconds(slot) for slot in self.slots.values()), default=0.0)
    return Simulated(self.now + last, tuple(self.intervals), tuple(self.updates_s))

  def may_start(self, task: Task, worker: str) -> bool:
    if task.kind == "reduce":
      return worker in self.summing[task.id]
    return self.graph.is_ready(task.id)

  def take_ready(self) -> None:
    ready = self.graph.get_ready()
    while ready:
      for task in ready:
        if task.kind in DRIVER_KINDS:
          self.graph.start(task.id)
          self.graph.done(task.id)
        elif task.kind == "reduce":
          self.start_sums(task)
        else:
          self.queue.push([task])
      ready = self.graph.get_ready()

  def start_sums(self, task: Task) -> None:
    """Each holder adds up its own buffers as soon as it is idle."""
    self.graph.start(task.id)
    owed = dict(self.holders.owed(task.update))
    self.summing[task.id] = owed
    for worker in owed:
      self.queue.push_for(task, worker)

  def start(self, task: Task, worker: str) -> None:
    slot = self.slots[worker]
    parts: tuple = ()
    if task.kind == "reduce":
      parts = self.summing[task.id][worker]
      seconds = self.costs.reduce_seconds(len(parts), slot, self.shape)
    else:
      self.graph.start(task.id)
      seconds = self.costs.seconds(task, slot, self.shape)
      if task.kind in ("replay", "forward", "backward") and self.versions[worker] != task.update:
        seconds += self.costs.push_seconds(slot)
        self.versions[worker] = task.update
      if self.plan.offload and self.awake.get(worker, False) != (task.kind == "judge"):
        seconds += self.costs.offload_seconds(slot)
        self.awake[worker] = task.kind == "judge"
    end = self.now + self.costs.dispatch_s * self.costs.scale + seconds
    self.intervals.append(Interval(task, worker, self.now, end))
    self.number += 1
    heapq.heappush(self.events, (end, self.number, task, worker, parts))

  def end(self, task: Task, worker: str, parts: tuple) -> None:
    self.queue.free(worker)
    if task.kind == "reduce":
      self.holders.took(task.update, parts)
      del self.summing[task.id][worker]
      if not self.summing[task.id]:
        self.graph.done(task.id)
      return
    if task.kind in ("replay", "backward") or task.fused:
      self.holders.made(task, worker)
    elif task.kind == "update":
      self.updates_s.append(self.now)
    self.graph.done(task.id)
