"""Which world a model's name belongs to, and what every world can be asked.

The embedded world brings weights, prompts and a judge; published weights bring a transformer, and
the user names prompts and judge. Whatever depends on that asks here.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from models.wan.presets import DiTConfig, SamplerConfig
from sbjax.settings import SettingsModel

DIGITS = "digits"


@dataclasses.dataclass(frozen=True)
class World:
  """What a world does for a run.

  Attributes:
    embedded: whether prompts (`world:train`, `world:eval`) and a judge (`world`) come with it.
    check: refuses settings and files that cannot work, before anything is loaded.
    sizes: of the transformer and its sampler, without loading weights.
    acceptance: (model, prompts.overflow) -> the check that every prompt must pass.
    load_models: (model, the run's prompts, prompts.overflow, mesh, seconds that a wait may take) ->
      a worker's `sbjax.worlds.models.WorldModels`.
  """

  embedded: bool
  check: Callable[[SettingsModel], None]
  sizes: Callable[[SettingsModel], tuple[DiTConfig, SamplerConfig]]
  acceptance: Callable[[SettingsModel, str], Callable[[str], None]]
  load_models: Callable[[SettingsModel, Callable[[], Sequence[str]], str, Any, float], Any]


def world_of(name: str) -> World:
  """The world of a model's name.

  Raises:
    ValueError: for an unknown name; the message lists the known ones.
  """
  # Both import JAX: not before they are needed.
  if name == DIGITS:
    from sbjax.worlds.digits import models

    return World(True, models.check, models.sizes, models.acceptance, models.load_models)
  from sbjax.worlds.wan import models

  if name not in models.NAMES:
    known = ", ".join(map(repr, (DIGITS, *models.NAMES)))
    raise ValueError(f"model.name is {name!r}; use one of {known}.")
  return World(False, models.check, models.sizes, models.acceptance, models.load_models)
