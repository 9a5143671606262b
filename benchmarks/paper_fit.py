"""The paper's setting fitted to its baselines, and its claims as ranges.

Free numbers, as many as targets: the forward replay, the seconds of one judgement, how many times
as long a colocated judge takes, and the speed of UnifiedReward-Flex. The first three follow from
VR-Thinker's three ratios alone, and all that is predicted for it follows from them. The third is
needed: `async_train` is as fast as `colocated` while `async_reward` waits, which no judge that is
equally fast in both gives. A constant price of exchanging policy and judge fits the three ratios as
well, but misses the paper's ranges by far at small batches. The fourth follows from the lowest
ratio of `async_train` (§5.2), read as that of DanceGRPO with the faster judge. Everything else is
fixed beforehand:

* a rollout with its decode is 1 s, 30 % of it decode (StageBreaker §5.5);
* reward and training are 75 % of a colocated step, the paper's largest share (§3.1), since
  VR-Thinker is its slowest judge; this sets the gradient replay;
* half of one judgement does not grow with its batch: writing is bound by memory, reading frames by
  compute. The paper gives no number, and the ratios are met with any;
* fusing replaces the rollout's forward passes by gradient passes, so it adds what a gradient replay
  takes beyond a forward replay.
"""

import dataclasses

import numpy as np

from sbjax.dataflow.paper import (
  Algorithm,
  JudgeCurve,
  PaperCosts,
  paper_costs,
  paper_shape,
)
from sbjax.dataflow.place import search
from sbjax.dataflow.plan import Plan, worker_slots
from sbjax.dataflow.schemes import scheme as scheme_of

ACTORS, REWARDS = 4, 2
ROLLOUT_SHARE = 0.25
"""Of a colocated step."""

BATCH_SHARE = 0.5
"""The part of one judgement that every further video of a batch adds."""

FREE = ("forward_s", "judgement_s", "colocated_judging", "flex")
"""`flex` is UnifiedReward-Flex's seconds relative to VR-Thinker's."""


@dataclasses.dataclass(frozen=True)
class Cell:
  """One of the paper's settings.

  Attributes:
    algorithm: DanceGRPO or KVPO.
    judge: which judge.
    frames: latent frames.
    candidates: of a step.
    minibatches: of a step.
    resolution: 480p or 360p.
    model: size of the video model.
  """

  algorithm: Algorithm = "dancegrpo"
  judge: str = "vr_thinker"
  frames: int = 21
  candidates: int = 24
  minibatches: int = 2
  resolution: str = "480p"
  model: str = "1.3B"


def plan_of(
  cell: Cell, scheme: str, costs: PaperCosts, fused: int | None = None, budget_s: float = 1.0
) -> Plan:
  """Plans a scheme in a cell on 4 + 2 devices; `fused` and `budget_s` are those of the search.

  Raises:
    ValueError: the cell cannot exist.
  """
  shape = paper_shape(cell.candidates, cell.minibatches, cell.frames, cell.algorithm)
  how = scheme_of(scheme)
  by_kind = paper_costs(costs, cell.frames, cell.judge, cell.algorithm, cell.resolution, cell.model)
  slots = worker_slots(how, ACTORS, REWARDS)
  return search(shape, how, slots, by_kind, fused=fused, budget_s=budget_s)


def step_s(cell: Cell, scheme: str, costs: PaperCosts) -> float:
  """Simulated seconds of a planned step."""
  simulated_s = plan_of(cell, scheme, costs).simulated_s
  assert simulated_s is not None
  return simulated_s


@dataclasses.dataclass(frozen=True)
class Target:
  """A scheme's speed relative to `colocated`.

  Attributes:
    scheme: which.
    cell: its setting.
    speed: the paper's.
  """

  scheme: str
  cell: Cell
  speed: float

  def reached(self, costs: PaperCosts) -> float:
    """The speed with these costs."""
    return step_s(self.cell, "colocated", costs) / step_s(self.cell, self.scheme, costs)


FLEX_CELL = Cell(judge="unified_reward_flex", candidates=12)
TARGETS = (
  Target("async_reward", Cell(), 0.78),
  Target("async_train", Cell(), 1.00),
  Target("merged_replay", Cell(), 1.13),
  Target("async_train", FLEX_CELL, 0.79),
)
"""§5.2 and §5.5."""

FLEX_CLAIMS = (
  Target("async_reward", FLEX_CELL, 0.71),
  Target("merged_replay", FLEX_CELL, 0.90),
  Target("stagebreaker", FLEX_CELL, 1.19),
)
"""The lowest of the others (§5.2). Nothing is fitted to them: they tell whether it is right to read
the lowest ratio of `async_train` as this cell's."""


def costs_of(
  forward_s: float,
  judgement_s: float,
  colocated_judging: float,
  flex: float,
  backward_s: float,
  share: float = BATCH_SHARE,
) -> PaperCosts:
  """The paper's costs from the free numbers, the gradient replay and the batch share."""
  judges = {
    name: JudgeCurve(judgement_s * times * (1.0 - share), judgement_s * times * share)
    for name, times in (("vr_thinker", 1.0), ("unified_reward_flex", flex))
  }
  return PaperCosts(
    forward_s=forward_s,
    backward_s=backward_s,
    fused_s=backward_s - forward_s,
    judges=judges,
    colocated_judging=colocated_judging,
  )


