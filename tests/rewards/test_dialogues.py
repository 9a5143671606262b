"""The vision-language judges: what they are asked and how their answers are read."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbjax.rewards import unified_reward, unified_reward_flex, vr_thinker
from sbjax.rewards.conversation import ConversationJudge
from sbjax.rewards.frames import evenly_spaced
from sbjax.rewards.generator import Frames, ScriptedGenerator
from sbjax.rewards.protocol import Job
from sbjax.rewards.unified_reward_flex import UnifiedRewardFlex
from sbjax.rewards.vr_thinker import VRThinker

JOB = Job((0, 1), "a red seven moves left", 5)


def video(frames, value):
  """Frame f of a video is `value + f` throughout."""
  shade = (value + np.arange(frames)).astype(np.uint8)
  return np.broadcast_to(shade[:, None, None, None], (frames, 4, 4, 3))


VIDEOS = {0: video(96, 0), 1: video(96, 100)}


def ask(protocol, *texts, job=JOB):
  """Plays a dialogue's rounds; gives its verdict and the requests."""
  requests = []

  def answer(place, round_, request):
    requests.append(request)
    return texts[round_]

  (verdict,) = ConversationJudge(protocol, ScriptedGenerator(answer)).judge([job], VIDEOS)
  assert len(requests) == len(texts)
  return verdict, requests


def shades(message):
  """The shade of every frame that a message shows."""
  frames = [part for part in message.parts if isinstance(part, Frames)]
  return [int(frame[0, 0, 0]) for part in frames for frame in part.pixels]


def words(message):
  return "".join(part for part in message.parts if isinstance(part, str))


def test_the_published_frame_choices():
  assert evenly_spaced(81, 8) == [0, 11, 22, 34, 45, 57, 68, 80]
  assert evenly_spaced(33, 8) == [0, 4, 9, 13, 18, 22, 27, 32]
  assert evenly_spaced(3, 8) == [0, 1, 2]
  assert evenly_spaced(1, 8) == [0]


# UnifiedReward-Flex.


def flex_reply(winner="Video 1", categories=("Video 1", "Video 2", "neither"), **more):
  listed = [{"name": f"c{i}", "cat_winner": w} for i, w in enumerate(categories)]
  return json.dumps({"categories": listed, "reason": "sharper", "winner": winner, **more})


def test_flex_shows_both_videos_and_then_asks():
  verdict, (request,) = ask(UnifiedRewardFlex(), flex_reply())
  (message,) = request.messages
  assert message.role == "user"
  assert [type(part) for part in message.parts] == [Frames, Frames, str]
  picked = evenly_spaced(96, 8)
  assert shades(message) == [*picked, *(100 + f for f in picked)]
  assert JOB.prompt in words(message)
  assert request.seed == 5 and request.temperature == 0.0 and request.max_tokens == 4096
  assert verdict.components == {"overall": 1.0, "alignment": 1.0, "quality": 0.0, "narrative": 0.5}
  assert json.loads(verdict.rationale)["reason"] == "sharper"


@pytest.mark.parametrize(
  ("text", "overall"),
  [
    (flex_reply(), 1.0),
    (f"Here it is:\n```json\n{flex_reply('video 2')}\n```", 0.0),
    (flex_reply("Video1"), 1.0),
    (flex_reply("Image 2 "), 0.0),
    (flex_reply("Video 1 and Video 2"), 0.5),
    (flex_reply(""), 0.5),
    (flex_reply(None), 0.5),
    (flex_reply("Video 12"), 0.5),
  ],
)
def test_flex_winners(text, overall):
  assert unified_reward_flex.parse_answer(text).overall == overall


@pytest.mark.parametrize(
  "text", ["", "Video 1 wins.", flex_reply()[:-20], "[1]", "3", "{}", '{"winner', "}{", "[" * 9999]
)
def test_flex_answers_that_are_no_verdict_are_failures(text):
  verdict, _ = ask(UnifiedRewardFlex(), text)
  assert verdict.components is None and verdict.cause == "unparsable"
  assert not verdict.retryable and text in verdict.rationale


def test_flex_uses_three_categories_by_their_place_and_survives_odd_ones():
  four = flex_reply(categories=("Video 1",) * 4)
  assert len(unified_reward_flex.parse_answer(four).categories) == 3
  odd = json.dumps({"winner": "Video 1", "categories": ["x", {"cat_winner": 2}, 7, {}]})
  assert unified_reward_flex.parse_answer(odd).categories == (("", 0.5), ("", 0.5))
  assert unified_reward_flex.parse_answer('{"winner": "Video 1", "categories": 3}').categories == ()
  assert unified_reward_flex.parse_answer("{}", lenient=True).overall == 0.5


@given(st.text(max_size=80) | st.text('{}[]":, winervdo12', max_size=40))
def test_no_text_breaks_a_parser(text):
  unified_reward_flex.parse_answer(text)
  unified_reward.parse_scores(text)
  vr_thinker.parse_answer(f"<answer>{text}")
  vr_thinker.parse_call(f"<tool_call>{text}", 96, 8)


# The pointwise judge.


def test_pointwise_scores_are_scaled():
  text = "Nice.\nAlignment Score (1-5): 5\nCoherence Score (1-5): 3.0\nStyle Score (1-5): 2"
  verdict, (request,) = ask(unified_reward.UnifiedReward(), text, job=Job((1,), "p", 3))
  assert verdict.components == {
    "overall": 7 / 12,
    "alignment": 1.0,
    "coherence": 0.5,
    "style": 0.25,
  }
  assert shades(request.messages[0])[0] == 100
  for wrong in ("no scores", text.replace("Style", "Taste"), text.replace(": 5", ": 9")):
    assert unified_reward.parse_scores(wrong) is None


