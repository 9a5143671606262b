"""What a plan may choose under a scheme, as a small grid of knobs, and the plan of a grid point."""

import dataclasses
import math
from collections.abc import Sequence

from sbjax.dataflow.graph import replay_id
from sbjax.dataflow.plan import (
  Plan,
  StepShape,
  WorkerSlot,
  fused_candidates,
  judge_batches,
  scheme_batches,
)
from sbjax.dataflow.queue import Order
from sbjax.dataflow.schemes import Scheme

Point = tuple[int, ...]
"""One index per knob."""


@dataclasses.dataclass(frozen=True)
class Knob:
  """One choice.

  Attributes:
    name: what is chosen, e.g. `decodes` or `replays/u1`.
    values: what may be chosen.
    ordered: True where neighbouring values give similar plans.
  """

  name: str
  values: tuple
  ordered: bool = True


@dataclasses.dataclass(frozen=True)
class Space:
  """Every plan that a search considers.

  Counts say how many tasks reward workers do, or for a scheme that plans freely may do: which ones
  follows from the count, for candidates of a step are alike. Generations and replays leave from the
  end of the order, where they hold up nobody; decodes from the front (or, by choice, the end),
  where their judgements are waited for first.

  A plan of a scheme with batches by device that moves nothing judges upon arrival: batches are
  what moved decodes gather (StageBreaker §4.4), and without any it is `merged_replay`.

  Attributes:
    shape: the step.
    scheme: its bindings and `plan_space` say which knobs there are.
    slots: the workers.
    knobs: the choices; none for a scheme without any.
  """

  shape: StepShape
  scheme: Scheme
  slots: tuple[WorkerSlot, ...]
  knobs: tuple[Knob, ...]

  @property
  def size(self) -> int:
    """How many plans there are."""
    return math.prod(len(knob.values) for knob in self.knobs)

  def chosen(self, point: Point) -> dict:
    """Name -> value of each knob."""
    return {knob.name: knob.values[i] for knob, i in zip(self.knobs, point, strict=True)}

  def canonical(self, point: Point) -> Point:
    """The first point with the same plan, where choices leave others without a meaning."""
    chosen, index = self.chosen(point), {knob.name: i for i, knob in enumerate(self.knobs)}
    out = list(point)
    if chosen.get("fused"):
      # What fuses neither replays nor splits; both knobs count from 0.
      left = len(self.shape.updates[0]) - chosen["fused"]
      for name in ("replays/u0", "splits/u0"):
        if name in index:
          out[index[name]] = min(out[index[name]], left)
    if "rest" in index and abs(chosen["decodes"]) == self.shape.candidates:
      out[index["rest"]] = 0
    if "judge_dealt" in index and chosen["judge_tasks"] in (1, len(self.shape.jobs)):
      out[index["judge_dealt"]] = 0
    return tuple(out)

  def plan(self, point: Point) -> Plan:
    """The plan of a point."""
    chosen = self.chosen(point)
    shape = self.shape
    # Workers of both groups take replays as they come free, unless a scheme fixes who replays.
    moved, stays = ("any" if "order" in chosen else "reward"), chosen.get("rest", "actor")
    everyone = tuple(range(shape.candidates))
    groups: dict[str, str] = {}
    if "decodes" in chosen:
      _share(groups, [f"decode/c{c}" for c in everyone], chosen["decodes"], "reward", stays)
      for c in shape.anchors:
        groups[f"decode/c{c}"] = "reward" if chosen["decodes"] else stays
    if "generations" in chosen:
      _share(groups, [f"generate/c{c}" for c in everyone], -chosen["generations"], moved)
    if "references" in chosen:
      _share(groups, [f"reference/c{c}" for c in everyone], -chosen["references"], "reward", stays)
    fused = fused_candidates(shape, chosen.get("fused", 0))
    splits: dict[tuple[int, int], tuple[tuple[int, ...], ...]] = {}
    whole = tuple(range(shape.blocks))
    for update, members in enumerate(shape.updates):
      mine = [c for c in members if not (update == 0 and c in fused)]
      apart = mine[max(len(mine) - chosen.get(f"splits/u{update}", 0), 0) :]
      names = []
      for c in mine:
        parts = tuple((b,) for b in whole) if c in apart else (whole,)
        if len(parts) > 1:
          splits[update, c] = parts
        names += [replay_id(update, c, part) for part in parts]
      if f"replays/u{update}" in chosen:
        count = sum(
          len(splits.get((update, c), (whole,))) for c in _last(members, chosen, update, fused)
        )
        _share(groups, names, -count, moved)
    order, offload = chosen.get("order", "kind"), chosen.get("offload", False)
    return Plan(groups, self._batches(chosen), splits, fused, order, offload)

  def _batches(self, chosen: dict) -> tuple[tuple[int, ...], ...]:
    if "judge_tasks" not in chosen:
      if self.scheme.judge_batches == "device" and self.knobs and not any(chosen.values()):
        return judge_batches(self.shape, 1, 1)
      return scheme_batches(self.scheme, self.shape, self.slots)
    stages = judge_batches(self.shape, 1, across=chosen["judge_across"])
    return _cut(stages, chosen["judge_tasks"], chosen["judge_late"], dealt=chosen["judge_dealt"])


