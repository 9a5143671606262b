"""The engine: what a request gives does not depend on how and with whom it runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from models.generate.engine import Engine
from models.generate.request import EngineConfig, Request, exact_config
from models.generate.sampling import Sampling, choose
from models.layers.dense import tree_of
from models.qwen_vl.checkpoint import load, save
from tests.tiny_judge import decode_text, prompt, tiny_model

# One bucket each, so that every engine of this file runs the same few programs.
SIZES = {
  "slots": 2,
  "max_length": 96,
  "burst": 4,
  "prefill_chunk": 32,
  "slot_buckets": (2,),
  "length_buckets": (128,),
  "prefill_buckets": (1,),
  "chunk_buckets": (32,),
  "min_shared": 4,
  "vocab_limit": 80,
}


@pytest.fixture(scope="module")
def tiny():
  config, _, p = tiny_model("qwen3", layers=1)
  return config, p


def _engine(tiny, clock=None, **changes):
  config, p = tiny
  more = {} if clock is None else {"clock": clock}
  sizes = EngineConfig(**{**SIZES, **changes})
  return Engine(p, config, sizes, decode_text=decode_text, **more)


@pytest.fixture(scope="module")
def mixed(tiny):
  """Five requests of all kinds, and what each gives when it runs alone."""
  config, _ = tiny
  requests = [
    Request(prompt(config, 3, seed=1), 5),
    Request(prompt(config, 2, "image", 4, seed=2), 11),
    Request(prompt(config, 30, seed=3), 2, temperature=1.0, top_p=0.99, seed=7),
    Request(prompt(config, 1, "video", 1, "image", 2, seed=4), 7, script=(5, 6, 7)),
    Request(prompt(config, 9, seed=5), 6, temperature=0.7, top_k=5, top_p=0.8, seed=7),
  ]
  return requests, [_engine(tiny).generate([request])[0] for request in requests]


def test_requests_give_the_same_alone_and_together(tiny, mixed):
  requests, alone = mixed
  engine = _engine(tiny)
  for one, result in zip(alone, engine.generate(requests), strict=True):
    assert result.tokens.tolist() == one.tokens.tolist()
    np.testing.assert_allclose(result.log_probs, one.log_probs, atol=1e-5)
    assert result.finish == one.finish
  assert [len(r.tokens) for r in alone] == [5, 11, 2, 3, 6]
  assert alone[3].tokens.tolist() == [5, 6, 7] and alone[3].finish == "script"
  assert (alone[3].log_probs < 0).all()
  assert engine.pending == 0
  # Two rows for 27 tokens; a row that ends is taken over within the burst, so little is idle.
  assert engine.counts["decode_steps"] <= 18
  assert max(r.tokens.max() for r in alone) < 80


def test_a_bigger_engine_with_other_buckets_gives_the_same(tiny, mixed):
  requests, alone = mixed
  engine = _engine(tiny, slots=4, slot_buckets=(1, 4))
  likeliest = [i for i, request in enumerate(requests) if not request.temperature]
  for i, result in zip(likeliest, engine.generate([requests[i] for i in likeliest]), strict=True):
    assert result.tokens.tolist() == alone[i].tokens.tolist()
  assert engine.counts["resizes"] >= 2  # from one row to four, and back for the longest


def test_exact_sizes_are_equal_to_the_last_bit(tiny):
  config, p = tiny
  sizes = exact_config(3, 64, 16, burst=4, vocab_limit=80)
  requests = [Request(prompt(config, n, "image", n, seed=n), 6) for n in (2, 5, 8, 11)]
  together = Engine(p, config, sizes).generate(requests)
  for request, result in zip(requests, together, strict=True):
    alone = Engine(p, config, sizes).generate([request])[0]
    assert alone.tokens.tolist() == result.tokens.tolist()
    np.testing.assert_array_equal(alone.log_probs, result.log_probs)


def test_seeds_name_streams(tiny):
  config, _ = tiny
  asked = prompt(config, 4, seed=6)
  drawn = [Request(asked, 8, temperature=2.0, top_k=40, seed=seed) for seed in (1, 2, 1)]
  narrow = Request(asked, 8, temperature=2.0, top_k=1, seed=5)
  a, b, c, d, e = (
    r.tokens.tolist() for r in _engine(tiny).generate([*drawn, narrow, Request(asked, 8)])
  )
  assert a == c != b
  assert d == e != a  # among one token there is no choice


def test_choosing_draws_from_what_the_filters_leave():
  rng = np.random.default_rng(0)
  scores = jnp.asarray(rng.standard_normal((64, 12)), jnp.float32)

  def drawn(mode, top_k=0, top_p=1.0, temperature=1.0):
    whole = jnp.full(64, top_k, jnp.int32)
    real = (jnp.full(64, x, jnp.float32) for x in (temperature, top_p))
    sampling = Sampling(jnp.arange(64, dtype=jnp.uint32), next(real), whole, next(real))
    token, log_prob = choose(scores, sampling, jnp.zeros(64, jnp.int32), mode, vocab_limit=10)
    np.testing.assert_allclose(
      log_prob, jax.nn.log_softmax(scores[:, :10])[np.arange(64), token], atol=1e-5
    )
    return np.asarray(token)

  order = np.argsort(-np.asarray(scores[:, :10]), axis=1)
  free = drawn("plain")
  np.testing.assert_array_equal(drawn("filtered"), free)  # filters that leave everything
  assert free.max() == 9 and (free != order[:, 0]).any()
  np.testing.assert_array_equal(drawn("plain", temperature=0.0), order[:, 0])
  few = drawn("filtered", top_k=3, temperature=5.0)
  places = np.argmax(order == few[:, None], axis=1)
  assert set(places) == {0, 1, 2}
  share = np.sort(np.asarray(jax.nn.softmax(scores[:, :10])), axis=1)[:, ::-1].cumsum(axis=1)
  places = np.argmax(order == drawn("filtered", top_p=0.5)[:, None], axis=1)
  assert (places <= (share < 0.5).sum(axis=1)).all() and places.max() > 0


def test_an_engine_on_a_mesh_gives_the_same(tiny, mixed, tmp_path):
  config, model, _ = tiny_model("qwen3", layers=1)
  requests, alone = mixed
  mesh = Mesh(np.asarray(jax.devices()).reshape(2, 2), ("fsdp", "seq"))
  save(tmp_path / "a.safetensors", model)
  p = tree_of(load(tmp_path / "a.safetensors", config, mesh=mesh))
  engine = Engine(p, config, EngineConfig(**SIZES), mesh=mesh)
  result = engine.generate(requests[1:2])[0]
  assert result.tokens.tolist() == alone[1].tokens.tolist()


def test_stop_tokens_and_stop_strings_end_a_request(tiny, mixed):
  requests, alone = mixed
  tokens = alone[1].tokens.tolist()
  config, _ = tiny
  stop = tokens[4]
  ended = _engine(tiny).generate([Request(requests[1].prompt, 11, stop_ids=(79, stop))])[0]
  first = tokens.index(stop)
  assert ended.tokens.tolist() == tokens[: first + 1] and ended.finish == "stop"
  assert ended.text == decode_text(tokens[:first])
  text = decode_text(tokens)
  told = _engine(tiny).generate([Request(requests[1].prompt, 11, stop_strings=(text[3:5],))])[0]
  at = text.index(text[3:5])
  assert told.finish == "stop_string" and told.text == text[:at]
  assert told.tokens.tolist() == tokens[: at + 2]
  del config


def test_budgets_deadlines_and_cancellation(tiny):
  config, _ = tiny
  now = [0.0]
  engine = _engine(tiny, clock=lambda: now[0])
  asked = prompt(config, 10, seed=8)
  short = engine.submit(Request(asked, 50, max_total_tokens=13))
  none = engine.submit(Request(asked, 50, max_total_tokens=10))
  late = engine.submit(Request(asked, 50, deadline_s=5.0))
  gone = engine.submit(Request(asked, 50))
  queued = engine.submit(Request(asked, 50, deadline_s=1.0))
  found = {}
  for _ in range(4):
    found |= {r.id: r for r in engine.step()}
  now[0] = 5.0
  engine.cancel(gone)
  while engine.pending:
    found |= {r.id: r for r in engine.step()}
  assert {k: r.finish for k, r in found.items()} == {
    short: "budget",
    none: "budget",
    late: "deadline",
    gone: "cancelled",
    queued: "deadline",
  }
  assert len(found[short].tokens) == 3 and len(found[none].tokens) == 0
  assert len(found[queued].tokens) == 0 and found[queued].waited_s == 5.0
  assert 0 < len(found[late].tokens) < 50


def test_a_later_round_keeps_the_earlier_cache(tiny):
  config, _ = tiny
  asked = prompt(config, 2, "image", 6, seed=9)
  engine = _engine(tiny, prefix_bytes=0)
  first = engine.generate([Request(asked, 5, keep=True)])[0]
  ids = np.concatenate([asked.ids, first.tokens, prompt(config, 4, seed=10).ids])
  asked_again = type(asked)(ids.astype(np.int32), asked.visuals)
  before = engine.counts["prefill_tokens"]
  second = engine.generate([Request(asked_again, 6, after=first.kept)])[0]
  assert second.reused_tokens == len(asked.ids) + 4  # the last token of a round is not cached
  assert engine.counts["prefill_tokens"] - before == len(ids) - 1 - second.reused_tokens
  fresh = _engine(tiny).generate([Request(asked_again, 6)])[0]
  assert fresh.reused_tokens == 0
  assert fresh.tokens.tolist() == second.tokens.tolist()
  # A history that differs in the middle is reused up to there.
  changed = ids.copy()
  changed[len(asked.ids) - 3] += 1
  third = engine.generate(
    [Request(type(asked)(changed.astype(np.int32), asked.visuals), 2, after=first.kept)]
  )[0]
  assert third.reused_tokens == len(asked.ids) - 3


def test_a_common_beginning_is_computed_once(tiny):
  config, _ = tiny
  shared = prompt(config, 2, "video", 5, seed=11)
  requests = [
    Request(
      type(shared)(np.concatenate([shared.ids, prompt(config, 3, seed=s).ids]), shared.visuals), 4
    )
    for s in range(3)
  ]
  engine = _engine(tiny)
  together = engine.generate(requests)
  assert engine.counts["prefill_tokens"] == len(shared.ids) + 3 * 2  # all but each last token
  assert [r.reused_tokens for r in together] == [0, len(shared.ids), len(shared.ids)]
  for request, result in zip(requests, together, strict=True):
    alone = _engine(tiny).generate([request])[0]
    assert alone.tokens.tolist() == result.tokens.tolist()


def test_what_a_picture_shows_counts_and_not_only_its_place(tiny):
  config, _ = tiny
  one, other = (prompt(config, "image", 3, seed=s) for s in (12, 13))
  same = type(one)(np.concatenate([one.ids[:-3], other.ids[-3:]]), one.visuals)
  swapped = type(one)(same.ids, other.visuals)
  engine = _engine(tiny, prefix_bytes=2**20)
  engine.generate([Request(one, 2)])
  a, b = engine.generate([Request(same, 4), Request(swapped, 4)])
  assert (a.reused_tokens, b.reused_tokens) == (len(one.ids) - 3, 0)


@pytest.mark.parametrize(
  ("change", "told"),
  [
    ({"max_new_tokens": 0}, "max_new_tokens is 0"),
    ({"temperature": -1.0}, "temperature is -1.0"),
    ({"top_p": 0.0}, "top_p is 0.0"),
    ({"seed": -1}, "seed is -1"),
    ({"script": ()}, "script is empty"),
    ({"stop_strings": ("",)}, "empty text"),
  ],
)
def test_requests_that_cannot_work_are_refused(tiny, change, told):
  config, _ = tiny
  with pytest.raises(ValueError, match=told):
    Request(**{"prompt": prompt(config, 3), "max_new_tokens": 4, **change})


def test_prompts_that_cannot_work_are_refused(tiny):
  config, p = tiny
  engine = _engine(tiny)
  with pytest.raises(ValueError, match="max_length is 96"):
    engine.submit(Request(prompt(config, 96), 1))
  image = prompt(config, "image")
  with pytest.raises(ValueError, match="ends in a visual"):
    engine.submit(Request(type(image)(image.ids[:-1], image.visuals), 1))
  with pytest.raises(ValueError, match="give the engine decode_text"):
    Engine(p, config, EngineConfig(**SIZES)).submit(
      Request(prompt(config, 3), 1, stop_strings=("x",))
    )
  with pytest.raises(ValueError, match="must rise to at least 2"):
    EngineConfig(**{**SIZES, "slot_buckets": (1,)})
  assert engine.pending == 0
