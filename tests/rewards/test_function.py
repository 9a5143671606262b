"""A user's reward function: how it is found, called, and how it fails."""

import math
import textwrap

import numpy as np
import pytest

from sbjax.rewards import function, protocol

VIDEO = np.arange(2 * 4 * 4 * 3, dtype=np.uint8).reshape(2, 4, 4, 3)
GROUP = protocol.Group(index=0, prompt="a red seven", candidates=(4, 5), seeds=(11, 12))


def _judge(user, components=("score",), retries=0):
  jobs = protocol.PointwiseReward(components).jobs(GROUP)
  judge = function.FunctionJudge(user, components)
  return protocol.judge_with_retries(judge, jobs, {4: VIDEO, 5: VIDEO + 1}, retries)


def test_function_sees_video_prompt_and_seed():
  seen = []

  def user(video, prompt, seed):
    seen.append((video.shape, video.dtype, int(video[0, 0, 0, 0]), prompt, seed))
    return seed / 2

  verdicts = _judge(user)
  assert seen == [
    ((2, 4, 4, 3), np.uint8, 0, "a red seven", 11),
    ((2, 4, 4, 3), np.uint8, 1, "a red seven", 12),
  ]
  assert [v.components for v in verdicts] == [{"score": 5.5}, {"score": 6.0}]


def test_dict_gives_components_and_keeps_further_ones():
  verdicts = _judge(lambda v, p, s: {"a": np.float32(1), "b": 2, "note": "x"}, ("a", "b"))
  assert verdicts[0].components == {"a": 1.0, "b": 2.0}


@pytest.mark.parametrize(
  ("answer", "components", "cause"),
  [
    (math.nan, ("score",), "not_finite"),
    (math.inf, ("score",), "not_finite"),
    ("0.7", ("score",), "wrong_type"),
    (None, ("score",), "wrong_type"),
    (True, ("score",), "wrong_type"),
    (np.ones(3), ("score",), "wrong_type"),
    ({"other": 1.0}, ("score",), "missing"),
    (1.0, ("a", "b"), "wrong_type"),
    ({"a": 1.0, "b": "high"}, ("a", "b"), "wrong_type"),
  ],
)
def test_wrong_answers_are_failures_and_never_zeros(answer, components, cause):
  for verdict in _judge(lambda v, p, s: answer, components):
    assert verdict.components is None
    assert verdict.cause == cause
    assert verdict.rationale


def test_raising_is_retried_and_then_a_failure_of_that_candidate_alone():
  calls = []

  def user(video, prompt, seed):
    calls.append(seed)
    if seed == 11:
      raise RuntimeError("no GPU left")
    return 1.0

  verdicts = _judge(user, retries=2)
  assert calls.count(11) == 3 and calls.count(12) == 1
  assert verdicts[0].components is None and verdicts[0].cause == "raised"
  assert "no GPU left" in verdicts[0].rationale
  assert verdicts[1].components == {"score": 1.0}


def test_a_flaky_function_succeeds_on_retry():
  calls = []

  def user(video, prompt, seed):
    calls.append(seed)
    return math.nan if calls.count(seed) == 1 else 3.0

  assert [v.components for v in _judge(user, retries=1)] == [{"score": 3.0}] * 2


def test_writing_into_the_video_changes_nothing_outside():
  before = VIDEO.copy()

  def user(video, prompt, seed):
    video[:] = 0
    return 0.5

  _judge(user)
  np.testing.assert_array_equal(VIDEO, before)


def test_load_from_files_of_one_name_and_from_a_module(tmp_path):
  path = tmp_path / "reward.py"
  path.write_text("def f(video, prompt, seed=0):\n  return float(video.mean())\n")
  assert function.load_function(f"{path}:f")(VIDEO, "p", 0) == VIDEO.mean()
  other = tmp_path / "more" / "reward.py"
  other.parent.mkdir()
  other.write_text("def f(*args):\n  return 7.0\n")
  assert function.load_function(f"{other}:f")(VIDEO, "p", 0) == 7.0
  assert function.load_function("builtins:max") is max


@pytest.mark.parametrize(
  ("name", "says"),
  [
    ("", "write module:function"),
    ("reward.py", "write module:function"),
    ("missing.py:f", "is not a file"),
    ("no_such_module:f", "cannot be imported"),
    ("{here}/broken.py:f", "SyntaxError"),
    ("{here}/raises.py:f", "ValueError: bad"),
    ("{here}/good.py:g", "it has f, two"),
    ("{here}/good.py:two", "must take (video, prompt, seed)"),
    ("{here}/good.py:number", "of type int"),
  ],
)
def test_unusable_functions_are_refused_in_one_sentence(tmp_path, name, says):
  (tmp_path / "broken.py").write_text("def f(:\n")
  (tmp_path / "raises.py").write_text("raise ValueError('bad\\nworse')\n")
  (tmp_path / "good.py").write_text(
    textwrap.dedent("""
      number = 3
      def f(video, prompt, seed): return 1.0
      def two(video, prompt): return 1.0
    """)
  )
  with pytest.raises(ValueError, match=r"reward\.function is") as error:
    function.load_function(name.format(here=tmp_path))
  assert says in str(error.value)
  assert "\n" not in str(error.value)
