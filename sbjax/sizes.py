"""How large the configured model is, read without its weights."""

from models.wan import presets
from sbjax.settings import Settings


def model_sizes(settings: Settings) -> tuple[presets.DiTConfig, presets.SamplerConfig]:
  """Gives the sizes of the network and of its sampler: the preset's, or the checkpoint folder's.

  Raises:
    ValueError: unknown model, or a folder that holds no readable world.
  """
  if not settings.model.checkpoint:
    return presets.preset(settings.model.name)
  from sbjax.worlds.digits import world  # imports JAX: only where it is needed

  try:
    return world.model_sizes(settings.model.checkpoint)
  except ValueError as error:
    raise ValueError(f"model.checkpoint: {error}") from error