def _last(members: Sequence[int], chosen: dict, update: int, fused: frozenset[int]) -> list[int]:
  """The members whose replays may leave the actors."""
  mine = [c for c in members if not (update == 0 and c in fused)]
  return mine[max(len(mine) - chosen[f"replays/u{update}"], 0) :]


def _moved(scheme: Scheme) -> frozenset[str]:
  """Kinds that a plan may move to reward workers."""
  return frozenset(k for k, groups in scheme.bindings.items() if len(groups) > 1)


def _share(
  groups: dict[str, str], names: Sequence[str], count: int, moved: str, stays: str = "actor"
) -> None:
  """Gives |count| of some tasks away: the first ones, or for a negative count the last."""
  for place, name in enumerate(names):
    away = place < count if count >= 0 else place >= len(names) + count
    groups[name] = moved if away else stays


def space(
  shape: StepShape,
  scheme: Scheme,
  slots: Sequence[WorkerSlot],
  fused: int | None = None,
  *,
  offload: bool = False,
) -> Space:
  """Gives the plans of a scheme on some workers.

  Args:
    shape: the step.
    scheme: the execution scheme.
    slots: the workers; without reward workers nothing can move.
    fused: how many candidates fuse; None: a choice, where the scheme has it.
    offload: True where judges may sleep.

  Raises:
    ValueError: if more candidates are to fuse than the first mini-batch has.
  """
  able = scheme.plan_space
  knobs: list[Knob] = []
  n = shape.candidates
  moved = _moved(scheme) if any(slot.group == "reward" for slot in slots) else frozenset()
  if "judge_batching" in able:
    knobs += _judging(shape, slots)
  if "order" in able:
    orders: tuple[Order, ...] = ("kind", "update", "rollout")
    knobs.append(Knob("order", orders, ordered=False))
  if "decode" in moved:
    ends = tuple(range(-n, n + 1)) if "order" in able else tuple(range(n + 1))
    knobs.append(Knob("decodes", ends))
    if "order" in able:
      knobs.append(Knob("rest", ("actor", "any"), ordered=False))
  if "generate" in moved:
    knobs.append(Knob("generations", tuple(range(-n, n + 1))))
  if "reference" in moved and shape.reference:
    knobs.append(Knob("references", tuple(range(n + 1))))
  for update, members in enumerate(shape.updates):
    if "replay" in moved:
      knobs.append(Knob(f"replays/u{update}", tuple(range(len(members) + 1))))
    if "split_replays" in able and shape.blocks > 1:
      knobs.append(Knob(f"splits/u{update}", tuple(range(len(members) + 1))))
  if offload:
    knobs.append(Knob("offload", (False, True), ordered=False))
  if "fused" in able:
    count = len(shape.updates[0])
    fused_candidates(shape, fused or 0)
    values = tuple(range(count + 1)) if fused is None else (fused,)
    knobs.append(Knob("fused", values))
  return Space(shape, scheme, tuple(slots), tuple(knobs))


def _judging(shape: StepShape, slots: Sequence[WorkerSlot]) -> list[Knob]:
  """How judge tasks are formed; see `_cut`."""
  judges = sum(slot.group in ("reward", "both") for slot in slots)
  jobs, updates = len(shape.jobs), max(len(set(shape.job_updates())), 1)
  # More than a few tasks a judge only lose the gain of batching.
  counts = {k for k in range(1, 4 * judges + 1) if k < jobs} | {jobs}
  return [
    Knob("judge_tasks", tuple(sorted(counts))),
    Knob("judge_across", (False, True) if updates > 1 else (False,), ordered=False),
    Knob("judge_late", (0, 1, 2)),
    Knob("judge_dealt", (False, True), ordered=False),
  ]


def _cut(
  stages: Sequence[tuple[int, ...]], tasks: int, late: int, *, dealt: bool
) -> tuple[tuple[int, ...], ...]:
  """Forms the judge tasks of each stage from its jobs.

  Runs of jobs are ready one after the other, and the first judge is busy while the others wait;
  jobs that are dealt out in turn are ready together, and no judge starts early. The last jobs,
  whose videos come last, may form a smaller task, which is soon done.
  """
  out: list[tuple[int, ...]] = []
  for jobs in stages:
    late_from = len(jobs) - late if late < len(jobs) else len(jobs)
    early = jobs[:late_from]
    size = math.ceil(len(early) / tasks)
    count = math.ceil(len(early) / size)
    if dealt:
      out += [early[i::count] for i in range(count)]
    else:
      out += [early[i : i + size] for i in range(0, len(early), size)]
    if late_from < len(jobs):
      out.append(jobs[late_from:])
  return tuple(out)