@dataclasses.dataclass(frozen=True)
class Fit:
  """The fitted setting.

  Attributes:
    costs: all numbers.
    free: the fitted ones by name; seconds are rollouts.
    reached: the speed of each target.
    rollout_share: of the colocated step.
  """

  costs: PaperCosts
  free: dict[str, float]
  reached: tuple[float, ...]
  rollout_share: float


def fit(rollout_share: float = ROLLOUT_SHARE, batch_share: float = BATCH_SHARE) -> Fit:
  """Solves for the free numbers and the gradient replay by Newton's method.

  Args:
    rollout_share: of a colocated step; fixed by the paper's text.
    batch_share: what a further video adds to a batch, as a share of one judgement.

  Raises:
    RuntimeError: it does not converge.
  """
  x = np.array([0.35, 0.9, 2.5, 0.7, 1.6])

  def residuals(at: np.ndarray) -> np.ndarray:
    reached, share = _reached(costs_of(*at, share=batch_share))
    off = [at - target.speed for at, target in zip(reached, TARGETS, strict=True)]
    return np.array([*off, share - rollout_share])

  for _ in range(20):
    now = residuals(x)
    if np.abs(now).max() < 1e-5:
      costs = costs_of(*x, share=batch_share)
      reached, share = _reached(costs)
      return Fit(costs, dict(zip(FREE, map(float, x[:4]), strict=True)), reached, share)
    steps = 1e-3 * np.eye(len(x))
    slope = np.stack([(residuals(x + step) - now) / 1e-3 for step in steps], axis=1)
    # Simulated time has kinks, at which the matrix is singular.
    move = np.linalg.lstsq(slope, -now, rcond=1e-6)[0]
    size = 1.0
    while size > 0.05 and np.abs(residuals(_inside(x + size * move))).max() > np.abs(now).max():
      size /= 2
    x = _inside(x + size * move)
  raise RuntimeError(f"the fit ends at {x} with residuals {residuals(x)}")


def _inside(x: np.ndarray) -> np.ndarray:
  return np.maximum(x, 1e-3)


def _reached(costs: PaperCosts) -> tuple[tuple[float, ...], float]:
  rollouts = Cell().candidates / (ACTORS + REWARDS)
  share = rollouts * (costs.generate_s + costs.decode_s) / step_s(Cell(), "colocated", costs)
  return tuple(target.reached(costs) for target in TARGETS), share


@dataclasses.dataclass(frozen=True)
class Claim:
  """A range that the paper reports.

  Attributes:
    name: what varies.
    cells: its settings.
    other: the scheme that `stagebreaker` is compared with.
    low: the paper's smallest speed-up.
    high: its largest.
  """

  name: str
  cells: tuple[Cell, ...]
  other: str
  low: float
  high: float


_JUDGES = ("vr_thinker", "unified_reward_flex")
_DANCE = tuple(Cell("dancegrpo", judge, 21, 12) for judge in _JUDGES)
_KVPO = tuple(Cell("kvpo", judge, 33, 12) for judge in _JUDGES)


def _vary(cells: tuple[Cell, ...], **fields: tuple) -> tuple[Cell, ...]:
  ((name, values),) = fields.items()
  return tuple(dataclasses.replace(cell, **{name: value}) for cell in cells for value in values)


def claims() -> tuple[Claim, ...]:
  """The ranges of §5.2 and §5.3."""
  lengths = _vary(_DANCE + _KVPO, frames=(21, 33, 45))
  small = _vary(_vary(_DANCE, frames=(21, 33, 45)), resolution=("360p",))
  large = _vary(_DANCE, frames=(21, 33, 45))
  sizes = (6, 12, 24)

  def of(cells: tuple[Cell, ...], judge: str) -> tuple[Cell, ...]:
    return tuple(cell for cell in cells if cell.judge == judge)

  many = _vary(_vary(_DANCE, candidates=(24,)), minibatches=(1, 2, 3, 4))
  many += _vary(_KVPO, minibatches=(1, 2, 3, 4))
  return (
    Claim("defaults", _DANCE + _KVPO, "colocated", 1.19, 1.32),
    Claim("defaults", _DANCE + _KVPO, "async_reward", 1.62, 1.76),
    Claim("length", lengths, "colocated", 1.05, 1.32),
    Claim("length", lengths, "async_reward", 1.48, 1.76),
    Claim("length, VR-Thinker", of(lengths, "vr_thinker"), "colocated", 1.17, 1.32),
    Claim("length, UR-Flex", of(lengths, "unified_reward_flex"), "colocated", 1.05, 1.27),
    Claim("batch, DanceGRPO", _vary(_DANCE, candidates=sizes), "colocated", 1.19, 1.41),
    Claim("batch, KVPO", _vary(_KVPO, candidates=sizes), "colocated", 1.12, 1.31),
    Claim("batch", _vary(_DANCE + _KVPO, candidates=sizes), "async_reward", 1.46, 1.79),
    Claim("DanceGRPO, 24", _vary(_DANCE, candidates=(24,)), "colocated", 1.25, 1.41),
    Claim("360p", small, "colocated", 1.13, 1.30),
    Claim("480p", large, "colocated", 1.05, 1.32),
    Claim("360p, UR-Flex", of(small, "unified_reward_flex"), "colocated", 1.13, 1.24),
    Claim("mini-batches", many, "colocated", 1.11, 1.41),
    Claim("5B, KVPO", _vary(_KVPO, model=("5B",)), "colocated", 1.13, 1.21),
  )
