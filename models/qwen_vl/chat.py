"""Chats to token ids: turns of text, images and videos in the layout the models were trained on."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Int

from models.qwen_vl.preprocess import Encoded
from models.qwen_vl.presets import QwenVLConfig

Encode = Callable[[str], Sequence[int]]  # text to ids; marks such as <|im_start|> are one id each


@dataclasses.dataclass(frozen=True, eq=False)
class Prompt:
  """What a model reads.

  Attributes:
    ids: tokens, placeholders included.
    visuals: in the order of their placeholders.
  """

  ids: Int[np.ndarray, " tokens"]
  visuals: tuple[Encoded, ...] = ()


def chat_prompt(
  config: QwenVLConfig,
  encode: Encode,
  turns: Sequence[tuple[str, Sequence[str | Encoded]]],
  *,
  reply: bool = True,
) -> Prompt:
  """Lays out a chat.

  Args:
    config: the model.
    encode: the tokenizer's text-to-ids function, special tokens recognised, none added.
    turns: role (system, user, assistant) and what it says, text and visuals in order.
    reply: whether the start of the assistant's answer follows.
  """
  ids: list[int] = []
  visuals: list[Encoded] = []
  text = ""
  for role, parts in turns:
    text += f"<|im_start|>{role}\n"
    for part in parts:
      if isinstance(part, str):
        text += part
        continue
      ids += encode(text)
      text = ""
      ids += visual_ids(config, encode, part)
      visuals.append(part)
    text += "<|im_end|>\n"
  if reply:
    text += "<|im_start|>assistant\n"
  ids += encode(text)
  return Prompt(np.asarray(ids, np.int32), tuple(visuals))


def visual_ids(config: QwenVLConfig, encode: Encode, encoded: Encoded) -> list[int]:
  """Placeholders of a visual with their marks; Qwen3 tells each slice of a video its time."""
  visual = encoded.visual
  merge = config.vision.merge

  def marked(token: int, count: int) -> list[int]:
    return [config.vision_start, *[token] * count, config.vision_end]

  if not visual.video:
    return marked(config.image_token, visual.grid.tokens(merge))
  if config.family == "qwen2.5":
    return marked(config.video_token, visual.grid.tokens(merge))
  per_slice = visual.grid._replace(slices=1).tokens(merge)
  ids: list[int] = []
  for time_s in encoded.times_s:
    ids += [*encode(f"<{time_s:.1f} seconds>"), *marked(config.video_token, per_slice)]
  return ids
