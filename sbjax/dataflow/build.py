"""Builds the step graph from a shape, a scheme and a plan."""

import dataclasses

from sbjax.dataflow.graph import StepGraph, Task, fold_id, replay_id
from sbjax.dataflow.plan import Plan, StepShape
from sbjax.dataflow.schemes import Scheme


def build_step(shape: StepShape, scheme: Scheme, plan: Plan) -> StepGraph:
  """Gives the tasks of one RL step and their dependencies.

  Args:
    shape: candidates, groups, updates and judge jobs.
    scheme: the replay mode decides which tasks exist, the stages which barriers.
    plan: how judging is batched, which replays are split, which candidates are fused.

  Raises:
    ValueError: if the plan fuses a candidate that the first update does not train on.
  """
  stray = plan.fused - set(shape.updates[0])
  if stray:
    raise ValueError(
      f"fused={sorted(stray)} are not in the first mini-batch; only its members fuse"
    )
  first = shape.first_updates()
  blocks = tuple(range(shape.blocks))
  tasks: list[Task] = []
  for c, update in sorted(first.items()):
    fused = c in plan.fused
    made = f"generate/c{c}"
    tasks.append(
      Task(made, "generate", (), (c,), update, blocks=blocks if fused else (), fused=fused)
    )
    tasks.append(Task(f"decode/c{c}", "decode", (made,), (c,), update))
    if shape.reference:
      tasks.append(Task(f"reference/c{c}", "reference", (made,), (c,), update))
  updates = shape.job_updates()
  for c in shape.anchors:
    update = min(u for u, job in zip(updates, shape.jobs, strict=True) if c in job)
    tasks.append(Task(f"generate/c{c}", "generate", (), (c,), update))
    tasks.append(Task(f"decode/c{c}", "decode", (f"generate/c{c}",), (c,), update))
  tasks += _judging(shape, plan)
  judged = tuple(task.id for task in tasks if task.kind == "judge")
  for update in range(len(shape.updates)):
    tasks += _training(shape, scheme, plan, update, judged)
  return StepGraph(_with_barriers(tasks, scheme))


def _judging(shape: StepShape, plan: Plan) -> list[Task]:
  tasks = []
  first = shape.first_updates()
  judged_by: dict[int, set[str]] = {c: set() for c in first}
  for index, jobs in enumerate(plan.judge_batches):
    needed = sorted({c for job in jobs for c in shape.jobs[job]})
    candidates = tuple(c for c in needed if c >= 0)
    needs = tuple(f"decode/c{c}" for c in needed)
    update = min(first[c] for c in candidates)
    tasks.append(Task(f"judge/b{index}", "judge", needs, candidates, update, jobs=jobs))
    for c in candidates:
      judged_by[c].add(f"judge/b{index}")
  for scope, candidates in enumerate(_scopes(shape)):
    needs = tuple(sorted({name for c in candidates for name in judged_by[c]}))
    tasks.append(Task(f"advantage/s{scope}", "advantage", needs, tuple(candidates), scope=scope))
  return tasks


def _scopes(shape: StepShape) -> list[tuple[int, ...]]:
  """The sets of candidates whose rewards an advantage needs together."""
  if shape.advantage_scope == "group":
    return list(shape.groups)
  if shape.advantage_scope == "minibatch":
    # A group may straddle mini-batches in the reference order; its advantage needs all of it.
    scopes = []
    for members in shape.updates[: shape.minibatches]:
      groups = [group for group in shape.groups if set(group) & set(members)]
      scopes.append(tuple(c for group in groups for c in group))
    return scopes
  return [tuple(range(shape.candidates))]


