"""The digits world's vision-language judge: what it sees, how it is asked, how it is read."""

import numpy as np
import pytest

from sbjax.rewards import catalogue, digits_reasoner
from sbjax.rewards.conversation import ConversationJudge
from sbjax.rewards.digits_reasoner import SIDE_PX, DigitsReasoner, parse_answer, parse_scores, view
from sbjax.rewards.generator import Frames, ScriptedGenerator
from sbjax.rewards.protocol import Job

JOB = Job((0, 1), "a red seven moves left slowly", 5)
ANSWER = (
  "<think> first video shows a red nine, perhaps a seven, moving left slowly. digit nine for seven "
  "2, colour red for red 5, motion left slowly for left slowly 4. second video shows a red seven "
  "moving left slowly. digit seven for seven 5, colour red for red 5, motion left slowly for left "
  "slowly 3. </think> digit: second. colour: equal. motion: first. overall: second."
)


def square(row, column):
  """33 frames with a bright 6x6 square whose upper left corner is given, moving right."""
  frames = np.full((33, 64, 64, 3), 10, np.uint8)
  for time, frame in enumerate(frames):
    frame[row : row + 6, column + time // 2 : column + time // 2 + 6] = 250
  return frames


def ask(text):
  requests = []

  def answer(place, round_, request):
    requests.append(request)
    return text

  videos = {0: square(10, 20), 1: square(40, 5)}
  (verdict,) = ConversationJudge(DigitsReasoner(96), ScriptedGenerator(answer)).judge([JOB], videos)
  return verdict, requests


def test_whole_frames_keep_the_place_and_close_ups_lose_it():
  near, far = view(square(10, 20)), view(square(40, 5))
  assert near.pixels.shape == (12, SIDE_PX, SIDE_PX, 3)
  assert near.times_s == far.times_s and near.times_s[:6] == near.times_s[6:]
  assert near.times_s[0] == 0.0 and near.times_s[5] == 2.0
  assert (near.pixels[:6] != far.pixels[:6]).any()
  np.testing.assert_array_equal(near.pixels[6:], far.pixels[6:])
  np.testing.assert_array_equal(near.pixels[6:, 13:19, 13:19], 250)


def test_a_close_up_at_the_edge_and_of_nothing():
  corner = view(square(0, 0))
  assert (corner.pixels[6:].max((1, 2, 3)) == 250).all()
  dark = view(np.full((33, 64, 64, 3), 12, np.uint8))
  assert (dark.pixels == 12).all()


def test_another_size_is_refused():
  with pytest.raises(ValueError, match="64x64"):
    view(np.zeros((33, 32, 32, 3), np.uint8))


def test_both_videos_and_the_prompt_are_in_one_question():
  verdict, (request,) = ask(ANSWER)
  (message,) = request.messages
  shown = [part for part in message.parts if isinstance(part, Frames)]
  assert len(shown) == 2 and all(part.times_s for part in shown)
  assert JOB.prompt in message.parts[0]
  assert (request.seed, request.max_tokens, request.temperature) == (5, 96, 0.0)
  assert verdict.components == {"overall": 0.0, "digit": 0.0, "colour": 0.5, "motion": 1.0}
  assert verdict.rationale == ANSWER


@pytest.mark.parametrize(
  "text",
  [
    "",
    ANSWER.replace("</think>", ""),
    "</think> digit: second. colour: equal. motion: first. overall: second.",
    ANSWER.replace("overall: second.", ""),
    ANSWER.replace("motion: first.", "motion: neither."),
    ANSWER + " overall: first.",
  ],
)
def test_what_is_not_of_the_form_is_a_failure(text):
  verdict, _ = ask(text)
  assert verdict.components is None
  assert verdict.cause == "unparsable" and not verdict.retryable
  assert parse_answer(text) is None


def test_scores_of_the_reasoning():
  assert parse_scores(ANSWER) == (
    {"digit": 2, "colour": 5, "motion": 4},
    {"digit": 5, "colour": 5, "motion": 3},
  )
  assert parse_scores(ANSWER.replace("slowly 3", "slowly 7")) is None


def test_the_shipped_judge_goes_by_the_name_world():
  assert catalogue.checkpoint_folder("world") == digits_reasoner.WEIGHTS
  assert catalogue.checkpoint_folder("elsewhere").name == "elsewhere"
