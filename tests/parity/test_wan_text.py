"""The tokenizer against transformers' own reading of the same folder."""

import pytest

from sbjax.worlds.wan.text import WanTokenizer, clean
from tests import tiny_wan

pytestmark = pytest.mark.parity


def test_ids_are_those_of_auto_tokenizer(tmp_path):
  transformers = pytest.importorskip("transformers")
  tiny_wan.tokenizer(tmp_path)
  theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path), local_files_only=True)
  ours = WanTokenizer(str(tmp_path), 24)
  for text in (*tiny_wan.PROMPTS, "a zebra &amp; a  cat", "Z\u00fcrich", "a red cat " * 30):
    row = theirs(
      clean(text), padding="max_length", truncation=True, max_length=24, add_special_tokens=True
    )
    ids, mask = row["input_ids"], row["attention_mask"]
    assert ours(text) == tuple(i for i, real in zip(ids, mask, strict=True) if real)
    assert sum(mask) == min(ours.length(text), 24)
