"""Does a loss separate from its rewards, and into how many buffers?

For a loss over scalars, the coefficient of a unit's gradient is c = ∂L/∂channel. Write a
candidate's coefficients as a matrix with a row per choice of all rewards and a column per choice of
its scalars. It has rank B exactly if c = Σ_b early_b(scalars) late_b(rewards): then B buffers are
enough, and B pretended rewards give the early weights (StageBreaker §4.2, generalised). The checker
samples that matrix in float64, factors it, and confirms the factors on new samples against autodiff
of the loss through a small model.
"""

import dataclasses
import textwrap
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from sbjax.separation.factor import Skeleton, name_of, rank_of, skeleton_of
from sbjax.separation.objective import Batch, Objective
from sbjax.separation.structure import structure

Loss = Callable[..., Any]
"""(channels [N, U, J], old [N, U, J], statistics [N, U, S], advantages [N] or [N, M]) -> scalar."""

_PARAMETERS = 11


@dataclasses.dataclass(frozen=True)
class Sizes:
  """How large a mini-batch the checker makes up.

  Attributes:
    candidates: N, at least 2.
    units: U per candidate.
    channels: J per unit, the score first.
    statistics: S per unit.
    rewards: M; with one, the loss gets advantages [N], else [N, M].
  """

  candidates: int = 4
  units: int = 5
  channels: int = 1
  statistics: int = 0
  rewards: int = 1

  def __post_init__(self) -> None:
    """Raises ValueError for sizes that no mini-batch has."""
    for field, least in (("candidates", 2), ("units", 1), ("channels", 1), ("rewards", 1)):
      if getattr(self, field) < least:
        raise ValueError(f"{field} is {getattr(self, field)}; use at least {least}.")
    if self.statistics < 0:
      raise ValueError(f"statistics is {self.statistics}; use 0 or more.")


@dataclasses.dataclass(frozen=True)
class Separation:
  """What the checker found.

  Attributes:
    kind: `strict`, early weights need the candidate's own scalars and late ones the rewards only;
      `coupled`, the late ones need scalars as well, often those of other candidates; `identity`, a
      buffer per unit and channel is needed.
    buffers: B per candidate.
    form: the name of the form, where it has one, or what the late coefficients are.
    scores_coupled: whether a candidate's coefficients depend on other candidates' scalars.
    rewards_coupled: whether they depend on other candidates' rewards.
    max_relative_error: of Σ coefficient x gradient in this form against autodiff through the model.
    draws: how many mini-batches that maximum is over.
    notes: what else a user should know.
    sizes: the sizes it was found with.
  """

  kind: Literal["strict", "coupled", "identity"]
  buffers: int
  form: str
  scores_coupled: bool
  rewards_coupled: bool
  max_relative_error: float
  draws: int
  notes: tuple[str, ...]
  sizes: Sizes

  def text(self) -> str:
    """Gives the report as a person reads it."""
    verdict = {
      "strict": "yes: early weights need neither rewards nor other candidates",
      "coupled": "not strictly: late coefficients need scores as well as rewards",
      "identity": "no compressed form: one buffer per unit and channel, coefficients by autodiff",
    }[self.kind]
    full = self.sizes.units * self.sizes.channels
    coupled = {"scores": self.scores_coupled, "rewards": self.rewards_coupled}
    named = " and ".join(what for what, is_coupled in coupled.items() if is_coupled)
    others = f", and other candidates' {named}" if named else " only"
    lines = [
      ("separates", verdict),
      ("buffers", f"{self.buffers} per candidate (one per unit and channel would be {full})"),
      ("form", self.form),
      ("depends on", f"own scores and reward{others}"),
      (
        "check",
        f"{self.max_relative_error:.1e} relative to autodiff through a toy model, at most, "
        f"in {self.draws} mini-batches",
      ),
      *(("note", note) for note in self.notes),
    ]
    indent = " " * 11
    return "\n".join(
      textwrap.fill(line, 100, initial_indent=f"{key:<11}", subsequent_indent=indent)
      for key, line in lines
    )


