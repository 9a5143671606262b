"""Who holds which gradient buffers: they stay where they were made until a sum takes them."""

from collections.abc import Iterable, Mapping

from sbjax.dataflow.graph import Task, fold_id, replay_id
from sbjax.dataflow.plan import Plan, StepShape
from sbjax.dataflow.schemes import Scheme

Part = tuple[int, int]
"""(candidate, folding block): one set of buffers."""


class Holders:
  """Keeps account of a step's buffers; the driver and the simulator ask it alike.

  Args:
    shape: the step's indices.
    scheme: says which task makes a buffer.
    plan: says which replays are split or fused.
  """

  def __init__(self, shape: StepShape, scheme: Scheme, plan: Plan):
    self._shape, self._scheme, self._plan = shape, scheme, plan
    self._held: dict[int, dict[Part, str]] = {u: {} for u in range(len(shape.updates))}
    self._taken: dict[int, set[Part]] = {u: set() for u in range(len(shape.updates))}

  def made(self, task: Task, worker: str) -> None:
    """Notes the buffers that a finished task has left on its worker."""
    for candidate in task.candidates:
      for block in task.blocks:
        self._held[task.update][candidate, block] = worker

  def of(self, update: int, part: Part) -> str:
    """The worker that holds a part's buffers."""
    return self._held[update][part]

  def owed(self, update: int) -> Mapping[str, tuple[Part, ...]]:
    """Worker -> the parts that it holds and no sum has taken yet, in order."""
    out: dict[str, list[Part]] = {}
    for part, worker in sorted(self._held[update].items()):
      if part not in self._taken[update]:
        out.setdefault(worker, []).append(part)
    return {worker: tuple(parts) for worker, parts in sorted(out.items())}

  def took(self, update: int, parts: Iterable[Part]) -> None:
    """Notes that a sum holds some parts."""
    self._taken[update].update(parts)

  def again(self, update: int, parts: Iterable[Part]) -> tuple[str, ...]:
    """Hears that a sum of some parts is lost; gives the tasks that must make them again."""
    names: set[str] = set()
    for part in parts:
      del self._held[update][part]
      self._taken[update].discard(part)
      names.update(self._makers(update, part))
    return tuple(sorted(names))

  def forget(self, worker: str, settled: Iterable[int]) -> tuple[str, ...]:
    """Drops what a worker held and gives the tasks that must make it again.

    Args:
      worker: it has died.
      settled: updates that are done; nobody needs their buffers any more.
    """
    names: set[str] = set()
    for update in set(self._held) - set(settled):
      held = self._held[update]
      for part in [p for p, w in held.items() if w == worker and p not in self._taken[update]]:
        del held[part]
        names.update(self._makers(update, part))
    return tuple(sorted(names))

  def _makers(self, update: int, part: Part) -> tuple[str, ...]:
    candidate, block = part
    if self._scheme.forward_first:
      return (f"backward/u{update}/c{candidate}",)
    if update == 0 and candidate in self._plan.fused:
      return (f"generate/c{candidate}",)
    every_block = tuple(range(self._shape.blocks))
    runs = self._plan.splits.get((update, candidate), (every_block,))
    (blocks,) = [run for run in runs if block in run]
    replay = replay_id(update, candidate, blocks)
    return (replay,) if len(runs) == 1 else (replay, fold_id(update, candidate, blocks))
