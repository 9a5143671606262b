"""Which files a Wan model is made of, how large it is, and whether all of it fits together."""

import dataclasses
import functools
import pathlib

from models.checkpoints import sizes as stored_sizes
from models.checkpoints.families import DIT, UMT5, VAE, Config, Family
from models.checkpoints.fit import fit
from models.checkpoints.load import refuse_misfit
from models.checkpoints.lora import is_lora, lora_info
from models.checkpoints.opening import open_checkpoint
from models.checkpoints.wan import find_weights
from models.wan.presets import PRESETS, DiTConfig, SamplerConfig
from models.wan.umt5 import UMT5Config, umt5_preset
from sbjax.settings import SettingsModel
from sbjax.worlds.wan.text import WanTokenizer

CUSTOM = "custom"
# The presets whose weights are published; the others come with the project.
PUBLISHED = tuple(name for name in PRESETS if name != "digits")
NAMES = (*PUBLISHED, CUSTOM)
TEMPORAL_FACTOR = 4
_NEEDED = {
  "checkpoint": "the transformer's weights, such as self_forcing_dmd.pt or a folder of safetensors",
  "vae": "the video autoencoder's weights, such as Wan2.1_VAE.pth",
  "text_encoder": "the text encoder's weights, such as models_t5_umt5-xxl-enc-bf16.pth",
  "tokenizer": "the tokenizer's folder, such as google/umt5-xxl",
}


@dataclasses.dataclass(frozen=True)
class WanSizes:
  """Sizes of everything that the settings name.

  Attributes:
    dit: the transformer.
    sampler: how it is rolled out, at the resolution that was asked for.
    vae: the video autoencoder.
    text: the text encoder.
  """

  dit: DiTConfig
  sampler: SamplerConfig
  vae: Config
  text: UMT5Config


def wan_sizes(model: SettingsModel) -> WanSizes:
  """Sizes of a published model, or of a custom one as its files tell; reads no tensor.

  Raises:
    ValueError: a file is missing or is no such model, or a setting cannot be.
  """
  _named(model)
  return _sizes(model)


def check(model: SettingsModel) -> None:
  """Refuses files that are missing or do not fit, before anything is loaded.

  Raises:
    ValueError: one sentence with the field, its value and what would do.
  """
  sizes = wan_sizes(model)
  with _Field("checkpoint"):
    _fits(model.checkpoint, model.part or None, DIT, sizes.dit)
  with _Field("vae"):
    _fits(model.vae, None, VAE, sizes.vae)
  with _Field("text_encoder"):
    _fits(model.text_encoder, None, UMT5, sizes.text)
  with _Field("tokenizer"):
    tokenizer = tokenizer_of(model)
    if tokenizer.vocab_size > sizes.text.vocab_size:
      raise ValueError(
        f"{model.tokenizer} has {tokenizer.vocab_size} tokens and the text encoder knows "
        f"{sizes.text.vocab_size}; use the tokenizer that belongs to it."
      )
  with _Field("adapter"):
    _check_adapter(model, sizes.dit)


@functools.lru_cache(maxsize=8)
def _tokenizer(folder: str, text_len: int) -> WanTokenizer:
  return WanTokenizer(folder, text_len)


def tokenizer_of(model: SettingsModel) -> WanTokenizer:
  """The tokenizer of the folder that the settings name.

  Raises:
    ValueError: it holds none.
  """
  return _tokenizer(model.tokenizer, wan_sizes(model).dit.text_len)


def _named(model: SettingsModel) -> None:
  for field, what in _NEEDED.items():
    path = getattr(model, field)
    if not path:
      raise ValueError(f"model.{field} is ''; model {model.name!r} needs {what}.")
    if not pathlib.Path(path).exists():
      raise ValueError(f"model.{field} is {path!r}, which does not exist; name {what}.")
  if model.adapter and not pathlib.Path(model.adapter).exists():
    raise ValueError(
      f"model.adapter is {model.adapter!r}, which does not exist; name a LoRA file such as "
      "LongLive's lora.pt, or leave it empty."
    )
  if model.sampler and model.sampler not in PUBLISHED:
    known = ", ".join(map(repr, PUBLISHED))
    raise ValueError(f"model.sampler is {model.sampler!r}; use one of {known}, or leave it empty.")
  if model.name == CUSTOM and not model.sampler:
    raise ValueError(
      "model.sampler is ''; a custom model has none of its own, so name the preset whose chunks, "
      "window and denoising steps it uses, such as 'self-forcing'."
    )