@dataclasses.dataclass(frozen=True)
class _Scalars:
  """Everything of a mini-batch but the rewards."""

  channels: np.ndarray
  old: np.ndarray
  statistics: np.ndarray


@dataclasses.dataclass(frozen=True)
class _Probe:
  """A loss, its coefficients as a function of scalars and rewards, and the samples to use."""

  loss: Loss
  coefficients: Callable[[_Scalars, np.ndarray], np.ndarray]
  rewards: list[np.ndarray]
  scalars: list[_Scalars]
  sizes: Sizes


def as_loss(objective: Objective, rewards: int = 1) -> Loss:
  """Gives an objective's loss as a plain function, all candidates valid and of one group."""

  def loss(channels: Any, old: Any, statistics: Any, advantages: Any) -> Any:
    count = channels.shape[0]
    columns: Any = np.reshape(advantages, (count, rewards))
    return objective.loss(
      Batch(
        channels=channels,
        old=old,
        statistics=statistics,
        advantages=columns,
        valid=np.ones(count, bool),
        group=np.zeros(count, int),
        normaliser=float(count * channels.shape[1]),
      )
    )

  return loss


def _draw_scalars(rng: np.random.Generator, sizes: Sizes, index: int) -> _Scalars:
  """Draws scores near their old values, from on policy to far beyond any clip range.

  Every other set is far off throughout: close to on policy, units look more alike than they are.
  """
  shape = (sizes.candidates, sizes.units, sizes.channels)
  old = rng.normal(size=shape)
  # Log-uniform per unit, so that some lie inside and some outside a clip range of any size.
  spread = 10.0 ** rng.uniform(-6, 0, size=shape) * rng.choice([-1.0, 1.0], size=shape)
  if index % 2:
    spread = rng.normal(size=shape)
  statistics = 10.0 ** rng.uniform(-6, 0, size=(*shape[:2], sizes.statistics))
  return _Scalars(old + spread, old, statistics)


def _draw_rewards(rng: np.random.Generator, sizes: Sizes, index: int) -> np.ndarray:
  """Draws advantages; every fourth set has ties at zero, every fifth one sign only."""
  shape = (sizes.candidates,) if sizes.rewards == 1 else (sizes.candidates, sizes.rewards)
  drawn = np.clip(rng.normal(size=shape), -2.4, 2.4)
  if index % 4 == 3:
    drawn = np.where(rng.random(shape) < 0.4, 0.0, drawn)
  if index % 5 == 4:
    drawn = np.abs(drawn) * rng.choice([-1.0, 1.0])
  return drawn


def _mixed(own: _Scalars, others: _Scalars, candidate: int) -> _Scalars:
  """Takes one candidate's scalars from `own` and everybody else's from `others`."""
  parts = []
  for mine, theirs in zip(_arrays(own), _arrays(others), strict=True):
    both = theirs.copy()
    both[candidate] = mine[candidate]
    parts.append(both)
  return _Scalars(*parts)


def _arrays(scalars: _Scalars) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  return scalars.channels, scalars.old, scalars.statistics


def _shape_text(shape: Any) -> str:
  """Names what a loss returned instead of a scalar."""
  got = getattr(shape, "shape", None)
  return type(shape).__name__ if got is None else f"an array of shape {got}"


