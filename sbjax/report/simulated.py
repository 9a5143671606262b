"""A simulated step in the records that reports read."""

from collections.abc import Sequence

from sbjax.dataflow.graph import StepGraph
from sbjax.dataflow.plan import Plan, StepShape, WorkerSlot
from sbjax.dataflow.schemes import Scheme
from sbjax.dataflow.simulate import Simulated
from sbjax.report import waiting
from sbjax.report.compare_report import MeasuredStep
from sbjax.runtime.records import Span

_REPLAYS = ("replay", "forward", "backward")


def as_step(
  simulated: Simulated,
  graph: StepGraph,
  shape: StepShape,
  scheme: Scheme,
  plan: Plan,
  slots: Sequence[WorkerSlot],
) -> MeasuredStep:
  """Gives a simulated step as if it had been measured.

  Args:
    simulated: what `simulate` gives.
    graph: the graph that it ran.
    shape: the step's indices.
    scheme: the execution scheme.
    plan: who ran what.
    slots: the workers.
  """
  group = {slot.name: slot.group for slot in slots}
  spans = tuple(
    Span(
      interval.worker,
      group[interval.worker],
      interval.task.kind,
      interval.task.id,
      1,
      interval.start_s,
      interval.end_s,
      candidate=interval.task.candidates[0] if len(interval.task.candidates) == 1 else None,
      minibatch=interval.task.update if interval.task.update >= 0 else None,
    )
    for interval in simulated.intervals
  )
  allowed = waiting.runners(scheme, plan, slots, spans)
  waits = waiting.reward_waits(spans, graph.tasks.values(), allowed, simulated.step_s)
  return MeasuredStep(simulated.step_s, spans, waits, _replays(simulated, shape))


def _replays(simulated: Simulated, shape: StepShape) -> float:
  """Chunks replayed / (chunks of the trajectories x updates)."""
  chunks = sum(shape.block_chunks)
  trained = sum(len(members) for members in shape.updates)
  replayed = 0
  for interval in simulated.intervals:
    task = interval.task
    if task.kind in _REPLAYS:
      replayed += sum(shape.block_chunks[b] for b in task.blocks) if task.blocks else chunks
  return replayed / (chunks * trained)
