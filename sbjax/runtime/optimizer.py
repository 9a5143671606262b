"""The optimizer step on the flat adapter, with clipping of the combined gradient and EMA."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Float

from sbjax.settings import SettingsOptim

Flat = Float[np.ndarray, " parameters"]


@dataclasses.dataclass(frozen=True)
class Outcome:
  """What an update gives.

  Attributes:
    adapter: the new adapter, or the old one where the update was skipped.
    ema: its moving average.
    optimizer: leaves of the optimizer's state.
    gradient: the combined gradient before clipping, for comparisons between schemes.
    scalars: grad_norm, lr, skipped, not_finite.
  """

  adapter: Flat
  ema: Flat
  optimizer: tuple[np.ndarray, ...]
  gradient: Flat
  scalars: dict[str, Any]


def make_optimizer(settings: SettingsOptim) -> optax.GradientTransformation:
  """AdamW after global-norm clipping; only the combined gradient is ever clipped."""
  rate = settings.learning_rate
  if settings.warmup_steps:
    # The first update already moves: a warm-up from zero would waste it.
    rate = optax.linear_schedule(rate / settings.warmup_steps, rate, settings.warmup_steps - 1)
  return optax.chain(
    optax.clip_by_global_norm(settings.max_grad_norm),
    optax.adamw(
      rate,
      b1=settings.b1,
      b2=settings.b2,
      eps=settings.eps,
      weight_decay=settings.weight_decay,
    ),
  )


def initial_state(settings: SettingsOptim, parameters: int) -> tuple[np.ndarray, ...]:
  """Leaves of the optimizer's state before the first update."""
  state = make_optimizer(settings).init(jnp.zeros((parameters,), jnp.float32))
  return tuple(np.asarray(leaf) for leaf in jax.tree.leaves(state))


def learning_rate(settings: SettingsOptim, count: int) -> float:
  """The rate of update number `count`, from 0."""
  if not settings.warmup_steps:
    return settings.learning_rate
  return settings.learning_rate * min(1.0, (count + 1) / settings.warmup_steps)


UpdateFn = Callable[..., Outcome]


def make_update(settings: SettingsOptim) -> UpdateFn:
  """Builds the update function; it compiles once.

  Args:
    settings: rates and decays.

  Returns:
    (gradient, adapter, ema, optimizer leaves, skip=, count=) -> Outcome. `gradient` is the combined
    one, rounded once to float32; `skip` is True where the rule on failed rewards forbids an update;
    `count` is the number of updates taken before, for the reported rate. A gradient that is not
    finite is skipped as well.
  """
  transform = make_optimizer(settings)
  decay = settings.ema_decay

  @jax.jit
  def run(gradient, adapter, ema, leaves):
    blank = jax.eval_shape(transform.init, adapter)
    state = jax.tree.unflatten(jax.tree.structure(blank), leaves)
    # optax mixes Python floats with integer counters; its casts are its own business.
    with jax.numpy_dtype_promotion("standard"):
      updates, after = transform.update(gradient, state, adapter)
    new = jnp.asarray(optax.apply_updates(adapter, updates))
    return new, decay * ema + (1.0 - decay) * new, jax.tree.leaves(after)

  def update(gradient: Flat, adapter: Flat, ema: Flat, optimizer, *, skip: bool, count: int):
    finite = bool(np.isfinite(gradient).all())
    scalars = {
      "grad_norm": float(np.linalg.norm(gradient.astype(np.float64))),
      "lr": learning_rate(settings, count),
      "skipped": skip or not finite,
      "not_finite": not finite,
    }
    if skip or not finite:
      return Outcome(adapter, ema, tuple(optimizer), gradient, scalars)
    new, new_ema, leaves = run(
      jnp.asarray(gradient),
      jnp.asarray(adapter),
      jnp.asarray(ema),
      [jnp.asarray(leaf) for leaf in optimizer],
    )
    after = tuple(np.asarray(leaf) for leaf in leaves)
    return Outcome(np.asarray(new), np.asarray(new_ema), after, gradient, scalars)

  return update
