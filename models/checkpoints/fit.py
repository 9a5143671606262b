"""Whether tensors of a file are those of a model, told by names, shapes and types alone."""

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from models.checkpoints.stored import WEIGHT_DTYPES, StateDict
from models.weights import Slot, TensorKey, clean_key, slots


@dataclasses.dataclass(frozen=True)
class Fit:
  """What was found.

  Attributes:
    places: where each tensor of the file goes, by its name there.
    twins: stored names that repeat another tensor under a second name, and that other name.
    missing: names of the table that the file lacks.
    unknown: names of the file that the table lacks.
    misshapen: names with the shape that they have and the one that they need.
    mistyped: names with a type that no weight has.
  """

  places: Mapping[str, Slot]
  twins: Mapping[str, str]
  missing: tuple[str, ...]
  unknown: tuple[str, ...]
  misshapen: tuple[str, ...]
  mistyped: tuple[str, ...]

  @property
  def problems(self) -> dict[str, tuple[str, ...]]:
    """Names by what is wrong with them; empty when the file fits."""
    found = {
      "missing": self.missing,
      "unknown": self.unknown,
      "misshapen": self.misshapen,
      "of a type that no weight has": self.mistyped,
    }
    return {what: names for what, names in found.items() if names}

  @property
  def count(self) -> int:
    """How many tensors do not fit."""
    return sum(map(len, self.problems.values()))

  def text(self) -> str:
    """All names that do not fit; equal ones of successive layers are written once."""
    return "; ".join(f"{what}: {', '.join(ranges(n))}" for what, n in self.problems.items())


def fit(
  tensors: StateDict,
  table: Sequence[TensorKey],
  like: Mapping[str, Any],
  aliases: Mapping[str, str],
) -> Fit:
  """Compares a state dictionary with a table, without reading a tensor.

  Args:
    tensors: of the file; wrapper parts in their names count for nothing.
    table: the key table.
    like: our parameters by path, with `shape`.
    aliases: names of the file that stand for others; where both are there, they must be equal.
  """
  wanted = slots(table, {path: tuple(array.shape) for path, array in like.items()})
  places: dict[str, Slot] = {}
  twins: dict[str, str] = {}
  seen: dict[str, str] = {}
  unknown, misshapen, mistyped = [], [], []
  for name, tensor in tensors.items():
    official = clean_key(name)
    alias = official in aliases
    official = aliases.get(official, official)
    slot = wanted.get(official)
    if slot is None or (official in seen and not aliases):
      unknown.append(name)
      continue
    if tensor.dtype not in WEIGHT_DTYPES:
      mistyped.append(f"{name} ({tensor.dtype})")
    if tensor.shape != slot.official_shape:
      misshapen.append(f"{name} ({list(tensor.shape)}, needs {list(slot.official_shape)})")
    if official not in seen:
      seen[official] = name
      places[name] = slot
    elif alias or clean_key(seen[official]) in aliases:
      twins[name] = seen[official]
    else:
      unknown.append(name)
  missing = [name for name in wanted if name not in seen]
  return Fit(places, twins, *map(tuple, (missing, unknown, misshapen, mistyped)))


def ranges(names: Sequence[str]) -> list[str]:
  """The names, with those that differ in one layer number only written as `blocks.{0-29}.…`."""
  groups: dict[tuple[str, str], list[int]] = {}
  for name in names:
    match = re.fullmatch(r"(.*?\.)(\d+)(\..*)", name)
    before, number, after = match.groups() if match else (name, "-1", "")
    groups.setdefault((before, after), []).append(int(number))
  return [f"{before}{_numbers(numbers)}{after}" for (before, after), numbers in groups.items()]


def _numbers(numbers: list[int]) -> str:
  if numbers == [-1]:
    return ""
  if len(numbers) == 1:
    return str(numbers[0])
  runs = []
  ordered = sorted(numbers)
  for _, group in itertools.groupby(enumerate(ordered), lambda pair: pair[1] - pair[0]):
    run = [number for _, number in group]
    runs.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
  return "{" + ",".join(runs) + "}"
