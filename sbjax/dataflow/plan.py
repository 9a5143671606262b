"""Plans: which worker group runs which task, and how judging is batched."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from sbjax.dataflow.graph import replay_id
from sbjax.dataflow.queue import Order
from sbjax.dataflow.schemes import Scheme


@dataclasses.dataclass(frozen=True)
class WorkerSlot:
  """One worker as a plan sees it.

  Attributes:
    name: e.g. `actor-0`.
    group: actor, reward or both.
    kind: which column of a profile holds its times; workers of unequal devices differ in it.
    memory_bytes: what its devices hold; 0: not known, nothing is refused.
  """

  name: str
  group: str
  kind: str = ""
  memory_bytes: int = 0


def worker_slots(scheme: Scheme, actor_workers: int, reward_workers: int) -> tuple[WorkerSlot, ...]:
  """Names the workers of a run.

  A scheme whose groups are not separate, and a run with no reward workers, gives every worker both
  roles.

  Args:
    scheme: the execution scheme.
    actor_workers: at least 1.
    reward_workers: 0 or more; 0 means that the actor workers judge as well.
  """
  if not scheme.separate_groups or reward_workers == 0:
    count = actor_workers + reward_workers
    return tuple(WorkerSlot(f"both-{i}", "both", "both") for i in range(count))
  actors = [WorkerSlot(f"actor-{i}", "actor", "actor") for i in range(actor_workers)]
  rewards = [WorkerSlot(f"reward-{i}", "reward", "reward") for i in range(reward_workers)]
  return tuple(actors + rewards)


@dataclasses.dataclass(frozen=True)
class StepShape:
  """What a step consists of, in indices.

  Attributes:
    groups: candidates of each prompt, in order.
    updates: candidates of each update, in order: mini-batches, epoch after epoch.
    minibatches: how many updates an epoch has.
    block_chunks: chunks of each folding block of a trajectory.
    jobs: the candidates whose videos each judge job needs; a negative number is a further video
      that others are compared with and nobody trains on.
    advantage_scope: who must be judged before an advantage is known: group, minibatch or step.
    reference: whether a replay reads the initial adapter's predictions.
  """

  groups: tuple[tuple[int, ...], ...]
  updates: tuple[tuple[int, ...], ...]
  minibatches: int
  block_chunks: tuple[int, ...]
  jobs: tuple[tuple[int, ...], ...]
  advantage_scope: str
  reference: bool = False

  @property
  def candidates(self) -> int:
    """How many candidates the step has."""
    return sum(len(group) for group in self.groups)

  @property
  def blocks(self) -> int:
    """Folding blocks of a trajectory."""
    return len(self.block_chunks)

  @property
  def anchors(self) -> tuple[int, ...]:
    """The further videos that jobs need."""
    return tuple(sorted({c for job in self.jobs for c in job if c < 0}, reverse=True))

  def first_updates(self) -> dict[int, int]:
    """Candidate -> the first update that trains on it; past the last where none does."""
    first = {c: len(self.updates) for group in self.groups for c in group}
    for index in reversed(range(len(self.updates))):
      for c in self.updates[index]:
        first[c] = index
    return first

  def job_updates(self) -> tuple[int, ...]:
    """The earliest update that waits for each judge job."""
    first = self.first_updates()
    return tuple(min(first[c] for c in job if c in first) for job in self.jobs)


@dataclasses.dataclass(frozen=True)
class Turn:
  """A task that a worker has been given a turn for.

  Attributes:
    task: its id.
    seconds: what it is expected to take, dispatch included.
    end_s: when it is expected to end, from the step's start; infinite: it is never late.
  """

  task: str
  seconds: float
  end_s: float = math.inf


@dataclasses.dataclass(frozen=True)
class Plan:
  """Where tasks run.

  Attributes:
    groups: task id -> group, `actor`, `reward` or `any`; absent: the first group of the scheme's
      binding.
    judge_batches: jobs of each judge task, in the order in which they are judged.
    splits: update and candidate -> runs of folding blocks that are replayed as tasks of their own;
      absent: one task replays the whole candidate.
    fused: candidates of the first update whose gradient is taken during their generation.
    order: which of several ready tasks a worker takes.
    offload: True where a judge sleeps in host memory while its worker does other work.
    turns: worker -> its tasks in the order in which it is to take them; those without a turn are
      taken as soon as they can be. Empty: workers take what the order says. See `turns.TurnQueue`.
    simulated_s: the step's simulated length; None where nothing was simulated.
    bound_s: no plan of the scheme can be faster than this; None where nothing was simulated.
    searched: how the plan was found: `exhaustive`, `branch_and_bound`, `local` or `fixed`; see
      `place.search`.
  """

  groups: Mapping[str, str]
  judge_batches: tuple[tuple[int, ...], ...]
  splits: Mapping[tuple[int, int], tuple[tuple[int, ...], ...]] = dataclasses.field(
    default_factory=dict
  )
  fused: frozenset[int] = frozenset()
  order: Order = "kind"
  offload: bool = False
  turns: Mapping[str, tuple[Turn, ...]] = dataclasses.field(default_factory=dict)
  simulated_s: float | None = None
  bound_s: float | None = None
  searched: str = "fixed"

  @property
  def gap(self) -> float | None:
    """How far the plan is above its bound, as a share of the bound."""
    if self.simulated_s is None or not self.bound_s:
      return None
    return self.simulated_s / self.bound_s - 1.0


def allowed_workers(
  kind: str, planned: str | None, scheme: Scheme, slots: Sequence[WorkerSlot]
) -> tuple[str, ...]:
  """The workers that may run a task, in order of preference.

  Args:
    kind: the task's kind.
    planned: the plan's group for it, `any`, or None.
    scheme: its bindings hold where the plan says nothing, and where no worker of the planned
      group is among the slots.
    slots: the workers that there are.
  """
  bound = scheme.bindings[kind]
  wanted = bound if planned == "any" else ((planned,) if planned else bound[:1])
  for groups in (wanted, bound, ("both",)):
    names = tuple(slot.name for slot in slots if slot.group in groups)
    if names:
      return names
  return ()


def judge_batches(
  shape: StepShape, judges: int, size: int = 0, *, across: bool = False
) -> tuple[tuple[int, ...], ...]:
  """Forms judge tasks, in mini-batch order.

  Args:
    shape: the step.
    judges: workers that judge.
    size: jobs of a task; 0: as many as give each judge one task a mini-batch.
    across: True where a task may hold jobs of several mini-batches.
  """
  updates = shape.job_updates()
  order = sorted(range(len(shape.jobs)), key=lambda job: (updates[job], job))
  parts: dict[int, list[int]] = {}
  for job in order:
    parts.setdefault(0 if across else updates[job], []).append(job)
  batches: list[tuple[int, ...]] = []
  for _, jobs in sorted(parts.items()):
    step = size or math.ceil(len(jobs) / judges)
    batches += [tuple(jobs[i : i + step]) for i in range(0, len(jobs), step)]
  return tuple(batches)


def scheme_batches(
  scheme: Scheme, shape: StepShape, slots: Sequence[WorkerSlot]
) -> tuple[tuple[int, ...], ...]:
  """The judge tasks that a scheme forms of itself."""
  judges = sum(slot.group in ("reward", "both") for slot in slots)
  if scheme.judge_batches == "job":
    return judge_batches(shape, judges, 1)
  return judge_batches(shape, judges, across=scheme.judge_batches == "stage")


def fixed_plan(
  scheme: Scheme,
  shape: StepShape,
  slots: Sequence[WorkerSlot],
  *,
  decodes_on_reward: float = 0.0,
  replays_on_reward: float = 0.0,
) -> Plan:
  """A plan from two shares, without a profile.

  Args:
    scheme: the execution scheme; where its bindings leave no choice the shares mean nothing.
    shape: the step.
    slots: the workers.
    decodes_on_reward: share of the decodes, by candidate, that reward workers do.
    replays_on_reward: share of each update's replays that reward workers do; whole candidates, the
      last ones, for these are generated last and so delay nobody.
  """
  groups: dict[str, str] = {}
  if any(slot.group == "reward" for slot in slots):
    if "reward" in scheme.bindings["decode"]:
      moved = round(decodes_on_reward * shape.candidates)
      for candidate in range(shape.candidates):
        groups[f"decode/c{candidate}"] = "reward" if candidate < moved else "actor"
    if "reward" in scheme.bindings["replay"]:
      blocks = tuple(range(shape.blocks))
      for update, members in enumerate(shape.updates):
        stay = len(members) - math.floor(replays_on_reward * len(members) + 0.5)
        for place, candidate in enumerate(members):
          group = "actor" if place < stay else "reward"
          groups[replay_id(update, candidate, blocks)] = group
  return Plan(groups, scheme_batches(scheme, shape, slots))


def fused_candidates(shape: StepShape, count: int) -> frozenset[int]:
  """The candidates that fuse where `count` do: the last ones of the first mini-batch.

  A run keeps the number for good, so the set follows from it alone; the last are generated last and
  so hold up the fewest videos.

  Raises:
    ValueError: if the first mini-batch has fewer members.
  """
  members = shape.updates[0]
  if not 0 <= count <= len(members):
    raise ValueError(
      f"runtime.fused is {count}; the first mini-batch has {len(members)} candidates, "
      f"so use 0 to {len(members)}"
    )
  return frozenset(members[len(members) - count :])
