"""The judge behind HTTP: every way in which a server can fail ends in time, with its cause."""

import base64
import dataclasses
import io
import json
import socket
import threading
import time

import imageio.v3 as iio
import numpy as np
import pytest

from sbjax.rewards.conversation import ConversationJudge
from sbjax.rewards.endpoints import Endpoints
from sbjax.rewards.http_generator import HTTPConfig, HTTPGenerator, parse_completion
from sbjax.rewards.protocol import Job, judge_with_retries
from sbjax.rewards.unified_reward_flex import UnifiedRewardFlex
from sbjax.rewards.vr_thinker import VRThinker
from tests.rewards.fake_server import serving, wait_until

WINNER = json.dumps({"categories": [], "winner": "Video 1"})
VIDEOS = {c: np.full((9, 8, 8, 3), 40 * c, np.uint8) for c in range(4)}
JOBS = [Job((a, b), f"prompt {a}{b}", a, ("overall",)) for a, b in ((0, 1), (0, 2), (1, 2))]


def config(*urls, **changes):
  base = HTTPConfig(
    endpoints=urls,
    model="judge",
    connect_timeout_s=0.3,
    total_timeout_s=1.5,
    attempts=3,
    backoff_s=0.005,
    evict_after=100,
    cooldown_s=60.0,
    concurrency=4,
  )
  return dataclasses.replace(base, **changes)


def ask(settings, jobs=JOBS[:1], protocol=None, retries=0):
  """Verdicts and the seconds they took."""
  generator = HTTPGenerator(settings)
  start_s = time.monotonic()
  judge = ConversationJudge(protocol or UnifiedRewardFlex(frames=2), generator)
  verdicts = judge_with_retries(judge, jobs, VIDEOS, retries)
  return verdicts, time.monotonic() - start_s, generator


def test_a_request_is_a_chat_completion_with_frames_as_images():
  with serving(lambda n, body: (200, WINNER)) as server:
    (verdict,), _, _ = ask(config(server.url + "/"), JOBS[1:2])
  assert verdict.components == {"overall": 1.0} and verdict.rationale == WINNER
  ((path, body),) = server.requests
  assert path == "/v1/chat/completions"
  assert body["model"] == "judge" and body["seed"] == 0 and body["temperature"] == 0.0
  (message,) = body["messages"]
  kinds = [part["type"] for part in message["content"]]
  assert kinds == ["image_url"] * 4 + ["text"]
  head, data = message["content"][2]["image_url"]["url"].split(",")
  assert head == "data:image/jpeg;base64"
  frame = iio.imread(io.BytesIO(base64.b64decode(data)))
  assert frame.shape == (8, 8, 3) and abs(int(frame.mean()) - 80) <= 1
  assert "prompt 02" in message["content"][4]["text"]


def test_rounds_of_a_dialogue_share_the_server_and_the_deadline():
  call = '<tool_call>{"name": "select_frames", "arguments": {"target_frames": [3]}}'
  answers = (call, "<final answer>OA=2</final answer>")
  with serving(lambda n, body: (200, answers[n])) as server:
    (verdict,), _, _ = ask(config(server.url), protocol=VRThinker())
  assert verdict.components == {"overall": 0.0}
  assert [len(body["messages"]) for _, body in server.requests] == [2, 4]
  assert server.requests[0][1]["stop"] == ["</tool_call>"]
  assert isinstance(server.requests[0][1]["messages"][0]["content"], str)


@pytest.mark.parametrize(
  ("status", "content", "cause", "requests"),
  [
    (500, b"out of memory", "http_500", 3),
    (503, b"", "http_503", 3),
    (429, b"slow down", "http_429", 3),
    (400, b"no such model", "http_400", 1),
    (404, b"", "http_404", 1),
    (301, b"", "http_301", 1),
    (200, b"\xff\x00garbage", "bad_response", 1),
    (200, b'{"choices": []}', "bad_response", 1),
    (200, b'{"choices": [{"message": {"content": null}}]}', "bad_response", 1),
    (200, b"[]", "bad_response", 1),
    (200, "Video 1, of course.", "unparsable", 1),
    (200, WINNER[:-4], "unparsable", 1),
    (200, "drop", "connection", 3),
  ],
)
def test_only_what_may_pass_is_tried_again(status, content, cause, requests):
  with serving(lambda n, body: (status, content)) as server:
    (verdict,), seconds, _ = ask(config(server.url))
  assert verdict.components is None and verdict.cause == cause
  assert verdict.rationale
  assert len(server.requests) == requests
  assert seconds < 1.5


@pytest.mark.parametrize("how", ["hang", "drip"])
def test_a_server_that_never_finishes_is_cut_off_at_the_deadline(how):
  with serving(lambda n, body: (200, how)) as server:
    verdicts, seconds, _ = ask(config(server.url, total_timeout_s=0.3), JOBS)
  assert [v.cause for v in verdicts] == ["timeout"] * 3
  assert 0.3 <= seconds < 2.0


def test_a_port_that_nobody_listens_on_and_one_that_never_accepts():
  with socket.socket() as unused:
    unused.bind(("127.0.0.1", 0))
    (verdict,), _, _ = ask(config(f"http://127.0.0.1:{unused.getsockname()[1]}/v1"))
    assert verdict.cause == "connection"
    unused.listen(0)
    waiting = []
    while len(waiting) < 4:  # fills the queue of connections that nobody takes
      waiting.append(socket.socket())
      waiting[-1].setblocking(False)
      waiting[-1].connect_ex(unused.getsockname())
    settings = config(f"http://127.0.0.1:{unused.getsockname()[1]}/v1", total_timeout_s=0.6)
    (verdict,), seconds, _ = ask(dataclasses.replace(settings, connect_timeout_s=0.1))
    for one in waiting:
      one.close()
  assert verdict.cause == "timeout" and seconds < 2.0


