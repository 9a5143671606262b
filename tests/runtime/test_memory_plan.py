"""The memory plan: against the compiler's account, in a command, and where a run does not fit."""

import json
from typing import Any

import pytest

from benchmarks import memory_formula
from configs import self_forcing, self_forcing_vr_thinker
from models.clip import presets as clip_presets
from sbjax import config as config_lib
from sbjax import plan_memory
from sbjax.dataflow.costs import StepCosts, WorkerCosts
from sbjax.dataflow.memory import Memory
from sbjax.dataflow.plan import worker_slots
from sbjax.dataflow.schemes import scheme
from sbjax.runtime import memory_plan
from sbjax.runtime.driver import Driver
from sbjax.runtime.inline import InlineExecutor
from sbjax.runtime.planning import Planner
from tests import tiny_clip
from tests.runtime import tiny

# Every kind of pass at three sizes, every remat policy; `benchmarks.memory_formula` has them all.
PASSES = [
  ("small", "forward", "none"),
  ("wide", "forward", "none"),
  ("long", "forward", "none"),
  ("small", "replay", "none"),
  ("wide", "replay", "block"),
  ("long", "folded", "block"),
  ("small", "replay", "dots"),
]


@pytest.mark.parametrize(("size", "kind", "remat"), PASSES)
def test_a_pass_takes_what_the_formula_says(size, kind, remat):
  reported, estimated = memory_formula.compare_pass(size, kind, remat)
  assert estimated == pytest.approx(reported, rel=0.15)


@pytest.mark.parametrize("name", ["one frame", "large image", "wide"])
def test_decoding_takes_what_the_formula_says(name):
  reported, estimated = memory_formula.compare_decode(name)
  assert estimated == pytest.approx(reported, rel=0.05)


def planned(capsys, *arguments):
  code = plan_memory.main(["plan_memory", *arguments])
  return code, capsys.readouterr()


def test_the_command_says_what_fits(capsys):
  config = "--config=configs/self_forcing.py"
  code, out = planned(capsys, config, "--device_gb=72,141", "--json")
  found = json.loads(out.out)
  assert code == 0 and found["fits"] and found["basis"] == "estimated"
  small, large = found["devices"]
  assert 64 <= small["largest_rank"] < large["largest_rank"]
  assert found["workers"]["actor"]["held"]["video model"] == 2 * 1_418_996_800
  # The largest rank fits, and the next one does not.
  for rank, wanted in ((small["largest_rank"], 0), (small["largest_rank"] + 1, 1)):
    code, _ = planned(capsys, config, f"--config.lora.rank={rank}", "--device_gb=72")
    assert code == wanted
  code, out = planned(capsys, config, "--device_gb=72")
  for part in ("estimated", "key-value caches", "replay adds", "largest rank", "actor fits"):
    assert part in out.out


def test_the_command_counts_the_judge(capsys):
  config = "--config=configs/self_forcing_vr_thinker.py"
  code, out = planned(capsys, config, "--device_gb=72", "--json=true")
  found = json.loads(out.out)
  # Only the workers that judge hold the judge, in the recipe's bfloat16.
  assert code == 1 and found["devices"][0]["fits_by_group"] == {"actor": True, "reward": False}
  assert found["workers"]["reward"]["held"]["judge"] == 2 * 8_292_166_656
  assert "judge" not in found["workers"]["actor"]["held"]
  _, out = planned(capsys, config, "--judge_dtype=float32", "--json=true")
  assert json.loads(out.out)["workers"]["reward"]["held"]["judge"] == 4 * 8_292_166_656
  code, out = planned(
    capsys, config, "--config.reward.judge.endpoints=('http://127.0.0.1:1/v1',)", "--json"
  )
  assert "judge" not in json.loads(out.out)["workers"]["reward"]["held"]


@pytest.mark.parametrize(
  ("argument", "words"),
  [
    ("--device_gb=big", "--device_gb has 'big'"),
    ("--judge_dtype=int4", "--judge_dtype is 'int4'; use float32 or bfloat16"),
    ("--judge=gpt", "use one of qwen2.5-vl-32b"),
  ],
)
def test_the_command_refuses_in_one_sentence(capsys, argument, words):
  code, out = planned(capsys, "--config=configs/self_forcing_vr_thinker.py", argument)
  assert code == 2 and words in out.err and out.err.count("\n") == 1


