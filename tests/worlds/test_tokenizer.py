"""The word tokenizer: what it gives and what it refuses."""

import numpy as np
import pytest

from sbjax.worlds.digits import prompts
from sbjax.worlds.digits.tokenizer import WordTokenizer, default_vocabulary


@pytest.fixture
def tokenizer():
  return WordTokenizer(default_vocabulary(), text_len=12)


def test_ids_spell_the_prompt_and_end_it(tokenizer):
  ids, mask = tokenizer(["A red seven, moves left slowly."])
  words = [tokenizer.vocabulary[i] for i in ids[0]]
  assert words == ["a", "red", "seven", "moves", "left", "slowly", "</s>", *["<pad>"] * 5]
  assert mask[0].tolist() == [True] * 7 + [False] * 5


def test_every_prompt_of_the_world_has_ids_of_its_own(tokenizer):
  ids, _ = tokenizer(prompts.all_prompts())
  assert len(np.unique(ids, axis=0)) == 480


def test_an_unknown_word_is_named(tokenizer):
  with pytest.raises(ValueError, match="unknown word 'orange'"):
    tokenizer(["an orange seven moves left slowly".replace("an", "a", 1)])


def test_marks_are_no_words(tokenizer):
  with pytest.raises(ValueError, match="unknown word"):
    tokenizer(["a red seven moves left slowly pad"])


def test_an_empty_prompt_is_refused(tokenizer):
  with pytest.raises(ValueError, match="no words"):
    tokenizer(["  ... "])


def test_a_long_prompt_is_refused_or_cut(tokenizer):
  long = "a red seven moves left slowly " * 2
  with pytest.raises(ValueError, match="13 tokens but text_len is 12"):
    tokenizer([long])
  ids, mask = tokenizer([long], prompt_overflow="truncate")
  assert mask.all() and ids[0, -1] == 1
  with pytest.raises(ValueError, match="prompt_overflow is 'drop'"):
    tokenizer([long], prompt_overflow="drop")


@pytest.mark.parametrize(
  ("vocabulary", "text_len", "message"),
  [
    (("a", "b"), 4, "vocabulary is"),
    (("<pad>", "</s>", "a", "a"), 4, "vocabulary is"),
    (("<pad>", "</s>", "a"), 1, "text_len is 1"),
  ],
)
def test_unusable_tokenizers_are_refused(vocabulary, text_len, message):
  with pytest.raises(ValueError, match=message):
    WordTokenizer(vocabulary, text_len)
