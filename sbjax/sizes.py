"""How large the configured model is, read without its weights."""

import dataclasses

from models.wan.presets import DiTConfig, SamplerConfig
from sbjax.settings import Settings
from sbjax.world_table import world_of


def model_sizes(settings: Settings) -> tuple[DiTConfig, SamplerConfig]:
  """Gives the sizes of the network and of its sampler, with the configured precision and remat.

  Raises:
    ValueError: an unknown model, files that are missing or unreadable, a precision or remat policy
      that there is not.
  """
  model = settings.model
  dit, sampler = world_of(model.name).sizes(model)
  try:
    return dataclasses.replace(dit, precision=model.precision, remat=model.remat), sampler
  except ValueError as error:
    raise ValueError(f"model.{error}") from error
