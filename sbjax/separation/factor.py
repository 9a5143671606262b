"""Factoring a table of coefficients into reward-free weights and score-free coefficients."""

import dataclasses

import numpy as np
from jaxtyping import Float, Int

RANK_TOLERANCE = 1e-9
"""Singular values below this share of the largest are rounding."""

CLIFF = 1e-4
"""The first singular value that is rounding is smaller than the last that is not by this factor."""


def rank_of(matrix: Float[np.ndarray, "rows columns"]) -> tuple[int, bool]:
  """Gives the numerical rank, and whether it is clear: the singular values end in a cliff.

  A table of a smooth function that does not factor has singular values that fade without one.
  """
  singular = np.linalg.svd(matrix, compute_uv=False)
  rank = int(np.sum(singular > RANK_TOLERANCE * max(singular[0], 1e-300)))
  if rank in (0, len(singular)):
    return rank, rank == 0
  return rank, bool(singular[rank] < CLIFF * singular[rank - 1])


@dataclasses.dataclass(frozen=True)
class Skeleton:
  """A rank-B factorisation of one candidate's table by B of its rows and B of its columns.

  c(A, x) = c(A, pivot columns) @ inverse @ c(pivot rewards, x): the last factor is the early
  weights, which know no reward, the rest the late coefficients, which know no scalar.
  """

  rows: Int[np.ndarray, " rank"]
  columns: Int[np.ndarray, " rank"]
  inverse: Float[np.ndarray, "rank rank"]


def pivots(matrix: Float[np.ndarray, "rows columns"], count: int) -> Int[np.ndarray, " count"]:
  """Chooses rows that span the row space, by greedy orthogonalisation."""
  left, chosen = matrix.copy(), []
  for _ in range(count):
    index = int(np.argmax(np.sum(left**2, axis=1)))
    chosen.append(index)
    direction = left[index] / np.linalg.norm(left[index])
    left = left - np.outer(left @ direction, direction)
  return np.array(chosen)


def skeleton_of(table: Float[np.ndarray, "rewards scalars"], rank: int) -> Skeleton:
  """Factors a table of known rank."""
  rows = pivots(table, rank)
  columns = pivots(table[rows].T, rank)
  return Skeleton(rows, columns, np.linalg.inv(table[np.ix_(rows, columns)]))


def name_of(
  table: Float[np.ndarray, "samples scalars"],
  rank: int,
  rewards: Float[np.ndarray, "samples rewards"],
) -> str:
  """Names the span of the late coefficients of one candidate, given its own rewards [A, M]."""
  positive = [np.maximum(rewards[:, m], 0) for m in range(rewards.shape[1])]
  negative = [np.minimum(rewards[:, m], 0) for m in range(rewards.shape[1])]
  plain, one = list(rewards.T), np.ones(len(rewards))
  forms = {
    "reward-free: late = 1": [one],
    "linear: late = A": plain,
    "linear and constant: late = A and 1, as in DiffusionNFT's 1 and 2r - 1": [*plain, one],
    "sign split: late = max(A, 0) and min(A, 0)": [*positive, *negative],
    "sign split and a reward-free term: late = max(A, 0), min(A, 0) and 1": [
      *positive,
      *negative,
      one,
    ],
  }
  late = np.linalg.svd(table, full_matrices=False)[0][:, :rank]
  for name, basis in forms.items():
    space = np.linalg.qr(np.stack(basis, axis=1))[0]
    if np.abs(late - space @ (space.T @ late)).max() < 1e-8:
      return name if rewards.shape[1] == 1 else name.replace("A", "weighted A")
  return f"its own: late = {rank} other function{'s' if rank > 1 else ''} of the rewards"
