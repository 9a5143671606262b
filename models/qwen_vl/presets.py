"""Sizes of the Qwen2.5-VL and Qwen3-VL families, by name or from a checkpoint's `config.json`."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

Family = Literal["qwen2.5", "qwen3"]


@dataclasses.dataclass(frozen=True)
class VisionConfig:
  """Sizes of a vision tower.

  Attributes:
    family: "qwen2.5" (RMS norms, gated feed-forward layer, windows) or "qwen3" (layer norms, a
      learned position table, deepstack).
    depth, dim, num_heads, ffn_dim: blocks, width, heads, feed-forward width.
    out_dim: width of the result, that of the text decoder.
    patch_px: side of a patch.
    temporal_patch: frames in a patch.
    merge: patches per side that become one token.
    in_channels: colour channels.
    window_px: side of an attention window; "qwen2.5" only.
    full_blocks: blocks that attend over the whole slice instead of windows; "qwen2.5" only.
    table_side: rows and columns of the learned position table; "qwen3" only.
    deepstack: blocks whose output also goes to the first decoder layers; "qwen3" only.
    rope_theta: base of the rotary frequencies.
    eps: of every norm.

  Raises:
    ValueError: a field that does not fit the others.
  """

  family: Family
  depth: int
  dim: int
  num_heads: int
  ffn_dim: int
  out_dim: int
  patch_px: int
  temporal_patch: int = 2
  merge: int = 2
  in_channels: int = 3
  window_px: int = 112
  full_blocks: tuple[int, ...] = ()
  table_side: int = 48
  deepstack: tuple[int, ...] = ()
  rope_theta: float = 10_000.0
  eps: float = 1e-6

  def __post_init__(self):
    if self.family not in ("qwen2.5", "qwen3"):
      raise ValueError(f"family is {self.family!r}; use 'qwen2.5' or 'qwen3'.")
    if self.dim % self.num_heads or (self.dim // self.num_heads) % 4:
      raise ValueError(
        f"num_heads is {self.num_heads}; dim ({self.dim}) divided by it must be a multiple of 4."
      )
    if self.family == "qwen2.5" and self.window_px % (self.patch_px * self.merge):
      raise ValueError(
        f"window_px is {self.window_px}; it must be a multiple of {self.patch_px * self.merge}, "
        "the side of a merged patch."
      )
    for field in ("full_blocks", "deepstack"):
      for block in getattr(self, field):
        if not 0 <= block < self.depth:
          raise ValueError(f"{field} has {block}; blocks are 0 to {self.depth - 1}.")

  @property
  def head_dim(self) -> int:
    """Width of one head."""
    return self.dim // self.num_heads

  @property
  def patch_width(self) -> int:
    """Numbers in a patch: channels × frames × rows × columns."""
    return self.in_channels * self.temporal_patch * self.patch_px**2

  @property
  def factor_px(self) -> int:
    """Side of the square that becomes one token; image sides are multiples of it."""
    return self.patch_px * self.merge


@dataclasses.dataclass(frozen=True)
class TextConfig:
  """Sizes of a text decoder.

  Attributes:
    vocab_size: rows of the embedding table.
    dim, ffn_dim, num_layers: width, feed-forward width, layers.
    num_heads, num_kv_heads, head_dim: query heads, key-value heads, their width.
    mrope_section: how many rotary frequencies follow time, row and column; they add up to half of
      `head_dim`.
    interleaved: whether the three take turns (Qwen3) or stand one after the other (Qwen2.5).
    rope_theta: base of the rotary frequencies.
    qkv_bias: whether q, k and v have a bias.
    qk_norm: whether q and k are normed per head.
    tied: whether the head is the embedding table.
    eps: of every norm.
    max_positions: tokens that the model was made for.

  Raises:
    ValueError: a field that does not fit the others.
  """

  vocab_size: int
  dim: int
  ffn_dim: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int = 128
  mrope_section: tuple[int, int, int] = (16, 24, 24)
  interleaved: bool = False
  rope_theta: float = 1e6
  qkv_bias: bool = True
  qk_norm: bool = False
  tied: bool = False
  eps: float = 1e-6
  max_positions: int = 128_000

  def __post_init__(self):
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        f"num_kv_heads is {self.num_kv_heads}; it must divide num_heads ({self.num_heads})."
      )
    if self.head_dim % 2 or sum(self.mrope_section) != self.head_dim // 2:
      raise ValueError(
        f"mrope_section is {self.mrope_section}; it must add up to half of head_dim "
        f"({self.head_dim})."
      )
    if self.interleaved and 3 * max(self.mrope_section[1:]) > self.head_dim // 2 + 2:
      raise ValueError(
        f"mrope_section is {self.mrope_section}; interleaved, three times its second and third "
        f"entry must fit in half of head_dim ({self.head_dim})."
      )


@dataclasses.dataclass(frozen=True)
class QwenVLConfig:
  """A whole model.

  Attributes:
    name: what error messages call it.
    vision, text: sizes of the two parts.
    image_token, video_token: ids of the placeholders that visual features replace.
    vision_start, vision_end: ids that stand around placeholders.
    tokens_per_second: time positions per second of a Qwen2.5 video.
    after_visual: where text goes on after a visual: "largest" past every position of it, as vLLM
      and transformers 4 do and the public judges were trained; "grid" past its larger side, as
      transformers 5 does. They differ for Qwen2.5 videos whose time positions exceed the grid.
  """

  name: str
  vision: VisionConfig
  text: TextConfig
  image_token: int = 151_655
  video_token: int = 151_656
  vision_start: int = 151_652
  vision_end: int = 151_653
  tokens_per_second: float = 2.0
  after_visual: Literal["largest", "grid"] = "largest"

  def __post_init__(self):
    """Refuses parts that do not fit."""
    if self.vision.out_dim != self.text.dim:
      raise ValueError(
        f"out_dim is {self.vision.out_dim}; it must be the width of the decoder ({self.text.dim})."
      )
    if self.after_visual not in ("largest", "grid"):
      raise ValueError(f"after_visual is {self.after_visual!r}; use 'largest' or 'grid'.")
    if len(self.vision.deepstack) > self.text.num_layers:
      raise ValueError(
        f"deepstack has {len(self.vision.deepstack)} blocks; the decoder has only "
        f"{self.text.num_layers} layers to take them."
      )

  @property
  def family(self) -> Family:
    """Which of the two families."""
    return self.vision.family


def _vision2_5(out_dim: int, ffn_dim: int = 3420) -> VisionConfig:
  return VisionConfig("qwen2.5", 32, 1280, 16, ffn_dim, out_dim, 14, full_blocks=(7, 15, 23, 31))


def _vision3_small(out_dim: int) -> VisionConfig:
  return VisionConfig("qwen3", 24, 1024, 16, 4096, out_dim, 16, deepstack=(5, 11, 17))


def _text3(dim: int, ffn_dim: int, layers: int, heads: int, tied: bool) -> TextConfig:
  return TextConfig(
    151_936,
    dim,
    ffn_dim,
    layers,
    heads,
    8,
    mrope_section=(24, 20, 20),
    interleaved=True,
    rope_theta=5e6,
    qkv_bias=False,
    qk_norm=True,
    tied=tied,
    max_positions=262_144,
  )


PRESETS: dict[str, QwenVLConfig] = {
  config.name: config
  for config in (
    QwenVLConfig(
      "qwen2.5-vl-3b",
      _vision2_5(2048),
      TextConfig(151_936, 2048, 11_008, 36, 16, 2, tied=True),
    ),
    QwenVLConfig("qwen2.5-vl-7b", _vision2_5(3584), TextConfig(152_064, 3584, 18_944, 28, 28, 4)),
    QwenVLConfig(
      "qwen2.5-vl-32b", _vision2_5(5120, 3456), TextConfig(152_064, 5120, 27_648, 64, 40, 8)
    ),
    QwenVLConfig("qwen3-vl-2b", _vision3_small(2048), _text3(2048, 6144, 28, 16, True)),
    QwenVLConfig("qwen3-vl-4b", _vision3_small(2560), _text3(2560, 9728, 36, 32, True)),
    QwenVLConfig(
      "qwen3-vl-8b",
      VisionConfig("qwen3", 27, 1152, 16, 4304, 4096, 16, deepstack=(8, 16, 24)),
      _text3(4096, 12_288, 36, 32, False),
    ),
  )
}


def preset(name: str) -> QwenVLConfig:
  """The sizes of a named model.

  Raises:
    ValueError: for an unknown name; the message lists the known ones.
  """
  if name not in PRESETS:
    raise ValueError(f"Qwen-VL preset is {name!r}; use one of {', '.join(sorted(PRESETS))}.")
  return PRESETS[name]


def from_json(name: str, data: Mapping[str, Any]) -> QwenVLConfig:
  """The sizes in a checkpoint's `config.json`, old layout (decoder's fields on top) or new.

  Raises:
    ValueError: when it is no Qwen2.5-VL or Qwen3-VL, or lacks a field.
  """
  kinds: dict[str, Family] = {"qwen2_5_vl": "qwen2.5", "qwen3_vl": "qwen3"}
  if data.get("model_type") not in kinds:
    raise ValueError(
      f"{name} has model_type {data.get('model_type')!r}; use one of {', '.join(kinds)}."
    )
  family = kinds[data["model_type"]]
  text = data.get("text_config", data)
  try:
    return QwenVLConfig(
      name,
      _vision_from(family, data["vision_config"], text["hidden_size"]),
      _text_from(family, text, data),
      image_token=data["image_token_id"],
      video_token=data["video_token_id"],
      vision_start=data["vision_start_token_id"],
      vision_end=data.get("vision_end_token_id", 151_653),
      tokens_per_second=data["vision_config"].get("tokens_per_second", 2),
    )
  except KeyError as error:
    raise ValueError(f"{name} lacks the config field {error}; use a whole config.json.") from error


def _vision_from(family: Family, vision: Mapping[str, Any], text_dim: int) -> VisionConfig:
  only = {}
  if family == "qwen2.5":
    only["window_px"] = vision["window_size"]
    only["full_blocks"] = tuple(vision["fullatt_block_indexes"])
  else:
    only["table_side"] = round(vision["num_position_embeddings"] ** 0.5)
    only["deepstack"] = tuple(vision["deepstack_visual_indexes"])
  return VisionConfig(
    family,
    vision["depth"],
    vision["hidden_size"],
    vision["num_heads"],
    vision["intermediate_size"],
    vision.get("out_hidden_size", text_dim),
    vision["patch_size"],
    temporal_patch=vision.get("temporal_patch_size", 2),
    merge=vision.get("spatial_merge_size", 2),
    in_channels=vision.get("in_channels", vision.get("in_chans", 3)),
    rope_theta=vision.get("rope_parameters", {}).get("rope_theta", 10_000.0),
    **only,
  )


def _text_from(family: Family, text: Mapping[str, Any], data: Mapping[str, Any]) -> TextConfig:
  rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
  heads = text["num_attention_heads"]
  return TextConfig(
    text["vocab_size"],
    text["hidden_size"],
    text["intermediate_size"],
    text["num_hidden_layers"],
    heads,
    text["num_key_value_heads"],
    head_dim=text.get("head_dim") or text["hidden_size"] // heads,
    mrope_section=tuple(rope["mrope_section"]),
    interleaved=family == "qwen3",
    rope_theta=rope["rope_theta"] if "rope_theta" in rope else text["rope_theta"],
    qkv_bias=family == "qwen2.5",
    qk_norm=family == "qwen3",
    tied=data.get("tie_word_embeddings", text.get("tie_word_embeddings", False)),
    eps=text["rms_norm_eps"],
    max_positions=text["max_position_embeddings"],
  )
