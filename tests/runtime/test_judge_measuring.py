"""A generating judge on the reward worker is measured by frames, tokens and batch."""

import numpy as np

from models.generate.engine import Engine
from models.generate.request import exact_config
from models.layers.dense import tree_of
from models.qwen_vl import checkpoint
from sbjax.dataflow.judge_costs import JudgeRow
from sbjax.rewards.combined import JudgeTable
from sbjax.rewards.conversation import ConversationJudge
from sbjax.rewards.engine_generator import EngineGenerator
from sbjax.rewards.unified_reward import UnifiedReward
from sbjax.runtime.judge_measuring import NEW_TOKENS, measure_judge, salted
from tests.rewards.test_engine_generator import folder  # noqa: F401  (a fixture)

VIDEO = np.random.default_rng(0).integers(0, 256, (5, 32, 32, 3), dtype=np.uint8)


def test_every_dialogue_is_computed_and_the_costs_are_told_apart(folder):  # noqa: F811
  model = checkpoint.load(folder)
  engine = Engine(tree_of(model), model.config, exact_config(2, 550, prefill_chunk=64))
  generator = EngineGenerator(
    engine, model.config, lambda text: list(text.encode()), stop_ids=(), total_timeout_s=60.0
  )
  judge = JudgeTable({"a": ConversationJudge(UnifiedReward(2, 8, 0.0), generator)})
  points = measure_judge(judge, VIDEO, jobs=9, frames=2, rounds=1)
  rows = [JudgeRow(**point, worker="reward") for point in points]
  assert {row.jobs for row in rows} == {1, 2} and {row.frames for row in rows} == {0, 2}
  assert len({row.key for row in rows}) == len(rows) == 6
  assert all(row.prefill_s > 0 and row.decode_s > 0 and row.slots == 2 for row in rows)
  # Nothing was found there already: all tokens but each prompt's last were computed, twice.
  counts = engine.counts
  asked = 2 * sum(row.jobs * (row.prompt_tokens - 1) for row in rows)
  assert asked - counts["prefill_tokens"] == counts["reused_tokens"] == 0
  assert counts["decoded_tokens"] == 2 * NEW_TOKENS * sum(row.jobs for row in rows)


def test_a_judge_without_an_engine_gives_nothing():
  assert measure_judge(JudgeTable({}), VIDEO, jobs=1, frames=1, rounds=1) == []


def test_salted_videos_differ_from_each_other_and_by_salt():
  made = [v.tobytes() for salt in ((1, 0), (1, 1), (2, 0)) for v in salted([VIDEO] * 3, salt)]
  assert len(set(made)) == len(made) and VIDEO.tobytes() not in made
  assert [v.tobytes() for v in salted([VIDEO] * 3, (1, 1))] == made[3:6]
