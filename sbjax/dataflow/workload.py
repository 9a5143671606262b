"""What a lower bound counts: classes of equal workers, seconds of tasks, and what updates need."""

import dataclasses
from collections.abc import Mapping, Sequence

from sbjax.dataflow.costs import StepCosts, WorkerCosts
from sbjax.dataflow.plan import StepShape, WorkerSlot, allowed_workers, scheme_batches
from sbjax.dataflow.relax import Item, Machine, Pool, spread, whole_tasks
from sbjax.dataflow.schemes import Scheme


@dataclasses.dataclass(frozen=True)
class Needs:
  """What an update waits for, itself and all before it.

  Attributes:
    trained: candidates whose trajectories, and references, are read.
    videos: how many generations and decodes, of candidates and of further videos, are needed.
    jobs: to be judged.
  """

  trained: int
  videos: int
  jobs: frozenset[int]


class Workload:
  """A step's work, by kinds of tasks and classes of workers.

  Args:
    shape: the step.
    scheme: its bindings say who may do what.
    slots: the workers; those of one group and kind are a class.
    costs: what tasks take. Dispatch counts with every task.
  """

  def __init__(
    self, shape: StepShape, scheme: Scheme, slots: Sequence[WorkerSlot], costs: StepCosts
  ):
    self.shape, self.scheme, self.costs = shape, scheme, costs
    keys: dict[tuple[str, str], list[WorkerSlot]] = {}
    for slot in slots:
      keys.setdefault((slot.group, slot.kind), []).append(slot)
    self.members = tuple(keys.values())
    self.pool = Pool(tuple(len(m) for m in self.members))
    self.by_class = tuple(costs.of(m[0]) for m in self.members)
    self.allowed = {
      kind: self._classes(kind, slots) for kind in (*scheme.bindings, "reduce", "update")
    }
    free = "judge_batching" in scheme.plan_space
    self.batches = None if free else scheme_batches(scheme, shape, slots)

  def _classes(self, kind: str, slots: Sequence[WorkerSlot]) -> tuple[int, ...]:
    if kind in ("reduce", "update"):
      return tuple(range(len(self.members)))
    names = set(allowed_workers(kind, "any", self.scheme, slots))
    return tuple(i for i, m in enumerate(self.members) if m[0].name in names)

  def taken(self, seconds: float) -> float:
    """A task's seconds with its dispatch, scaled."""
    return self.costs.scale * (self.costs.dispatch_s + seconds)

  def times(self, kind: str, update: int = 0) -> Mapping[int, float]:
    """Seconds of a whole task on each class that may do it; the update sets a replay's kind."""
    return {c: self.taken(_seconds(self.by_class[c], kind, update)) for c in self.allowed[kind]}

  def least(self, kind: str, update: int = 0) -> float:
    """Seconds of a task on the fastest class."""
    return min(self.times(kind, update).values())

  def push_s(self, index: int) -> float:
    """Seconds in which a worker of a class receives an adapter."""
    return self.costs.scale * self.by_class[index].push_s

  def needs(self, upto: int) -> Needs:
    """What update `upto` and those before it need."""
    shape = self.shape
    trained = {c for update in shape.updates[: upto + 1] for c in update}
    scope = set(range(shape.candidates))
    if shape.advantage_scope != "step":
      # A mini-batch's advantages need whole groups, as far as its members reach.
      scope = {c for group in shape.groups if trained & set(group) for c in group}
    jobs = frozenset(i for i, job in enumerate(shape.jobs) if scope & set(job))
    return self._closure(frozenset(trained), jobs)

  def everything(self) -> Needs:
    """All that the step makes, whether an update needs it or not."""
    every = frozenset(range(self.shape.candidates))
    return self._closure(every, frozenset(range(len(self.shape.jobs))))

  def _closure(self, trained: frozenset[int], jobs: frozenset[int]) -> Needs:
    if self.batches is not None:
      # A batch that holds a needed job is judged whole.
      jobs = frozenset(j for batch in self.batches if jobs & set(batch) for j in batch)
    seen = {c for job in jobs for c in self.shape.jobs[job]}
    return Needs(len(trained), len(trained | seen), jobs)

  def whole(self, kind: str, count: int, update: int = 0) -> float:
    """When so many tasks of a kind can be done, none of them divided."""
    times = self.times(kind, update)
    machines = [Machine(self.pool.counts[c], 0.0, t) for c, t in times.items()]
    return whole_tasks(machines, count)

  def made(self, videos: int) -> tuple[float, float]:
    """When so many trajectories, and their videos, can exist."""
    made = self.whole("generate", videos)
    items = [Item(videos, (self.times("generate"),)), Item(videos, (self.times("decode"),))]
    return made, max(made + self.least("decode"), spread(self.pool, items, self.heads()))

  def heads(self) -> tuple[float, ...]:
    """When a worker that does not generate can start at all."""
    first = self.least("generate")
    makers = self.allowed["generate"]
    return tuple(0.0 if c in makers else first for c in range(len(self.members)))

  def fusing(self) -> Mapping[int, float]:
    """Seconds of a generation that takes its candidate's gradient."""
    times = self.times("generate")
    return {c: t + self.costs.scale * self.by_class[c].fused_s for c, t in times.items()}


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