# Headers only, but a run asks for them many times.
@functools.lru_cache(maxsize=8)
def _sizes(model: SettingsModel) -> WanSizes:
  if model.name == CUSTOM:
    with _Field("checkpoint"):
      dit = stored_sizes.dit_sizes(model.checkpoint, part=model.part or None)
    with _Field("vae"):
      vae = stored_sizes.vae_sizes(model.vae)
    with _Field("text_encoder"):
      text = stored_sizes.umt5_sizes(model.text_encoder)
  else:
    dit, text = PRESETS[model.name][0], umt5_preset("umt5-xxl")
    # Latents of 16 channels are Wan2.1's, of 48 Wan2.2's.
    vae = next(config for config in VAE.presets.values() if config.z_dim == dit.out_dim)
  sampler = PRESETS[model.sampler or model.name][1]
  _belong_together(dit, vae, text)
  return WanSizes(dit, _resolution(model, sampler, dit, vae), vae, text)


def _belong_together(dit: DiTConfig, vae: Config, text: UMT5Config) -> None:
  if (dit.in_dim, dit.out_dim) != (vae.z_dim, vae.z_dim):
    raise ValueError(
      f"model.vae has latents of {vae.z_dim} channels and the transformer takes {dit.in_dim} and "
      f"gives {dit.out_dim}; use the autoencoder that it was trained with."
    )
  if vae.temporal_factor != TEMPORAL_FACTOR:
    raise ValueError(
      f"model.vae makes {vae.temporal_factor} frames of a latent frame; use one that makes "
      f"{TEMPORAL_FACTOR}."
    )
  if dit.text_dim != text.dim:
    raise ValueError(
      f"model.text_encoder gives rows {text.dim} wide and the transformer takes {dit.text_dim}; "
      "use the encoder that it was trained with."
    )


def _resolution(
  model: SettingsModel, sampler: SamplerConfig, dit: DiTConfig, vae: Config
) -> SamplerConfig:
  factor = vae.spatial_factor
  cells = {}
  for field, own, patch in (
    ("height_px", sampler.latent_height * factor, dit.patch_size[1]),
    ("width_px", sampler.latent_width * factor, dit.patch_size[2]),
  ):
    size_px = getattr(model, field) or own
    step_px = factor * patch
    if size_px % step_px:
      below = size_px // step_px * step_px
      nearest = " or ".join(str(n) for n in (below, below + step_px) if n)
      raise ValueError(
        f"model.{field} is {size_px}; it must be a multiple of {step_px}, so {nearest} would do."
      )
    cells[field] = size_px // factor
  return dataclasses.replace(
    sampler,
    latent_channels=dit.out_dim,
    latent_height=cells["height_px"],
    latent_width=cells["width_px"],
  )


def _fits(path: str, part: str | None, family: Family, config: Config) -> None:
  tensors, _, layout = find_weights(open_checkpoint(path), part, family)
  refuse_misfit(path, fit(tensors, layout.table(config), family.like(config), layout.aliases))


def _check_adapter(model: SettingsModel, dit: DiTConfig) -> None:
  if not model.adapter:
    if model.adapter_alpha:
      raise ValueError(f"adapter_alpha is {model.adapter_alpha:g} without an adapter; leave it 0.")
    return
  checkpoint = open_checkpoint(model.adapter)
  held = [n for n, t in checkpoint.parts.items() if is_lora(t) and "critic" not in n]
  if len(held) != 1:
    raise ValueError(f"{model.adapter} holds {len(held)} adapters of a generator; one is needed.")
  info = lora_info(checkpoint, held[0])
  if info.alpha is None and not model.adapter_alpha:
    raise ValueError(
      f"{model.adapter} does not say its alpha; set model.adapter_alpha (LongLive trained with "
      f"alpha = rank, here {info.rank})."
    )
  theirs = (info.layers, info.dim or dit.dim, info.ffn_dim or dit.ffn_dim)
  ours = (dit.num_layers, dit.dim, dit.ffn_dim)
  if theirs != ours:
    raise ValueError(
      f"{model.adapter} adapts blocks, width and feed-forward width {theirs} and the transformer "
      f"has {ours}; use the adapter that was trained on it."
    )


class _Field:
  """Puts the field's name in front of what a file's reader refuses."""

  def __init__(self, name: str):
    self._name = name

  def __enter__(self) -> None:
    """Nothing to prepare."""

  def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
    if isinstance(error, ValueError):
      raise ValueError(f"model.{self._name}: {error}") from error
