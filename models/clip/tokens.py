"""CLIP's texts as token ids, by the tokenizer file that its checkpoints bring."""

import os
import pathlib
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from models.clip.presets import CLIPConfig

END = "<|endoftext|>"


class TextTokens:
  """Texts to ids: start token, the text cut to what fits, end token, zeros.

  What stands after the end token changes nothing, since a text is the row of its end token.

  Args:
    folder: has a `tokenizer.json`, as Hugging Face checkpoints of CLIP do.
    config: the model's sizes.

  Raises:
    ValueError: the file is missing or damaged, or its tokens are not the model's.
  """

  def __init__(self, folder: str | os.PathLike, config: CLIPConfig):
    path = pathlib.Path(folder, "tokenizer.json")
    if not path.is_file():
      raise ValueError(f"{path} is missing; copy the one of a CLIP checkpoint there.")
    from transformers import PreTrainedTokenizerFast  # takes seconds

    try:
      self._tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path))
    except Exception as error:  # the library raises the bare class
      raise ValueError(f"{path} cannot be read as a tokenizer ({error}).") from error
    end, size = self._tokenizer.get_vocab().get(END), len(self._tokenizer)
    if end != size - 1 or size != config.vocab_size:
      raise ValueError(
        f"{path} has {size} tokens with {END} at {end}; the model has {config.vocab_size}, and "
        f"{END} must be the last."
      )
    self._context = config.context

  def __call__(self, texts: Sequence[str]) -> Int[np.ndarray, "texts context"]:
    """Ids of texts; several spaces are one, as in open_clip."""
    ids = np.zeros((len(texts), self._context), np.int32)
    for row, text in enumerate(texts):
      plain = " ".join(text.split())
      found = self._tokenizer(plain, truncation=True, max_length=self._context)["input_ids"]
      ids[row, : len(found)] = found
    return ids
