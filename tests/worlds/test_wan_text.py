"""Prompts as Wan tokenises them, and embeddings that are worked out once."""

import dataclasses
import gc
import subprocess
import sys

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from models.checkpoints.wan import load_umt5
from models.wan.umt5 import encode_tokens
from sbjax.worlds.wan import embeddings as embeddings_lib
from sbjax.worlds.wan.embeddings import Embeddings, TextSource
from sbjax.worlds.wan.text import WanTokenizer, clean
from tests import tiny_wan

TEXT_LEN = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return tiny_wan.make(tmp_path_factory.mktemp("wan"))


def source(folder, keep, dtype="float32"):
  tokenizer = WanTokenizer(str(folder / tiny_wan.PATHS["tokenizer"]), TEXT_LEN)
  encoder = str(folder / tiny_wan.PATHS["text_encoder"])
  return TextSource(encoder, tiny_wan.UMT5_CONFIG, tokenizer, dtype, keep)


@pytest.mark.parametrize(
  ("text", "cleaned"),
  [
    ("  a cat \n\t and a dog  ", "a cat and a dog"),
    ("a\u3000cat\u00a0sits", "a cat sits"),
    ("salt &amp; pepper", "salt & pepper"),
    ("salt &amp;amp; pepper", "salt & pepper"),
    ("&amp;amp;amp;", "&"),  # ftfy undoes one escape too
    ("the cat\u00e2\u20ac\u2122s day", "the cat's day"),  # decoded wrongly once
    ("the cat\u2019s \u201cbig\u201d day", 'the cat\'s "big" day'),
    ("\ufb01ne \uff21\uff22", "fine AB"),
    ("cafe\u0301", "caf\u00e9"),
    ("a\x00cat\ufeff", "acat"),
    ("Zürich 東京 🎬", "Zürich 東京 🎬"),
  ],
)
def test_cleaning(text, cleaned):
  assert clean(text) == cleaned


@given(st.text(st.sampled_from("ab &;amp#3\u2019\u3000\n\x07"), max_size=30))
def test_cleaned_text_has_single_blanks_and_straight_quotes(text):
  cleaned = clean(text)
  assert cleaned == " ".join(cleaned.split())
  assert "\u2019" not in cleaned and "\u3000" not in cleaned


def test_a_prompt_ends_with_the_end_mark_and_is_cut_before_it(folder):
  tokenizer = source(folder, folder).tokenizer
  ids = tokenizer("a red cat")
  assert ids[-1] == 1 and len(ids) == 4 and 1 not in ids[:-1]
  assert ids == tokenizer("  a  red\ncat ")
  long = "a red cat " * 20
  assert tokenizer.length(long) == 61
  assert len(tokenizer(long)) == TEXT_LEN and tokenizer(long)[-1] == 1
  assert tokenizer(long)[:-1] == tokenizer(("a red cat " * 20) + "dog")[:-1]
  tokenizer.accept("a red cat")
  with pytest.raises(ValueError, match=r"has 61 tokens but the text encoder takes 24"):
    tokenizer.accept(long)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
  with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
    WanTokenizer(str(tmp_path), 8)
  (tmp_path / "tokenizer.json").write_text("{}")
  with pytest.raises(ValueError, match="holds no tokenizer"):
    WanTokenizer(str(tmp_path), 8)


def test_embeddings_are_those_of_the_encoder_and_zero_past_the_prompt(folder, tmp_path):
  made = source(folder, tmp_path)
  found = Embeddings(made, say=lambda text: None)(tiny_wan.PROMPTS)
  assert found.shape == (3, TEXT_LEN, tiny_wan.UMT5_CONFIG.dim) and found.dtype == np.float32
  encoder, encode = load_umt5(made.encoder, made.config), jax.jit(encode_tokens)
  for prompt, rows in zip(tiny_wan.PROMPTS, found, strict=True):
    ids = made.tokenizer(prompt)
    padded = np.zeros((1, TEXT_LEN), np.int32)
    padded[0, : len(ids)] = ids
    mask = (np.arange(TEXT_LEN) < len(ids))[None].astype(np.int32)
    np.testing.assert_allclose(rows, encode(encoder, padded, mask)[0], atol=1e-6)
    assert (rows[len(ids) :] == 0).all() and (rows[: len(ids)] != 0).any(axis=1).all()