# VR-Thinker.

FINAL = "<think>done</think><final answer>TA=1,VQ=0,MQ=2,OA=1</final answer>"


def call(*frames, name="select_frames"):
  body = json.dumps({"name": name, "arguments": {"target_frames": list(frames)}})
  provisional = "<recommend answer>TA=2,VQ=2,MQ=2,OA=2,CF=3</recommend answer>"
  return f"<snapshot>s</snapshot><think>t</think>{provisional}<tool_call>{body}</tool_call>"


def test_thinker_sees_four_frames_of_each_and_may_end_at_once():
  verdict, (request,) = ask(VRThinker(), FINAL)
  system, user = request.messages
  assert "select_frames" in words(system) and "<tools>" in words(system)
  picked = evenly_spaced(96, 48)
  first = [picked[i] for i in (0, 12, 24, 36)]
  assert shades(user) == [*first, *(100 + f for f in first)]
  assert "1, 13, 25, 37, 49, 61, 73, 85" in words(user)
  assert verdict.components == {"overall": 1.0, "alignment": 1.0, "quality": 0.5, "motion": 0.0}
  assert FINAL in verdict.rationale


def test_thinker_fetches_frames_and_only_the_latest_stay_in_view():
  protocol = VRThinker(pool=96)
  verdict, requests = ask(protocol, call(2, 98) + "made up", call(3), call(4), FINAL)
  assert [len(r.messages) for r in requests] == [2, 4, 6, 8]
  assert shades(requests[1].messages[3]) == [1, 101]
  assert words(requests[1].messages[2]).endswith("</tool_call>")  # what follows a call is cut off
  last = requests[3].messages
  assert [shades(m) for m in last[3::2]] == [[], [], [3]]
  assert "no longer in view" in words(last[3])
  assert "final answer now" in words(last[7]) and "final answer now" not in words(last[5])
  assert len(shades(last[1])) == 8  # the first frames always stay
  assert requests[3].stop == ("</tool_call>",)
  assert verdict.components["overall"] == 1.0
  assert verdict.rationale.count("<think>") == 4


def test_thinker_at_the_end_of_its_calls_is_held_to_its_provisional_answer():
  verdict, requests = ask(VRThinker(calls=1), call(2), call(3))
  assert len(requests) == 2
  assert verdict.components == {"overall": 0.0, "alignment": 0.0, "quality": 0.0, "motion": 0.0}
  verdict, _ = ask(VRThinker(calls=0), call(2))
  assert verdict.components["overall"] == 0.0


def test_thinker_shows_no_more_images_than_it_may():
  _, requests = ask(VRThinker(max_images=10), call(1, 2), call(3))
  assert len(requests) == 2


@pytest.mark.parametrize(
  ("text", "says"),
  [
    (call(*range(1, 10)), "too many"),
    (call(97), "does not exist"),
    (call(0), "does not exist"),
    (call(), "at least one"),
    (call(1, name="zoom"), "no function 'zoom'"),
    (call("2"), "list of"),
    (call(True), "list of"),
    ("<tool_call>{bad", "could not be read"),
    ('<tool_call>{"name": "select_frames"}', "name and arguments"),
    ('<tool_call>{"name": "select_frames", "arguments": 3}', "list of"),
  ],
)
def test_thinker_hears_why_a_call_was_not_served(text, says):
  _, requests = ask(VRThinker(), text, FINAL)
  assert says in words(requests[1].messages[-1])
  assert shades(requests[1].messages[-1]) == []


def test_thinker_a_call_without_its_end_was_stopped_there():
  _, requests = ask(VRThinker(), call(2).removesuffix("</tool_call>"), FINAL)
  assert shades(requests[1].messages[-1]) == [evenly_spaced(96, 48)[1]]


@pytest.mark.parametrize(
  ("text", "letters"),
  [
    ("<answer>oa = 2, TA=0</answer>", {"OA": 2, "TA": 0}),
    ("<FINAL ANSWER>OA=1</Final Answer>", {"OA": 1}),
    ("<answer>OA=1</answer> <answer>OA=2</answer>", {"OA": 2}),
    ("<answer>OA=1</answer><recommend answer>OA=2,CF=1</recommend answer>", {"OA": 1}),
    ("<recommend answer>OA=2,CF=1,MQ=5</recommend answer>", {"OA": 2, "CF": 1}),
    ("<answer>OA=12, CF=4</answer>", {}),
    ("<answer>OA=0", {"OA": 0}),
    ("OA=1", None),
  ],
)
def test_thinker_answers(text, letters):
  assert vr_thinker.parse_answer(text) == letters


def test_thinker_without_oa_is_a_failure():
  verdict, _ = ask(VRThinker(), "<answer>TA=1,VQ=1,MQ=1</answer>")
  assert verdict.components is None and verdict.cause == "unparsable"


def test_thinker_pools_of_unequal_videos_are_cut_to_the_shorter():
  job = Job((0, 2), "p", 1)
  views = [VRThinker().view(v) for v in (VIDEOS[0], video(6, 50))]
  dialogue = VRThinker().dialogue(job, views)
  assert dialogue.shown == (1, 2, 3, 4, 7, 8, 9, 10)
  assert shades(dialogue.request([]).messages[1])[4:] == [50, 51, 52, 53]
