"""What a state dictionary is: which model, in which layout, and of which size."""

import dataclasses
import re
from collections.abc import Iterable

from models.checkpoints.families import FAMILIES, Config, Family, Layout
from models.checkpoints.fit import Fit, fit
from models.checkpoints.stored import Checkpoint, StateDict
from models.weights import clean_key

QUANTISED = (".quantized_weight_values", ".quantized_weight_scale_factors")
_ENOUGH = 0.5  # share of names in common from where on a file is taken for a damaged one of a kind


@dataclasses.dataclass(frozen=True)
class Identity:
  """The model that a state dictionary most resembles.

  Attributes:
    family, layout: kind of model, and how its tensors are named.
    preset: the size that fits best.
    presets: all sizes that fit wholly; models that differ only in their sampler share theirs.
    fit: how the tensors fit `preset`.
  """

  family: Family
  layout: Layout
  preset: str
  presets: tuple[str, ...]
  fit: Fit


def kind_of(tensors: StateDict) -> tuple[Family, Layout] | None:
  """The closest known kind of model and its layout by names alone, or None."""
  names = _patterns(map(clean_key, tensors))
  best: tuple[float, Family, Layout] | None = None
  for family in FAMILIES:
    for layout in family.layouts:
      share = max(_share(names, layout, config) for config in family.presets.values())
      if best is None or share > best[0]:
        best = (share, family, layout)
  return None if best is None or best[0] < _ENOUGH else best[1:]


def quantised(tensors: StateDict) -> str | None:
  """Why quantised weights cannot be used; None where they are not quantised. LongLive 2.0's NVFP4
  files hold four-bit values with scales in place of each linear map's weight.
  """
  for name in tensors:
    if name.endswith(QUANTISED):
      return f"quantised weights ({name}), which are not read; use the bfloat16 file"
  return None


def identify(tensors: StateDict) -> Identity | None:
  """The closest known model, or None where most names are of none. Reads no tensor."""
  kind = kind_of(tensors)
  if kind is None:
    return None
  family, layout = kind
  fits = {
    name: fit(tensors, layout.table(config), family.like(config), layout.aliases)
    for name, config in family.presets.items()
  }
  # Names tell more than shapes. Among equal ones the first that is listed: the plain model, before
  # what was made of it.
  preset = min(fits, key=lambda n: (len(fits[n].missing) + len(fits[n].unknown), fits[n].count))
  whole = tuple(name for name, found in fits.items() if not found.count)
  return Identity(family, layout, preset, whole, fits[preset])


def choose_part(checkpoint: Checkpoint, part: str | None, kind: str, parts: Iterable[str]) -> str:
  """The part of a checkpoint to use: the one asked for, or the only one there is.

  Critics, which training keeps beside a generator, are never meant unless asked for.

  Args:
    checkpoint: where it is looked for.
    part: its name, or None.
    kind: what messages call the thing.
    parts: names of the parts that are of that kind.

  Raises:
    ValueError: when it is not there, or when there are several and none was asked for.
  """
  if part is not None:
    if part not in checkpoint.parts:
      known = ", ".join(repr(name) for name in checkpoint.parts)
      raise ValueError(f"{checkpoint.path} has no part {part!r}; it has {known}.")
    return part
  if len(checkpoint.parts) == 1:
    return next(iter(checkpoint.parts))
  meant = [name for name in parts if not name.rpartition("/")[2].startswith("critic")]
  if len(meant) != 1:
    listed = ", ".join(repr(name) for name in meant or checkpoint.parts)
    many = "several parts that could be" if meant else "no part that is"
    raise ValueError(f"{checkpoint.path} has {many} a {kind}: {listed}; name the part to use.")
  return meant[0]


def _share(names: frozenset[str], layout: Layout, config: Config) -> float:
  expected = _patterns(key.official for key in layout.table(config))
  return len(names & expected) / max(1, len(names | expected))


def _patterns(names: Iterable[str]) -> frozenset[str]:
  """Names with every number replaced, so that depth does not matter."""
  return frozenset(re.sub(r"\d+|\{layer\}", "#", name) for name in names)
