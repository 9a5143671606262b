"""Builds the step graph from a shape, a scheme and a plan."""

from sbjax.dataflow.graph import StepGraph, Task
from sbjax.dataflow.plan import Plan, StepShape
from sbjax.dataflow.schemes import Scheme


def build_step(shape: StepShape, scheme: Scheme, plan: Plan) -> StepGraph:
  """Gives the tasks of one RL step and their dependencies.

  Args:
    shape: candidates, groups, updates and judge jobs.
    scheme: the replay mode decides which tasks exist, the stages which barriers.
    plan: how judging is batched, and which replays are split.
  """
  tasks: list[Task] = []
  for c in range(shape.candidates):
    first = shape.first_update(c)
    tasks.append(Task(f"generate/c{c}", "generate", candidates=(c,), update=first))
    tasks.append(Task(f"decode/c{c}", "decode", (f"generate/c{c}",), (c,), first))
    if shape.reference:
      tasks.append(Task(f"reference/c{c}", "reference", (f"generate/c{c}",), (c,), first))
  tasks += _judging(shape, plan)
  for update in range(len(shape.updates)):
    tasks += _training(shape, scheme, plan, update)
  return StepGraph(_with_barriers(tasks, scheme))


def _judging(shape: StepShape, plan: Plan) -> list[Task]:
  tasks = []
  judged_by: dict[int, set[str]] = {c: set() for c in range(shape.candidates)}
  for index, jobs in enumerate(plan.judge_batches):
    candidates = tuple(sorted({c for job in jobs for c in shape.jobs[job]}))
    needs = tuple(f"decode/c{c}" for c in candidates)
    update = min(shape.first_update(c) for c in candidates)
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


def _training(shape: StepShape, scheme: Scheme, plan: Plan, update: int) -> list[Task]:
  members = shape.updates[update]
  before = (f"update/u{update - 1}",) if update else ()
  every_block = tuple(range(shape.blocks))
  tasks, scored, graded = [], [], []
  for c in members:
    needs = (f"generate/c{c}", *before)
    if shape.reference:
      needs = (*needs, f"reference/c{c}")
    if scheme.replay_mode == "merged":
      parts = plan.splits.get((update, c), (every_block,))
      replays = [Task(replay_id(update, c, p), "replay", needs, (c,), update, p) for p in parts]
      tasks += replays
      scored += [task.id for task in replays]
      if len(parts) > 1:
        folds = _folding(update, c, replays)
        tasks += folds
        graded += [task.id for task in folds if task.kind == "fold"]
    else:
      name = f"forward/u{update}/c{c}"
      tasks.append(Task(name, "forward", needs, (c,), update))
      scored.append(name)
      back = f"backward/u{update}/c{c}"
      needs_back = (f"generate/c{c}", f"coefficients/u{update}", *before)
      tasks.append(Task(back, "backward", needs_back, (c,), update, every_block))
      graded.append(back)
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


def replay_id(update: int, candidate: int, blocks: tuple[int, ...]) -> str:
  """Names the replay of some blocks of a candidate."""
  return f"replay/u{update}/c{candidate}/b{'-'.join(map(str, blocks))}"


def fold_id(update: int, candidate: int, blocks: tuple[int, ...]) -> str:
  """Names the folding of a replayed part."""
  return f"fold/u{update}/c{candidate}/b{'-'.join(map(str, blocks))}"


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
  out: list[Task] = []
  stage_of = {kind: index for index, kinds in enumerate(scheme.stages) for kind in kinds}
  for task in tasks:
    stage = stage_of.get(task.kind, 0)
    if stage == 0:
      out.append(task)
      continue
    needs = (*task.needs, f"barrier/{stage - 1}")
    out.append(
      Task(
        task.id,
        task.kind,
        needs,
        task.candidates,
        task.update,
        task.blocks,
        task.jobs,
        task.scope,
      )
    )
  for stage in range(len(scheme.stages) - 1):
    members = [t.id for t in tasks if stage_of.get(t.kind) == stage]
    before = (f"barrier/{stage - 1}",) if stage else ()
    out.append(Task(f"barrier/{stage}", "barrier", (*members, *before)))
  return out
