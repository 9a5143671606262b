"""Which denoising steps a candidate trains on, and which candidates an update takes.

Everything is a function of seed, step and candidate (or group), drawn before the rollout: no choice
depends on a reward, so a replay can start before there is one. The draws use a counter-based
generator's raw 64-bit output, which NumPy keeps the same across versions.
"""

import re
from collections.abc import Sequence
from typing import Literal

import numpy as np

Order = Literal["group_major", "reference"]

_STEPS, _WINDOW, _EPOCH = 1, 2, 3  # what a draw is for: part of its name
_TRAIN_STEPS = re.compile(r"all|fraction:(?P<fraction>[^:]+)|window:(?P<window>\d+)")


def _draw(count: int, *name: int) -> np.ndarray:
  """Gives `count` random 64-bit integers that depend on the name only."""
  return np.random.Philox(np.random.SeedSequence(list(name))).random_raw(count)


def trained_steps(
  text: str, stochastic: int, *, seed: int, step: int, candidate: int, group: int
) -> tuple[int, ...]:
  """Gives the denoising steps that one candidate trains on, ascending.

  Args:
    text: `all`; `fraction:f`, a random subset of int(f x stochastic) steps for each candidate
      (DanceGRPO); or `window:w`, w neighbouring steps at a random place that a group shares
      (Flow-GRPO-Fast: a window of one's own would add to the spread of rewards within the group).
    stochastic: steps that draw noise; only these have a log-probability.
    seed: seed of the run.
    step: RL step.
    candidate: index of the candidate within the step.
    group: index of its group.

  Returns:
    Indices in [0, stochastic), as many for every candidate.

  Raises:
    ValueError: for a text that is not understood, or that leaves no step.
  """
  match = _TRAIN_STEPS.fullmatch(text)
  if match is None:
    raise ValueError(f"train_steps is {text!r}; use 'all', 'fraction:0.5' or 'window:2'.")
  if text == "all":
    return tuple(range(stochastic))
  if match["window"] is not None:
    size = int(match["window"])
    if not 1 <= size <= stochastic:
      raise ValueError(f"train_steps is {text!r}; use a window of 1 to {stochastic} steps.")
    start = int(_draw(1, seed, step, group, _WINDOW)[0] % (stochastic - size + 1))
    return tuple(range(start, start + size))
  try:
    count = int(stochastic * float(match["fraction"]))
  except (ValueError, OverflowError):
    count = 0
  if not 1 <= count <= stochastic:
    raise ValueError(
      f"train_steps is {text!r}; use a fraction of at most 1 that leaves one of {stochastic} steps."
    )
  order = np.argsort(_draw(stochastic, seed, step, candidate, _STEPS), kind="stable")
  return tuple(sorted(int(k) for k in order[:count]))


def minibatches(
  groups: Sequence[Sequence[int]], parts: int, order: Order
) -> tuple[tuple[int, ...], ...]:
  """Cuts the candidates of a step into mini-batches of one size.

  Args:
    groups: candidates of each prompt, all groups of one size.
    parts: how many mini-batches.
    order: `group_major` keeps groups whole, so the first update needs the rewards of its own groups
      only; `reference` gives every mini-batch a slice of every group, as DanceGRPO does, whose
      first update therefore needs all rewards.

  Returns:
    Candidates of each mini-batch, ascending.

  Raises:
    ValueError: if the mini-batches would differ in size or cut a group that must stay whole.
  """
  if order not in ("group_major", "reference"):
    raise ValueError(f"minibatch_order is {order!r}; use 'group_major' or 'reference'.")
  if order == "group_major":
    if parts < 1 or len(groups) % parts:
      raise ValueError(
        f"minibatches is {parts}; it must divide the {len(groups)} groups of a step, for "
        "groups must not straddle mini-batches."
      )
    candidates = [c for group in groups for c in group]
  else:
    # Member by member across groups: equal slices of this order are slices of every group.
    longest = max((len(group) for group in groups), default=0)
    candidates = [group[j] for j in range(longest) for group in groups if j < len(group)]
  if parts < 1 or len(candidates) % parts:
    raise ValueError(
      f"minibatches is {parts}; it must divide the {len(candidates)} candidates of a step."
    )
  size = len(candidates) // parts
  return tuple(tuple(sorted(candidates[b * size : (b + 1) * size])) for b in range(parts))


def updates(
  groups: Sequence[Sequence[int]], parts: int, epochs: int, order: Order, *, seed: int, step: int
) -> tuple[tuple[int, ...], ...]:
  """Gives the candidates of every update of a step, epoch after epoch.

  The first epoch takes groups in the order in which they are generated, so that its mini-batches
  become ready in turn; later epochs take the groups in an order drawn from the seed.

  Args:
    groups: candidates of each prompt.
    parts: mini-batches of an epoch.
    epochs: how often a step's candidates are used.
    order: how mini-batches are cut.
    seed: seed of the run.
    step: RL step.

  Raises:
    ValueError: as `minibatches` does, and for fewer than one epoch.
  """
  if epochs < 1:
    raise ValueError(f"epochs is {epochs}; use at least 1.")
  out: list[tuple[int, ...]] = []
  for epoch in range(epochs):
    taken = list(groups)
    if epoch:
      drawn = np.argsort(_draw(len(groups), seed, step, epoch, _EPOCH), kind="stable")
      taken = [groups[int(g)] for g in drawn]
    out.extend(minibatches(taken, parts, order))
  return tuple(out)
