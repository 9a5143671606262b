"""The driver: plans a step, runs its graph on the pool, and keeps references and scalars only."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from sbjax.dataflow.build import build_step
from sbjax.dataflow.costs import StepCosts
from sbjax.dataflow.graph import StepGraph
from sbjax.dataflow.memory_table import memory_of
from sbjax.dataflow.plan import Plan, allowed_workers, worker_slots
from sbjax.dataflow.profile import Profile
from sbjax.dataflow.schemes import scheme as scheme_of
from sbjax.rewards.protocol import Group, Reward
from sbjax.runtime import memory, memory_plan
from sbjax.runtime.dispatch import Dispatcher
from sbjax.runtime.evaluation import evaluate
from sbjax.runtime.executor import Call, Executor, Handle, Result, WorkerLost, WorkerSpec
from sbjax.runtime.judging import step_groups
from sbjax.runtime.metrics import step_metrics
from sbjax.runtime.planning import Planner, can_fuse
from sbjax.runtime.pool import Pool, RunFailed
from sbjax.runtime.profiling import devices_of, fingerprint, video_size
from sbjax.runtime.recipe import Recipe
from sbjax.runtime.records import (
  Candidate,
  CandidateRecord,
  EvalResult,
  StepResult,
  TrainHandles,
  TrainState,
)
from sbjax.runtime.scalars import weighted_reward
from sbjax.runtime.step import StepProgram
from sbjax.runtime.warmup import WarmUp, warm_up

DEADLINE_FACTOR = 20.0
"""A task that takes this many times its warm time, and longer than the configured floor, hangs."""


class Driver:
  """Runs RL steps.

  Args:
    recipe: the run's recipe.
    executor: reaches the workers.
    reward: the driver's part of the reward.
    log_dir: folder for worker logs.
    say: prints one line for the user.
    builder: `module:function` that gives a worker's models, as `WorkerSpec` says.
    costs: what tasks take, from a profile; None: the run measures itself.
  """

  def __init__(
    self,
    recipe: Recipe,
    executor: Executor,
    reward: Reward,
    log_dir: str,
    say: Callable[[str], None],
    builder: str = "sbjax.runtime.roles:build_roles",
    costs: StepCosts | None = None,
  ):
    settings = recipe.settings
    self.recipe, self.executor, self._reward, self._say = recipe, executor, reward, say
    self.scheme = scheme_of(settings.scheme)
    self.slots = worker_slots(
      self.scheme, settings.runtime.actor_workers, settings.runtime.reward_workers
    )
    judging = allowed_workers("judge", "any", self.scheme, self.slots)
    specs = [
      WorkerSpec(
        slot.name,
        slot.group,
        index,
        settings,
        f"{log_dir}/{slot.name}.log",
        builder,
        judges=slot.name in judging,
      )
      for index, slot in enumerate(self.slots)
    ]
    say(f"starting {len(specs)} workers")
    self.pool = Pool(executor, specs, startup_timeout_s=settings.runtime.startup_timeout_s, say=say)
    self.planner = Planner(recipe, self.scheme, self.slots, costs)
    self.warm: WarmUp | None = None
    self._initial: Handle = None
    self._evaluated: dict[Any, Any] = {}
    self.gradients: dict[int, Handle] = {}

  # Start.

  def wait_for_workers(self) -> None:
    """Waits until every worker has loaded its models."""
    self.pool.drain()
    for name in self.pool.workers:
      self._say(self.executor.describe(name))
    self._limit_memory()

  def _limit_memory(self) -> None:
    """Checks the run against the workers' devices, and keeps plans within them.

    Raises:
      ValueError: it does not fit.
    """
    asked = memory_plan.device_bytes(self.recipe.settings.runtime.device_memory_gb)
    known = {name: asked or facts.get("memory_bytes", 0) for name, facts in self.facts.items()}
    if not any(known.values()):
      return
    on_cpu = all(facts["platform"] == "cpu" for facts in self.facts.values())
    sizes = memory_plan.run_sizes(self.recipe, on_cpu=on_cpu)
    slots = memory_plan.sized_slots(self.slots, known)
    memory_plan.check(self.recipe, sizes, {(s.group, s.memory_bytes) for s in slots})
    self.planner.limit(slots, memory_of(sizes, self.scheme))

  def use_profile(self, profile: Profile) -> None:
    """Plans by a profile file from now on.

    Raises:
      ValueError: it was measured on other devices or with another configuration.
    """
    devices = devices_of(self.facts, self.slots)
    profile.check(fingerprint(self.recipe.settings), devices)
    self.planner.use(profile.costs(*video_size(self.recipe, self.pixel_stride)))

  def start(self, prompt: str, restored: TrainState | None) -> TrainHandles:
    """Waits for the workers, makes or restores the training state, and warms up.

    Args:
      prompt: any prompt of the run.
      restored: the state of a checkpoint, or None for a new run.
    """
    first = self.slots[0].name
    flat, optimizer = self._ask(first, Call("initial_adapter", {}, 2)).heavy
    self._initial = flat
    if restored is None:
      state = TrainHandles(flat, flat, optimizer, 0, 0)
    else:
      state = TrainHandles(
        self.executor.put(restored.adapter),
        self.executor.put(restored.ema),
        self.executor.put(restored.optimizer),
        restored.version,
        restored.skipped_in_row,
      )
      self.planner.fused = restored.fused
    kinds = ["judge"]
    if self.scheme.replay_mode != "two_pass":
      kinds.append("replay")
    if "fused" in self.scheme.plan_space and self.planner.fused != 0 and can_fuse(self.recipe):
      kinds.append("fused")
    self.warm = warm_up(
      self.pool,
      self.recipe,
      state.adapter,
      prompt,
      judge_jobs=self._reward.jobs(Group(0, prompt, (0,), (0,), anchor=1)),
      kinds=kinds,
      timeout_s=self.recipe.settings.runtime.startup_timeout_s,
      say=self._say,
    )
    self.planner.warmed(self.warm)
    return state

  @property
  def plan(self) -> Plan | None:
    """The plan in force; None before the first step."""
    return self.planner.plan

  @property
  def costs(self) -> StepCosts | None:
    """What tasks take, as far as the run knows."""
    return self.planner.costs

  def _ask(self, worker: str, call: Call, inputs: Sequence[Handle] = ()) -> Result:
    """One call, waited for."""
    box: list[Result] = []

    def ended(result: Result | Exception) -> None:
      if isinstance(result, Exception):
        raise RunFailed(f"{call.op} on {self.executor.describe(worker)}: {result}")
      box.append(result)

    timeout_s = self.recipe.settings.runtime.startup_timeout_s
    self.pool.submit(worker, call, inputs, call.op, timeout_s, ended)
    self.pool.drain()
    return box[0]

  @property
  def pixel_stride(self) -> int:
    """Pixels of a latent cell's side."""
    return self.pool.facts[self.slots[0].name]["pixel_stride"]

  @property
  def facts(self) -> Mapping[str, Mapping[str, Any]]:
    """Platform, device and parameter counts of each worker."""
    return self.pool.facts

  def timeouts_s(self) -> dict[str, float]:
    """Deadlines per task kind: the configured floor, or a multiple of the warm time."""
    settings = self.recipe.settings
    floor = settings.runtime.task_timeout_s
    out = {"default": floor}
    for kind, by_group in (self.warm.seconds if self.warm else {}).items():
      out[kind] = max(floor, DEADLINE_FACTOR * max(by_group.values()))
    out["judge"] = settings.reward.timeout_s
    return out

  # Steps.

  def candidates(self, step: int, prompts: Sequence[str]) -> list[Candidate]:
    """The step's candidates: `group_size` of each prompt."""
    size = self.recipe.settings.rollout.group_size
    out = []
    for index in range(size * len(prompts)):
      group = index // size
      seed, seed_initial = self.recipe.candidate_seeds(step, index, group)
      trained = self.recipe.trained_steps(step, index, group)
      out.append(Candidate(group, prompts[group], seed, seed_initial, trained))
    return out

  def run_step(
    self,
    state: TrainHandles,
    step: int,
    prompts: Sequence[str],
    *,
    keep_videos: Sequence[int] = (),
    on_progress: Callable[[StepGraph], None] = lambda graph: None,
  ) -> tuple[TrainHandles, StepResult]:
    """Runs one RL step.

    Args:
      state: where adapter, EMA and optimizer state are.
      step: its number, from 1.
      prompts: one per group.
      keep_videos: candidates whose videos the result holds.
      on_progress: called when a task has ended.

    Raises:
      RunFailed: the step cannot be completed, or too many updates in a row were skipped.
    """
    settings = self.recipe.settings
    candidates = self.candidates(step, prompts)
    groups = self.recipe.shape(step, ()).groups
    jobs = [
      job.candidates
      for group in step_groups(groups, candidates, self._reward)
      for job in self._reward.jobs(group)
    ]
    shape = self.recipe.shape(step, tuple(jobs))
    plan = self.planner.plan_for(shape)
    program = StepProgram(
      recipe=self.recipe,
      scheme=self.scheme,
      plan=plan,
      shape=shape,
      step=step,
      candidates=candidates,
      reward=self._reward,
      state=state,
      initial=self._initial,
      pool=self.pool,
      timeouts_s=self.timeouts_s(),
    )
    dispatcher = Dispatcher(self.pool, step, on_progress)
    start = self.executor.now()
    dispatcher.run(build_step(shape, self.scheme, plan), program)
    used = self._settle(program, step)
    step_s = self.executor.now() - start
    self.gradients = program.gradients
    metrics = step_metrics(self.recipe, program, step, step_s) | memory.metrics(used)
    if self.warm is not None:
      metrics["check/logp_diff_actor_reward"] = self.warm.score_difference
    if program.state.skipped_in_row >= settings.reward.max_skipped_in_row:
      raise RunFailed(program.why_skipped())
    records = self._records(program, keep_videos)
    spans = tuple(dispatcher.spans)
    if plan.simulated_s is not None and plan.bound_s is not None:
      metrics["plan/simulated_s"], metrics["plan/bound_s"] = plan.simulated_s, plan.bound_s
    again = self.planner.observe(spans)
    if again:
      self._say(again)
    return program.state, StepResult(step, metrics, records, spans)

  def _settle(self, program: StepProgram, step: int) -> dict[str, memory.Usage]:
    """Gives every worker the new adapter, and lets it forget the step's older ones.

    Returns:
      What each worker's process then occupies.
    """
    used: dict[str, memory.Usage] = {}
    version = f"v{program.state.count}"
    for name, worker in self.pool.workers.items():
      if worker.ticket is not None:
        continue  # it is starting again and will get the adapter with its next task
      keep = Call("keep", {"versions": (version, "initial"), "step": step + 1})

      def ended(result: Result | Exception, name: str = name) -> None:
        # A death here costs nothing: the next task brings the adapter again.
        if not isinstance(result, Exception):
          used[name] = result.scalars["usage"]

      timeout_s = self.recipe.settings.runtime.task_timeout_s
      try:
        self.pool.give_adapter(name, version, program.state.adapter)
        self.pool.submit(name, keep, (), f"adapter {version}", timeout_s, ended)
      except WorkerLost as error:
        self.pool.lost(name, error)
        continue
      worker.versions &= {version, "initial"}
      worker.deaths = 0  # a worker that dies now and then must not end a long run
    while any(w.ticket is not None and not w.starting for w in self.pool.workers.values()):
      self.pool.wait()
    return used

  def _records(
    self, program: StepProgram, keep_videos: Sequence[int]
  ) -> tuple[CandidateRecord, ...]:
    records = []
    for c, who in enumerate(program.candidates):
      reward = program.rewards[c]
      video = None
      if c in keep_videos and c in program.videos:
        video = np.asarray(self.executor.fetch(program.videos[c]))
      records.append(
        CandidateRecord(
          c,
          who.prompt,
          who.seed,
          weighted_reward(self.recipe, reward),
          dict(reward.components or {}),
          reward.rationale,
          video,
        )
      )
    return tuple(records)

  # Evaluation and state.

  def evaluate(
    self,
    adapters: Mapping[str, Handle | None],
    prompts: Sequence[str],
    seeds: Sequence[int],
    step: int,
    *,
    keep_videos: int = 0,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
  ) -> EvalResult:
    """Fixed prompts and seeds under several adapters; None stands for the run's first adapter.

    An adapter's videos never change, so what was evaluated once is not evaluated again.
    """
    handles = {n: self._initial if h is None else h for n, h in adapters.items()}
    return evaluate(
      self.pool,
      self.recipe,
      self._reward,
      handles,
      prompts,
      seeds,
      step,
      cached=self._evaluated,
      timeouts_s=self.timeouts_s(),
      keep_videos=keep_videos,
      on_progress=on_progress,
    )

  def train_state(self, state: TrainHandles, step: int, prompt_cursor: int) -> TrainState:
    """Brings the training state here, for a checkpoint."""
    fetch = self.executor.fetch
    return TrainState(
      step=step,
      version=state.count,
      adapter=np.array(fetch(state.adapter)),
      ema=np.array(fetch(state.ema)),
      optimizer=tuple(np.array(leaf) for leaf in fetch(state.optimizer)),
      prompt_cursor=prompt_cursor,
      skipped_in_row=state.skipped_in_row,
      fused=self.planner.fused or 0,
    )

  def shutdown(self) -> None:
    """Ends every worker."""
    self.executor.shutdown()
