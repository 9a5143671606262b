"""Several judges as one reward: names, required and optional components, advantages."""

import dataclasses
import math

import numpy as np
import pytest

from configs import quickstart
from sbjax import config as config_lib
from sbjax.algorithms.advantages import AdvantageConfig, advantages
from sbjax.rewards import catalogue
from sbjax.rewards.combined import CombinedReward, JudgeTable
from sbjax.rewards.pairwise import PairwiseReward
from sbjax.rewards.protocol import Group, PointwiseReward, Verdict

GROUP = Group(0, "p", (0, 1, 2), (10, 11, 12))


def good(**components):
  return Verdict(components, rationale="seen")


BAD = Verdict(None, "timeout", "no answer within 1 s")


def rewards_of(reward, verdicts):
  jobs = reward.jobs(GROUP)
  return reward.aggregate(GROUP, jobs, [verdicts(job) for job in jobs])


def two(optional=()):
  parts = {"world": PointwiseReward(("digit",)), "function": PointwiseReward(("sharp",))}
  return CombinedReward(parts, ("world.digit", "function.sharp"), optional)


def test_one_judge_keeps_its_names_and_rationale():
  reward = CombinedReward({"world": PointwiseReward(("digit",))}, ("digit",))
  assert {job.judge for job in reward.jobs(GROUP)} == {"world"}
  found = rewards_of(reward, lambda job: good(digit=0.5, more=1.0))
  assert found[1].components == {"digit": 0.5, "more": 1.0} and found[1].rationale == "seen"


def test_several_judges_have_names_of_their_own():
  found = rewards_of(
    two(), lambda job: good(digit=0.5) if job.judge == "world" else good(sharp=job.seed)
  )
  assert found[2].components == {"world.digit": 0.5, "function.sharp": 12}
  assert found[2].rationale == "world: seen\n\nfunction: seen"


def fails(judge, *candidates):
  def verdict(job):
    if job.judge == judge and job.candidates[0] in candidates:
      return BAD
    return good(digit=0.5, sharp=0.25)

  return verdict


def test_a_required_part_that_fails_costs_the_candidate():
  found = rewards_of(two(), fails("function", 1))
  assert found[1].components is None and found[1].cause == "timeout"
  assert set(found[0].components) >= {"world.digit", "function.sharp"}


def test_an_optional_part_that_fails_once_is_left_out_for_the_group():
  reward = two(("function.sharp",))
  found = rewards_of(reward, fails("function", 1))
  assert all(r.components["world.digit"] == 0.5 for r in found.values())
  assert not any("function.sharp" in r.components for r in found.values())


def test_an_optional_part_that_fails_for_a_failed_candidate_costs_nobody():
  reward = two(("function.sharp",))
  found = rewards_of(
    reward, lambda job: BAD if job.candidates == (1,) else good(digit=0.5, sharp=0.25)
  )
  assert found[1].components is None
  assert found[0].components["function.sharp"] == 0.25


@pytest.mark.parametrize(("value", "cause"), [(math.nan, "not_finite"), (None, "missing")])
def test_a_value_that_is_not_there_or_not_finite_is_a_failure(value, cause):
  reward = CombinedReward({"world": PointwiseReward(("a",))}, ("a",))
  found = rewards_of(reward, lambda job: Verdict({} if value is None else {"a": value}))
  assert [r.cause for r in found.values()] == [cause] * 3


def test_a_dimension_that_no_answer_had_is_missing():
  reward = CombinedReward({"vr_thinker": PairwiseReward()}, ("overall", "motion"))
  found = rewards_of(reward, lambda job: Verdict({"overall": 1.0}))
  assert [r.cause for r in found.values()] == ["missing"] * 3


def test_the_table_keeps_the_order_of_jobs_and_one_judge_apart_from_another():
  class Echo:
    def judge(self, jobs, videos):
      return [Verdict({"digit": float(job.seed)}) for job in jobs]

  class Broken:
    def judge(self, jobs, videos):
      raise OSError("no card")

  jobs = two().jobs(GROUP)
  mixed = [jobs[3], jobs[0], jobs[4], jobs[1]]
  verdicts = JudgeTable({"world": Echo(), "function": Broken()}).judge(mixed, {})
  assert [v.cause for v in verdicts] == ["raised", "", "raised", ""]
  assert verdicts[3].components == {"digit": 11.0}
  assert "no card" in verdicts[0].rationale


