"""How large the configured model is, read without its weights."""

from models.wan.presets import DiTConfig, SamplerConfig
from sbjax.settings import Settings


def model_sizes(settings: Settings) -> tuple[DiTConfig, SamplerConfig]:
  """Gives the sizes of the network and of its sampler, as its folder of weights states them.

  Raises:
    ValueError: the folder holds no readable world.
  """
  from sbjax.worlds.digits import world  # imports JAX: not before it is needed

  try:
    return world.model_sizes(settings.model.checkpoint or None)
  except ValueError as error:
    raise ValueError(f"model.checkpoint: {error}") from error
