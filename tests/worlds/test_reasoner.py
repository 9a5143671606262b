"""What the reasoner learns from: its words, its answers, its sequences, the tower's lesson."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from models.layers.dense import tree_of
from models.qwen_vl.model import QwenVL
from models.qwen_vl.presets import QwenVLConfig, from_json
from models.qwen_vl.text import TextDecoder
from models.qwen_vl.vision import encode_slices
from sbjax.rewards.digits_reasoner import (
  ANSWERS,
  COMPONENTS,
  WEIGHTS,
  parse_answer,
  parse_scores,
)
from sbjax.rewards.protocol import Verdict
from sbjax.worlds.digits import data, judge, prompts, world
from sbjax.worlds.digits.reasoner import agreement, create, pairs, text, train, videos

RED_SEVEN = prompts.parse("a red seven moves left slowly")


@pytest.fixture(scope="module")
def tokenizer():
  return text.tokenizer()


@pytest.fixture(scope="module")
def images():
  return data.load_images(world.WEIGHTS / "digits.npz")


def certain(prompt):
  """Tables of a video that shows a prompt beyond doubt."""
  asked = prompts.parse(prompt)
  return {n: np.eye(k, dtype=np.float32)[getattr(asked, n)] for n, k in judge.HEADS.items()}


def table_of(classes):
  return st.lists(st.floats(0.01, 1.0), min_size=classes, max_size=classes).map(
    lambda values: np.asarray(values) / np.sum(values)
  )


TABLES = st.fixed_dictionaries({name: table_of(classes) for name, classes in judge.HEADS.items()})
ASKED = st.sampled_from(prompts.all_prompts()).map(prompts.parse)


def test_the_vocabulary_has_every_word_of_every_prompt_once(tokenizer):
  tokens = text.vocabulary()
  assert len(set(tokens)) == len(tokens) == tokenizer.get_vocab_size()
  assert [tokenizer.token_to_id(token) for token in tokens] == list(range(len(tokens)))
  unknown = tokenizer.token_to_id(text.UNKNOWN)
  for prompt in prompts.all_prompts():
    assert unknown not in tokenizer.encode(prompt).ids
  assert tokenizer.encode("A Red, seven!").tokens == ["a", "red", ",", text.UNKNOWN]
  assert len(tokenizer.encode("<|im_start|>user\n<0.4 seconds><|vision_start|>").ids) == 4


@given(first=TABLES, second=TABLES, asked=ASKED)
def test_an_answer_survives_its_tokens_and_says_what_its_scores_say(
  tokenizer, first, second, asked
):
  written = text.answer(first, second, asked)
  assert tokenizer.decode(tokenizer.encode(written).ids) == written
  scores, verdict = parse_scores(written), parse_answer(written)
  assert scores is not None and verdict is not None
  expected = [
    {n: text.score(p) for n, p in text.probabilities(t, asked).items()} for t in (first, second)
  ]
  assert list(scores) == expected
  totals = [sum(text.WEIGHTS[n] * s[n] for n in COMPONENTS) for s in expected]
  for name, a, b in [
    *((n, expected[0][n], expected[1][n]) for n in COMPONENTS),
    ("overall", *totals),
  ]:
    assert verdict[name] == (0.5 if a == b else float(a > b))


@given(first=TABLES, second=TABLES, asked=ASKED)
def test_swapped_videos_swap_the_answer(first, second, asked):
  one, other = (parse_answer(text.answer(*v, asked)) for v in ((first, second), (second, first)))
  assert one is not None and other == {name: 1.0 - value for name, value in one.items()}


def test_scores_are_fifths():
  assert [text.score(p) for p in (0.0, 0.19, 0.2, 0.5, 0.8, 1.0)] == [1, 1, 2, 3, 5, 5]


def test_a_doubtful_digit_is_named():
  tables = certain("a red seven moves left slowly")
  tables["digit"] = np.full(10, 0.02, np.float32)
  tables["digit"][[7, 9]] = 0.5, 0.34
  written = text.answer(tables, certain("a blue six moves up quickly"), RED_SEVEN)
  assert "first video shows a red seven, perhaps a nine, moving left slowly." in written
  assert "digit seven for seven 3, colour red for red 5, motion left slowly" in written
  assert "second video shows a blue six moving up quickly. digit six for seven 1," in written


def small():
  """The reasoner's layout at a few per cent of its size."""
  whole = train.sizes()
  return dataclasses.replace(
    whole,
    vision=dataclasses.replace(whole.vision, dim=16, ffn_dim=16, depth=2, out_dim=32),
    text=dataclasses.replace(
      whole.text, dim=32, ffn_dim=32, num_layers=1, num_heads=2, num_kv_heads=1
    ),
  )


def test_sizes_travel_as_a_hugging_face_config():
  for config in (train.sizes(), small()):
    assert isinstance(config, QwenVLConfig)
    assert from_json(config.name, json.loads(json.dumps(create.to_json(config)))) == config
  assert train.sizes().text.vocab_size >= len(text.vocabulary())


