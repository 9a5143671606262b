"""Plans: which worker group runs which task, and how judging is batched."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from sbjax.dataflow.schemes import Scheme


@dataclasses.dataclass(frozen=True)
class WorkerSlot:
  """One worker as a plan sees it.

  Attributes:
    name: e.g. `actor-0`.
    group: actor, reward or both.
  """

  name: str
  group: str


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
    return tuple(WorkerSlot(f"both-{i}", "both") for i in range(actor_workers + reward_workers))
  actors = [WorkerSlot(f"actor-{i}", "actor") for i in range(actor_workers)]
  rewards = [WorkerSlot(f"reward-{i}", "reward") for i in range(reward_workers)]
  return tuple(actors + rewards)


@dataclasses.dataclass(frozen=True)
class StepShape:
  """What a step consists of, in indices.

  Attributes:
    groups: candidates of each prompt, in order.
    updates: candidates of each update, in order: mini-batches, epoch after epoch.
    minibatches: how many updates an epoch has.
    blocks: folding blocks of a trajectory.
    jobs: the candidates whose videos each judge job needs.
    advantage_scope: who must be judged before an advantage is known: group, minibatch or step.
    reference: whether a replay reads the initial adapter's predictions.
  """

  groups: tuple[tuple[int, ...], ...]
  updates: tuple[tuple[int, ...], ...]
  minibatches: int
  blocks: int
  jobs: tuple[tuple[int, ...], ...]
  advantage_scope: str
  reference: bool = False

  @property
  def candidates(self) -> int:
    """How many candidates the step has."""
    return sum(len(group) for group in self.groups)

  def first_update(self, candidate: int) -> int:
    """The first update that trains on a candidate."""
    for index, members in enumerate(self.updates):
      if candidate in members:
        return index
    return len(self.updates)


@dataclasses.dataclass(frozen=True)
class Plan:
  """Where tasks run.

  Attributes:
    groups: task kind and candidate (and update, for replays) -> group; absent: any group that the
      scheme's bindings allow.
    judge_batches: jobs of each judge task, in the order in which they are judged.
    splits: update and candidate -> runs of folding blocks that are replayed as tasks of their own;
      absent: one task replays the whole candidate.
  """

  groups: Mapping[tuple[str, int, int], str]
  judge_batches: tuple[tuple[int, ...], ...]
  splits: Mapping[tuple[int, int], tuple[tuple[int, ...], ...]] = dataclasses.field(
    default_factory=dict
  )


def fixed_plan(
  scheme: Scheme,
  shape: StepShape,
  slots: Sequence[WorkerSlot],
  *,
  decodes_on_reward: float,
  replays_on_reward: float,
) -> Plan:
  """A plan from two shares, without a profile.

  Args:
    scheme: the execution scheme.
    shape: the step.
    slots: the workers.
    decodes_on_reward: share of the decodes, by candidate, that reward workers do.
    replays_on_reward: share of each update's replays that reward workers do; whole candidates, the
      last ones, for these are generated last and so delay nobody.
  """
  groups: dict[tuple[str, int, int], str] = {}
  if scheme.separate_groups and any(slot.group == "reward" for slot in slots):
    moved = round(decodes_on_reward * shape.candidates)
    for candidate in range(shape.candidates):
      groups["decode", candidate, -1] = "reward" if candidate < moved else "actor"
    if scheme.replay_mode == "merged":
      for update, members in enumerate(shape.updates):
        stay = len(members) - math.floor(replays_on_reward * len(members) + 0.5)
        for place, candidate in enumerate(members):
          groups["replay", candidate, update] = "actor" if place < stay else "reward"
  return Plan(groups, _judge_batches(scheme, shape, slots))


def _judge_batches(
  scheme: Scheme, shape: StepShape, slots: Sequence[WorkerSlot]
) -> tuple[tuple[int, ...], ...]:
  order = sorted(
    range(len(shape.jobs)),
    key=lambda job: (min(shape.first_update(c) for c in shape.jobs[job]), job),
  )
  if scheme.judge_batches == "job":
    return tuple((job,) for job in order)
  judges = sum(slot.group in ("reward", "both") for slot in slots)
  batches = []
  by_update: dict[int, list[int]] = {}
  for job in order:
    by_update.setdefault(min(shape.first_update(c) for c in shape.jobs[job]), []).append(job)
  for _, jobs in sorted(by_update.items()):
    size = math.ceil(len(jobs) / judges)
    batches += [tuple(jobs[i : i + size]) for i in range(0, len(jobs), size)]
  return tuple(batches)
