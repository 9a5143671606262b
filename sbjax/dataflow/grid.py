"""The grid of settings on which schemes are compared by simulation."""

import dataclasses
import itertools
from collections.abc import Iterator

from sbjax.dataflow.paper import Algorithm, PaperCosts, paper_costs, paper_shape
from sbjax.dataflow.place import search
from sbjax.dataflow.plan import Plan, StepShape, worker_slots
from sbjax.dataflow.schemes import SCHEMES, Scheme

FRAMES = (21, 33, 45)
CANDIDATES = (6, 12, 24)
MINIBATCHES = (1, 2, 3, 4)
JUDGES = ("vr_thinker", "unified_reward_flex")
ALGORITHMS: tuple[Algorithm, ...] = ("dancegrpo", "kvpo")
PAPER_SCHEMES = ("colocated", "async_reward", "async_train", "merged_replay", "stagebreaker")


@dataclasses.dataclass(frozen=True)
class Cell:
  """One setting.

  Attributes:
    algorithm: whose cost shape.
    judge: whose curve.
    frames: latent frames.
    candidates: of a step.
    minibatches: of a step.
  """

  algorithm: Algorithm
  judge: str
  frames: int
  candidates: int
  minibatches: int

  def shape(self) -> StepShape:
    """The cell's step.

    Raises:
      ValueError: if the cell cannot exist; the sentence says why.
    """
    return paper_shape(self.candidates, self.minibatches, self.frames, self.algorithm)


def cells() -> Iterator[Cell]:
  """Every cell, those that cannot exist included."""
  for made in itertools.product(ALGORITHMS, JUDGES, FRAMES, CANDIDATES, MINIBATCHES):
    yield Cell(*made)


def plan_cell(
  cell: Cell,
  scheme: Scheme,
  parameters: PaperCosts,
  *,
  actors: int = 4,
  rewards: int = 2,
  budget_s: float = 1.0,
) -> Plan:
  """Plans a scheme in a cell.

  Args:
    cell: one that can exist.
    scheme: the execution scheme.
    parameters: the paper's numbers.
    actors: actor workers.
    rewards: reward workers.
    budget_s: see `place.search`.
  """
  costs = paper_costs(parameters, cell.frames, cell.judge, cell.algorithm)
  slots = worker_slots(scheme, actors, rewards)
  # KVPO replays in another context than it generates in, and has a reference: it cannot fuse.
  fused = 0 if cell.algorithm == "kvpo" else None
  return search(cell.shape(), scheme, slots, costs, budget_s=budget_s, fused=fused)


def without(scheme: Scheme, choice: str) -> Scheme:
  """A scheme that may not make one of its choices, to show what the choice gains.

  Raises:
    ValueError: if the scheme has no such choice.
  """
  if choice not in scheme.plan_space:
    raise ValueError(f"scheme {scheme.name} does not choose {choice!r}")
  return dataclasses.replace(scheme, plan_space=scheme.plan_space - {choice})


def all_schemes() -> tuple[Scheme, ...]:
  """Every scheme, the paper's first."""
  last = tuple(s for name, s in SCHEMES.items() if name not in PAPER_SCHEMES)
  return tuple(SCHEMES[name] for name in PAPER_SCHEMES) + last
