"""From a prompt to token ids as Wan does it: cleaned, tokenised, cut to the encoder's length."""

import html
import pathlib

import ftfy
from tokenizers import Tokenizer

_FILE = "tokenizer.json"


def clean(text: str) -> str:
  """The prompt as Wan tokenises it: text repaired, HTML escapes undone twice, single blanks."""
  return " ".join(html.unescape(html.unescape(ftfy.fix_text(text))).split())


class WanTokenizer:
  """Prompts to token ids.

  Args:
    folder: has UMT5's `tokenizer.json`, as `google/umt5-xxl` in Wan's repositories.
    text_len: tokens that the text encoder takes, the end mark included.

  Raises:
    ValueError: there is no such file, or it holds no tokenizer.
  """

  def __init__(self, folder: str, text_len: int):
    path = pathlib.Path(folder) / _FILE
    if not path.is_file():
      raise ValueError(
        f"{folder!r} has no {_FILE}; name the tokenizer's folder, such as Wan2.1's google/umt5-xxl."
      )
    try:
      self._tokenizer = Tokenizer.from_file(str(path))
    # The library raises a plain Exception whatever is wrong with the file.
    except Exception as error:
      raise ValueError(f"{path} holds no tokenizer ({error}).") from error
    self.text_len = text_len
    self._tokenizer.no_padding()

  @property
  def vocab_size(self) -> int:
    """How many ids there are, marks included."""
    return self._tokenizer.get_vocab_size(with_added_tokens=True)

  def length(self, text: str) -> int:
    """How many tokens a prompt has, the end mark included, however long it is."""
    self._tokenizer.no_truncation()
    return len(self._tokenizer.encode(clean(text)).ids)

  def __call__(self, text: str) -> tuple[int, ...]:
    """The ids of a prompt, the end mark last; what is too long is cut before the end mark."""
    self._tokenizer.enable_truncation(self.text_len)
    return tuple(self._tokenizer.encode(clean(text)).ids)

  def accept(self, text: str) -> None:
    """Refuses a prompt that would be cut.

    Raises:
      ValueError: with its length and the one that fits.
    """
    tokens = self.length(text)
    if tokens > self.text_len:
      raise ValueError(
        f"the prompt has {tokens} tokens but the text encoder takes {self.text_len}; shorten it or "
        "set prompts.overflow to 'truncate'."
      )
