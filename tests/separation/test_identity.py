"""Merged replay, two-pass replay and full autograd give one gradient, for every objective.

A toy chunked policy in float64: a small nonlinear network with a low-rank adapter and a carried
context that no gradient enters, real transitions and real channels.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sbjax.algorithms import objectives
from sbjax.algorithms.transitions import SDE, DanceSDE, Renoise
from sbjax.separation.channels import Point
from sbjax.separation.objective import Batch

CHUNKS, SIGMAS, SHAPE, SIZE = 3, (1.0, 0.9, 0.7, 0.4), (2, 1, 2, 2), 8
STEPS = len(SIGMAS) - 1
CANDIDATES, GROUPS, MINIBATCH = 6, np.repeat([0, 1], 3), 3
_WEIGHTS = np.random.default_rng(7).normal(size=(2 * SIZE + 1, 12)) / 4
_OUTPUT = np.random.default_rng(8).normal(size=(12, SIZE)) / 3


@jax.jit
def _network(theta, x, cache, sigma):
  joined = jnp.concatenate([x.reshape(-1), cache, sigma[None]])
  first = jnp.asarray(_WEIGHTS) + theta["a"] @ theta["b"]
  return (jnp.tanh(joined @ first) @ jnp.asarray(_OUTPUT)).reshape(SHAPE)


@jax.jit
def _context(theta, cache, clean):
  seen = _network(theta, clean, cache, jnp.zeros(()))
  return jax.lax.stop_gradient(0.5 * cache + jnp.tanh(seen.reshape(-1)))


def _adapter(seed, scale):
  rng = np.random.default_rng(seed)
  return {
    "a": jnp.asarray(scale * rng.normal(size=(2 * SIZE + 1, 2))),
    "b": jnp.asarray(scale * rng.normal(size=(2, 12))),
  }


@functools.cache
def _pieces(channels, statistics, transition):
  """Jitted scalars, gradients and weighted gradient of one chunk and step; shared by the cases."""

  @jax.jit
  def scalars(theta, cache, point):
    velocity = _network(theta, point.x, jax.lax.stop_gradient(cache), point.timestep)
    fixed = jax.lax.stop_gradient(velocity)
    extra = [fn(point, fixed, transition) for fn in statistics]
    values = jnp.stack([fn(point, velocity, transition) for fn in channels])
    return values, jnp.stack(extra) if extra else jnp.zeros((0,))

  def total(theta, cache, point, weights):
    return scalars(theta, cache, point)[0] @ weights

  return scalars, jax.jit(jax.jacrev(lambda *args: scalars(*args)[0])), jax.jit(jax.grad(total))


@dataclasses.dataclass(frozen=True)
class Toy:
  """An objective, its transition, and trajectories made by the initial adapter."""

  objective: object
  transition: object
  points: list  # [candidate][chunk][step]
  clean: list  # [candidate][chunk]

  @property
  def _made(self):
    made, objective = self.objective.functions, self.objective
    channels = tuple(made[n] for n in objective.channels)
    return channels, tuple(made[n] for n in objective.statistics), self.transition

  @property
  def piece(self):
    """(theta, cache, point) -> (channels [J], statistics [S]) of one chunk and step."""
    return _pieces(*self._made)[0]

  @property
  def pullbacks(self):
    """The gradient of every channel of a piece."""
    return _pieces(*self._made)[1]

  @property
  def weighted(self):
    """The gradient of a weighted sum of a piece's channels."""
    return _pieces(*self._made)[2]

  def unit(self, step):
    """Which unit a denoising step belongs to."""
    return step if self.objective.unit == "step" else 0

  @property
  def units(self):
    """Units of a candidate."""
    return STEPS if self.objective.unit == "step" else 1

  def walk(self, theta, candidate):
    """Yields (step, cache, point) in replay order; the context is rebuilt under theta."""
    cache = jnp.zeros(SIZE)
    for chunk in range(CHUNKS):
      for step in range(STEPS):
        yield step, cache, self.points[candidate][chunk][step]
      cache = _context(theta, cache, self.clean[candidate][chunk])

  def scalars(self, theta, candidate):
    """Channels [U, J] and statistics [U, S] of a candidate, summed over chunks."""
    channels, statistics = [0.0] * self.units, [0.0] * self.units
    for step, cache, point in self.walk(theta, candidate):
      values, seen = self.piece(theta, cache, point)
      channels[self.unit(step)] += values
      statistics[self.unit(step)] += seen
    return jnp.stack(channels), jnp.stack(statistics)


