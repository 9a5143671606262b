"""Tiny vision-language models and prompts that tests share."""

import dataclasses

import numpy as np
from flax import nnx

from models.layers.dense import tree_of
from models.qwen_vl.chat import Prompt, visual_ids
from models.qwen_vl.model import QwenVL
from models.qwen_vl.preprocess import Limits, encode_image, encode_video
from models.qwen_vl.presets import QwenVLConfig, TextConfig, VisionConfig
from models.weights import fill, parameters

SMALL = Limits(1, 10**6)
TOKENS = {"image_token": 90, "video_token": 91, "vision_start": 92, "vision_end": 93}


def tiny_config(family, *, layers=2, tied=True):
  """Two layers, 16 wide, heads of 8."""
  new = family == "qwen3"
  vision = VisionConfig(
    family,
    2,
    16,
    2,
    24,
    16,
    4,
    window_px=16,
    full_blocks=() if new else (1,),
    table_side=5,
    deepstack=(0,) if new else (),
  )
  text = TextConfig(
    96,
    16,
    24,
    layers,
    4,
    2,
    head_dim=8,
    mrope_section=(2, 1, 1) if new else (1, 1, 2),
    interleaved=new,
    qkv_bias=not new,
    qk_norm=new,
    tied=tied,
    max_positions=512,
  )
  return QwenVLConfig(f"tiny-{family}", vision, text, **TOKENS)


def tiny_model(family, **changes):
  """Sizes, module and parameters; biases and norms are drawn too, so that each counts."""
  config = tiny_config(family, **changes)
  model = nnx.eval_shape(lambda: QwenVL(config, rngs=nnx.Rngs(0)))
  rng = np.random.default_rng(1)

  def drawn(shape):
    # Wide maps are scaled, so that activations stay near one; vectors scatter around one.
    noise = rng.standard_normal(shape).astype(np.float32)
    return noise * shape[1] ** -0.5 if len(shape) == 2 else np.float32(1) + np.float32(0.3) * noise

  fill(model, {name: drawn(array.shape) for name, array in parameters(model).items()})
  return config, model, tree_of(model)


def encode_text(text):
  """A stand-in for a tokenizer: a token per character, 20 to 59."""
  return [20 + ord(c) % 40 for c in text]


def decode_text(ids):
  """Its inverse, as far as there is one: a letter per token."""
  return "".join(chr(32 + i) for i in ids)


def prompt(config, *parts, seed=0):
  """A prompt of parts: a number is that many drawn tokens, "image" and "video" are drawn too."""
  rng = np.random.default_rng(seed)
  ids, visuals = [], []
  for part in parts:
    if isinstance(part, int):
      ids += rng.integers(1, 80, part).tolist()
      continue
    frames = rng.integers(0, 256, (3, 12, 20, 3), dtype=np.uint8)
    if part == "image":
      made = encode_image(frames[0], config.vision, SMALL)
    else:
      made = encode_video(frames, config.vision, np.arange(3) * 0.5, SMALL)
    ids += visual_ids(config, encode_text, made)
    visuals.append(made)
  return Prompt(np.asarray(ids, np.int32), tuple(visuals))


def with_rule(config, rule):
  """The sizes with another rule for positions after a visual."""
  return dataclasses.replace(config, after_visual=rule)