def test_embeddings_are_worked_out_once_and_found_by_content(folder, tmp_path, monkeypatch):
  first = Embeddings(source(folder, tmp_path), say=lambda text: None)
  assert first.prepare((*tiny_wan.PROMPTS, tiny_wan.PROMPTS[0])) == 3
  kept = first(tiny_wan.PROMPTS)
  stored = load_file(first.path(tiny_wan.PROMPTS[0]))["embedding"]
  assert stored.shape == (5, tiny_wan.UMT5_CONFIG.dim)  # the prompt's rows only

  # Whoever comes later loads no encoder for them.
  def never(*arguments, **names):
    raise AssertionError("the encoder was loaded again")

  with monkeypatch.context() as patch:
    patch.setattr(embeddings_lib, "load_umt5", never)
    again = Embeddings(source(folder, tmp_path), say=lambda text: None)
    assert again.prepare(tiny_wan.PROMPTS) == 0
    np.testing.assert_array_equal(again(tiny_wan.PROMPTS), kept)
    np.testing.assert_array_equal(again(["a  red cat   runs"]), kept[:1])  # the same tokens
    with pytest.raises(AssertionError, match="loaded again"):
      again(["a red dog runs"])
  # Other weights and another type are other embeddings.
  other = tmp_path / "other.pth"
  state = tiny_wan.state(tiny_wan.UMT5, tiny_wan.UMT5_CONFIG, 9)
  tiny_wan.write_flat(other, tiny_wan.tensors(state))
  changed = dataclasses.replace(source(folder, tmp_path), encoder=str(other))
  narrow = source(folder, tmp_path, "bfloat16")
  assert Embeddings(changed).missing(tiny_wan.PROMPTS) == list(tiny_wan.PROMPTS)
  assert Embeddings(narrow).missing(tiny_wan.PROMPTS) == list(tiny_wan.PROMPTS)


def test_the_text_encoder_leaves_the_device(folder, tmp_path):
  def alive():
    shapes = [array.shape for array in jax.live_arrays()]
    return shapes.count((tiny_wan.UMT5_CONFIG.vocab_size, tiny_wan.UMT5_CONFIG.dim))

  gc.collect()  # encoders of other tests
  seen = []
  embeddings = Embeddings(source(folder, tmp_path), say=seen.append)
  before, write = alive(), embeddings._write
  during = []
  embeddings._write = lambda *arguments: (during.append(alive()), write(*arguments))
  embeddings(tiny_wan.PROMPTS)
  assert during == [before + 1] * 3  # it was there
  assert alive() == before  # and is gone
  assert "3 prompts to embed" in seen[0]


def test_a_damaged_file_is_refused_by_name(folder, tmp_path):
  embeddings = Embeddings(source(folder, tmp_path), say=lambda text: None)
  embeddings.prepare(["a cat"])
  path = embeddings.path("a cat")
  path.write_bytes(path.read_bytes()[:40])
  with pytest.raises(ValueError, match=rf"{path.name} cannot be read .*remove it"):
    embeddings(["a cat"])
  save_file({"embedding": np.zeros((2, 3), np.float32)}, path)
  with pytest.raises(ValueError, match="remove it"):
    embeddings(["a cat"])


def test_workers_take_turns_and_a_wait_has_an_end(folder, tmp_path):
  said: list[str] = []
  embeddings = Embeddings(source(folder, tmp_path), say=said.append, timeout_s=0.3)
  lock = embeddings.path("a cat").parent / ".lock"
  lock.parent.mkdir(parents=True)
  hold = "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.flock(f, fcntl.LOCK_EX); print(1); "
  words = [sys.executable, "-u", "-c", f"{hold}sys.stdin.read()", str(lock)]
  with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
    assert other.stdout is not None and other.stdout.readline()
    with pytest.raises(TimeoutError, match=r"runtime\.startup_timeout_s"):
      embeddings.prepare(["a cat"])
    assert "waiting for it" in said[-1]
    other.communicate()
  assert embeddings.prepare(["a cat"]) == 1
