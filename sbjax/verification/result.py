"""What a replay reports: the largest difference of each quantity and the tolerance it must keep."""

import dataclasses

import numpy as np
from jaxtyping import Shaped


@dataclasses.dataclass(frozen=True)
class Check:
  """One quantity of one file.

  Attributes:
    quantity: what was compared.
    difference: largest absolute difference over everything of that name; NaN counts as infinite.
    tolerance: what is allowed.
    count: numbers compared.
  """

  quantity: str
  difference: float
  tolerance: float
  count: int

  @property
  def passed(self) -> bool:
    """Whether the difference is within tolerance."""
    return self.difference <= self.tolerance


class Comparison:
  """Collects differences by quantity.

  A tolerance is relative to the largest reference value of the quantity, and absolute below one.
  """

  def __init__(self, tolerance: float):
    """Starts empty; `tolerance` is multiplied by `max(1, largest reference)`."""
    self._tolerance = tolerance
    self._found: dict[str, list[float]] = {}
    self._fixed: dict[str, float] = {}

  def add(
    self,
    quantity: str,
    ours: Shaped[np.ndarray, "..."],
    reference: Shaped[np.ndarray, "..."],
    *,
    absolute: float | None = None,
  ) -> None:
    """Compares one array; a shape that differs counts as an infinite difference.

    `absolute` replaces the quantity's tolerance, whatever its size (0 for indices).
    """
    if absolute is not None:
      self._fixed[quantity] = absolute
    ours = np.asarray(ours, np.float64)
    reference = np.asarray(reference, np.float64)
    entry = self._found.setdefault(quantity, [0.0, 0.0, 0])
    if ours.shape != reference.shape:
      entry[0] = float("inf")
    elif reference.size:
      difference = float(np.max(np.abs(ours - reference)))
      entry[0] = float("inf") if np.isnan(difference) else max(entry[0], difference)
      entry[1] = max(entry[1], float(np.max(np.abs(reference))))
    entry[2] += reference.size

  def checks(self) -> list[Check]:
    """One check per quantity, in the order they came."""
    return [
      Check(
        name,
        difference,
        self._fixed.get(name, self._tolerance * max(1.0, largest)),
        int(count),
      )
      for name, (difference, largest, count) in self._found.items()
    ]