def _make_probe(loss: Loss, sizes: Sizes, seed: int) -> tuple[_Probe, tuple[str, ...]]:
  """Builds the coefficient function, compiled where the loss can be traced in the rewards."""
  rng = np.random.default_rng(seed)
  example, reward = _draw_scalars(rng, sizes, 0), _draw_rewards(rng, sizes, 0)
  args = tuple(jnp.asarray(a) for a in (*_arrays(example), reward))
  gradient = jax.grad(loss)
  try:
    shape = jax.eval_shape(loss, *args)
    notes, compiled = structure(loss, *args).notes(), jax.jit(gradient)
    n_rewards, n_scalars = 32, 8
  except jax.errors.TracerArrayConversionError:
    # Rewards are read by numpy: evaluate step by step, on fewer samples.
    shape, compiled = jax.eval_shape(lambda c: loss(c, *args[1:3], reward), args[0]), gradient
    notes = ("the loss reads rewards outside JAX, so its use of them was not traced",)
    n_rewards, n_scalars = 16, 5
  if getattr(shape, "shape", None) != ():
    raise ValueError(f"the loss returns {_shape_text(shape)}; it must return one scalar.")
  if shape.dtype != jnp.float64:
    raise ValueError(
      f"the loss returns {shape.dtype} for float64 arguments; keep the dtype of the arguments."
    )

  def coefficients(scalars: _Scalars, rewards: np.ndarray) -> np.ndarray:
    got = np.asarray(compiled(*(jnp.asarray(a) for a in _arrays(scalars)), rewards))
    if not np.isfinite(got).all():
      raise ValueError("the loss has a non-finite gradient at sampled scores; guard its divisions.")
    return got.reshape(sizes.candidates, -1)

  return (
    _Probe(
      loss,
      coefficients,
      [_draw_rewards(rng, sizes, i) for i in range(n_rewards)],
      [_draw_scalars(rng, sizes, i) for i in range(n_scalars)],
      sizes,
    ),
    notes,
  )


def _table(probe: _Probe) -> np.ndarray:
  """Coefficients [rewards, scalars, candidates, units x channels] over all samples."""
  return np.stack([[probe.coefficients(x, a) for x in probe.scalars] for a in probe.rewards])


def _coupling(probe: _Probe) -> tuple[bool, bool]:
  """Tells whether a candidate's coefficients change with other candidates' scalars and rewards."""
  scores = rewards = False
  for index in range(min(len(probe.scalars), 4) - 1):
    x, y = probe.scalars[index], probe.scalars[index + 1]
    a, b = probe.rewards[index], probe.rewards[index + 1]
    for n in range(probe.sizes.candidates):
      base = probe.coefficients(x, a)[n]
      scale = 1e-12 * max(np.abs(base).max(), 1e-30)
      scores |= bool(np.abs(probe.coefficients(_mixed(x, y, n), a)[n] - base).max() > scale)
      other = b.copy()
      other[n] = a[n]
      rewards |= bool(np.abs(probe.coefficients(x, other)[n] - base).max() > scale)
  return scores, rewards


def _own_basis(probe: _Probe, scalars: _Scalars, candidate: int) -> np.ndarray:
  """Spans a candidate's coefficients over all rewards and everybody else's scalars [B, U x J]."""
  rows = np.stack(
    [
      probe.coefficients(_mixed(scalars, others, candidate), a)[candidate]
      for others in probe.scalars[:3]
      for a in probe.rewards[:10]
    ]
  )
  rank, clear = rank_of(rows)
  if not clear:  # the coefficients fill the space, if thinly in some directions
    return np.eye(rows.shape[1])
  return np.linalg.svd(rows, full_matrices=False)[2][:rank]


