"""The digits world as a worker needs it, and what its text encoder takes."""

import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from models.wan.presets import DiTConfig, SamplerConfig
from sbjax.settings import SettingsModel
from sbjax.worlds.decoding import to_bytes
from sbjax.worlds.digits import prompts as sentences
from sbjax.worlds.digits import tokenizer, world
from sbjax.worlds.models import WorldModels

# What a config says of published weights and this world has of its own.
_OWN = {
  "part": "",
  "adapter": "",
  "adapter_alpha": 0.0,
  "vae": "",
  "text_encoder": "",
  "tokenizer": "",
  "embeddings": "",
  "sampler": "",
  "height_px": 0,
  "width_px": 0,
  "weights_dtype": "float32",
}


def check(model: SettingsModel) -> None:
  """Refuses a folder without a world, and settings of published weights.

  Raises:
    ValueError: one sentence with the field, its value and what would do.
  """
  if model.checkpoint and not pathlib.Path(model.checkpoint).is_dir():
    raise ValueError(f"model.checkpoint is {model.checkpoint!r}; it must be a folder of weights.")
  for field, own in _OWN.items():
    if getattr(model, field) != own:
      raise ValueError(
        f"model.{field} is {getattr(model, field)!r}; the world 'digits' brings its own, so leave "
        f"it {own!r}, or name published weights by model.name."
      )
  sizes(model)


def sizes(model: SettingsModel) -> tuple[DiTConfig, SamplerConfig]:
  """Sizes of the transformer and its sampler, as the folder of weights states them.

  Raises:
    ValueError: the folder holds no readable world.
  """
  try:
    return world.model_sizes(model.checkpoint or None)
  except ValueError as error:
    raise ValueError(f"model.checkpoint: {error}") from error


def acceptance(model: SettingsModel, overflow: str) -> Callable[[str], None]:
  """Gives the check that a prompt must pass: the text encoder knows its words, and its length.

  Args:
    model: the config's section.
    overflow: "refuse" or "truncate" what is too long.
  """
  dit, _ = sizes(model)
  tokenize = tokenizer.WordTokenizer(tokenizer.default_vocabulary(), dit.text_len)

  def accept(prompt: str) -> None:
    tokens = len(sentences.words(prompt)) + 1  # the end mark
    if tokens > dit.text_len and overflow == "refuse":
      raise ValueError(
        f"the prompt has {tokens} tokens but the text encoder takes {dit.text_len}; shorten it or "
        "set prompts.overflow to 'truncate'."
      )
    tokenize((prompt,), overflow)

  return accept


def load_models(
  model: SettingsModel,
  prompts: Callable[[], Sequence[str]],
  overflow: str,
  mesh: Mesh | None,
  timeout_s: float,
) -> WorldModels:
  """Loads the world; its text encoder is small and stays, so that prompts need not be known."""
  del prompts, mesh, timeout_s
  loaded = world.load_world(model.checkpoint or None)
  vae_def, vae_state = nnx.split(loaded.vae)

  @jax.jit
  def decode(state, latents):
    return to_bytes(nnx.merge(vae_def, state).decode(latents[None])[0])

  @functools.lru_cache(maxsize=1024)
  def embed(text: str) -> np.ndarray:
    return world.encode_prompts(loaded, (text,), overflow)[0]

  return WorldModels(
    dit=loaded.dit,
    conditioning_channels=np.asarray(loaded.conditioning_channels, np.float32),
    vae=loaded.vae,
    embed=lambda texts: np.stack([embed(text) for text in texts]),
    decode=lambda latents: np.asarray(decode(vae_state, jnp.asarray(latents))),
    heldout=lambda videos, texts: _measures(world.heldout_scores(loaded, videos, tuple(texts))),
    judging=lambda videos, texts, views: world.judge_videos(loaded, videos, tuple(texts), views),
    parameters={"decoder": sum(int(leaf.size) for leaf in jax.tree.leaves(vae_state))},
    pixel_stride=loaded.vae.config.spatial_factor,
  )


def _measures(read: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  """The held-out classifier's measures; which digit it read is not one."""
  return {name: np.asarray(read[name], np.float64) for name in ("p", "right")}
