"""Plans a run's steps: from a profile file, or from what the run measures of itself."""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence

from sbjax.dataflow import place
from sbjax.dataflow.costs import StepCosts, WorkerCosts
from sbjax.dataflow.memory import Memory
from sbjax.dataflow.plan import Plan, StepShape, WorkerSlot, fixed_plan, fused_candidates
from sbjax.dataflow.schemes import Scheme
from sbjax.runtime.early import known_weights
from sbjax.runtime.recipe import Recipe
from sbjax.runtime.records import Span
from sbjax.runtime.warmup import WarmUp

OWN_STEPS = 2
"""Steps after which a run without a profile file has measured itself well enough to plan anew."""


class Planner:
  """Keeps the workers, the costs, the plan in force and the number of fused candidates.

  Args:
    recipe: the run's recipe.
    scheme: the execution scheme.
    slots: the workers.
    profiled: costs from a profile file; None: the run measures itself.
    fused: a checkpoint's number of fused candidates; None: this run decides.
  """

  def __init__(
    self,
    recipe: Recipe,
    scheme: Scheme,
    slots: Sequence[WorkerSlot],
    profiled: StepCosts | None = None,
    fused: int | None = None,
  ):
    self._runtime = recipe.settings.runtime
    self._scheme, self.slots = scheme, tuple(slots)
    self._own = profiled is None
    self.costs = profiled
    self._planned_with = profiled
    self.fused = fused if fused is not None else self._asked(recipe)
    self.plan: Plan | None = None
    self._shape: StepShape | None = None
    self._memory: Memory | None = None
    self._observed = 0

  def _asked(self, recipe: Recipe) -> int | None:
    """The configured number of fused candidates; 0 where none can fuse, None: to be planned."""
    if "fused" not in self._scheme.plan_space or not can_fuse(recipe):
      return 0
    return None if self._runtime.fused < 0 else self._runtime.fused

  def use(self, costs: StepCosts) -> None:
    """Takes a profile's costs; the run no longer measures itself to plan."""
    self._own, self.costs, self._planned_with, self.plan = False, costs, costs, None

  def limit(self, slots: Sequence[WorkerSlot], memory: Memory) -> None:
    """Keeps searched plans within the workers' memory.

    Args:
      slots: the same workers, with the memory of their devices.
      memory: what tasks and what they leave behind take.
    """
    self.slots, self._memory, self.plan = tuple(slots), memory, None

  def warmed(self, warm: WarmUp) -> None:
    """Takes the warm-up's times where there is no profile."""
    if self._own:
      self.costs = self._planned_with = costs_of_warmup(warm, self.slots)

  def plan_for(self, shape: StepShape) -> Plan:
    """The plan of a step; searched anew where the shape or the costs have changed.

    Raises:
      ValueError: if no plan fits the workers.
    """
    if self.plan is None or shape != self._shape:
      self.plan, self._shape = self._make(shape), shape
    if self.fused is None:
      self.fused = len(self.plan.fused)
    return self.plan

  def _make(self, shape: StepShape) -> Plan:
    if self._runtime.plan == "fixed" or self.costs is None:
      plan = fixed_plan(
        self._scheme,
        shape,
        self.slots,
        decodes_on_reward=self._runtime.decodes_on_reward,
        replays_on_reward=self._runtime.replays_on_reward,
      )
      count = max(self.fused or 0, 0)
      return dataclasses.replace(plan, fused=fused_candidates(shape, count))
    return place.search(
      shape, self._scheme, self.slots, self.costs, memory=self._memory, fused=self.fused
    )

  def observe(self, spans: Sequence[Span]) -> str | None:
    """Learns from a step; gives a line for the user where the next step is planned anew.

    A run without a profile plans once more when it has measured itself. Later, and with a profile,
    it plans again only where `runtime.replan_drift` allows it and a kind's time has drifted
    further than that. Only placement changes: never which candidates are fused.
    """
    if self._runtime.plan == "fixed" or self.costs is None or self.plan is None:
      return None
    self._observed += 1
    self.costs = refined(self.costs, spans, self.plan, self.slots)
    if self._own and self._observed == OWN_STEPS:
      return self._again("the run has measured its own tasks")
    limit = self._runtime.replan_drift
    if limit > 0 and self._planned_with is not None and self._observed > OWN_STEPS:
      share, what = drift(self._planned_with, self.costs)
      if share > limit:
        return self._again(f"{what} has drifted by {share:.0%} from the profile")
    return None

  def _again(self, why: str) -> str:
    self._planned_with = self.costs
    self.plan = None
    return f"planning anew: {why}"


