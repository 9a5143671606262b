"""Dialogues on the engine: a tiny random Qwen3-VL, loaded from a folder as a judge would be."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from models.qwen_vl import checkpoint
from models.qwen_vl.model import QwenVL
from models.qwen_vl.presets import from_json
from sbjax.rewards import engine_generator
from sbjax.rewards.generator import Frames, Message, Request

MARKS = (
  "<|endoftext|>",
  "<|im_start|>",
  "<|im_end|>",
  "<|vision_start|>",
  "<|vision_end|>",
  "<|image_pad|>",
  "<|video_pad|>",
)
CONFIG = {
  "architectures": ["Qwen3VLForConditionalGeneration"],
  "model_type": "qwen3_vl",
  "image_token_id": 261,
  "video_token_id": 262,
  "vision_start_token_id": 259,
  "vision_end_token_id": 260,
  "tie_word_embeddings": True,
  "text_config": {
    "model_type": "qwen3_vl_text",
    "attention_bias": False,
    "head_dim": 16,
    "hidden_size": 32,
    "intermediate_size": 48,
    "max_position_embeddings": 4096,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"mrope_section": [4, 2, 2], "rope_theta": 5e6, "rope_type": "default"},
    "vocab_size": 263,
  },
  "vision_config": {
    "model_type": "qwen3_vl_vision",
    "deepstack_visual_indexes": [0],
    "depth": 2,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 16,
    "in_channels": 3,
    "intermediate_size": 24,
    "num_heads": 2,
    "num_position_embeddings": 16,
    "out_hidden_size": 32,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
  },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  path = tmp_path_factory.mktemp("judge")
  alphabet = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
  tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  tokenizer.decoder = decoders.ByteLevel()
  tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
  tokenizer.save(str(path / "tokenizer.json"))
  (path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
  (path / "config.json").write_text(json.dumps(CONFIG))
  model = QwenVL(from_json("tiny", CONFIG), rngs=nnx.Rngs(0))
  checkpoint.save(path / "model.safetensors", model)
  return path


@dataclasses.dataclass(frozen=True)
class Rounds:
  """Shows frames and asks, then asks again about its own answer."""

  frames: Frames
  question: str
  rounds: int

  def request(self, replies):
    if len(replies) == self.rounds:
      return None
    messages = [Message("user", (self.frames, self.question))]
    for reply in replies:
      messages += [Message("assistant", (reply.text,)), Message("user", ("And now?",))]
    more = len(replies) + 1 < self.rounds
    return Request(tuple(messages), 1, 4, more_rounds=more)


def loaded(folder, **changes):
  limits = {"slots": 2, "context_tokens": 512, "total_timeout_s": 300.0, **changes}
  return engine_generator.from_checkpoint(str(folder), mesh=None, **limits)


def test_dialogues_of_one_and_two_rounds_share_the_engine_and_failures_touch_nobody(folder):
  frames = Frames(np.full((2, 8, 8, 3), 90, np.uint8))
  generator = loaded(folder)
  short, long = Rounds(frames, "What is it?", 1), Rounds(frames, "Which?", 2)
  endless = Rounds(frames, "x" * 600, 1)
  found = generator.generate([short, endless, long])
  assert [len(replies) for replies in found] == [1, 1, 2]
  assert found[1][0].cause == "too_long" and "max_length is 512" in found[1][0].detail
  assert all(not r.cause and r.truncated for replies in (found[0], found[2]) for r in replies)
  # Alone they say the same: greedy, and no dialogue depends on the others.
  assert generator.generate([long]) == [found[2]]
  late = engine_generator.EngineGenerator(
    generator._engine, generator._model, generator._encode, stop_ids=(), total_timeout_s=0.0
  )
  assert late.generate([short])[0][0].cause == "timeout"


def test_weights_and_cache_are_of_the_type_that_is_asked_for(folder):
  generator = loaded(folder, weights_dtype="bfloat16")
  (replies,) = generator.generate([Rounds(Frames(np.zeros((1, 8, 8, 3), np.uint8)), "What?", 1)])
  assert not replies[0].cause
  for tree in (generator.engine._p, generator.engine._places.cache):
    kinds = {leaf.dtype for leaf in jax.tree.leaves(tree) if np.ndim(leaf) > 1}
    assert kinds == {jnp.dtype("bfloat16")}
