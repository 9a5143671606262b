"""What a loss does with rewards and scores, read off its traced program.

Numbers tell whether a loss separates; the program tells why, and what to beware of: a choice made
by reward, or a clip that is differentiated.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

SCORE, REWARD = 1, 2
"""Bits of what a value depends on; a value that depends on both has both."""

_CHOICES = {"argmax", "argmin", "sort", "top_k", "approx_top_k"}
_STEPS = {"gt", "lt", "ge", "le", "eq", "ne", "sign", "floor", "ceil", "round"}
_KINKS = {"max", "min", "clamp", "reduce_max", "reduce_min", "abs"}


@dataclasses.dataclass(frozen=True)
class Structure:
  """Primitives of a loss that are not smooth, by what they act on.

  Attributes:
    choices: orderings and selections by reward alone, e.g. argmax.
    steps: comparisons and rounding of rewards alone.
    kinks: max, min and clamp of values that depend on scores: their gradient at equality is the
      library's convention.
  """

  choices: tuple[str, ...]
  steps: tuple[str, ...]
  kinks: tuple[str, ...]

  def notes(self) -> tuple[str, ...]:
    """Gives one plain sentence for each thing that a user should know."""
    out = []
    if self.choices:
      out.append(
        f"candidates are ordered or chosen by reward ({', '.join(self.choices)}): no gradient sees "
        "the choice, and who counts is known only with the rewards, so every candidate keeps its "
        "buffers until then"
      )
    if self.steps:
      out.append(
        f"the loss branches on rewards ({', '.join(self.steps)}): no gradient sees the branch, and "
        "late coefficients may jump there"
      )
    if self.kinks:
      out.append(
        f"scores pass through {', '.join(self.kinks)}: where both sides are equal, JAX halves the "
        "gradient, so write the clip as explicit inclusive masks"
      )
    return tuple(out)


def structure(loss: Callable[..., Any], *args: Any) -> Structure:
  """Traces `loss(channels, old, statistics, advantages)` and sorts its non-smooth primitives.

  Args:
    loss: the loss, in jax.numpy.
    *args: example arrays, whose values do not matter.
  """
  closed = jax.make_jaxpr(loss)(*args)
  found: set[tuple[str, int, bool]] = set()
  _walk(closed.jaxpr, [SCORE, 0, 0, REWARD], [True] * len(closed.jaxpr.outvars), found)
  return Structure(
    choices=tuple(sorted({n for n, t, _ in found if n in _CHOICES and t == REWARD})),
    steps=tuple(sorted({n for n, t, _ in found if n in _STEPS and t == REWARD})),
    kinks=tuple(sorted({n for n, t, flows in found if n in _KINKS and t & SCORE and flows})),
  )


def _is_real(variable: Any) -> bool:
  """Tells floats from indices and masks, through which no gradient flows."""
  dtype = getattr(variable.aval, "dtype", None)  # a token has none
  return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def _needed(jaxpr: Any, outputs: list[bool]) -> set[int]:
  """Gives the positions of the equations through which gradient reaches a needed output."""
  wanted = {v for v, w in zip(jaxpr.outvars, outputs, strict=True) if w and not _is_literal(v)}
  positions = set()
  for position in reversed(range(len(jaxpr.eqns))):
    equation = jaxpr.eqns[position]
    if equation.primitive.name == "stop_gradient" or wanted.isdisjoint(equation.outvars):
      continue
    positions.add(position)
    wanted |= {v for v in equation.invars if not _is_literal(v) and _is_real(v)}
  return positions


def _is_literal(variable: Any) -> bool:
  return hasattr(variable, "val")


def _walk(
  jaxpr: Any, inputs: list[int], outputs: list[bool], found: set[tuple[str, int, bool]]
) -> list[int]:
  """Carries dependence through a program.

  Records (primitive, what its real inputs depend on, whether gradient flows through it).
  """
  known: dict[Any, int] = dict(zip(jaxpr.invars, inputs, strict=True))
  needed = _needed(jaxpr, outputs)

  def of(variable: Any) -> int:
    return 0 if _is_literal(variable) else known.get(variable, 0)

  for position, equation in enumerate(jaxpr.eqns):
    name, taints = equation.primitive.name, [of(v) for v in equation.invars]
    union = functools.reduce(operator.or_, taints, 0)
    results = [union] * len(equation.outvars)
    if name == "stop_gradient":
      results = [t & ~SCORE for t in results]
    inner = [] if name.startswith("custom_") else _inner(equation.params)  # these are smooth
    for sub in inner:
      fits = len(sub.invars) == len(taints) and name not in ("scan", "while")
      flows = [position in needed] * len(sub.outvars)
      got = _walk(sub, taints if fits else [union] * len(sub.invars), flows, found)
      # Only a plain call's outputs are its program's; a loop's also depend on its carry.
      if len(inner) == 1 and fits and len(got) == len(results):
        results = got
    real = [t for v, t in zip(equation.invars, taints, strict=True) if _is_real(v)]
    if not inner:
      found.add((name, functools.reduce(operator.or_, real, 0), position in needed))
    known.update(zip(equation.outvars, results, strict=True))
  return [of(v) for v in jaxpr.outvars]


def _inner(params: dict[str, Any]) -> list[Any]:
  """Gives the programs that an equation calls."""
  out = []
  for value in params.values():
    for item in value if isinstance(value, list | tuple) else (value,):
      item = getattr(item, "jaxpr", item)
      if hasattr(item, "eqns") and hasattr(item, "invars"):
        out.append(item)
  return out
