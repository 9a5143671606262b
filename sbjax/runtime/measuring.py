"""Times every task kind on every worker that does it, while the others do the same."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from sbjax.dataflow.judge_costs import JudgeRow
from sbjax.dataflow.profile import Row
from sbjax.rewards.protocol import Group, Job, Reward
from sbjax.runtime.early import early_weights
from sbjax.runtime.executor import Call, Handle, Result
from sbjax.runtime.planning import can_fuse
from sbjax.runtime.pool import Pool, RunFailed
from sbjax.runtime.recipe import Recipe

_STEP = -1  # its buffers belong to no step
_VERSION = "profile"

Calls = Callable[[str, int], tuple[Call, Sequence[Handle]]]
"""Worker and round -> the call that it is given."""


def judge_batches(most: int) -> tuple[int, ...]:
  """1, 2, 4, 8 and so on up to the largest batch, itself included."""
  sizes = [1]
  while sizes[-1] * 2 < most:
    sizes.append(sizes[-1] * 2)
  return (*sizes, most) if most > sizes[-1] else tuple(sizes)


def judge_jobs(reward: Reward, prompt: str, count: int) -> tuple[Job, ...]:
  """As many of a group's questions, from the smallest group that has them."""
  members = 1
  while True:
    group = Group(
      0,
      prompt,
      tuple(range(members)),
      tuple(range(members)),
      anchor=-1 if reward.compares else None,
    )
    jobs = reward.jobs(group)
    if len(jobs) >= count:
      return tuple(jobs[:count])
    members += 1


def step_jobs(recipe: Recipe, reward: Reward) -> tuple[Job, ...]:
  """The questions of one step."""
  groups = recipe.shape(1, ()).groups
  return tuple(
    job
    for g, members in enumerate(groups)
    for job in reward.jobs(
      Group(g, "", members, members, anchor=-1 - g if reward.needs_anchor else None)
    )
  )


def measured_kinds(recipe: Recipe, most_jobs: int) -> int:
  """How many times a measuring reports progress."""
  extra = can_fuse(recipe) + recipe.needs_reference + _folds(recipe)
  return 10 + extra + len(judge_batches(most_jobs))


def _folds(recipe: Recipe) -> bool:
  return recipe.updates > 1 and len(recipe.blocks) > 1