def check_fused(scheme: Scheme, recipe: Recipe, kept: int = 0) -> None:
  """Refuses what cannot fuse, before anything compiles.

  Args:
    scheme: the execution scheme.
    recipe: the run's recipe.
    kept: the number of fused candidates of a checkpoint that the run continues from.

  Raises:
    ValueError: in one sentence.
  """
  asked = recipe.settings.runtime.fused
  able = "fused" in scheme.plan_space
  if kept and not able:
    raise ValueError(
      f"scheme={scheme.name!r} cannot continue a run that fuses {kept} candidates a step; "
      "use scheme='sbjax'"
    )
  if ((asked > 0 and able) or kept) and not can_fuse(recipe):
    raise ValueError(
      f"runtime.fused is {asked or kept}, but algorithm.name="
      f"{recipe.settings.algorithm.name!r} cannot take its first gradient during rollout (it needs "
      "another point, channel or reference than a rollout has); use runtime.fused=0"
    )
  first = len(recipe.shape(1, ()).updates[0])
  if asked > first:
    raise ValueError(
      f"runtime.fused is {asked}; the first mini-batch has {first} candidates, so use 0 to {first}"
    )
  if asked < -1:
    raise ValueError(f"runtime.fused is {asked}; use -1 (planned), or 0 to {first}")


def can_fuse(recipe: Recipe) -> bool:
  """Whether the first mini-batch's gradient can be taken during rollout.

  It takes one channel whose weights are known without scores, at the trajectory's own states, and
  no reference.
  """
  objective = recipe.objective_of(0)
  known = known_weights(recipe, objective)
  return (
    known is not None
    and known.shape[-1] == 1
    and objective.points == "trajectory"
    and not recipe.needs_reference
  )


def costs_of_warmup(warm: WarmUp, slots: Sequence[WorkerSlot]) -> StepCosts:
  """Costs from one warm task of each kind on each group; judging is infinite where none was."""
  by_kind = {}
  for slot in slots:
    took = {
      k: by_group[slot.group] for k, by_group in warm.seconds.items() if slot.group in by_group
    }
    replay = took.get("replay", took["backward"])
    by_kind[slot.kind] = WorkerCosts(
      generate_s=took["generate"],
      fused_s=max(took.get("fused", took["generate"]) - took["generate"], 0.0),
      decode_s=took["decode"],
      judge_s=((1, took.get("judge", math.inf)),),
      reference_s=took.get("reference", 0.0),
      forward_s=took["forward"],
      backward_s=took["backward"],
      replay_s=replay,
      prefix_s=took["prefix"],
    )
  return StepCosts(by_kind)


_FIELDS = {"decode": "decode_s", "reference": "reference_s", "forward": "forward_s"}
_FIELDS |= {"fold": "fold_s", "update": "update_s"}


