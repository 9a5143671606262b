"""Prompt sets: reading, refusing, and an order that only seed and cursor decide."""

import collections

import hypothesis
import pytest
from hypothesis import strategies as st

from sbjax import prompts


def _write(path, data):
  path.write_bytes(data if isinstance(data, bytes) else data.encode())
  return str(path)


def test_text_keeps_order_and_duplicates_and_skips_blank_lines(tmp_path):
  path = _write(tmp_path / "p.txt", "\ufeffone\r\n\n  two  \none\n\n")
  assert prompts.load(path).prompts == ("one", "two", "one")


def test_unusual_line_separators_do_not_cut_a_prompt(tmp_path):
  path = _write(tmp_path / "p.txt", "one\u2028half\ntwo\n")
  assert prompts.load(path).prompts == ("one\u2028half", "two")


def test_csv_reads_the_column_prompt(tmp_path):
  path = _write(tmp_path / "p.csv", 'id, prompt \n1,"a, b"\n2,"c ""d"""\n')
  assert prompts.load(path).prompts == ("a, b", 'c "d"')


def test_jsonl_reads_the_key_prompt(tmp_path):
  path = _write(tmp_path / "p.jsonl", '{"prompt": "a"}\n\n{"prompt": " b ", "x": 1}\n')
  assert prompts.load(path).prompts == ("a", "b")


def test_world_halves_are_disjoint():
  train, held_out = (prompts.load(s).prompts for s in prompts.WORLD_SPLITS)
  assert len(train) == len(held_out) == 240
  assert not set(train) & set(held_out)


@pytest.mark.parametrize(
  ("name", "data", "says"),
  [
    ("p.txt", "", "is empty"),
    ("p.txt", " \n\n", "is empty"),
    ("p.txt", b"fine\nfine\n\xff\xfe\n", "not UTF-8 at line 3"),
    ("p.txt", "one".encode("utf-16"), "not UTF-8 at line 1"),
    ("p.csv", "id,text\n1,a\n", "columns id, text"),
    ("p.csv", "id,prompt\n", "holds no prompts"),
    ("p.csv", "id,prompt\n1,a\n2\n", "line 3 has an empty prompt"),
    ("p.csv", 'prompt\n"a\nb"\n\n""\n', "line 5 has an empty prompt"),
    ("p.csv", 'prompt\n"a\n', "is not CSV"),
    ("p.jsonl", '{"prompt": "a"}\n{oh\n', "line 2 is not JSON"),
    ("p.jsonl", '{"text": "a"}\n', 'line 1 has no text under the key "prompt"'),
    ("p.jsonl", '["a"]\n', "line 1 has no text"),
    ("p.jsonl", '{"prompt": 3}\n', "line 1 has no text"),
  ],
)
def test_unusable_files_are_refused_with_the_line(tmp_path, name, data, says):
  path = _write(tmp_path / name, data)
  with pytest.raises(ValueError) as error:
    prompts.load(path)
  assert says in str(error.value) and str(path) in str(error.value)
  assert "\n" not in str(error.value)


@pytest.mark.parametrize(
  ("source", "says"),
  [
    ("nowhere.txt", "is not there"),
    (".", "cannot be read"),
    ("world:test", "not a set of prompts"),
  ],
)
def test_sources_that_are_not_there(source, says):
  with pytest.raises(ValueError, match=says):
    prompts.load(source)


def test_a_refused_prompt_is_named_by_line(tmp_path):
  path = _write(tmp_path / "p.txt", "short\n\nlonger\n")

  def accept(prompt):
    if len(prompt) > 5:
      raise ValueError("too long")

  with pytest.raises(ValueError, match=r"p\.txt line 3: too long"):
    prompts.load(path, accept)


@hypothesis.given(
  size=st.integers(1, 12),
  seed=st.integers(0, 2**31 - 1),
  cursor=st.integers(0, 100),
  counts=st.lists(st.integers(0, 9), min_size=1, max_size=4),
)
def test_any_cut_into_steps_gives_the_same_sequence(size, seed, cursor, counts):
  some = prompts.PromptSet("test", tuple(str(i) for i in range(size)))
  whole = some.take(seed, cursor, sum(counts))
  parts = []
  for count in counts:
    parts.extend(some.take(seed, cursor + len(parts), count))
  assert tuple(parts) == whole


@hypothesis.given(size=st.integers(1, 12), seed=st.integers(0, 1000), epoch=st.integers(0, 5))
def test_every_epoch_uses_each_prompt_once(size, seed, epoch):
  some = prompts.PromptSet("test", tuple(str(i) for i in range(size)))
  taken = some.take(seed, epoch * size, size)
  assert collections.Counter(taken) == collections.Counter(some.prompts)


def test_epochs_and_seeds_have_orders_of_their_own():
  some = prompts.PromptSet("test", tuple(str(i) for i in range(50)))
  assert some.take(0, 0, 50) != some.take(0, 50, 50)
  assert some.take(0, 0, 50) != some.take(1, 0, 50)