@functools.cache
def _rollout(transition, forward, branches):
  """Rolls out and records points with the rollout's and the reference's predictions."""
  theta, reference = _adapter(0, 0.4), _adapter(1, 0.4)
  rng = np.random.default_rng(3)
  points, cleans = [], []
  for _ in range(CANDIDATES):
    cache, ref_cache = jnp.zeros(SIZE), jnp.zeros(SIZE)
    per_chunk, clean_chunks = [], []
    for _ in range(CHUNKS):
      x, trajectory = jnp.asarray(rng.normal(size=SHAPE)), []
      for k in range(STEPS):
        sigma, after = jnp.asarray(SIGMAS[k]), jnp.asarray(SIGMAS[k + 1])
        velocity = _network(theta, x, cache, sigma)
        other = _network(reference, x, ref_cache, sigma)
        mean, std = transition.step(x, velocity, sigma, after)
        following = mean + std * jnp.asarray(rng.normal(size=SHAPE))
        ref_mean, _ = transition.step(x, other, sigma, after)
        # KVPO's branches are rolled out in another context than they are replayed in.
        anchor = mean + 0.3 * rng.normal(size=SHAPE) if branches else mean
        trajectory.append(Point(x, sigma, sigma, after, following, anchor, ref_mean))
        x = following
      clean = x - SIGMAS[-1] * _network(theta, x, cache, jnp.asarray(SIGMAS[-1]))
      if forward:
        trajectory = []
        for k in range(STEPS):
          sigma = jnp.asarray(SIGMAS[k])
          noised = (1 - sigma) * clean + sigma * jnp.asarray(rng.normal(size=SHAPE))
          old = _network(theta, noised, cache, sigma)
          ref = _network(reference, noised, ref_cache, sigma)
          trajectory.append(Point(noised, sigma, sigma, sigma, clean, old, ref))
      per_chunk.append(trajectory)
      clean_chunks.append(clean)
      cache, ref_cache = _context(theta, cache, clean), _context(reference, ref_cache, clean)
    points.append(per_chunk)
    cleans.append(clean_chunks)
  return points, cleans


def _batch(toy, old, members, advantages, valid, channels, statistics):
  return Batch(
    channels=channels,
    old=old[members],
    statistics=statistics,
    advantages=advantages[members],
    valid=valid[members],
    group=GROUPS[members],
    normaliser=float(len(members) * toy.units),
  )


def _stacked(toy, theta, members):
  pairs = [toy.scalars(theta, n) for n in members]
  return jnp.stack([c for c, _ in pairs]), jnp.stack([s for _, s in pairs])


def _autograd(toy, theta, make_batch, members):
  def loss(adapter):
    channels, statistics = _stacked(toy, adapter, members)
    return toy.objective.loss(make_batch(channels, jax.lax.stop_gradient(statistics)))

  return jax.grad(loss)(theta)


def _merged(toy, theta, make_batch, members):
  """One pass: unit gradients, folded by early weights; the rewards come in at the very end."""
  channels, statistics, folded = [], [], []
  for n in members:
    values, seen = toy.scalars(theta, n)
    gradients = [[0.0] * len(toy.objective.channels) for _ in range(toy.units)]
    for step, cache, point in toy.walk(theta, n):
      pulled = toy.pullbacks(theta, cache, point)
      for j in range(len(toy.objective.channels)):
        row = gradients[toy.unit(step)]
        part = jax.tree.map(lambda g, j=j: g[j], pulled)
        row[j] = part if row[j] == 0.0 else jax.tree.map(jnp.add, row[j], part)
    old = np.asarray(make_batch(None, None).old)[list(members).index(n)]
    early = toy.objective.early(np.asarray(values), old, np.asarray(seen))
    assert early.shape[0] == toy.objective.buffers(toy.units)
    buffers = [
      jax.tree.map(
        lambda *g, b=b, early=early: sum(
          early[b, u, j] * g[u * len(toy.objective.channels) + j]
          for u in range(toy.units)
          for j in range(len(toy.objective.channels))
        ),
        *[g for row in gradients for g in row],
      )
      for b in range(early.shape[0])
    ]
    folded.append(buffers)
    channels.append(values)
    statistics.append(seen)
  late = toy.objective.late(make_batch(np.stack(channels), np.stack(statistics)))
  parts = [(late[i, b], folded[i][b]) for i in range(len(members)) for b in range(late.shape[1])]
  return jax.tree.map(
    lambda *g: sum(w * x for (w, _), x in zip(parts, g, strict=True)), *[p[1] for p in parts]
  )


