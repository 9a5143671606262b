"""Sizes of CLIP models."""

import dataclasses


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