def full_size(**fields: Any):
  config: Any = self_forcing.get_config()
  config.runtime.device_memory_gb = 80.0
  for name, value in fields.items():
    section, field = name.split("__")
    config[section][field] = value
  return memory_plan.planned_recipe(config_lib.convert(config))


def test_a_run_that_does_not_fit_is_refused_with_what_would_fit():
  memory_plan.check_settings(full_size())
  recipe = full_size(lora__rank=1024)
  with pytest.raises(
    ValueError, match=r"group 'actor' needs about .* use lora\.rank=\d+"
  ) as caught:
    memory_plan.check_settings(recipe)
  assert "\n" not in str(caught.value)
  rank = int(str(caught.value).split("lora.rank=")[1].split()[0])
  memory_plan.check_settings(full_size(lora__rank=rank))
  with pytest.raises(ValueError, match=r"lora\.rank"):
    memory_plan.check_settings(full_size(lora__rank=rank + 1))
  with pytest.raises(ValueError, match=r"model\.remat='block'"):
    memory_plan.check_settings(full_size(model__remat="none"))


def test_a_judge_that_does_not_fit_is_refused_by_its_size():
  config: Any = self_forcing_vr_thinker.get_config()
  config.runtime.device_memory_gb = 88.0
  memory_plan.check_settings(memory_plan.planned_recipe(config_lib.convert(config)))
  config.reward.judge.weights_dtype = "float32"
  recipe = memory_plan.planned_recipe(config_lib.convert(config))
  with pytest.raises(
    ValueError, match=r"group 'reward' .*weights_dtype='bfloat16', or a smaller judge"
  ):
    memory_plan.check_settings(recipe)


@pytest.mark.parametrize("checkpoint", ["", "folder"])
def test_judges_of_frames_count_by_their_own_sizes(checkpoint, tmp_path):
  if checkpoint:
    tiny_clip.write_config(tmp_path)
  config: Any = self_forcing.get_config()
  config.reward.name = "hps_v21"
  config.reward.image.hps_checkpoint = str(tmp_path) if checkpoint else ""
  sizes = memory_plan.run_sizes(memory_plan.planned_recipe(config_lib.convert(config)))
  (one,) = sizes.images
  assert one.frames == config.reward.image.frames
  assert (one.model == clip_presets.preset("vit-h-14")) == (not checkpoint)


def test_the_judge_that_is_shipped_has_sizes():
  run = tiny.settings(reward__name="digits_reasoner", reward__judge__checkpoint="world")
  judge = memory_plan.run_sizes(tiny.recipe_of(run)).judge
  assert judge is not None and judge.value_bytes == 4


def test_a_driver_checks_its_workers_and_limits_the_search(tmp_path):
  def driver(device_memory_gb):
    run = tiny.settings(runtime__device_memory_gb=device_memory_gb)
    return Driver(
      tiny.recipe_of(run),
      InlineExecutor(),
      tiny.reward_of(run),
      str(tmp_path),
      lambda line: None,
      "tests.runtime.tiny:build_roles",
    )

  with pytest.raises(ValueError, match="group 'actor' needs about"):
    driver(1e-3).wait_for_workers()
  roomy = driver(1.0)
  roomy.wait_for_workers()
  assert {slot.memory_bytes for slot in roomy.planner.slots} == {10**9}


def test_a_search_leaves_out_what_does_not_fit():
  chosen, run = scheme("stagebreaker"), tiny.settings(scheme="stagebreaker", runtime__plan="search")
  recipe, slots = tiny.recipe_of(run), worker_slots(scheme("stagebreaker"), 1, 1)
  shape = recipe.shape(1, tuple((c,) for c in range(6)))
  memory = Memory(policy_bytes=4, decoder_bytes=1, judge_bytes=8)
  cheap_judging = WorkerCosts(1.0, 0.5, ((1, 0.01),), 1.0, 1.0, 1.0)
  costs = StepCosts({"actor": cheap_judging, "reward": cheap_judging})
  planner = Planner(recipe, chosen, slots, costs)
  assert "reward" in planner.plan_for(shape).groups.values()
  # The reward worker has room for the judge alone.
  planner.limit(memory_plan.sized_slots(slots, {"actor-0": 20, "reward-0": 8}), memory)
  assert "reward" not in planner.plan_for(shape).groups.values()
  planner.limit(memory_plan.sized_slots(slots, {"actor-0": 20, "reward-0": 7}), memory)
  with pytest.raises(ValueError, match="worker reward-0 has"):
    planner.plan_for(shape)
