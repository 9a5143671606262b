"""Whether a plan fits the workers: models, buffers, activations and videos against memory."""

import dataclasses
from collections.abc import Sequence

from sbjax.dataflow.graph import Task
from sbjax.dataflow.plan import Plan, StepShape, WorkerSlot, allowed_workers
from sbjax.dataflow.schemes import Scheme
from sbjax.dataflow.simulate import Interval

_POLICY = frozenset({"generate", "reference", "forward", "replay", "backward"})


@dataclasses.dataclass(frozen=True)
class Memory:
  """Bytes of what a step keeps on a worker; 0 for what is not known or lies elsewhere.

  Attributes:
    policy_bytes: the video model with its adapters.
    decoder_bytes: the video decoder.
    judge_bytes: the reward model.
    optimizer_bytes: optimizer state and moving average, on the worker that updates.
    activations_bytes: (kind of task, bytes) that one task needs while it runs.
    folded_bytes: the folded buffers of one candidate, kept until its update sums them.
    unit_bytes: the buffers of one candidate with one for each unit, which a part of a split replay
      keeps, whatever its length, until its early weights are there.
    video_bytes: one decoded video, held by the task that makes or judges it.
    latent_bytes: one trajectory, held by the task that makes or reads it.
    may_offload: True where a judge can sleep in host memory while its worker does other work;
      `WorkerCosts.offload_s` is the price of each change.
  """

  policy_bytes: int = 0
  decoder_bytes: int = 0
  judge_bytes: int = 0
  optimizer_bytes: int = 0
  activations_bytes: tuple[tuple[str, int], ...] = ()
  folded_bytes: int = 0
  unit_bytes: int = 0
  video_bytes: int = 0
  latent_bytes: int = 0
  may_offload: bool = False


def peaks(
  shape: StepShape,
  scheme: Scheme,
  plan: Plan,
  slots: Sequence[WorkerSlot],
  intervals: Sequence[Interval],
  memory: Memory,
) -> dict[str, int]:
  """Gives each worker's largest use in bytes over a simulated step.

  A worker holds every model that a task it may be given needs, whether the simulation gave it one
  or not: a run may.

  Args:
    shape: the step.
    scheme: its bindings hold where the plan says nothing.
    plan: who may run what.
    slots: the workers.
    intervals: the simulated tasks.
    memory: sizes.
  """
  roles = _roles(shape, scheme, plan, slots, intervals)
  usage = {slot.name: _Usage(roles[slot.name], shape, plan, memory) for slot in slots}
  trainer = next((s.name for s in slots if s.group in ("actor", "both")), slots[0].name)
  usage[trainer].base += memory.optimizer_bytes
  # What ends at a time has made room when the next task starts.
  events = [(i.end_s, 0, n, i) for n, i in enumerate(intervals)]
  events += [(i.start_s, 1, n, i) for n, i in enumerate(intervals)]
  for _, starts, _, interval in sorted(events, key=lambda e: e[:3]):
    one = usage[interval.worker]
    if starts:
      one.start(interval.task)
    else:
      one.end(interval.task)
  return {name: one.peak for name, one in usage.items()}


def shortfall(
  shape: StepShape,
  scheme: Scheme,
  plan: Plan,
  slots: Sequence[WorkerSlot],
  intervals: Sequence[Interval],
  memory: Memory,
) -> tuple[int, str]:
  """Says what a plan lacks: bytes of the worker that lacks most, and a sentence; 0 if it fits.

  Takes what `peaks` takes. Workers of which no memory is known hold everything.
  """
  needed = peaks(shape, scheme, plan, slots, intervals, memory)
  short = [(needed[s.name] - s.memory_bytes, s) for s in slots if s.memory_bytes]
  lack, slot = max(short, key=lambda pair: pair[0], default=(0, None))
  if slot is None or lack <= 0:
    return 0, ""
  return lack, (
    f"worker {slot.name} has {slot.memory_bytes / 2**30:.2f} GiB and scheme {scheme.name} needs at "
    f"least {needed[slot.name] / 2**30:.2f} GiB there; use more workers, a smaller adapter or "
    "judge, shorter videos, or devices with more memory"
  )


def _roles(shape, scheme, plan, slots, intervals) -> dict[str, set[str]]:
  roles: dict[str, set[str]] = {slot.name: set() for slot in slots}
  seen: set[tuple[str, str | None]] = set()
  for interval in intervals:
    task = interval.task
    if task.kind in scheme.bindings:
      seen.add((task.kind, plan.groups.get(task.id)))
    else:
      roles[interval.worker].add(task.kind)
  for kind, planned in seen:
    for name in allowed_workers(kind, planned, scheme, slots):
      roles[name].add(kind)
  return roles


class _Usage:
  """One worker's bytes as tasks start and end."""

  def __init__(self, kinds: set[str], shape: StepShape, plan: Plan, memory: Memory):
    self.shape, self.memory = shape, memory
    self.activations = dict(memory.activations_bytes)
    self.base = memory.policy_bytes if kinds & _POLICY else 0
    self.base += memory.decoder_bytes if "decode" in kinds else 0
    judges = memory.judge_bytes if "judge" in kinds else 0
    self.asleep = plan.offload
    self.base += 0 if plan.offload else judges
    self.held: dict[int, int] = {}
    self.units: dict[tuple[int, int, tuple[int, ...]], int] = {}
    self.peak = self.base

  def _kept(self) -> int:
    return sum(self.held.values()) + sum(self.units.values())

  def _folded(self, task: Task) -> int:
    return self.memory.folded_bytes * len(task.blocks) // self.shape.blocks

  def start(self, task: Task) -> None:
    memory = self.memory
    needs = self.activations.get(task.kind, 0)
    if task.kind == "judge":
      needs += memory.video_bytes * len({c for j in task.jobs for c in self.shape.jobs[j]})
      needs += memory.judge_bytes if self.asleep else 0
    elif task.kind == "decode":
      needs += memory.video_bytes + memory.latent_bytes
    elif task.kind in _POLICY:
      needs += memory.latent_bytes
    if self._split(task):
      needs += memory.unit_bytes
    elif task.kind in ("replay", "backward", "fold") or task.fused:
      needs += self._folded(task)
    self.peak = max(self.peak, self.base + self._kept() + needs)

  def _split(self, task: Task) -> bool:
    return task.kind == "replay" and len(task.blocks) < self.shape.blocks

  def end(self, task: Task) -> None:
    if self._split(task):
      self.units[task.update, task.candidates[0], task.blocks] = self.memory.unit_bytes
    elif task.kind in ("replay", "backward", "fold") or task.fused:
      if task.kind == "fold":
        self.units.pop((task.update, task.candidates[0], task.blocks), None)
      self.held[task.update] = self.held.get(task.update, 0) + self._folded(task)
    elif task.kind == "reduce":
      # The sum itself has a buffer's size or two; the accumulator stays until the update.
      self.held.pop(task.update, None)
