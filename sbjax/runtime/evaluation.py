"""Evaluation: fixed prompts and seeds under several adapters, on the same workers and tasks."""

import itertools
import zlib
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np

from sbjax.dataflow.graph import StepGraph, Task
from sbjax.dataflow.queue import Order
from sbjax.dataflow.turns import Turns
from sbjax.randomness import stream_seed
from sbjax.rewards.protocol import CandidateReward, Group, Reward
from sbjax.runtime.dispatch import Dispatcher
from sbjax.runtime.executor import Call, Deadline, Handle, Result
from sbjax.runtime.judging import Judging
from sbjax.runtime.pool import Pool
from sbjax.runtime.recipe import Recipe
from sbjax.runtime.records import CandidateRecord, EvalResult
from sbjax.runtime.scalars import weighted_reward


def evaluation_seed(seed: int, prompt: str) -> int:
  """The stream of one (seed, prompt): it depends on nothing else, so sets can grow or shrink."""
  return stream_seed(seed, zlib.crc32(prompt.encode()))


class _EvalProgram:
  """Implements `dispatch.Program` for videos that are generated, decoded, judged and measured.

  With a reward that compares videos each meets `opponents[i]`, or itself where there are none. Only
  the first `keep_videos` are kept beyond their use, or all where they are others' opponents.
  `on_video` is called when a video was measured and judged.
  """

  def __init__(
    self, pool, recipe, reward, handle, version, items, timeouts_s, opponents, keep_videos, on_video
  ):
    self._pool, self._recipe, self._timeouts_s = pool, recipe, timeouts_s
    self._handle, self._version, self._items = handle, version, items
    self._reward = reward
    self._opponents = opponents
    self._groups = [
      Group(i, prompt, (i,), (seed,), anchor=self._anchor(i))
      for i, (prompt, seed) in enumerate(items)
    ]
    self._jobs = [job for group in self._groups for job in reward.jobs(group)]
    self._judging = Judging(self._jobs, recipe.settings.reward.retries)
    self._latents: dict[int, Handle] = {}
    self.videos: dict[int, Handle] = {}
    self.heldout: dict[int, Mapping[str, float]] = {}
    self._kept = len(items) if reward.compares else keep_videos
    self._on_video = on_video
    # The held-out measure and every job of it look at a video.
    self._uses = dict.fromkeys(range(len(items)), 1)
    for job in self._jobs:
      self._count(job.candidates, 1)

  def _count(self, candidates: Iterable[int], uses: int) -> None:
    for i in candidates:
      if i >= 0:
        self._uses[i] += uses
        if not self._uses[i]:
          self._on_video()
          if i >= self._kept:
            del self.videos[i]

  def _anchor(self, item: int) -> int | None:
    if not self._reward.compares:
      return None
    return item if self._opponents is None else -1 - item

  def _video(self, index: int) -> Handle:
    return self.videos[index] if index >= 0 else self._opponents[-1 - index]

  def graph(self) -> StepGraph:
    tasks = []
    for i in range(len(self._items)):
      tasks.append(Task(f"generate/c{i}", "generate", (), (i,)))
      tasks.append(Task(f"decode/c{i}", "decode", (f"generate/c{i}",), (i,)))
      tasks.append(Task(f"heldout/c{i}", "heldout", (f"decode/c{i}",), (i,)))
    for j, job in enumerate(self._jobs):
      mine = tuple(c for c in job.candidates if c >= 0)
      needs = tuple(f"decode/c{c}" for c in mine)
      tasks.append(Task(f"judge/j{j}", "judge", needs, mine, jobs=(j,)))
    return StepGraph(tasks)

  def on_driver(self, task: Task) -> None:
    raise RuntimeError(f"an evaluation has no driver task {task.id}")

  @property
  def order(self) -> Order:
    return "kind"

  @property
  def turns(self) -> Turns:
    return {}

  def workers(self, task: Task) -> tuple[str, ...]:
    """Nothing here waits for training, so any worker may do anything but judge without a judge."""
    return tuple(self._pool.judges if task.kind == "judge" else self._pool.workers)

  def adapter(self, version: str) -> Handle:
    return self._handle

  def timeout_s(self, task: Task) -> float:
    return self._timeouts_s.get(task.kind, self._timeouts_s["default"])

  def call(self, task: Task, worker: str):
    del worker
    i = task.candidates[0]
    prompt, seed = self._items[i]
    if task.kind == "generate":
      args = {"prompt": prompt, "seed": seed, "seed_initial": seed, "version": self._version}
      return Call("generate", args, 2), (), (self._version,)
    if task.kind == "decode":
      return Call("decode", {}, 1), (self._latents[i],), ()
    if task.kind == "heldout":
      return Call("heldout", {"prompt": prompt}), (self.videos[i],), ()
    jobs = tuple(self._jobs[j] for j in self._judging.next_jobs(task))
    needed = tuple(sorted({c for job in jobs for c in job.candidates}))
    args = {
      "jobs": jobs,
      "candidates": needed,
      "retries": self._recipe.settings.reward.retries,
    }
    return Call("judge", args), tuple(self._video(c) for c in needed), ()

  def finish(self, task: Task, worker: str, result: Result) -> bool:
    del worker
    i = task.candidates[0]
    if task.kind == "generate":
      self._latents[i] = result.heavy[1]
    elif task.kind == "decode":
      (self.videos[i],) = result.heavy
      del self._latents[i]
    elif task.kind == "heldout":
      self.heldout[i] = result.scalars["values"]
      self._count((i,), -1)
    else:
      if not self._judging.answered(task, result.scalars["verdicts"]):
        return False
      for job in task.jobs:
        self._count(self._jobs[job].candidates, -1)
    return True

  def lost(self, task: Task, error: Exception) -> bool:
    cause = "timeout" if isinstance(error, Deadline) else "died"
    return task.kind == "judge" and self._judging.interrupted(task, cause, str(error))

  def forget(self, worker: str) -> Sequence[str]:
    del worker
    return ()

  def makers(self, handles: Sequence[Handle]) -> Sequence[str]:
    gone = {id(handle) for handle in handles}
    lost = [i for i, handle in self.videos.items() if id(handle) in gone]
    names = [f"decode/c{i}" for i in lost]
    # A decoded video's latents are gone with its decode.
    lost += [i for i, handle in self._latents.items() if id(handle) in gone]
    return names + [f"generate/c{i}" for i in lost]

  def rewards(self) -> list[CandidateReward]:
    out: dict[int, CandidateReward] = {}
    for group in self._groups:
      mine = [j for j, job in enumerate(self._jobs) if set(job.candidates) & set(group.candidates)]
      jobs = [self._jobs[j] for j in mine]
      out.update(self._reward.aggregate(group, jobs, [self._judging.verdicts[j] for j in mine]))
    return [out[i] for i in range(len(self._items))]