def refined(
  costs: StepCosts, spans: Sequence[Span], plan: Plan, slots: Sequence[WorkerSlot]
) -> StepCosts:
  """Replaces costs by what a step has measured; what it did not run stays.

  Judge tasks of other sizes keep their proportion to those that ran.

  Args:
    costs: the costs so far.
    spans: a step's tasks.
    plan: its plan, which says how many jobs a judge task had and what was fused or split.
    slots: the workers.
  """
  kind_of = {slot.name: slot.kind for slot in slots}
  seen: dict[str, dict[str, list[float]]] = {}
  judged: dict[str, dict[int, list[float]]] = {}
  for span in spans:
    if span.failed or span.worker not in kind_of:
      continue
    took, kind = (span.end_s - span.start_s) / costs.scale, kind_of[span.worker]
    if span.kind == "judge":
      size = len(plan.judge_batches[int(span.task.rpartition("b")[2])])
      judged.setdefault(kind, {}).setdefault(size, []).append(took)
      continue
    field = _field(span, plan)
    if field:
      seen.setdefault(kind, {}).setdefault(field, []).append(took)
  by_kind = {}
  for kind, old in costs.by_kind.items():
    new = {f: statistics.median(times) for f, times in seen.get(kind, {}).items()}
    fused = new.pop("fused_total", None)
    if fused is not None and "generate_s" in new:
      new["fused_s"] = max(fused - new["generate_s"], 0.0)
    elif fused is not None:
      # Which part of a fused rollout has changed is not known: both, in proportion.
      whole = old.generate_s + old.fused_s
      new |= {f: getattr(old, f) * fused / whole for f in ("generate_s", "fused_s")}
    table = {size: statistics.median(t) for size, t in judged.get(kind, {}).items()}
    # Sizes that did not run are as much slower or faster, or the table would favour them.
    changed = [took / old.judging_s(size) for size, took in table.items() if old.judge_s]
    ratio = statistics.median(changed) if changed else 1.0
    table = {size: ratio * took for size, took in old.judge_s} | table
    by_kind[kind] = dataclasses.replace(old, **new, judge_s=tuple(sorted(table.items())))
  return dataclasses.replace(costs, by_kind=by_kind, dispatch_s=_dispatch_s(spans) / costs.scale)


def _field(span: Span, plan: Plan) -> str | None:
  if span.kind == "generate":
    return "fused_total" if span.candidate in plan.fused else "generate_s"
  if span.kind in ("replay", "backward"):
    update = span.minibatch or 0
    if (update, span.candidate) in plan.splits:
      return None
    return "backward_s" if update == 0 or span.kind == "backward" else "replay_s"
  return _FIELDS.get(span.kind)


def _dispatch_s(spans: Sequence[Span]) -> float:
  """A worker's pause between two tasks when it has more to do: a low quantile of all pauses."""
  by_worker: dict[str, list[Span]] = {}
  for span in sorted(spans, key=lambda s: s.start_s):
    by_worker.setdefault(span.worker, []).append(span)
  gaps = [
    max(after.start_s - before.end_s, 0.0)
    for mine in by_worker.values()
    for before, after in itertools.pairwise(mine)
  ]
  return statistics.quantiles(gaps, n=4)[0] if len(gaps) >= 2 else 0.0


def drift(before: StepCosts, now: StepCosts) -> tuple[float, str]:
  """The largest relative change of a kind's seconds, and its name."""
  worst = (0.0, "nothing")
  for kind, old in before.by_kind.items():
    names = [f.name for f in dataclasses.fields(WorkerCosts) if f.name != "judge_s"]
    pairs: Mapping[str, tuple[float, float]] = {
      name: (getattr(old, name), getattr(now.by_kind[kind], name)) for name in names
    }
    sizes = [size for size, _ in old.judge_s]
    judging = {
      f"judge of {size}": (old.judging_s(size), now.by_kind[kind].judging_s(size)) for size in sizes
    }
    # What takes next to no time may double without mattering.
    matters = 0.02 * old.generate_s
    for name, (a, b) in {**pairs, **judging}.items():
      if a > matters and abs(b - a) / a > worst[0]:
        worst = (abs(b - a) / a, f"{name.removesuffix('_s')} on {kind} workers")
  return worst