def test_a_passing_failure_passes_and_jobs_do_not_touch_each_other():
  def behave(number, body):
    text = body["messages"][0]["content"][-1]["text"]
    if "prompt 02" in text:
      return 500, b"always"
    return (503, b"once") if number == 0 else (200, WINNER)

  with serving(behave) as server:
    verdicts, _, _ = ask(config(server.url, concurrency=1), JOBS)
  assert [v.cause for v in verdicts] == ["", "http_500", ""]


def test_what_cannot_be_parsed_is_not_asked_again_and_what_was_refused_is():
  with serving(lambda n, body: (200, "prose")) as server:
    ask(config(server.url), retries=3)
  assert len(server.requests) == 1
  with serving(lambda n, body: (400, b"no") if n < 2 else (200, WINNER)) as server:
    (verdict,), _, _ = ask(config(server.url), retries=3)
  assert verdict.cause == "" and len(server.requests) == 3


def test_a_dead_server_is_evicted_and_returns_after_its_cool_down():
  healthy = threading.Event()

  def behave(number, body):
    return (200, WINNER) if healthy.is_set() else (500, b"down")

  with serving(behave) as dead, serving(lambda n, body: (200, WINNER)) as good:
    settings = config(dead.url, good.url, evict_after=1, cooldown_s=0.2, concurrency=1)
    verdicts, _, generator = ask(settings, JOBS)
    assert [v.cause for v in verdicts] == [""] * 3
    assert len(dead.requests) == 1 and generator.endpoints.living == (good.url,)
    healthy.set()
    time.sleep(0.25)
    judge = ConversationJudge(UnifiedRewardFlex(frames=2), generator)
    assert [v.cause for v in judge.judge(JOBS, VIDEOS)] == [""] * 3
    assert len(dead.requests) > 1 and generator.endpoints.living == (dead.url, good.url)


def test_with_every_server_evicted_the_last_failure_is_told():
  with serving(lambda n, body: (500, b"down")) as server:
    settings = config(server.url, evict_after=2, concurrency=1)
    verdicts, seconds, _ = ask(settings, JOBS)
  assert [v.cause for v in verdicts] == ["no_endpoint"] * 3
  assert all("500: down" in v.rationale for v in verdicts)
  assert len(server.requests) == 2 and seconds < 1.5


class Clock:
  def __init__(self):
    self.time_s = 0.0

  def __call__(self):
    return self.time_s


def test_the_least_loaded_living_server_is_chosen():
  endpoints = Endpoints("abc", evict_after=2, cooldown_s=10.0, now=Clock())
  assert [endpoints.acquire(1.0) for _ in range(4)] == ["a", "b", "c", "a"]
  endpoints.release("c")
  assert endpoints.acquire(1.0) == "c"
  for _ in range(2):
    endpoints.release("a", "refused")
  endpoints.release("b")
  endpoints.release("c")
  assert endpoints.living == ("b", "c")
  assert [endpoints.acquire(1.0) for _ in range(4)] == ["b", "c", "b", "c"]
  assert endpoints.last_failure == "refused"


def test_a_success_in_between_forgives_and_a_cooled_server_gets_one_request():
  clock = Clock()
  endpoints = Endpoints("a", evict_after=2, cooldown_s=10.0, now=clock)
  for failure in ("x", "", "x"):
    assert endpoints.acquire(1.0) == "a"
    endpoints.release("a", failure)
  assert endpoints.living == ("a",)
  endpoints.acquire(1.0)
  endpoints.release("a", "x")
  assert endpoints.acquire(9.0) is None  # it cannot be back by then
  clock.time_s = 10.0
  assert endpoints.acquire(10.5) == "a"
  clock.time_s = 10.6
  assert endpoints.acquire(10.5) is None  # one at a time, until it has shown that it lives
  endpoints.release("a", "x")
  clock.time_s = 20.5
  assert endpoints.acquire(20.5) is None  # that failure alone began another cool-down
  clock.time_s = 20.6
  assert endpoints.acquire(21.0) == "a"
  endpoints.release("a")
  assert endpoints.living == ("a",)


def test_who_waits_for_a_probed_server_gets_it_when_the_probe_succeeds():
  endpoints = Endpoints("a", evict_after=1, cooldown_s=0.01)
  endpoints.acquire(time.monotonic() + 1)
  endpoints.release("a", "x")
  assert endpoints.acquire(time.monotonic() + 5) == "a"
  got = []
  waiting = threading.Thread(target=lambda: got.append(endpoints.acquire(time.monotonic() + 5)))
  waiting.start()
  assert not got
  endpoints.release("a")
  wait_until(lambda: got == ["a"])
  waiting.join()


def test_a_cut_off_reply_is_known_as_such():
  body = {"choices": [{"message": {"content": "half a"}, "finish_reason": "length"}]}
  reply = parse_completion(json.dumps(body).encode())
  assert reply.truncated and reply.text == "half a" and not reply.cause


@pytest.mark.parametrize(
  "url", ["127.0.0.1:8000", "ftp://x/v1", "http://", "http://x:port", "", "http://[::1"]
)
def test_an_address_that_cannot_be_one_is_refused(url):
  with pytest.raises(ValueError, match=r"reward\.judge\.endpoints has") as error:
    HTTPGenerator(config(url))
  assert "\n" not in str(error.value)