def evaluate(
  pool: Pool,
  recipe: Recipe,
  reward: Reward,
  adapters: Mapping[str, Handle],
  prompts: Sequence[str],
  seeds: Sequence[int],
  step: int,
  *,
  cached: MutableMapping[Any, Any],
  timeouts_s: Mapping[str, float],
  keep_videos: int,
  on_progress: Callable[[int, int], None],
) -> EvalResult:
  """Evaluates adapters side by side.

  A reward that compares videos compares each with the base adapter's of the same prompt and seed.

  Args:
    pool: the workers.
    recipe: the run's recipe.
    reward: the driver's part of the reward.
    adapters: name -> flat adapter; the base adapter is named `base` and comes first.
    prompts: fixed prompts.
    seeds: fixed seeds; every prompt gets one video per seed.
    step: RL steps completed.
    cached: what was evaluated before, by handle; filled here.
    timeouts_s: deadlines per kind.
    keep_videos: how many videos of each adapter the records hold, the first ones.
    on_progress: called with the videos judged so far and all that are made, whenever one is judged.
  """
  items = [(p, evaluation_seed(s, p)) for p in prompts for s in seeds]
  # The base adapter alone is asked for again and again; it is known by its name.
  base = ("base", tuple(items), keep_videos)
  made = [name for name in adapters if name != "base" or base not in cached]
  judged = itertools.count(1)

  def on_video() -> None:
    on_progress(next(judged), len(made) * len(items))

  scores: dict[str, dict[str, np.ndarray]] = {}
  records: dict[str, tuple[CandidateRecord, ...]] = {}
  opponents = None
  for name, handle in adapters.items():
    if name in made:
      found = _evaluate_one(
        pool,
        recipe,
        reward,
        handle,
        name,
        step,
        items,
        timeouts_s,
        keep_videos,
        on_video,
        opponents,
      )
    else:
      found = cached[base]
    scores[name], records[name], videos = found
    if name == "base":
      cached[base], opponents = found, videos
  return EvalResult(step, scores, records)


def _evaluate_one(
  pool, recipe, reward, handle, name, step, items, timeouts_s, keep_videos, on_video, opponents
):
  version = f"eval-{name}-{step}"
  program = _EvalProgram(
    pool, recipe, reward, handle, version, items, timeouts_s, opponents, keep_videos, on_video
  )
  Dispatcher(pool, step).run(program.graph(), program)
  rewards = program.rewards()
  totals = [weighted_reward(recipe, r) for r in rewards]
  nan = float("nan")
  values = {"reward": np.array([nan if t is None else t for t in totals])}
  for component in recipe.settings.reward.components:
    values[component] = np.array(
      [nan if r.components is None else r.components.get(component, nan) for r in rewards]
    )
  for measure in sorted(program.heldout[0]) if program.heldout else ():
    # `heldout` is the continuous measure; others keep their own name behind it.
    key = "heldout" if measure == "p" else f"heldout_{measure}"
    values[key] = np.array([program.heldout[i][measure] for i in range(len(items))])
  records = tuple(
    CandidateRecord(
      i,
      prompt,
      seed,
      totals[i],
      dict(rewards[i].components or {}),
      rewards[i].rationale,
      np.asarray(pool.executor.fetch(program.videos[i])) if i < keep_videos else None,
    )
    for i, (prompt, seed) in enumerate(items)
  )
  videos = [program.videos[i] for i in range(len(items))] if reward.compares else None
  return values, records, videos