def _training(
  shape: StepShape, scheme: Scheme, plan: Plan, update: int, judged: tuple[str, ...]
) -> list[Task]:
  members = shape.updates[update]
  before = (f"update/u{update - 1}",) if update else ()
  tasks, scored, graded = [], [], []
  for c in members:
    if update == 0 and c in plan.fused:
      scored.append(f"generate/c{c}")
      continue
    needs = (f"generate/c{c}", *before)
    if shape.reference:
      needs = (*needs, f"reference/c{c}")
    if scheme.forward_first:
      name = f"forward/u{update}/c{c}"
      tasks.append(Task(name, "forward", needs, (c,), update))
      scored.append(name)
    else:
      replays, folds = _replays(shape, scheme, plan, update, c, needs, judged)
      tasks += [*replays, *folds]
      scored += [task.id for task in replays]
      graded += [task.id for task in folds if task.kind == "fold"]
  if scheme.forward_first:
    tasks += _backwards(shape, scheme, update, tuple(scored))
    graded += [f"backward/u{update}/c{c}" for c in members]
  advantages = tuple(
    f"advantage/s{scope}"
    for scope, candidates in enumerate(_scopes(shape))
    if set(candidates) & set(members)
  )
  tasks.append(
    Task(f"coefficients/u{update}", "coefficients", (*scored, *advantages), members, update)
  )
  last = (f"coefficients/u{update}", *scored, *graded)
  tasks.append(Task(f"reduce/u{update}", "reduce", last, members, update))
  tasks.append(Task(f"update/u{update}", "update", (f"reduce/u{update}",), members, update))
  return tasks


def _replays(
  shape: StepShape,
  scheme: Scheme,
  plan: Plan,
  update: int,
  c: int,
  needs: tuple[str, ...],
  judged: tuple[str, ...],
) -> tuple[list[Task], list[Task]]:
  """One candidate's merged replay, in parts where the plan splits it, and its folding."""
  replays = []
  for part in plan.splits.get((update, c), (tuple(range(shape.blocks)),)):
    name = replay_id(update, c, part)
    waits = judged if scheme.judging_first and plan.groups.get(name) == "reward" else ()
    replays.append(Task(name, "replay", (*needs, *waits), (c,), update, part))
  return replays, _folding(update, c, replays) if len(replays) > 1 else []


def _backwards(
  shape: StepShape, scheme: Scheme, update: int, scored: tuple[str, ...]
) -> list[Task]:
  """The second of two passes, behind the loss of the whole mini-batch.

  Where the gradient carries the rewards it waits for the coefficients; where rewards come later it
  waits for every score, as a loss over the mini-batch does.
  """
  before = (f"update/u{update - 1}",) if update else ()
  gate = f"scores/u{update}"
  tasks = [Task(gate, "barrier", scored)]
  loss = gate if scheme.replay_mode == "two_pass_early" else f"coefficients/u{update}"
  for c in shape.updates[update]:
    needs = (f"generate/c{c}", loss, *before)
    if shape.reference:
      needs = (*needs, f"reference/c{c}")
    blocks = tuple(range(shape.blocks))
    tasks.append(Task(f"backward/u{update}/c{c}", "backward", needs, (c,), update, blocks))
  return tasks


def _folding(update: int, candidate: int, replays: list[Task]) -> list[Task]:
  """A split replay folds once every part's scores are known: its early weights need them all."""
  early = Task(
    f"early/u{update}/c{candidate}",
    "early",
    tuple(task.id for task in replays),
    (candidate,),
    update,
  )
  folds = [
    Task(
      fold_id(update, candidate, task.blocks),
      "fold",
      (early.id, task.id),
      (candidate,),
      update,
      task.blocks,
    )
    for task in replays
  ]
  return [early, *folds]


def _with_barriers(tasks: list[Task], scheme: Scheme) -> list[Task]:
  """Adds one barrier task between two stages, so that a barrier costs edges, not products."""
  stage_of = {kind: index for index, kinds in enumerate(scheme.stages) for kind in kinds}
  out = [
    dataclasses.replace(task, needs=(*task.needs, f"stage/{stage_of[task.kind] - 1}"))
    if stage_of.get(task.kind, 0)
    else task
    for task in tasks
  ]
  for stage in range(len(scheme.stages) - 1):
    members = [t.id for t in tasks if stage_of.get(t.kind) == stage]
    before = (f"stage/{stage - 1}",) if stage else ()
    out.append(Task(f"stage/{stage}", "barrier", (*members, *before)))
  return out
