"""The second lesson: two videos, what was asked for, and the whole answer, token by token."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int
from tokenizers import Tokenizer

from models.layers.dense import Tree
from models.qwen_vl.chat import Prompt, chat_prompt
from models.qwen_vl.model import forward
from models.qwen_vl.positions import place
from models.qwen_vl.preprocess import Encoded, encode_video
from models.qwen_vl.presets import QwenVLConfig
from models.qwen_vl.vision import Features
from sbjax.rewards.digits_reasoner import question
from sbjax.rewards.generator import Frames
from sbjax.worlds.digits import judge, prompts
from sbjax.worlds.digits.reasoner import text
from sbjax.worlds.digits.reasoner.videos import Clips


@dataclasses.dataclass(frozen=True)
class Pair:
  """Two of a batch's videos and the prompt that they are compared by."""

  first: int
  second: int
  asked: prompts.Asked


class Lesson(NamedTuple):
  """A batch of whole sequences, padded at the end.

  Attributes:
    ids, positions, visual_rows: as `models.qwen_vl.model.forward` takes them; row numbers count
      the tokens of all videos of the batch.
    learned: which tokens are predicted: those of the answer.
  """

  ids: Int[np.ndarray, "batch tokens"]
  positions: Int[np.ndarray, "batch 3 tokens"]
  visual_rows: Int[np.ndarray, "batch tokens"]
  learned: Bool[np.ndarray, "batch tokens"]


def asked_of(
  rng: np.random.Generator, clips: Clips, first: int, second: int, own: float = 0.3
) -> prompts.Asked:
  """A prompt that tells two videos apart.

  A generated video's own prompt in `own` of the cases. Else each attribute is what one of the two
  shows most probably, now and then their second reading, or anything.
  """
  made_for = clips.asked[[first, second]]
  if made_for.max() >= 0 and rng.uniform() < own:
    return prompts.parse(prompts.all_prompts()[made_for.max()])
  values = {}
  for name, classes in judge.HEADS.items():
    order = np.argsort(clips.tables[name][first if rng.uniform() < 0.5 else second])
    chance = rng.uniform()
    place_ = -1 if chance < 0.75 else -2
    values[name] = int(order[place_]) if chance < 0.9 else int(rng.integers(classes))
  return prompts.Asked(**values)


def random_pairs(rng: np.random.Generator, clips: Clips, alike: float = 0.0) -> list[Pair]:
  """Neighbours in the batch, and the same the other way round under another prompt.

  In the share `alike` of the pairs both videos are the same one.
  """
  pairs = []
  for first in range(0, len(clips) - 1, 2):
    for one, other in ((first, first + 1), (first + 1, first)):
      second = one if rng.uniform() < alike else other
      pairs.append(Pair(one, second, asked_of(rng, clips, one, second)))
  return pairs


def encoded(frames: Frames, config: QwenVLConfig) -> Encoded:
  """One video as the engine encodes it."""
  return encode_video(frames.pixels, config.vision, np.asarray(frames.times_s))


def prompt_of(
  config: QwenVLConfig, tokenizer: Tokenizer, asked: str, videos: tuple[Encoded, Encoded]
) -> Prompt:
  """The question about two videos as the engine lays it out."""
  empty = Frames(np.zeros((0, 0, 0, 3), np.uint8))
  parts = [
    part if isinstance(part, str) else videos[i // 2]
    for i, part in enumerate(question(asked, (empty, empty)).parts)
  ]
  return chat_prompt(config, lambda t: tokenizer.encode(t).ids, [("user", parts)])


def lesson(
  config: QwenVLConfig,
  tokenizer: Tokenizer,
  clips: Clips,
  videos: Sequence[Encoded],
  pairs: Sequence[Pair],
  length: int,
) -> Lesson:
  """Lays pairs out as training sequences.

  Raises:
    ValueError: if one is longer than `length`.
  """
  batch = len(pairs)
  made = Lesson(
    np.zeros((batch, length), np.int32),
    np.zeros((batch, 3, length), np.int32),
    np.full((batch, length), -1, np.int32),
    np.zeros((batch, length), bool),
  )
  each = videos[0].visual.grid.tokens(config.vision.merge)
  end = tokenizer.token_to_id("<|im_end|>")
  for row, pair in enumerate(pairs):
    shown = (videos[pair.first], videos[pair.second])
    prompt = prompt_of(config, tokenizer, prompts.sentence(pair.asked), shown)
    first, second = ({n: t[i] for n, t in clips.tables.items()} for i in (pair.first, pair.second))
    answer = [*tokenizer.encode(text.answer(first, second, pair.asked)).ids, end]
    ids = np.concatenate([prompt.ids, np.asarray(answer, np.int32)])
    if len(ids) > length:
      raise ValueError(f"a sequence has {len(ids)} tokens; length is {length}, so raise it")
    placed = place(config, ids, [v.visual for v in shown])
    count = len(ids)
    made.ids[row, :count] = ids
    made.positions[row, :, :count] = placed.positions
    made.learned[row, len(prompt.ids) : count] = True
    rows = placed.visual_rows
    # Rows count the pair's own two videos; in the batch they stand elsewhere.
    starts = np.where(rows < each, pair.first * each, (pair.second - 1) * each)
    made.visual_rows[row, :count] = np.where(rows < 0, -1, rows + starts)
  return made


def loss(
  text_parameters: Tree, config: QwenVLConfig, seen: Features, made: Lesson
) -> tuple[Float[Array, ""], Float[Array, ""]]:
  """Mean cross-entropy of the answers' tokens, and the share of tokens that are right.

  Args:
    text_parameters: the decoder's.
    config: the sizes.
    seen: what the tower makes of the batch's videos, slice by slice.
    made: the sequences.
  """
  flat = seen.tokens.reshape(-1, seen.tokens.shape[-1])
  deep = seen.deep.reshape(seen.deep.shape[0], *flat.shape)
  p = {"text": text_parameters}
  ids, positions, rows = map(jnp.asarray, (made.ids, made.positions, made.visual_rows))
  scores = forward(p, config, ids, positions, flat, rows, deep)[:, :-1]
  target = ids[:, 1:]
  learned = jnp.asarray(made.learned[:, 1:], jnp.float32)
  entropy = optax.softmax_cross_entropy_with_integer_labels(scores, target)
  right = (scores.argmax(axis=-1) == target).astype(jnp.float32)
  total = learned.sum()
  return (entropy * learned).sum() / total, (right * learned).sum() / total
