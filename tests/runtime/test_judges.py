"""RL steps with a pairwise judge: a fixed opponent a group, and judges that fail."""

import base64
import io
import json

import imageio.v3 as iio
import numpy as np
import pytest

from sbjax.rewards import catalogue
from sbjax.rewards.combined import JudgeTable
from sbjax.runtime.driver import Driver
from sbjax.runtime.inline import InlineExecutor
from tests.rewards.fake_server import serving
from tests.runtime import tiny

PROMPTS = ("hello", "world!")
JOBS = 6  # two groups of three, each candidate against its group's opponent


def brighter(body):
  """Prefers the brighter video over all, and the darker one in the first category."""
  urls = [p["image_url"]["url"] for p in body["messages"][0]["content"] if p["type"] != "text"]
  means = [iio.imread(io.BytesIO(base64.b64decode(u.split(",")[1]))).mean() for u in urls]
  half = len(means) // 2
  first, second = np.mean(means[:half]), np.mean(means[half:])
  if first == second:
    return json.dumps({"categories": [], "winner": "neither"})
  winner, other = ("Video 1", "Video 2") if first > second else ("Video 2", "Video 1")
  return json.dumps({"categories": [{"cat_winner": other}], "reason": "look", "winner": winner})


def build_roles(run, judges):
  judge = catalogue.conversation_judge(run.reward.judge, run.reward.name)
  return tiny.build_roles(run, judges, JudgeTable({run.reward.name: judge}))


class Run:
  """A driver with one worker, whose judge is a server that does as `behaviour` says."""

  def __init__(self, server, tmp_path):
    self.server, self.steps = server, 0
    self.settings = tiny.settings(
      reward__name="unified_reward_flex",
      reward__components=("overall", "dimensions"),
      reward__weights=(0.3, 0.7),
      reward__judge__mode="pairwise_anchor",
      reward__judge__model="flex",
      reward__judge__endpoints=(server.url,),
      reward__judge__total_timeout_s=1.5,
      reward__judge__attempts=2,
      reward__judge__backoff_s=0.01,
      reward__judge__evict_after=1000,
      reward__retries=0,
      reward__timeout_s=2.0,
      reward__max_skipped_in_row=100,
      runtime__reward_workers=0,
      algorithm__minibatches=1,
    )
    self.driver = Driver(
      tiny.recipe_of(self.settings),
      InlineExecutor(),
      catalogue.reward_of(self.settings.reward),
      str(tmp_path),
      lambda line: None,
      "tests.runtime.test_judges:build_roles",
    )
    self.driver.wait_for_workers()
    self.state = self.driver.start(PROMPTS[0], None)

  def step(self):
    self.steps += 1
    self.state, result = self.driver.run_step(self.state, self.steps, PROMPTS)
    return result

  @property
  def adapter(self):
    return np.array(self.driver.train_state(self.state, self.steps, 0).adapter)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  def behave(number, body):
    status, content = server.behaviour
    return status, content(body) if callable(content) else content

  with serving(behave) as server:
    server.behaviour = (200, brighter)
    yield Run(server, tmp_path_factory.mktemp("logs"))


def test_every_candidate_meets_a_video_of_the_first_adapter(run):
  before = run.adapter
  result = run.step()
  made = [span.task for span in result.spans if span.kind in ("generate", "decode")]
  assert {"generate/c-1", "generate/c-2", "decode/c-1", "decode/c-2"} <= set(made)
  assert len(made) == 2 * (6 + 2)
  for candidate in result.candidates:
    won = candidate.components["overall"]
    assert won in (0.0, 1.0) and candidate.components["dimensions"] == 1.0 - won
    assert "shown first, against -" in candidate.rationale and "look" in candidate.rationale
  assert result.metrics["reward/failed"] == 0
  assert result.metrics["training/replays_per_candidate"] == 1.0
  assert result.metrics["training/skipped_updates"] == 0
  if result.metrics["critic/rewards/std_mean"] > 0:
    assert not np.array_equal(run.adapter, before)


def test_an_evaluation_compares_with_the_base_adapter(run):
  adapters = {"base": None, "same": None, "half": run.driver.executor.put(0.5 * run.adapter)}
  heard: list[list[tuple[int, int]]] = [[], []]
  found = [
    run.driver.evaluate(
      adapters, PROMPTS, (5,), 1, on_progress=lambda done, total, to=to: to.append((done, total))
    ).scores
    for to in heard
  ]
  # What is known of the base adapter is not made again, nor counted.
  for made, to in zip((3 * len(PROMPTS), 2 * len(PROMPTS)), heard, strict=True):
    assert to == [(done, made) for done in range(1, made + 1)]
  for name in adapters:
    np.testing.assert_array_equal(found[0][name]["overall"], found[1][name]["overall"])
  found = found[0]
  np.testing.assert_array_equal(found["base"]["overall"], 0.5)
  np.testing.assert_array_equal(found["same"]["overall"], 0.5)  # equal videos tie
  assert set(found["half"]["overall"]) <= {0.0, 0.5, 1.0}


def test_an_outage_of_several_steps_skips_them_and_training_goes_on_after_it(run):
  before = run.adapter
  run.server.behaviour = (500, b"out of memory")
  for skipped in (1, 2, 3):
    metrics = run.step().metrics
    assert metrics["reward/failed"] == metrics["reward/failed/http_500"] == JOBS
    assert run.state.skipped_in_row == skipped  # reward.max_skipped_in_row would end the run here
    np.testing.assert_array_equal(run.adapter, before)
  run.server.behaviour = (200, brighter)
  metrics = run.step().metrics
  assert metrics["reward/failed"] == metrics["training/skipped_updates"] == 0
  assert run.state.skipped_in_row == 0
  if metrics["critic/rewards/std_mean"] > 0:
    assert not np.array_equal(run.adapter, before)


@pytest.mark.parametrize(
  ("status", "content", "cause"),
  [
    (500, b"out of memory", "http_500"),
    (200, "hang", "timeout"),
    (200, b"\x00garbage", "bad_response"),
    (200, "I like the first one.", "unparsable"),
    (None, None, "connection"),
  ],
)
def test_a_judge_that_fails_ends_the_step_in_time_with_its_cause(run, status, content, cause):
  before = run.adapter
  if status is None:
    run.server.stop()
  run.server.behaviour = (status, content)
  result = run.step()
  metrics = result.metrics
  assert metrics["reward/failed"] == metrics[f"reward/failed/{cause}"] == JOBS
  assert metrics["training/skipped_updates"] == 1
  assert all(c.reward is None and c.rationale for c in result.candidates)
  judging_s = sum(s.end_s - s.start_s for s in result.spans if s.kind == "judge")
  assert 0 < judging_s <= JOBS * run.settings.reward.timeout_s
  np.testing.assert_array_equal(run.adapter, before)  # a failure is never a zero: nothing is learnt
