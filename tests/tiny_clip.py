"""Tiny random CLIP checkpoints in the published layouts, with a tokenizer."""

import json

import numpy as np
from flax import nnx
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors

from models.clip.checkpoint import keys
from models.clip.model import CLIP
from models.clip.presets import from_open_clip
from models.weights import fill, parameters, to_official

START, END = "<|startoftext|>", "<|endoftext|>"
OPEN_CLIP = {
  "model_cfg": {
    "embed_dim": 12,
    "vision_cfg": {
      "image_size": 28,
      "patch_size": 14,
      "width": 16,
      "layers": 2,
      "head_width": 8,
    },
    "text_cfg": {"context_length": 16, "vocab_size": 258, "width": 16, "heads": 2, "layers": 2},
  }
}


def write_tokenizer(folder):
  """A byte-level tokenizer that lowers and brackets a text as CLIP's does: 258 tokens."""
  alphabet = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
  tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
  tokenizer.normalizer = normalizers.Lowercase()
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in (START, END)])
  ids = {mark: tokenizer.token_to_id(mark) for mark in (START, END)}
  tokenizer.post_processor = processors.TemplateProcessing(
    single=f"{START} $A {END}", special_tokens=list(ids.items())
  )
  tokenizer.save(str(folder / "tokenizer.json"))


def tensors(seed=0):
  """Random weights under open_clip's names."""
  config = from_open_clip("tiny", OPEN_CLIP)
  model = nnx.eval_shape(lambda: CLIP(config, rngs=nnx.Rngs(0)))
  rng = np.random.default_rng(seed)
  drawn = {
    name: (0.3 * rng.standard_normal(p.shape)).astype(np.float32)
    for name, p in parameters(model).items()
  }
  fill(model, drawn)
  return dict(to_official(drawn, keys(config)))


def write_config(folder):
  """Its `open_clip_config.json`."""
  (folder / "open_clip_config.json").write_text(json.dumps(OPEN_CLIP))
