"""What the tasks of an RL step mean: their inputs, and what becomes of their results."""

from collections.abc import Mapping, Sequence

import numpy as np

from sbjax.dataflow.graph import Task
from sbjax.dataflow.holders import Holders, Part
from sbjax.dataflow.plan import Plan, StepShape, WorkerSlot, allowed_workers
from sbjax.dataflow.queue import Order
from sbjax.dataflow.schemes import Scheme
from sbjax.dataflow.turns import Turns
from sbjax.rewards.protocol import CandidateReward, Job, Reward, Verdict
from sbjax.runtime.early import early_weights
from sbjax.runtime.executor import Call, Deadline, Handle, Result
from sbjax.runtime.judging import Judging, step_groups
from sbjax.runtime.pool import Pool
from sbjax.runtime.recipe import Recipe
from sbjax.runtime.records import Candidate, TrainHandles
from sbjax.runtime.scalars import UpdateScalars, update_scalars


class StepProgram:
  """Implements `dispatch.Program` for one RL step.

  Args:
    recipe: the run's recipe.
    scheme: the execution scheme.
    plan: who runs what.
    shape: the step's indices.
    step: its number, from 1.
    candidates: one per candidate, in order.
    reward: the driver's part of the reward.
    state: where adapter, EMA and optimizer state are.
    initial: the adapter that the run started with, for references.
    pool: the workers.
    timeouts_s: how long a task of each kind may take, per candidate or job.
  """

  def __init__(
    self,
    *,
    recipe: Recipe,
    scheme: Scheme,
    plan: Plan,
    shape: StepShape,
    step: int,
    candidates: Sequence[Candidate],
    reward: Reward,
    state: TrainHandles,
    initial: Handle,
    pool: Pool,
    timeouts_s: Mapping[str, float],
  ):
    self._recipe, self._scheme, self._plan, self.shape = recipe, scheme, plan, shape
    self._step, self._reward, self._pool = step, reward, pool
    self._timeouts_s = timeouts_s
    self.candidates = tuple(candidates)
    self.state = state
    self._first_count = state.count
    self._versions: dict[str, Handle] = {"initial": initial, self._version(0): state.adapter}
    self.trajectories: dict[int, Handle] = {}
    self.latents: dict[int, Handle] = {}
    self.videos: dict[int, Handle] = {}
    self._references: dict[int, Handle] = {}
    self.old_scores: dict[int, np.ndarray] = {}
    self._groups = step_groups(shape.groups, self.candidates, reward)
    self._jobs = [job for group in self._groups for job in reward.jobs(group)]
    self.judging = Judging(self._jobs, recipe.settings.reward.retries)
    self.rewards: dict[int, CandidateReward] = {}
    self.scalars: dict[tuple[int, int], dict[int, dict]] = {}
    self.updates: dict[int, UpdateScalars] = {}
    self._holders = Holders(shape, scheme, plan)
    self._sums: dict[int, list[tuple[tuple[Part, ...], Handle]]] = {
      u: [] for u in range(len(shape.updates))
    }
    self.outcomes: dict[int, dict] = {}
    self.gradients: dict[int, Handle] = {}
    self.dropped = 0
    self.chunks_replayed = 0
    self.buffer_bytes = 0

  # Versions.

  def _version(self, update: int) -> str:
    """The adapter that update number `update` of this step trains."""
    return f"v{self._first_count + update}"

  def adapter(self, version: str) -> Handle:
    """Where a version is; the driver holds all of the step's until it ends."""
    return self._versions[version]

  # Who.

  @property
  def order(self) -> Order:
    """Which of several ready tasks a worker takes, as the plan says."""
    return self._plan.order

  @property
  def turns(self) -> Turns:
    """What the plan has each worker run, one task after the other."""
    return self._plan.turns

  def workers(self, task: Task) -> tuple[str, ...]:
    """Workers that may run a task, in order of preference.

    Nobody waits for a worker that is starting again while another one may do its work.
    """
    if task.kind == "reduce":
      return tuple(self._holders.owed(task.update))
    if task.kind == "fold":
      return (self._holders.of(task.update, (task.candidates[0], task.blocks[0])),)
    slots = [
      WorkerSlot(name, state.spec.group)
      for name, state in self._pool.workers.items()
      if not state.starting
    ]
    if task.kind == "update":
      return tuple(slot.name for slot in slots if slot.group in ("actor", "both"))[:1]
    return allowed_workers(task.kind, self._plan.groups.get(task.id), self._scheme, slots)

  def timeout_s(self, task: Task) -> float:
    """A deadline per kind and amount of work."""
    amount = max(1, len(task.jobs)) if task.kind == "judge" else 1
    return self._timeouts_s.get(task.kind, self._timeouts_s["default"]) * amount

  # Calls.

  def call(self, task: Task, worker: str) -> tuple[Call, Sequence[Handle], Sequence[str]]:
    """The operation, its heavy inputs and the versions it names."""
    if task.kind == "reduce":
      return self._call_reduce(task, worker)
    candidate = task.candidates[0]
    return getattr(self, f"_call_{task.kind}")(task, candidate)

  def _call_generate(self, task: Task, c: int):
    if c < 0:
      prompt = self._groups[-1 - c].prompt
      seed = self._recipe.anchor_seed(prompt)
      args = {"prompt": prompt, "seed": seed, "seed_initial": seed, "version": "initial"}
      return Call("generate", args, 2), (), ("initial",)
    who, version = self.candidates[c], self._version(0)
    args = {
      "prompt": who.prompt,
      "seed": who.seed,
      "seed_initial": who.seed_initial,
      "version": version,
    }
    if task.fused:
      args["fused"] = (self._step, task.update, c)
      args["trained"] = who.trained
    return Call("generate", args, 2), (), (version,)

  def _call_decode(self, task: Task, c: int):
    return Call("decode", {}, 1), (self.latents[c],), ()

  def _call_judge(self, task: Task, c: int):
    jobs = tuple(self._jobs[j] for j in self.judging.next_jobs(task))
    needed = tuple(sorted({c for job in jobs for c in job.candidates}))
    args = {"jobs": jobs, "candidates": needed, "retries": self._recipe.settings.reward.retries}
    return Call("judge", args), tuple(self.videos[c] for c in needed), ()

  def _call_reference(self, task: Task, c: int):
    args = {"trained": self.candidates[c].trained, "version": "initial"}
    return Call("reference", args, 1), (self.trajectories[c],), ("initial",)

  def _replay_inputs(self, c: int) -> tuple[Handle, ...]:
    reference = (self._references[c],) if c in self._references else ()
    return (self.trajectories[c], *reference)

  def _call_forward(self, task: Task, c: int):
    version = self._version(task.update)
    args = {"trained": self.candidates[c].trained, "version": version}
    return Call("forward", args), self._replay_inputs(c), (version,)

  def _call_replay(self, task: Task, c: int):
    version = self._version(task.update)
    args = {
      "key": (self._step, task.update, c),
      "blocks": task.blocks,
      "trained": self.candidates[c].trained,
      "version": version,
    }
    return Call("replay", args), self._replay_inputs(c), (version,)

  def _call_fold(self, task: Task, c: int):
    scalars = self._whole(task.update, c)
    early = early_weights(self._recipe, task.update, scalars, self.old_scores_of(c))
    args = {"key": (self._step, task.update, c), "blocks": task.blocks, "early": early}
    return Call("fold", args), (), ()

  def _call_backward(self, task: Task, c: int):
    if self._scheme.replay_mode == "two_pass_early":
      return self._call_replay(task, c)  # the gradient before the rewards is the merged one
    version = self._version(task.update)
    args = {
      "key": (self._step, task.update, c),
      "trained": self.candidates[c].trained,
      "version": version,
      "weights": self.updates[task.update].backward_weights[c],
    }
    return Call("backward", args), self._replay_inputs(c), (version,)

  def _call_reduce(self, task: Task, worker: str):
    parts = self._holders.owed(task.update)[worker]
    args = {
      "step": self._step,
      "update": task.update,
      "parts": parts,
      "late": {c: self.updates[task.update].late[c] for c, _ in parts},
    }
    return Call("reduce", args, 1), (), ()

  def _call_update(self, task: Task, c: int):
    sums = sorted(self._sums[task.update], key=lambda s: min(s[0]))
    scalars = self.updates[task.update]
    args = {"skip": scalars.skip, "count": self.state.count}
    inputs = (
      self.state.adapter,
      self.state.ema,
      self.state.optimizer,
      *(handle for _, handle in sums),
    )
    return Call("update", args, 4), inputs, ()

  # Results.

  def finish(self, task: Task, worker: str, result: Result) -> bool:
    """Takes a result; False where the task needs another call."""
    candidate = task.candidates[0]
    return getattr(self, f"_finish_{task.kind}")(task, candidate, worker, result) is not False

  def _finish_generate(self, task: Task, c: int, worker: str, result: Result) -> None:
    self.trajectories[c], self.latents[c] = result.heavy
    self.old_scores[c] = result.scalars["old_scores"]
    if task.fused:
      self._store_scalars(task, c, result)
      self._holders.made(task, worker)

  def _finish_decode(self, task: Task, c: int, worker: str, result: Result) -> None:
    (self.videos[c],) = result.heavy

  def _finish_judge(self, task: Task, c: int, worker: str, result: Result) -> bool:
    return self.judging.answered(task, result.scalars["verdicts"])

  def _finish_reference(self, task: Task, c: int, worker: str, result: Result) -> None:
    (self._references[c],) = result.heavy

  def _finish_forward(self, task: Task, c: int, worker: str, result: Result) -> None:
    self._keep_scalars(task, c, result)

  def _finish_replay(self, task: Task, c: int, worker: str, result: Result) -> None:
    self._keep_scalars(task, c, result)
    self._holders.made(task, worker)

  def _finish_backward(self, task: Task, c: int, worker: str, result: Result) -> None:
    self.chunks_replayed += len(result.scalars["chunks"])
    self._holders.made(task, worker)

  def _finish_fold(self, task: Task, c: int, worker: str, result: Result) -> None:
    pass

  def _finish_reduce(self, task: Task, c: int, worker: str, result: Result) -> None:
    self._sums[task.update].append((result.scalars["parts"], result.heavy[0]))
    self._holders.took(task.update, result.scalars["parts"])
    self.dropped += result.scalars["dropped"]
    self.buffer_bytes = max(self.buffer_bytes, result.scalars["buffer_bytes"])

  def _finish_update(self, task: Task, c: int, worker: str, result: Result) -> None:
    adapter, ema, optimizer, gradient = result.heavy
    skipped = result.scalars["skipped"]
    self.outcomes[task.update] = dict(result.scalars)
    self.gradients[task.update] = gradient
    self.state = TrainHandles(
      adapter,
      ema,
      optimizer,
      self.state.count + 1,
      self.state.skipped_in_row + 1 if skipped else 0,
    )
    self._versions[self._version(task.update + 1)] = adapter
    # The node that made the only copy may be lost.
    self._pool.executor.keep((adapter, ema, optimizer))

  def _keep_scalars(self, task: Task, c: int, result: Result) -> None:
    self._store_scalars(task, c, result)
    self.chunks_replayed += len(result.scalars["chunks"])

  def _store_scalars(self, task: Task, c: int, result: Result) -> None:
    kept = self.scalars.setdefault((task.update, c), {})
    for row, chunk in enumerate(result.scalars["chunks"]):
      kept[chunk] = {k: result.scalars[k][row] for k in ("channels", "statistics")}

  def _whole(self, update: int, c: int) -> dict[str, np.ndarray]:
    kept = self.scalars[update, c]
    order = sorted(kept)
    return {k: np.stack([kept[i][k] for i in order]) for k in ("channels", "statistics")}

  def chunk_scores(self, update: int, c: int) -> np.ndarray:
    """A candidate's raw scores in one update, [chunks, trained steps]."""
    return self._whole(update, c)["channels"][..., 0]

  def old_scores_of(self, c: int) -> np.ndarray:
    """The rollout's scores of a candidate's trained steps, [chunks, trained steps]."""
    return np.asarray(self.old_scores[c])[:, list(self.candidates[c].trained)]

  # The driver's own tasks.

  def on_driver(self, task: Task) -> None:
    """Advantages and coefficients; barriers and early weights need nothing done here."""
    if task.kind == "advantage":
      self._aggregate(task.candidates)
    elif task.kind == "coefficients":
      members = self.shape.updates[task.update]
      self.updates[task.update] = update_scalars(
        self._recipe,
        update=task.update,
        members=members,
        two_pass=self._scheme.replay_mode == "two_pass",
        groups={c: who.group for c, who in enumerate(self.candidates)},
        rewards=self.rewards,
        scalars={c: self._whole(task.update, c) for c in members},
        old_scores={c: self.old_scores_of(c) for c in members},
      )

  def _aggregate(self, candidates: Sequence[int]) -> None:
    wanted = set(candidates)
    for group in self._groups:
      if not set(group.candidates) & wanted:
        continue
      jobs: list[Job] = []
      verdicts: list[Verdict] = []
      for index, job in enumerate(self._jobs):
        if set(job.candidates) & set(group.candidates):
          jobs.append(job)
          verdicts.append(self.judging.verdicts[index])
      self.rewards.update(self._reward.aggregate(group, jobs, verdicts))

  def why_skipped(self) -> str:
    """Why updates came to nothing, in one sentence, for a run that ends of it."""
    settings = self._recipe.settings
    causes = sorted({r.cause for r in self.rewards.values() if r.components is None})
    texts = [r.rationale for r in self.rewards.values() if r.components is None]
    if causes:
      return (
        f"{self.state.skipped_in_row} updates in a row were skipped because more than "
        f"{settings.reward.max_failed_frac:.0%} of a mini-batch's rewards failed "
        f"({', '.join(causes)}); the last failure was: {texts[-1]}"
      )
    return f"{self.state.skipped_in_row} updates in a row had a gradient that is not finite"

  # Losses.

  def lost(self, task: Task, error: Exception) -> bool:
    """A judge that hangs or dies is retried job by job; its failure is a verdict, not a crash."""
    if task.kind != "judge":
      return False
    cause = "timeout" if isinstance(error, Deadline) else "died"
    return self.judging.interrupted(task, cause, str(error))

  def forget(self, worker: str) -> Sequence[str]:
    """The tasks whose buffers died with a worker before a sum had taken them."""
    return self._holders.forget(worker, self.outcomes)

  def makers(self, handles: Sequence[Handle]) -> Sequence[str]:
    """The tasks that make lost results again; none for an adapter or an optimizer state."""
    gone = {id(handle) for handle in handles}
    names: set[str] = set()
    tables = (
      ("generate", self.trajectories),
      ("generate", self.latents),
      ("decode", self.videos),
      ("reference", self._references),
    )
    for kind, table in tables:
      names |= {f"{kind}/c{c}" for c, handle in table.items() if id(handle) in gone}
    for update, sums in self._sums.items():
      lost = [parts for parts, handle in sums if id(handle) in gone]
      if lost:
        self._sums[update] = [one for one in sums if id(one[1]) not in gone]
        # A worker keeps no buffers after their sum, so they are made again.
        for parts in lost:
          names |= set(self._holders.again(update, parts))
        names.add(f"reduce/u{update}")
    return sorted(names)
