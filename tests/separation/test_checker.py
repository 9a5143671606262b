"""The checker: what separates, what is coupled, what does not, and what a user is told."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sbjax import separate
from sbjax.algorithms.objectives import Clipped, objective
from sbjax.separation.checker import Sizes, check_separation
from sbjax.separation.structure import structure

SMALL = Sizes(candidates=3, units=4)


def _log_ratio(channels, old):
  return (channels - old)[..., 0]


def clipped(channels, old, statistics, advantages):
  rho, a = jnp.exp(_log_ratio(channels, old)), advantages[:, None]
  return -jnp.mean(jnp.minimum(rho * a, jnp.clip(rho, 0.9, 1.1) * a))


def masked(channels, old, statistics, advantages):
  d, a = _log_ratio(channels, old), advantages[:, None]
  inside = jnp.where(a > 0, d <= jnp.log1p(0.1), d >= jnp.log1p(-0.1))
  return -jnp.mean(jnp.where(inside, a * jnp.exp(jnp.where(inside, d, 0.0)), 0.0))


def plain(channels, old, statistics, advantages):
  return -jnp.mean(advantages[:, None] * channels[..., 0])


def exponential(channels, old, statistics, advantages):
  return -jnp.mean(jnp.exp(advantages)[:, None] * channels[..., 0])


def normalised(channels, old, statistics, advantages):
  centred = advantages - advantages.mean()
  return masked(channels, old, statistics, centred / (advantages.std() + 1e-8))


def dpo(channels, old, statistics, advantages):
  margin = _log_ratio(channels, old).sum(1)
  best, worst = jnp.argmax(advantages), jnp.argmin(advantages)
  return -jax.nn.log_sigmoid(2.0 * (margin[best] - margin[worst]))


def softmax(channels, old, statistics, advantages):
  return -jnp.sum(jax.nn.softmax(channels[..., 0].sum(1)) * advantages)


def power(channels, old, statistics, advantages):
  return -jnp.mean(jnp.exp(advantages[:, None] * _log_ratio(channels, old)))


@pytest.mark.parametrize(
  ("loss", "kind", "buffers", "form"),
  [
    (masked, "strict", 2, "sign split"),
    (clipped, "strict", 2, "sign split"),
    (plain, "strict", 1, "linear"),
    (exponential, "strict", 1, "its own"),
    (normalised, "strict", 2, "its own"),
    (dpo, "coupled", 1, "late from the scores and rewards of all"),
    (softmax, "coupled", 1, "late from the scores and rewards of all"),
    (power, "identity", 4, "one buffer per unit and channel"),
  ],
)
def test_losses_are_told_apart_and_their_forms_reproduce_autodiff(loss, kind, buffers, form):
  found = check_separation(loss, SMALL)
  assert (found.kind, found.buffers) == (kind, buffers)
  assert form in found.form
  assert found.max_relative_error < 1e-10
  assert found.scores_coupled is (loss in (dpo, softmax))
  assert found.rewards_coupled is (loss in (dpo, softmax, normalised))


@pytest.mark.parametrize(
  ("made", "rewards", "kind", "buffers"),
  [
    (Clipped(clip_low=0.1, clip_high=0.1), 1, "strict", 2),
    (Clipped(on_policy=True), 1, "strict", 1),
    (Clipped(kl_coef=0.5), 1, "strict", 3),
    (Clipped(reward_weights=(1.0, 0.5)), 2, "strict", 2),
    (objective("dppo"), 1, "strict", 2),
    (objective("nft", ref_kl_coef=0.1), 1, "strict", 2),
    (objective("kvpo"), 1, "identity", 1),
  ],
)
def test_objectives_keep_no_more_buffers_than_they_must(made, rewards, kind, buffers):
  found = check_separation(made, dataclasses.replace(SMALL, rewards=rewards))
  assert (found.kind, found.buffers) == (kind, buffers)
  assert made.buffers(4 if made.unit == "step" else 1) == buffers
  assert found.max_relative_error < 1e-10


def test_a_reduction_that_chooses_by_reward_is_named():
  found = check_separation(dpo, SMALL)
  assert any("chosen by reward (argmax, argmin)" in note for note in found.notes)
  text = found.text()
  assert "not strictly" in text
  assert max(len(line) for line in text.splitlines()) <= 100


def test_a_clip_that_is_differentiated_is_named_and_a_mask_is_not():
  args = [jnp.zeros((3, 4, 1)), jnp.zeros((3, 4, 1)), jnp.zeros((3, 4, 0)), jnp.zeros(3)]
  assert structure(clipped, *args).kinks
  assert not structure(masked, *args).kinks
  # Inside softmax a maximum is taken, but no gradient passes through it.
  assert not structure(softmax, *args).kinks
  assert structure(jax.jit(clipped), *args) == structure(clipped, *args)


def test_a_wrong_gradient_would_be_noticed():
  @jax.custom_jvp
  def tampered(channels, old, statistics, advantages):
    return plain(channels, old, statistics, advantages)

  @tampered.defjvp
  def _(primals, tangents):
    # A gradient that changes with the number of calls cannot be a function of its inputs.
    calls.append(None)
    return tampered(*primals), (1.0 + 1e-3 * len(calls)) * plain(tangents[0], *primals[1:])

  calls = []
  found = check_separation(tampered, SMALL)
  assert found.max_relative_error > 1e-4


def test_numpy_on_rewards_is_evaluated_and_said():
  def loss(channels, old, statistics, advantages):
    return -jnp.mean(np.sign(advantages)[:, None] * channels[..., 0])

  def reads(channels, old, statistics, advantages):
    return loss(channels, old, statistics, np.asarray(advantages))

  found = check_separation(reads, Sizes(candidates=2, units=2), draws=2)
  assert (found.kind, found.buffers) == ("strict", 1)
  assert any("outside JAX" in note for note in found.notes)


@pytest.mark.parametrize(
  ("loss", "words"),
  [
    (lambda c, o, s, a: c, "array of shape"),
    (lambda c, o, s, a: (c.sum(), a), "returns tuple"),
    (lambda c, o, s, a: c.sum().astype(jnp.float32), "returns float32"),
    (lambda c, o, s, a: (a * 0.0).sum() + 0.0 * c.sum(), "does not depend on the channels"),
    (lambda c, o, s, a: jnp.sum(jnp.sqrt(c - c)), "non-finite gradient"),
  ],
)
def test_losses_that_cannot_be_checked_are_refused(loss, words):
  with pytest.raises(ValueError, match=words):
    check_separation(loss, SMALL)


def test_sizes_that_no_minibatch_has_are_refused():
  with pytest.raises(ValueError, match="candidates is 1"):
    Sizes(candidates=1)


LOSS = """
import jax.numpy as jnp