class Measuring:
  """Runs kinds of tasks on all workers of a pool at a time and keeps their seconds.

  Args:
    pool: workers that have loaded their models.
    recipe: the run's recipe.
    size: (frames, height, width) of its videos in pixels.
    rounds: timed repetitions of a kind, after one that compiles.
    timeout_s: deadline of one task with its compilation.
    progress: called when a kind has been measured.

  Attributes:
    judges: what a generating judge took, by frames, tokens and batch.
  """

  def __init__(
    self,
    pool: Pool,
    recipe: Recipe,
    size: tuple[int, int, int],
    *,
    rounds: int,
    timeout_s: float,
    progress: Callable[[], None],
  ):
    self._pool, self._recipe, self._size = pool, recipe, size
    self._rounds, self._timeout_s, self._progress = rounds, timeout_s, progress
    self._last: dict[str, dict[str, Result]] = {}
    self._rows: list[Row] = []
    self.judges: list[JudgeRow] = []

  def run(self, prompt: str, reward: Reward, most_jobs: int) -> tuple[Row, ...]:
    """Measures every kind.

    Args:
      prompt: any prompt of the run.
      reward: forms the judge's questions.
      most_jobs: the largest batch of a judge task.

    Raises:
      RunFailed: a worker died or a task raised.
    """
    first = next(iter(self._pool.workers))
    self._messages()
    self._last["initial"] = self._one(
      "initial", lambda name, _: (Call("initial_adapter", {}, 2), ())
    )
    flat, optimizer = self._heavy(first, "initial"), self._heavy(first, "initial", 1)
    self._measure("push", lambda name, _: (Call("set_adapter", {"version": _VERSION}), (flat,)))
    for state in self._pool.workers.values():
      state.versions.add(_VERSION)
    self._rollout(prompt)
    for size in judge_batches(most_jobs):
      self._judging(judge_jobs(reward, prompt, size))
    self._dialogues(most_jobs)
    self._training(flat, optimizer)
    for name, state in self._pool.workers.items():
      keep = Call("keep", {"versions": (), "step": 0})
      self._pool.submit(name, keep, (), "end of profiling", self._timeout_s, lambda result: None)
      state.versions = set()
    self._pool.drain()
    return tuple(self._rows)

  def _rollout(self, prompt: str) -> None:
    recipe = self._recipe
    args = {"prompt": prompt, "seed": 1, "seed_initial": 1, "version": _VERSION}
    self._measure("generate", lambda name, _: (Call("generate", args, 2), ()))
    if can_fuse(recipe):
      fused = {**args, "fused": (_STEP, 0, 1), "trained": recipe.trained_steps(0, 0, 0)}
      self._measure("fused", lambda name, _: (Call("generate", fused, 2), ()))
    self._measure(
      "decode", lambda name, _: (Call("decode", {}, 1), (self._heavy(name, "generate", 1),))
    )

  def _judging(self, jobs: Sequence[Job]) -> None:
    needed = tuple(sorted({c for job in jobs for c in job.candidates}))
    args = {"jobs": tuple(jobs), "candidates": needed, "retries": 0}

    # One video plays every candidate: a judge's time follows from the number of videos.
    def call(name: str, round_: int):
      salt = (len(jobs), round_)
      return Call("judge", {**args, "salt": salt}), (self._heavy(name, "decode"),) * len(needed)

    self._measure("judge", call, batch=len(jobs), workers=self._pool.judges)

  def _dialogues(self, most_jobs: int) -> None:
    """A judge that generates is measured by frames, tokens and batch too, on one worker a group."""
    groups = {self._pool.workers[name].spec.group: name for name in self._pool.judges}
    args = {"jobs": most_jobs, "rounds": self._rounds}
    for group, name in groups.items():
      found = self._one(
        "judge",
        lambda name, _: (Call("measure_judge", args), (self._heavy(name, "decode"),)),
        workers=(name,),
      )
      for point in found[name].scalars["points"]:
        self.judges.append(JudgeRow(**point, worker=group))

  def _training(self, flat: Handle, optimizer: Handle) -> None:
    recipe = self._recipe
    common: dict[str, Any] = {"trained": recipe.trained_steps(0, 0, 0), "version": _VERSION}

    def alone(name: str) -> tuple[Handle, ...]:
      return (self._heavy(name, "generate"),)

    if recipe.needs_reference:
      self._measure("reference", lambda name, _: (Call("reference", common, 1), alone(name)))

    def inputs(name: str) -> tuple[Handle, ...]:
      extra = (self._heavy(name, "reference"),) if recipe.needs_reference else ()
      return (*alone(name), *extra)

    self._measure("prefix", lambda name, _: (Call("prefix", common), alone(name)))
    self._measure("forward", lambda name, _: (Call("forward", common), inputs(name)))
    weights = np.zeros((recipe.geometry.chunks, recipe.trained, len(recipe.objective.channels)))
    back = Call("backward", {"key": (_STEP, 0, 0), "weights": weights, **common})
    self._measure("backward", lambda name, _: (back, inputs(name)))
    later = min(1, recipe.updates - 1)
    every = tuple(range(len(recipe.blocks)))
    whole = Call("replay", {"key": (_STEP, later, 0), "blocks": every, **common})
    self._measure("replay", lambda name, _: (whole, inputs(name)))
    late = {0: np.ones(recipe.objective_of(later).buffers(recipe.units))}
    sums = {"step": _STEP, "update": later, "parts": tuple((0, b) for b in every), "late": late}
    self._measure("reduce", lambda name, _: (Call("reduce", sums, 1), ()))
    step = Call("update", {"skip": False, "count": 0}, 4)
    self._measure(
      "update", lambda name, _: (step, (flat, flat, optimizer, self._heavy(name, "reduce")))
    )
    if _folds(recipe):
      self._folding(common, inputs)

  def _folding(
    self, common: Mapping[str, Any], inputs: Callable[[str], tuple[Handle, ...]]
  ) -> None:
    """A split replay's part leaves units, which a fold takes: one part a fold."""
    recipe, trained = self._recipe, list(common["trained"])

    def key(round_: int) -> tuple[int, int, int]:
      return _STEP, 1, 1 + round_

    def part(name: str, round_: int):
      return Call("replay", {"key": key(round_), "blocks": (0,), **common}), inputs(name)

    def fold(name: str, round_: int):
      old = self._last["generate"][name].scalars["old_scores"][:, trained]
      early = early_weights(recipe, 1, self._last["forward"][name].scalars, old)
      return Call("fold", {"key": key(round_), "blocks": (0,), "early": early}), ()

    self._measure("fold", fold, before=part)

  def _messages(self) -> None:
    """What a call takes beside its operation, one worker at a time; the operation does nothing."""
    first = next(iter(self._pool.workers))
    times = []
    for _ in range(4 * self._rounds):
      start = self._pool.executor.now()
      box = self._one("load", lambda name, _: (Call("load", {}), ()), workers=(first,))
      times.append(self._pool.executor.now() - start - box[first].seconds)
    self._keep("dispatch", "driver", times)
    self._progress()

  # One kind.

  def _measure(
    self,
    kind: str,
    calls: Calls,
    *,
    batch: int = 1,
    before: Calls | None = None,
    workers: Sequence[str] = (),
  ) -> None:
    """Workers do the kind at the same time, round after round; the first is not counted.

    All workers do it where none are named.
    """
    seconds: dict[str, list[float]] = {}
    for round_ in range(self._rounds + 1):
      if before is not None:
        self._one(kind, before, round_)
      results = self._one(kind, calls, round_, workers)
      self._last[kind] = results
      for name, result in results.items():
        if round_:
          group = self._pool.workers[name].spec.group
          seconds.setdefault(group, []).append(result.seconds)
    for group, times in seconds.items():
      self._keep(kind, group, times, batch)
    self._progress()

  def _one(
    self, kind: str, calls: Calls, round_: int = 0, workers: Sequence[str] = ()
  ) -> dict[str, Result]:
    box: dict[str, Result] = {}
    for name in workers or self._pool.workers:
      call, inputs = calls(name, round_)

      def ended(result: Result | Exception, name: str = name) -> None:
        if isinstance(result, Exception):
          raise RunFailed(f"profiling {kind}: {result}")
        box[name] = result

      self._pool.submit(name, call, inputs, f"profiling {kind}", self._timeout_s, ended)
    self._pool.drain()
    return box

  def _heavy(self, name: str, kind: str, index: int = 0) -> Handle:
    return self._last[kind][name].heavy[index]

  def _keep(self, kind: str, worker: str, times: Sequence[float], batch: int = 1) -> None:
    spread_s = 0.0
    if len(times) > 1:
      low, _, high = statistics.quantiles(times, n=4, method="inclusive")
      spread_s = high - low
    self._rows.append(Row(kind, worker, *self._size, statistics.median(times), spread_s, batch))
