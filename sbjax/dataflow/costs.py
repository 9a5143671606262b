"""What a step's tasks cost on each kind of worker: the numbers that a simulation runs on."""

import bisect
import dataclasses
from collections.abc import Mapping

from sbjax.dataflow.graph import Task
from sbjax.dataflow.plan import StepShape, WorkerSlot


@dataclasses.dataclass(frozen=True)
class WorkerCosts:
  """Seconds of one task of each kind on one kind of worker, for one length and resolution.

  A kind that the worker cannot do is infinite.

  Attributes:
    generate_s: a candidate's rollout.
    fused_s: what taking the gradient adds to a rollout.
    decode_s: a candidate's video.
    judge_s: (jobs, seconds) of one judge task, rising in jobs.
    reference_s: the initial adapter's pass over a trajectory.
    forward_s: a scoring replay.
    backward_s: a gradient replay whose weights are known, two-pass or of the first mini-batch.
    replay_s: a merged replay that keeps its units' gradients and folds them.
    prefix_s: rebuilding one chunk's context, which a split replay's later parts repeat.
    fold_s: folding one part's units.
    reduce_s: summing one candidate's buffers.
    update_s: the optimizer.
    push_s: receiving an adapter.
    offload_s: putting a judge to sleep in host memory, or waking it.
  """

  generate_s: float
  decode_s: float
  judge_s: tuple[tuple[int, float], ...]
  forward_s: float
  backward_s: float
  replay_s: float
  fused_s: float = 0.0
  reference_s: float = 0.0
  prefix_s: float = 0.0
  fold_s: float = 0.0
  reduce_s: float = 0.0
  update_s: float = 0.0
  push_s: float = 0.0
  offload_s: float = 0.0

  def judging_s(self, jobs: int) -> float:
    """Seconds of a judge task, interpolated in its jobs; beyond the table its last slope holds.

    Raises:
      ValueError: if the table is empty.
    """
    return interpolate(self.judge_s, jobs)


def interpolate(table: tuple[tuple[int, float], ...], at: int) -> float:
  """Piecewise linear through (size, seconds); in proportion below the first entry.

  Raises:
    ValueError: if the table is empty.
  """
  if not table:
    raise ValueError("a profile's table has no entry; measure at least one size")
  sizes = [size for size, _ in table]
  right = bisect.bisect_left(sizes, at)
  if right < len(table) and sizes[right] == at:
    return table[right][1]
  if len(table) == 1 or right == 0:
    return table[0][1] * at / table[0][0]
  right = min(right, len(table) - 1)
  (a, ya), (b, yb) = table[right - 1], table[right]
  return ya + (yb - ya) * (at - a) / (b - a)


@dataclasses.dataclass(frozen=True)
class StepCosts:
  """Costs of a step's tasks.

  Attributes:
    by_kind: kind of worker -> its costs.
    dispatch_s: from one task's end to the start of the worker's next, beside the task itself.
    scale: what the seconds are multiplied by; emulations run on another clock.
  """

  by_kind: Mapping[str, WorkerCosts]
  dispatch_s: float = 0.0
  scale: float = 1.0

  def of(self, slot: WorkerSlot) -> WorkerCosts:
    """A worker's costs.

    Raises:
      ValueError: if the profile does not know its kind.
    """
    if slot.kind not in self.by_kind:
      known = ", ".join(sorted(self.by_kind))
      raise ValueError(f"the profile has no worker kind {slot.kind!r}; it has {known}")
    return self.by_kind[slot.kind]

  def seconds(self, task: Task, slot: WorkerSlot, shape: StepShape) -> float:
    """Seconds that a task occupies a worker, without dispatch.

    A reduce counts per part that the worker holds; see `reduce_seconds`.
    """
    costs = self.of(slot)
    return self.scale * _seconds(task, costs, shape)

  def reduce_seconds(self, parts: int, slot: WorkerSlot, shape: StepShape) -> float:
    """Seconds of a worker's sum over some (candidate, block) parts."""
    return self.scale * self.of(slot).reduce_s * parts / shape.blocks

  def offload_seconds(self, slot: WorkerSlot) -> float:
    """Seconds until a judge sleeps, or is awake."""
    return self.scale * self.of(slot).offload_s

  def push_seconds(self, slot: WorkerSlot) -> float:
    """Seconds until a worker holds an adapter."""
    return self.scale * self.of(slot).push_s


def _seconds(task: Task, costs: WorkerCosts, shape: StepShape) -> float:
  kind = task.kind
  if kind == "generate":
    return costs.generate_s + (costs.fused_s if task.fused else 0.0)
  if kind == "judge":
    return costs.judging_s(len(task.jobs))
  if kind == "replay":
    # Before the first update ratios are one and weights known, so nothing is kept per unit.
    whole = costs.backward_s if task.update == 0 else costs.replay_s
    if len(task.blocks) == shape.blocks:
      return whole
    return part_seconds(whole, costs.prefix_s, task.blocks, shape)
  return {
    "decode": costs.decode_s,
    "reference": costs.reference_s,
    "forward": costs.forward_s,
    "backward": costs.backward_s if task.update == 0 else max(costs.backward_s, costs.replay_s),
    "fold": costs.fold_s,
    "update": costs.update_s,
  }[kind]


def part_seconds(
  whole_s: float, prefix_s: float, blocks: tuple[int, ...], shape: StepShape
) -> float:
  """Seconds of a part of a replay: its share of the chunks, and the context before it anew.

  The whole replay's seconds hold the context between its chunks already, so a part's own share is
  scaled and only the chunks before it are added.
  """
  chunks = sum(shape.block_chunks)
  mine = sum(shape.block_chunks[b] for b in blocks)
  before = sum(shape.block_chunks[: blocks[0]])
  return whole_s * mine / chunks + prefix_s * before