def check_separation(
  loss: Loss | Objective, sizes: Sizes | None = None, *, seed: int = 0, draws: int = 8
) -> Separation:
  """Decides whether a loss separates, into how many buffers, and confirms it against autodiff.

  Args:
    loss: `loss(channels, old, statistics, advantages)` in jax.numpy, or an objective.
    sizes: sizes of the sampled mini-batches; for an objective, channels and statistics are its own
      and a candidate-wise one has one unit.
    seed: seed of the samples.
    draws: mini-batches on which the form is confirmed.

  Raises:
    ValueError: if the loss is no differentiable float64 scalar of the channels, or does not depend
      on them.
  """
  sizes = sizes or Sizes()
  if not callable(loss):
    sizes = dataclasses.replace(
      sizes,
      channels=len(loss.channels),
      statistics=len(loss.statistics),
      units=1 if loss.unit == "candidate" else sizes.units,
    )
    loss = as_loss(loss, sizes.rewards)
  with jax.enable_x64(True):
    probe, notes = _make_probe(loss, sizes, seed)
    table = _table(probe)
    if not table.any():
      raise ValueError("the loss does not depend on the channels; there is nothing to train.")
    scores_coupled, rewards_coupled = _coupling(probe)
    full, n_rewards = sizes.units * sizes.channels, len(probe.rewards)
    tables = [table[:, :, n].reshape(n_rewards, -1) for n in range(sizes.candidates)]
    ranks, clear = zip(*(rank_of(t) for t in tables), strict=True)
    kind: Literal["strict", "coupled", "identity"]
    form = "one buffer per unit and channel, late = gradient of the loss"
    if not scores_coupled and all(clear) and max(ranks) <= n_rewards // 2:
      kind, buffers = "strict", min(max(ranks), full)
      n = int(np.argmax(ranks))
      own = np.stack([a.reshape(sizes.candidates, -1)[n] for a in probe.rewards])
      form = name_of(tables[n], ranks[n], own)
    else:
      found = [len(_own_basis(probe, x, n)) for x in probe.scalars[:2] for n in (0, 1)]
      kind, buffers = ("coupled", max(found)) if max(found) < full else ("identity", full)
      if kind == "coupled":
        form = "early weights of a candidate's own scores, late from the scores and rewards of all"
      elif scores_coupled and full == 1:
        form = "one buffer per candidate, coefficients from the whole group's scores"
    skeletons = [skeleton_of(t, r) if r else None for t, r in zip(tables, ranks, strict=True)]
    error = max(
      _confirm(probe, kind, skeletons, np.random.default_rng((seed, draw + 1)), draw)
      for draw in range(draws)
    )
  return Separation(
    kind, buffers, form, scores_coupled, rewards_coupled, error, draws, notes, sizes
  )


def _confirm(
  probe: _Probe,
  kind: str,
  skeletons: list[Skeleton | None],
  rng: np.random.Generator,
  draw: int,
) -> float:
  """Relative error of the found form on new scalars and rewards, through a model of the scalars."""
  sizes, drawn = probe.sizes, _draw_scalars(rng, probe.sizes, draw)
  rewards = _draw_rewards(rng, sizes, draw)
  theta = jnp.asarray(rng.normal(size=_PARAMETERS))
  weights = jnp.asarray(rng.normal(size=(*drawn.channels.shape, _PARAMETERS)))
  shift = jnp.asarray(drawn.channels) - jnp.tanh(weights @ theta)

  def model(parameters: Any) -> Any:
    return jnp.tanh(weights @ parameters) + shift

  channels = np.asarray(model(theta))
  scalars = _Scalars(channels, drawn.old, drawn.statistics)
  pulled = np.asarray(jax.jacobian(model)(theta)).reshape(sizes.candidates, -1, _PARAMETERS)
  total = np.zeros(_PARAMETERS)
  for n in range(sizes.candidates):
    early, late = _factors(probe, kind, skeletons[n], scalars, rewards, n)
    total += late @ (early @ pulled[n])  # buffers first, rewards last

  def through(parameters: Any) -> Any:
    return probe.loss(
      model(parameters), jnp.asarray(drawn.old), jnp.asarray(drawn.statistics), rewards
    )

  truth = np.asarray(jax.grad(through)(theta))
  return float(np.linalg.norm(total - truth) / max(np.linalg.norm(truth), 1e-300))


def _factors(
  probe: _Probe,
  kind: str,
  skeleton: Skeleton | None,
  scalars: _Scalars,
  rewards: Float[np.ndarray, "..."],
  candidate: int,
) -> tuple[np.ndarray, np.ndarray]:
  """Early weights [B, U x J] and late coefficients [B] of a candidate in the found form."""
  full = probe.sizes.units * probe.sizes.channels
  if kind == "identity":
    return np.eye(full), probe.coefficients(scalars, rewards)[candidate]
  if kind == "coupled":
    early = _own_basis(probe, scalars, candidate)
    return early, early @ probe.coefficients(scalars, rewards)[candidate]
  if skeleton is None:
    return np.zeros((1, full)), np.zeros(1)
  early = np.stack(
    [probe.coefficients(scalars, probe.rewards[i])[candidate] for i in skeleton.rows]
  )
  pivots = [divmod(int(column), full) for column in skeleton.columns]
  late = np.array([probe.coefficients(probe.scalars[x], rewards)[candidate][u] for x, u in pivots])
  return early, late @ skeleton.inverse