def test_a_lesson_shows_each_pair_its_own_videos(tokenizer, images):
  ink, labels = images.half("reader")
  rng = np.random.default_rng(0)
  clips = videos.drawn(rng, 4, ink, labels)
  config = small()
  encoded = [pairs.encoded(view, config) for view in clips.views()]
  asked = pairs.random_pairs(rng, clips)
  assert [(p.first, p.second) for p in asked] == [(0, 1), (1, 0), (2, 3), (3, 2)]
  made = pairs.lesson(config, tokenizer, clips, encoded, asked, 184)
  each = encoded[0].visual.grid.tokens(config.vision.merge)
  for row, pair in enumerate(asked):
    shown = made.visual_rows[row][made.visual_rows[row] >= 0]
    expected = [*range(pair.first * each, (pair.first + 1) * each)]
    expected += range(pair.second * each, (pair.second + 1) * each)
    assert shown.tolist() == expected
    learned = tokenizer.decode(made.ids[row][made.learned[row]].tolist())
    tables = [{n: t[i] for n, t in clips.tables.items()} for i in (pair.first, pair.second)]
    assert learned == text.answer(tables[0], tables[1], pair.asked)
  with pytest.raises(ValueError, match="length is 100"):
    pairs.lesson(config, tokenizer, clips, encoded, asked, 100)


def test_a_few_steps_lower_the_loss_and_a_run_continues_where_it_was(images, tokenizer, tmp_path):
  ink, labels = images.half("reader")
  clips = videos.drawn(np.random.default_rng(1), 4, ink, labels, spoiled=False)
  model = QwenVL(small(), rngs=nnx.Rngs(0))
  config = model.config
  encoded = [pairs.encoded(view, config) for view in clips.views()]
  asked = pairs.random_pairs(np.random.default_rng(2), clips)
  made = pairs.lesson(config, tokenizer, clips, encoded, asked, 184)
  patches = jnp.asarray(np.concatenate([one.patches for one in encoded]))
  seen = encode_slices(tree_of(model.visual), config.vision, patches, 4, 4)
  value = jax.jit(lambda p: pairs.loss(p, config, seen, made))
  before, _ = value(tree_of(model.text))
  schedule = train.Schedule(steps=6, videos=4, vector_peak=1e-2)
  with jax.numpy_dtype_promotion("standard"):  # optax's schedules mix integers and floats
    train.train_pairs(model, lambda rng: clips, 0, schedule, str(tmp_path))
  after, right = value(tree_of(model.text))
  assert float(after) < float(before) - 0.5
  assert 0.0 <= float(right) <= 1.0
  again = QwenVL(small(), rngs=nnx.Rngs(0))
  again.text = TextDecoder(again.config.text, rngs=nnx.Rngs(5))
  with jax.numpy_dtype_promotion("standard"):
    train.train_pairs(again, lambda rng: clips, 0, schedule, str(tmp_path))
  jax.tree.map(np.testing.assert_array_equal, tree_of(again), tree_of(model))


def test_a_tie_or_an_answer_that_cannot_be_read_is_not_right():
  def question(first, second):
    return agreement.Question((np.zeros(1), np.zeros(1)), "", ({"digit": first}, {"digit": second}))

  questions = [question(1.0, 0.0), question(0.0, 1.0), question(0.6, 0.5), question(1.0, 1.0)]
  verdicts = [Verdict({"digit": v}) for v in (1.0, 0.5, 1.0, 0.5)]

  def counted(some, least):
    found = agreement.shares(questions, some, "digit", least)
    return [round(found[kind] * found["answers"]) for kind in ("right", "tied", "wrong")]

  assert counted(verdicts, 0.0) == [2, 1, 0]
  assert counted(verdicts, 0.2) == [1, 1, 0]
  failed = [Verdict(None, "unparsable"), *verdicts[1:]]
  assert counted(failed, 0.0) == [1, 1, 1]
  assert agreement.shares(questions, verdicts, "digit", 2.0)["right"] is None
  assert agreement.share_agreeing(verdicts, failed, "digit") == 3 / 4


def test_the_shipped_judge_is_small_and_tells_real_videos_apart(images):
  files = {path.name: path.stat().st_size for path in WEIGHTS.iterdir()}
  assert set(files) == {
    "config.json",
    "model.safetensors",
    "reasoner.json",
    "tokenizer.json",
    "tokenizer_config.json",
  }
  assert sum(files.values()) <= create.MAX_SHIPPED_BYTES
  assert Tokenizer.from_file(str(WEIGHTS / "tokenizer.json")).to_str() == text.tokenizer().to_str()
  questions = agreement.drawn_questions(images, 16, seed=7)
  reasoner = agreement.load(WEIGHTS, slots=16)
  verdicts = agreement.ask(reasoner, questions, swapped=False)
  found = [agreement.shares(questions, verdicts, name, 0.0) for name in ANSWERS]
  count = sum(one["answers"] for one in found)
  assert count >= 20 and sum(one["right"] * one["answers"] for one in found) / count >= 0.85
  swapped = agreement.ask(reasoner, questions, swapped=True)
  assert np.mean([agreement.share_agreeing(verdicts, swapped, n) for n in ANSWERS]) >= 0.9
  assert all(parse_scores(verdict.rationale) for verdict in verdicts)
