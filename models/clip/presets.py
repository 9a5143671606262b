"""Sizes of CLIP models: named ones, and the sizes that stand in a checkpoint's config."""

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class CLIPConfig:
  """Sizes of a CLIP model with a vision transformer.

  Attributes:
    name: what error messages call it.
    image_px: side of the image.
    patch_px: side of a patch.
    vision_dim, vision_layers, vision_heads, vision_ffn_dim: sizes of the image tower.
    text_dim, text_layers, text_heads, text_ffn_dim: sizes of the text tower.
    context: tokens of a text.
    vocab_size: rows of the embedding table.
    out_dim: width of the space that both share.
    eps: of the layer norms.
    quick_gelu: whether the blocks use `x·σ(1.702 x)` in place of GELU, as OpenAI's models do.

  Raises:
    ValueError: a field that does not fit the others.
  """

  name: str
  image_px: int
  patch_px: int
  vision_dim: int
  vision_layers: int
  vision_heads: int
  vision_ffn_dim: int
  text_dim: int
  text_layers: int
  text_heads: int
  text_ffn_dim: int
  context: int
  vocab_size: int
  out_dim: int
  eps: float = 1e-5
  quick_gelu: bool = False

  def __post_init__(self):
    if self.image_px % self.patch_px:
      raise ValueError(
        f"patch_px is {self.patch_px}; it must divide image_px, which is {self.image_px}."
      )
    for tower in ("vision", "text"):
      dim, heads = getattr(self, f"{tower}_dim"), getattr(self, f"{tower}_heads")
      if dim % heads:
        raise ValueError(f"{tower}_heads is {heads}; it must divide {tower}_dim ({dim}).")

  @property
  def patches(self) -> int:
    """Patches of an image."""
    return (self.image_px // self.patch_px) ** 2


PRESETS: dict[str, CLIPConfig] = {
  config.name: config
  for config in (
    CLIPConfig("vit-h-14", 224, 14, 1280, 32, 16, 5120, 1024, 24, 16, 4096, 77, 49_408, 1024),
  )
}


def preset(name: str) -> CLIPConfig:
  """The sizes of a named model.

  Raises:
    ValueError: for an unknown name; the message lists the known ones.
  """
  if name not in PRESETS:
    raise ValueError(f"CLIP preset is {name!r}; use one of {', '.join(sorted(PRESETS))}.")
  return PRESETS[name]


def from_huggingface(name: str, read: Mapping[str, Any]) -> CLIPConfig:
  """Sizes from a `config.json` of transformers' `CLIPModel`; what it leaves out is CLIP B/32's.

  Raises:
    ValueError: it is no CLIP, or its blocks use something that is not here.
  """
  if read.get("model_type") != "clip":
    raise ValueError(f"{name}: model_type is {read.get('model_type')!r}; a CLIP has 'clip'.")
  vision, text = (read.get(f"{tower}_config") or {} for tower in ("vision", "text"))
  acts = {tower.get("hidden_act", "quick_gelu") for tower in (vision, text)}
  eps = {float(tower.get("layer_norm_eps", 1e-5)) for tower in (vision, text)}
  if len(acts) > 1 or not acts <= {"gelu", "quick_gelu"}:
    raise ValueError(f"{name}: hidden_act is {sorted(acts)}; use 'gelu' or 'quick_gelu' in both.")
  if len(eps) > 1:
    raise ValueError(f"{name}: layer_norm_eps is {sorted(eps)}; both towers need the same.")
  return CLIPConfig(
    name,
    vision.get("image_size", 224),
    vision.get("patch_size", 32),
    vision.get("hidden_size", 768),
    vision.get("num_hidden_layers", 12),
    vision.get("num_attention_heads", 12),
    vision.get("intermediate_size", 3072),
    text.get("hidden_size", 512),
    text.get("num_hidden_layers", 12),
    text.get("num_attention_heads", 8),
    text.get("intermediate_size", 2048),
    text.get("max_position_embeddings", 77),
    text.get("vocab_size", 49_408),
    read.get("projection_dim", 512),
    eps.pop(),
    acts.pop() == "quick_gelu",
  )


def from_open_clip(name: str, read: Mapping[str, Any]) -> CLIPConfig:
  """Sizes from an `open_clip_config.json`.

  Raises:
    ValueError: it lacks a size.
  """
  model = read.get("model_cfg", read)
  try:
    vision, text = model["vision_cfg"], model["text_cfg"]
    ratio = vision.get("mlp_ratio", 4.0)
    return CLIPConfig(
      name,
      vision["image_size"],
      vision["patch_size"],
      vision["width"],
      vision["layers"],
      vision["width"] // vision.get("head_width", 64),
      int(vision["width"] * ratio),
      text["width"],
      text["layers"],
      text["heads"],
      int(text["width"] * text.get("mlp_ratio", 4.0)),
      text["context_length"],
      text["vocab_size"],
      model["embed_dim"],
      quick_gelu=bool(model.get("quick_gelu", False)),
    )
  except (KeyError, TypeError) as error:
    raise ValueError(f"{name}: its open_clip config cannot be used, it lacks {error}.") from error