def _two_pass(toy, theta, make_batch, members):
  """Scalars first, then one weighted backward pass."""
  channels, statistics = (np.asarray(v) for v in _stacked(toy, theta, members))
  batch = make_batch(channels, statistics)
  late, total = toy.objective.late(batch), None
  for i, n in enumerate(members):
    early = toy.objective.early(channels[i], batch.old[i], statistics[i])
    weights = np.einsum("buj,b->uj", early, late[i])
    for step, cache, point in toy.walk(theta, n):
      part = toy.weighted(theta, cache, point, jnp.asarray(weights[toy.unit(step)]))
      total = part if total is None else jax.tree.map(jnp.add, total, part)
  return total


def _distance(left, right):
  left, right = (np.concatenate([np.ravel(v) for v in jax.tree.leaves(t)]) for t in (left, right))
  return np.linalg.norm(left - right) / np.linalg.norm(right)


_make = objectives.objective
CASES = {
  "clipped": (_make("clipped", clip_low=0.05, clip_high=0.05), Renoise()),
  "clipped, sum over dimensions": (
    _make("clipped", clip_low=0.2, clip_high=0.3),
    DanceSDE(dim_reduce="sum"),
  ),
  "dual clip": (_make("clipped", clip_low=0.02, clip_high=0.04, dual_clip=1.06), DanceSDE()),
  "two rewards": (
    _make("clipped", clip_low=0.05, clip_high=0.08, reward_weights=(1.0, 0.5)),
    Renoise(),
  ),
  "kl": (_make("clipped", clip_low=0.05, clip_high=0.05, kl_coef=0.3), Renoise()),
  "flow-grpo kl": (
    _make("clipped", clip_low=0.05, clip_high=0.05, kl_coef=0.3, kl_channel="kl_flow_grpo"),
    SDE(),
  ),
  "guard": (_make("guard", clip_low=0.02, clip_high=0.02), SDE()),
  "dppo": (_make("dppo", kl_mask_threshold=0.02), SDE()),
  "gspo": (_make("gspo", steps=STEPS, clip_low=0.02, clip_high=0.02), Renoise()),
  "fpo": (_make("fpo", clip_low=0.02, clip_high=0.03), Renoise()),
  "nft": (_make("nft"), Renoise()),
  "nft with reference": (_make("nft", mix_beta=0.1, ref_kl_coef=0.2), Renoise()),
  "kvpo": (_make("kvpo"), Renoise()),
  "kvpo without kl, gradient in the noisy steps": (
    _make("kvpo", kl_coef=0.0, grad_sigma_min=0.8),
    Renoise(),
  ),
}
_SOURCE = CASES["clipped"][0]
CASES["identity"] = (
  objectives.IdentityObjective(name="identity", loss_fn=_SOURCE.loss),
  Renoise(),
)


def _setting(name):
  objective, transition = CASES[name]
  theta = _adapter(0, 0.4)
  forward, branches = objective.points == "forward", objective.name == "kvpo"
  toy = Toy(objective, transition, *_rollout(transition, forward, branches))
  old = np.stack([toy.scalars(theta, n)[0] for n in range(CANDIDATES)])
  columns = len(getattr(objective, "reward_weights", (1.0,)))
  advantages = np.random.default_rng(5).normal(size=(CANDIDATES, columns))
  advantages[1] = 0.0  # a tie
  advantages[3], advantages[4] = np.abs(advantages[3]), -np.abs(advantages[4])
  valid = np.ones(CANDIDATES, bool)
  valid[5] = False  # a failed reward
  advantages[5] = np.nan
  return toy, theta, old, advantages, valid


