"""A word-level tokenizer whose vocabulary is the words of the digits world."""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Bool, Int

from sbjax.worlds.digits import prompts

PAD, END = "<pad>", "</s>"
OVERFLOWS = ("refuse", "truncate")


def default_vocabulary() -> tuple[str, ...]:
  """Padding and end marks, then every word a prompt can hold. Order is the token id."""
  return (
    PAD,
    END,
    *prompts.FILLERS,
    *prompts.COLOURS,
    *prompts.DIGITS,
    *prompts.DIRECTIONS,
    *prompts.SPEEDS,
  )


@dataclasses.dataclass(frozen=True)
class WordTokenizer:
  """Words to ids. The end mark follows the last word, as UMT5's tokenizer appends it."""

  vocabulary: tuple[str, ...]
  text_len: int

  def __post_init__(self):
    if len(set(self.vocabulary)) != len(self.vocabulary) or self.vocabulary[:2] != (PAD, END):
      raise ValueError(
        f"vocabulary is {self.vocabulary!r}; it must be distinct words that begin with {PAD}, {END}"
      )
    if self.text_len < 2:
      raise ValueError(f"text_len is {self.text_len}; it must be at least 2")

  def __call__(
    self, texts: list[str] | tuple[str, ...], prompt_overflow: str = "refuse"
  ) -> tuple[Int[np.ndarray, "batch text_len"], Bool[np.ndarray, "batch text_len"]]:
    """Token ids, padded, and the mask of real tokens.

    Args:
      texts: prompts.
      prompt_overflow: what to do with a prompt of more than `text_len` tokens: "refuse" it or
        "truncate" it (the end mark stays, as in UMT5's tokenizer).

    Raises:
      ValueError: for an unknown word, an empty prompt, or a prompt that is too long and refused.
    """
    if prompt_overflow not in OVERFLOWS:
      raise ValueError(
        f"prompt_overflow is {prompt_overflow!r}; it must be one of {', '.join(OVERFLOWS)}"
      )
    table = {word: i for i, word in enumerate(self.vocabulary)}
    ids = np.zeros((len(texts), self.text_len), np.int32)
    mask = np.zeros((len(texts), self.text_len), bool)
    for row, text in enumerate(texts):
      found = prompts.words(text)
      if not found:
        raise ValueError(f"prompt {text!r} has no words; it needs at least one")
      unknown = [word for word in found if word not in table]
      if unknown:
        raise ValueError(
          f"prompt {text!r} has the unknown word {unknown[0]!r}; this world knows "
          f"{', '.join(self.vocabulary[2:])}"
        )
      tokens = [table[word] for word in found]
      if len(tokens) + 1 > self.text_len and prompt_overflow == "refuse":
        raise ValueError(
          f"prompt {text!r} has {len(tokens) + 1} tokens but text_len is {self.text_len}; shorten "
          f"it or set prompt_overflow='truncate'"
        )
      tokens = [*tokens[: self.text_len - 1], 1]
      ids[row, : len(tokens)] = tokens
      mask[row, : len(tokens)] = True
    return ids, mask
