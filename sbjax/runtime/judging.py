"""Judging of one step: who is compared, what is still to ask, and what a judge that hangs costs."""

from collections.abc import Sequence

from sbjax.dataflow.graph import Task
from sbjax.rewards.protocol import Group, Job, Reward, Verdict
from sbjax.runtime.records import Candidate


def step_groups(
  groups: Sequence[Sequence[int]], candidates: Sequence[Candidate], reward: Reward
) -> list[Group]:
  """A step's groups, each with an anchor where the reward needs one: group g has -1 - g.

  Args:
    groups: the candidates of each.
    candidates: all of the step's.
    reward: says whether there are anchors.
  """
  return [
    Group(
      g,
      candidates[members[0]].prompt,
      tuple(members),
      tuple(candidates[c].seed for c in members),
      anchor=-1 - g if reward.needs_anchor else None,
    )
    for g, members in enumerate(groups)
  ]


class Judging:
  """Keeps verdicts and attempts.

  A task asks all its jobs at once. If the judge hangs or its worker dies, the jobs are asked one by
  one, so that one bad video costs its own verdict only.

  Args:
    jobs: every job of the step.
    retries: further attempts for a job after its first interruption.
  """

  def __init__(self, jobs: Sequence[Job], retries: int):
    self._retries = retries
    self._asked: dict[str, tuple[int, ...]] = {}
    self._single: set[str] = set()
    self._interruptions: dict[int, int] = {}
    self.verdicts: dict[int, Verdict] = {}
    self._count = len(jobs)

  def next_jobs(self, task: Task) -> tuple[int, ...]:
    """Indices of the jobs that the task's next call asks."""
    pending = [j for j in task.jobs if j not in self.verdicts]
    asked = tuple(pending[:1] if task.id in self._single else pending)
    self._asked[task.id] = asked
    return asked

  def answered(self, task: Task, verdicts: Sequence[Verdict]) -> bool:
    """Takes a call's verdicts; tells whether the task has all of its own."""
    for job, verdict in zip(self._asked[task.id], verdicts, strict=True):
      self.verdicts[job] = verdict
    return self._complete(task)

  def interrupted(self, task: Task, cause: str, text: str) -> bool:
    """Hears that a call did not end; tells whether the task is settled nevertheless.

    Args:
      task: the judge task.
      cause: `timeout` or `died`.
      text: what happened, in full.
    """
    asked = self._asked[task.id]
    self._single.add(task.id)
    for job in asked:
      self._interruptions[job] = self._interruptions.get(job, 0) + 1
      if len(asked) == 1 and self._interruptions[job] > self._retries:
        self.verdicts[job] = Verdict(None, cause, text)
    return self._complete(task)

  def _complete(self, task: Task) -> bool:
    return all(job in self.verdicts for job in task.jobs)