@pytest.mark.parametrize("name", CASES)
def test_three_ways_to_the_gradient_agree_over_two_minibatches(name):
  with jax.enable_x64(True):
    toy, theta, old, advantages, valid = _setting(name)
    cut = []
    for first in range(0, CANDIDATES, MINIBATCH):
      members = list(range(first, first + MINIBATCH))
      make = functools.partial(_batch, toy, old, members, advantages, valid)
      autograd = _autograd(toy, theta, make, members)
      merged = _merged(toy, theta, make, members)
      assert _distance(merged, autograd) <= 1e-12
      assert _distance(_two_pass(toy, theta, make, members), autograd) <= 1e-12
      channels, statistics = (np.asarray(v) for v in _stacked(toy, theta, members))
      cut.append(toy.objective.metrics(make(channels, statistics)).get("actor/pg_clipfrac"))
      # The policy moves between the mini-batches, far enough for ratios to leave their bounds.
      size = math.sqrt(sum(float(jnp.sum(g**2)) for g in jax.tree.leaves(merged)))
      theta = jax.tree.map(lambda p, g, s=size: p - 0.6 * g / s, theta, merged)
    if cut[0] is not None and not name.startswith("kvpo"):
      assert cut[0] == 0.0  # the first mini-batch is on policy
      assert 0.0 < cut[1] < 1.0  # the second has units inside and outside


@pytest.mark.parametrize("name", ["kl", "gspo", "guard", "two rewards"])
def test_one_buffer_is_enough_where_the_ratio_is_known_to_be_one(name):
  with jax.enable_x64(True):
    toy, theta, old, advantages, valid = _setting(name)
    known = dataclasses.replace(toy, objective=dataclasses.replace(toy.objective, on_policy=True))
    members = list(range(MINIBATCH))
    make = functools.partial(_batch, toy, old, members, advantages, valid)
    general = _autograd(toy, theta, make, members)
    for way in (_merged, _two_pass, _autograd):
      assert _distance(way(known, theta, make, members), general) <= 1e-12
    assert known.objective.buffers(toy.units) == toy.objective.buffers(toy.units) - 1
    blind = np.full((toy.units, len(toy.objective.channels)), np.nan)
    _, statistics = toy.scalars(theta, 0)
    # No score is looked at: gradients may be folded while they are taken.
    assert np.isfinite(known.objective.early(blind, blind, np.asarray(statistics))).all()


def _bound_at(log_ratio):
  """A clip range whose bound is this log-ratio to the last bit."""
  bound = abs(math.expm1(log_ratio))
  for _ in range(200):
    got = math.log1p(math.copysign(bound, log_ratio))
    if got == log_ratio:
      return bound
    bound = math.nextafter(bound, math.inf if abs(got) < abs(log_ratio) else 0.0)
  raise AssertionError(f"no clip range has its bound at {log_ratio!r}")


def test_a_ratio_exactly_on_a_bound_keeps_its_whole_gradient():
  with jax.enable_x64(True):
    toy, theta, old, advantages, valid = _setting("clipped")
    theta = jax.tree.map(lambda p, q: p + 0.05 * q, theta, _adapter(9, 1.0))
    members = list(range(CANDIDATES))
    channels, statistics = (np.asarray(v) for v in _stacked(toy, theta, members))
    log_ratio = (channels - old)[..., 0]
    down = np.unravel_index(np.argmin(log_ratio), log_ratio.shape)
    others = np.arange(CANDIDATES)[:, None] != down[0]
    up = np.unravel_index(np.argmax(np.where(others, log_ratio, -1)), log_ratio.shape)
    assert log_ratio[up] > 0 > log_ratio[down]
    advantages = np.ones_like(advantages)
    advantages[down[0]] = -1.0
    valid = np.ones_like(valid)
    high, low = _bound_at(log_ratio[up]), _bound_at(log_ratio[down])
    gradients = {}
    for edge in ("on", "inside high", "inside low"):
      objective = objectives.Clipped(
        clip_high=math.nextafter(high, 0) * (1 - 1e-15) if edge == "inside high" else high,
        clip_low=math.nextafter(low, 0) * (1 - 1e-15) if edge == "inside low" else low,
      )
      at = dataclasses.replace(toy, objective=objective)
      make = functools.partial(_batch, at, old, members, advantages, valid)
      autograd = _autograd(at, theta, make, members)
      assert _distance(_merged(at, theta, make, members), autograd) <= 1e-12
      assert _distance(_two_pass(at, theta, make, members), autograd) <= 1e-12
      gradients[edge] = objectives.gradient(objective.loss, make(channels, statistics))
    # One step beyond the bound the unit is gone; on it, it counts in full.
    count = CANDIDATES * toy.units
    for unit, edge in ((up, "inside high"), (down, "inside low")):
      full = -advantages[unit[0], 0] * math.exp(log_ratio[unit]) / count
      np.testing.assert_allclose(gradients["on"][unit][0], full, rtol=1e-14)
      assert gradients[edge][unit][0] == 0.0
