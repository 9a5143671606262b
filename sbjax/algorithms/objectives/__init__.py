"""Objectives: each a loss over the scalars of a mini-batch, and its compressed form."""

import dataclasses
import types
from collections.abc import Mapping
from typing import Any

from sbjax.algorithms.objectives.base import IdentityObjective, RatioObjective, gradient, value
from sbjax.algorithms.objectives.clipped import Clipped
from sbjax.algorithms.objectives.dppo import FlowDPPO
from sbjax.algorithms.objectives.gspo import GSPO
from sbjax.algorithms.objectives.guard import Guard
from sbjax.algorithms.objectives.kvpo import KVPO
from sbjax.algorithms.objectives.nft import DiffusionNFT

OBJECTIVES: Mapping[str, type[RatioObjective] | type[DiffusionNFT] | type[KVPO]] = (
  types.MappingProxyType(
    {
      "clipped": Clipped,
      "guard": Guard,
      "dppo": FlowDPPO,
      "gspo": GSPO,
      "nft": DiffusionNFT,
      "kvpo": KVPO,
    }
  )
)
"""Objectives by the name that a config uses."""


def objective(name: str, **settings: Any) -> RatioObjective | DiffusionNFT | KVPO:
  """Makes an objective by the name that a config uses.

  Raises:
    ValueError: for an unknown name or setting, a setting that is missing, or a value that the
      objective cannot work with.
  """
  if name not in OBJECTIVES:
    raise ValueError(f"objective is {name!r}; use one of {', '.join(sorted(OBJECTIVES))}.")
  fields = {field.name: field for field in dataclasses.fields(OBJECTIVES[name])}
  for setting in settings:
    if setting not in fields:
      raise ValueError(
        f"objective {name!r} has no setting {setting!r}; it takes {', '.join(sorted(fields))}."
      )
  for field in fields.values():
    if field.default is dataclasses.MISSING and field.name not in settings:
      raise ValueError(f"objective {name!r} needs {field.name!r}; set it.")
  if isinstance(settings.get("reward_weights"), list):
    settings = {**settings, "reward_weights": tuple(settings["reward_weights"])}
  return OBJECTIVES[name](**settings)


__all__ = [
  "GSPO",
  "KVPO",
  "OBJECTIVES",
  "Clipped",
  "DiffusionNFT",
  "FlowDPPO",
  "Guard",
  "IdentityObjective",
  "RatioObjective",
  "gradient",
  "objective",
  "value",
]