def loss(channels, old, statistics, advantages):
  return -jnp.mean(advantages[:, None] * jnp.exp(channels - old)[..., 0])

def broken(channels, old, statistics, advantages):
  raise KeyError("what")

constant = 3
"""


def test_the_command_prints_a_report(tmp_path, capsys):
  file = tmp_path / "mine.py"
  file.write_text(LOSS)
  assert separate.main([f"{file}:loss", "--candidates=3", "--units=2"]) == 0
  out = capsys.readouterr().out
  assert "separates  yes" in out
  assert "buffers    1 per candidate" in out
  assert "linear: late = A" in out


@pytest.mark.parametrize(
  ("target", "words"),
  [
    ("absent.py:loss", "there is no file"),
    ("mine.py", "write it as FILE.py:FUNCTION"),
    ("mine.py:nothing", "has no function 'nothing'"),
    ("mine.py:constant", "has no function 'constant'"),
    ("mine.py:broken", "fails with KeyError"),
    ("bad.py:loss", "fails with SyntaxError"),
  ],
)
def test_the_command_answers_mistakes_in_one_sentence(target, words, tmp_path, capsys, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "mine.py").write_text(LOSS)
  (tmp_path / "bad.py").write_text("def loss(:")
  assert separate.main([target]) == 2
  captured = capsys.readouterr()
  assert words in captured.err
  assert captured.err.count("\n") == 1
  assert captured.out == ""


@pytest.mark.parametrize("arguments", [[], ["mine.py:loss", "--units=x"], ["a", "--nope"]])
def test_the_command_line_itself_is_answered_in_one_sentence(arguments, capsys):
  with pytest.raises(SystemExit) as ended:
    separate.main(arguments)
  assert ended.value.code == 2
  assert capsys.readouterr().err.count("\n") == 1
