"""Objectives: each a loss over the scalars of a mini-batch, and its compressed form."""

import dataclasses
import types
from collections.abc import Mapping
from typing import Any

from sbjax.algorithms.objectives.base import IdentityObjective, RatioObjective, gradient, value
from sbjax.algorithms.objectives.clipped import Clipped
from sbjax.algorithms.objectives.dppo import FlowDPPO
from sbjax.algorithms.objectives.fpo import FPO
from sbjax.algorithms.objectives.gspo import GSPO
from sbjax.algorithms.objectives.guard import Guard
from sbjax.algorithms.objectives.kvpo import KVPO
from sbjax.algorithms.objectives.nft import DiffusionNFT
from sbjax.settings import Settings

OBJECTIVES: Mapping[str, type[RatioObjective] | type[DiffusionNFT] | type[KVPO]] = (
  types.MappingProxyType(
    {
      "clipped": Clipped,
      "guard": Guard,
      "dppo": FlowDPPO,
      "fpo": FPO,
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


def from_settings(
  settings: Settings, trained: int | None = None
) -> RatioObjective | DiffusionNFT | KVPO:
  """Makes the objective that a run's settings ask for.

  Flow-DPPO has no clip range; its KL threshold is `algorithm.clip_high`.

  Args:
    settings: the settings of a run.
    trained: trained denoising steps per candidate, which GSPO needs to take a mean over steps.

  Raises:
    ValueError: for `gspo` without `trained`, and for values that the objective cannot work with.
  """
  algorithm, clip = settings.algorithm, settings.advantage.clip
  low, high = algorithm.clip_low, algorithm.clip_high
  if algorithm.name == "diffusion_nft":
    return DiffusionNFT(adv_clip=clip, ref_kl_coef=algorithm.kl_coef)
  if algorithm.name == "kvpo":
    return KVPO(clip_low=low, clip_high=high, kl_coef=algorithm.kl_coef, adv_clip=clip)
  separate = settings.advantage.combine == "separate_loss"
  weights = tuple(settings.reward.weights) if separate else (1.0,)
  shared: dict[str, Any] = {"kl_coef": algorithm.kl_coef, "reward_weights": weights}
  if algorithm.name == "flow_dppo":
    return FlowDPPO(kl_mask_threshold=high, **shared)
  shared |= {"clip_low": low, "clip_high": high, "adv_clip": clip}
  shared["dual_clip"] = algorithm.dual_clip or None
  if algorithm.name == "gspo":
    if trained is None:
      raise ValueError("algorithm.name is 'gspo', which needs to know how many steps are trained.")
    return GSPO(steps=trained, **shared)
  if algorithm.name == "fpo":
    return FPO(**shared)
  if algorithm.name == "grpo_guard":
    return Guard(**shared)
  if algorithm.name == "flow_grpo":
    return Clipped(kl_channel="kl_flow_grpo", **shared)
  return Clipped(**shared)


__all__ = [
  "FPO",
  "GSPO",
  "KVPO",
  "OBJECTIVES",
  "Clipped",
  "DiffusionNFT",
  "FlowDPPO",
  "Guard",
  "IdentityObjective",
  "RatioObjective",
  "from_settings",
  "gradient",
  "objective",
  "value",
]