@pytest.mark.parametrize("combine", ["adv_sum", "raw_sum", "gdpo", "separate_loss"])
@pytest.mark.parametrize("std", ["group_unbiased", "global_population", "none"])
def test_a_reward_left_out_of_a_group_changes_nothing_but_its_own_part(combine, std):
  rng = np.random.default_rng(0)
  rewards = rng.normal(size=(6, 2))
  group, valid = np.array([0, 0, 0, 1, 1, 1]), np.ones(6, bool)
  settings = AdvantageConfig(std=std, combine=combine, weights=(1.0, 0.5))
  left_out = np.zeros((6, 2), bool)
  left_out[3:, 1] = True
  holed = np.where(left_out, np.nan, rewards)
  got = advantages(holed, valid, group, settings, left_out=left_out).values
  assert np.isfinite(got).all()
  if combine == "separate_loss":
    assert not got[3:, 1].any() and got[:3, 1].any()
  if std == "group_unbiased" and combine in ("adv_sum", "raw_sum"):
    whole = advantages(rewards, valid, group, settings).values
    np.testing.assert_allclose(got[:3], whole[:3], rtol=1e-12)
    alone = dataclasses.replace(settings, weights=(1.0,))
    one = advantages(rewards[3:, :1], valid[3:], group[3:], alone).values
    np.testing.assert_allclose(got[3:], one, rtol=1e-12)
  if std == "global_population" and combine == "separate_loss":
    # The other group's deviation is taken without this one.
    alone = advantages(rewards[:3], valid[:3], group[:3], settings).values
    np.testing.assert_allclose(got[:3, 1], alone[:, 1], rtol=1e-12)


def settings_with(**changes):
  c = quickstart.get_config()
  c.reward.name = "unified_reward_flex"
  c.reward.components, c.reward.weights = ("overall", "dimensions"), (0.3, 0.7)
  c.reward.judge.mode = "pairwise_all"
  c.reward.judge.endpoints = ("http://127.0.0.1:8000/v1",)
  c.reward.judge.model = "flex"
  for name, value in changes.items():
    *path, leaf = name.split("__")
    node = c.reward
    for part in path:
      node = node[part]
    del node[leaf]
    node[leaf] = value
  return config_lib.convert(c).reward


def test_judges_are_built_as_configured():
  reward = catalogue.reward_of(settings_with(judge__mode="pairwise_anchor"))
  assert reward.needs_anchor and reward.compares
  catalogue.check(settings_with())
  both = settings_with(
    also=("function",),
    components=("unified_reward_flex.overall", "function.sharp"),
    optional=("function.sharp",),
  )
  catalogue.check(both)
  jobs = catalogue.reward_of(both).jobs(GROUP)
  assert [(j.judge, j.components) for j in jobs[2:4]] == [
    ("unified_reward_flex", ("overall",)),
    ("function", ()),
  ]
  thinker = catalogue.protocol_of(settings_with(judge__calls=5).judge, "vr_thinker")
  assert thinker.calls == 5
  assert catalogue.protocol_of(
    settings_with(judge__unparsable="tie").judge, "unified_reward_flex"
  ).lenient


@pytest.mark.parametrize(
  ("changes", "says"),
  [
    ({"also": ("clap",)}, "reward.also has 'clap'; judges are 'world'"),
    ({"also": ("unified_reward_flex",)}, "name each judge once"),
    ({"also": ("world",)}, "judge 'unified_reward_flex' gives none of them"),
    (
      {
        "also": ("vr_thinker",),
        "components": ("unified_reward_flex.overall", "vr_thinker.overall"),
      },
      "so use 'unified_reward_flex' or 'vr_thinker'",
    ),
    (
      {"also": ("world",), "components": ("unified_reward_flex.overall", "world.digit", "x")},
      "with reward.also each is written as judge, dot, component",
    ),
    ({"components": ("overall", "beauty")}, "judge 'unified_reward_flex' gives 'overall'"),
    ({"optional": ("alignment",)}, "reward.optional has 'alignment'"),
    ({"optional": ("overall", "dimensions")}, "at least one component must be required"),
    ({"judge__mode": "pointwise"}, "use 'pairwise_all' or 'pairwise_anchor'"),
    (
      {"name": "unified_reward", "components": ("overall", "style")},
      "reward.judge.mode is 'pairwise_all'; no judge here compares videos, so use 'pointwise'",
    ),
    ({"judge__endpoints": ()}, "'unified_reward_flex' needs one of them, servers or a folder"),
    ({"judge__checkpoint": "x"}, "needs one of them"),
    (
      {"judge__checkpoint": "nowhere", "judge__endpoints": ()},
      "reward.judge.checkpoint is 'nowhere', where config.json is missing",
    ),
    ({"judge__endpoints": ("localhost",)}, "reward.judge.endpoints has 'localhost'"),
    ({"judge__model": ""}, "reward.judge.model is ''"),
    ({"judge__total_timeout_s": 21.0}, "so use at most 20 or a reward.timeout_s of at least 63"),
    (
      {"name": "world", "components": ("digit", "colour"), "judge__mode": "pointwise"},
      "but no judge of ('world',) is a vision-language model",
    ),
  ],
)
def test_judges_that_cannot_work_are_refused_in_one_sentence(changes, says):
  with pytest.raises(ValueError) as error:
    catalogue.check(settings_with(**changes))
  assert says in str(error.value) and "\n" not in str(error.value)
