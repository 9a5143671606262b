"""Random steps, workers, costs and plans for tests of simulator, bound and search."""

import dataclasses

from hypothesis import strategies as st

from sbjax.dataflow.costs import StepCosts, WorkerCosts
from sbjax.dataflow.graph import replay_id
from sbjax.dataflow.plan import (
  Plan,
  StepShape,
  WorkerSlot,
  fixed_plan,
  fused_candidates,
  judge_batches,
  worker_slots,
)
from sbjax.dataflow.queue import Order
from sbjax.dataflow.schemes import SCHEMES, Scheme


def step_shape(
  groups=2, size=3, minibatches=2, blocks=(2, 2), scope="group", reference=False, anchors=False
):
  """A step with one judge job a candidate."""
  members = tuple(tuple(range(g * size, (g + 1) * size)) for g in range(groups))
  every = tuple(c for group in members for c in group)
  per = len(every) // minibatches
  updates = tuple(every[m * per : (m + 1) * per] for m in range(minibatches))
  jobs = tuple((c, -1 - c // size) if anchors else (c,) for c in every)
  return StepShape(members, updates, minibatches, blocks, jobs, scope, reference)


def worker_costs(**changes) -> WorkerCosts:
  """Costs of a worker; a judgement is the longest task."""
  made = WorkerCosts(
    generate_s=1.0,
    decode_s=0.4,
    judge_s=((1, 1.0), (4, 2.5)),
    forward_s=0.4,
    backward_s=1.2,
    replay_s=1.3,
    fused_s=0.9,
    reference_s=0.4,
    prefix_s=0.02,
    fold_s=0.01,
    reduce_s=0.01,
    update_s=0.02,
    push_s=0.01,
  )
  return dataclasses.replace(made, **changes)


def step_costs(**changes) -> StepCosts:
  """The same costs on every kind of worker."""
  made = worker_costs(**changes)
  return StepCosts({"actor": made, "reward": made, "both": made}, dispatch_s=0.002)


def seconds(plan: Plan) -> float:
  """A searched plan's simulated seconds."""
  assert plan.simulated_s is not None
  return plan.simulated_s


ORDERS: tuple[Order, ...] = ("kind", "update", "rollout")


@dataclasses.dataclass(frozen=True)
class Case:
  """One random setting."""

  shape: StepShape
  scheme: Scheme
  slots: tuple[WorkerSlot, ...]
  costs: StepCosts
  plan: Plan


_LIGHT = ("fused_s", "reference_s", "prefix_s", "fold_s", "reduce_s", "update_s", "push_s")
_SECONDS = st.floats(0.05, 5.0)
_SMALL = st.floats(0.0, 0.3)


@st.composite
def random_costs(draw) -> StepCosts:
  """Unequal workers, in every task."""

  def one() -> WorkerCosts:
    first, more = draw(_SECONDS), draw(_SECONDS)
    return WorkerCosts(
      draw(_SECONDS),
      draw(_SECONDS),
      ((1, first), (3, first + more)),
      *(draw(_SECONDS) for _ in range(3)),
      **{name: draw(_SMALL) for name in _LIGHT},
    )

  kinds = {kind: one() for kind in ("actor", "reward", "both", "slow")}
  return StepCosts(kinds, draw(_SMALL), draw(st.sampled_from([1.0, 0.5])))


@st.composite
def cases(draw) -> Case:
  """Any scheme, with a plan that it may have."""
  scheme = SCHEMES[draw(st.sampled_from(sorted(SCHEMES)))]
  groups = draw(st.integers(1, 4))
  shape = step_shape(
    groups,
    draw(st.integers(1, 3)),
    draw(st.sampled_from([1, groups])),
    draw(st.sampled_from([(1,), (2, 1), (1, 1, 2)])),
    draw(st.sampled_from(["group", "minibatch", "step"])),
    draw(st.booleans()),
    draw(st.booleans()),
  )
  slots = worker_slots(scheme, draw(st.integers(1, 3)), draw(st.integers(0, 2)))
  if len(slots) > 2 and draw(st.booleans()):
    slots = (*slots[:-1], dataclasses.replace(slots[-1], kind="slow"))
  share = st.floats(0.0, 1.0)
  plan = fixed_plan(
    scheme, shape, slots, decodes_on_reward=draw(share), replays_on_reward=draw(share)
  )
  if scheme.plan_space:
    plan = _free_plan(draw, shape)
  return Case(shape, scheme, slots, draw(random_costs()), plan)


def _free_plan(draw, shape: StepShape) -> Plan:
  group = st.sampled_from(["actor", "reward", "any"])
  groups = {
    f"{kind}/c{c}": draw(group)
    for kind in ("generate", "decode", "reference")
    for c in range(shape.candidates)
  }
  splits = {}
  for update, members in enumerate(shape.updates):
    for c in members:
      parts = (tuple(range(shape.blocks)),)
      if shape.blocks > 1 and draw(st.booleans()):
        parts = splits[update, c] = ((0,), tuple(range(1, shape.blocks)))
      groups |= {replay_id(update, c, part): draw(group) for part in parts}
  fused = fused_candidates(shape, draw(st.integers(0, len(shape.updates[0]))))
  splits = {key: parts for key, parts in splits.items() if key[0] or key[1] not in fused}
  batches = judge_batches(shape, 2, draw(st.integers(0, 4)), across=draw(st.booleans()))
  return Plan(groups, batches, splits, fused, draw(st.sampled_from(ORDERS)))
