"""Comparing schemes: two real ones on the tiny model, all of them emulated, what is refused."""

import contextlib
import functools
import json

import imageio.v3 as iio
import numpy as np
import pytest

from configs import quickstart
from sbjax import compare as compare_command
from sbjax import config as config_lib
from sbjax.dataflow.costs import StepCosts, WorkerCosts
from sbjax.dataflow.schemes import SCHEMES
from sbjax.prompts import PromptSet
from sbjax.report import compare, compare_html, compare_report
from sbjax.runtime.driver import Driver
from sbjax.runtime.inline import InlineExecutor
from tests.runtime import tiny

PROMPTS = ("hello", "world!", "again?")


@contextlib.contextmanager
def open_tiny(settings, log_dir, say):
  reward = tiny.reward_of(settings)
  builder = "tests.report.shared_tiny:build_roles"
  driver = Driver(tiny.recipe_of(settings), InlineExecutor(), reward, log_dir, say, builder)
  driver.wait_for_workers()
  yield compare.Opened(driver, reward)
  driver.shutdown()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  """Two schemes, taking turns."""
  folder, said = tmp_path_factory.mktemp("compared"), []
  settings = compare.scheme_settings(
    tiny.settings(algorithm__minibatches=1, rollout__group_size=2, model__frames=5),
    "colocated,stagebreaker",
  )
  report = compare.compare(
    settings,
    PromptSet("tiny", PROMPTS),
    folder,
    open_tiny,
    config="tiny.py",
    steps=2,
    paired=True,
    emulated=False,
    say=said.append,
  )
  return folder, report, said


COSTS = WorkerCosts(
  generate_s=1.0,
  fused_s=0.6,
  decode_s=0.3,
  judge_s=((1, 0.8), (4, 1.6)),
  forward_s=0.3,
  backward_s=0.9,
  replay_s=0.95,
  update_s=0.02,
  push_s=0.01,
)


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
  """Every scheme under the real driver, on emulated workers with a virtual clock."""
  folder, said = tmp_path_factory.mktemp("emulated"), []
  costs = StepCosts(dict.fromkeys(("actor", "reward", "both"), COSTS), dispatch_s=0.002)
  config = quickstart.get_config()
  config.rollout.prompts_per_step, config.rollout.group_size = 2, 4
  config.runtime.actor_workers = 2
  report = compare.compare(
    compare.scheme_settings(config_lib.convert(config), "all"),
    PromptSet("some", ("a red seven moves left slowly", "a blue two moves right fast")),
    folder,
    functools.partial(compare_command.open_emulated, costs, virtual=True),
    config="quickstart",
    steps=1,
    paired=False,
    emulated=True,
    say=said.append,
  )
  return folder, report, said


def test_report_holds_every_figure_of_every_scheme(finished):
  folder, report, _ = finished
  assert json.loads((folder / "report.json").read_text()) == report
  assert report["emulated"] is False
  assert list(report["schemes"]) == ["colocated", "stagebreaker"]
  for name, s in report["schemes"].items():
    assert len(s["step_s"]["all"]) == 2 and s["step_s"]["median"] > 0
    assert set(s["utilisation"]) == {"actor", "reward"}
    assert all(0 < share <= 1 for share in s["utilisation"].values()), name
    assert 0 <= s["wait_for_reward_frac"] < 1
    assert 0 < s["lower_bound_s"] <= s["simulated_s"]
    assert sum(s["busy_shares"].values()) == pytest.approx(1)
  colocated, ours = report["schemes"].values()
  assert (colocated["replays_per_candidate"], ours["replays_per_candidate"]) == (2.0, 1.0)
  assert colocated["speedup_vs_colocated"] == 1.0
  assert ours["speedup_vs_colocated"] == ours["speedup_vs"]["colocated"]
  assert "judge" in ours["busy_shares"] and "forward" not in ours["busy_shares"]


def test_gradients_are_of_the_same_videos_and_agree(finished):
  _, report, _ = finished
  assert report["same_rewards"]
  for s in report["schemes"].values():
    assert 0 <= s["max_rel_gradient_diff"] <= 1e-5


def test_page_and_pictures(finished):
  folder, _, said = finished
  lines = [line for text in said for line in text.splitlines()]
  assert any("warm-up step 1 of 1" in line for line in lines)
  assert any("step 2 of 2" in line for line in lines)
  page = (folder / "report.html").read_text()
  assert page.count("data:image/png;base64,") == 2
  assert "<script" not in page and "http" not in page and "emulated" not in page
  for name in ("timelines.png", "steps.png"):
    assert iio.imread(folder / name).std() > 10
  trace = json.loads((folder / "timeline" / "stagebreaker.json").read_text())
  assert trace["otherData"] == {"scheme": "stagebreaker", "emulated": False}


def test_emulated_stands_on_every_line_and_picture(emulated):
  folder, report, said = emulated
  assert report["emulated"] is True
  lines = [line for text in said for line in text.splitlines()]
  assert lines and [line for line in lines if "emulated" not in line] == []
  page = (folder / "report.html").read_text()
  assert page.count("emulated") >= len(report["schemes"]) + 4
  trace = json.loads((folder / "timeline" / "sbjax.json").read_text())
  assert trace["otherData"]["emulated"] is True


def test_every_scheme_is_driven_as_it_was_simulated(emulated):
  _, report, _ = emulated
  assert list(report["schemes"]) == list(SCHEMES)
  for name, s in report["schemes"].items():
    assert s["step_s"]["median"] == pytest.approx(s["simulated_s"], rel=0.05), name
    assert s["lower_bound_s"] <= s["step_s"]["median"]
    # An emulated task takes its profiled time, so hindsight teaches nothing.
    assert s["own_simulated_s"] == pytest.approx(s["simulated_s"], rel=0.02), name
    assert s["own_lower_bound_s"] <= s["own_simulated_s"]
    if name != "colocated":
      allowed = s["own_lower_bound_s"] / s["step_s"]["median"]
      assert s["share_of_allowed_speedup"] == pytest.approx(allowed, rel=0.02)
    assert s["max_rel_gradient_diff"] is not None
  waits = {name: s["wait_for_reward_frac"] for name, s in report["schemes"].items()}
  assert waits["async_reward"] > waits["async_train"]
  assert list(report["gain"]) == [
    "overlap",
    "merged replay",
    "balance",
    "fused, split and planned together",
  ]


def measured(scheme, steps_s, gradient=(1.0, 0.0)):
  steps = tuple(compare_report.MeasuredStep(s, (), {}, 1.0) for s in steps_s)
  return compare_report.Measured(
    scheme, steps, np.array(gradient), (0.5,), "plan", "fixed", None, None
  )


CHAIN = (
  measured("colocated", (10.0, 20.0, 10.0)),
  measured("async_reward", (12.0, 12.0, 12.0)),
  measured("async_train", (10.0, 10.0, 10.0)),
  measured("merged_replay", (9.0, 9.0, 9.0)),
  measured("stagebreaker", (8.0, 5.0, 8.0), gradient=(1.0, 0.1)),
)


@pytest.mark.parametrize(("paired", "factor"), [(True, 1.25), (False, 1.25)])
def test_gain_is_split_along_the_chain(paired, factor):
  facts = {"config": "x"}
  report = compare_report.summarise(CHAIN, emulated=False, paired=paired, facts=facts)
  gain = report["gain"]
  assert list(gain) == ["overlap", "merged replay", "balance"]
  assert [g["saved_s"] for g in gain.values()] == [2.0, 1.0, 1.0]
  assert gain["overlap"]["factor"] == pytest.approx(1.2)
  assert report["schemes"]["stagebreaker"]["speedup_vs_colocated"] == pytest.approx(factor)
  assert report["schemes"]["stagebreaker"]["max_rel_gradient_diff"] == pytest.approx(
    0.1 / np.hypot(1, 0.1)
  )


def test_paired_speed_up_is_the_median_over_rounds():
  slow, fast = measured("a", (10.0, 30.0, 10.0)), measured("b", (5.0, 10.0, 9.0))
  assert compare_report.speedup(fast, slow, paired=True) == 2.0
  assert compare_report.speedup(fast, slow, paired=False) == pytest.approx(10 / 9)


def test_page_without_a_baseline_leaves_its_cells_empty():
  names = ("config", "seed", "candidates", "updates", "actor_workers", "reward_workers", "executor")
  facts = dict.fromkeys((*names, "warm_up_steps", "measured_steps"), "<&>")
  report = compare_report.summarise(CHAIN[1:2], emulated=False, paired=False, facts=facts)
  page = compare_html.render(report, {})
  assert "emulated" not in page and "&lt;&amp;&gt;" in page and "<&>" not in page
  assert report["schemes"]["async_reward"]["speedup_vs_colocated"] is None
  assert compare_report.rows(report)[0][2] == "-"


@pytest.mark.parametrize(
  ("arguments", "said"),
  [
    (["--schemes=stagebraker"], "use all, or some of colocated"),
    (["--schemes=sbjax,sbjax"], "twice"),
    (["--config.runtime.reward_workers=0"], "runtime.reward_workers is 0, but scheme"),
    (["--steps=0"], "--steps is '0'; use a whole number from 1."),
    (["--paired=perhaps"], "--paired is 'perhaps'"),
    (["--workdir=tests"], "not empty"),
    (["--emulated=nowhere.json"], "nowhere.json"),
    (["--time_scale=2"], "--time_scale goes with --emulated"),
    (["--time_scale=-1"], "--time_scale is '-1'"),
  ],
)
def test_what_cannot_work_is_one_sentence(tmp_path, capsys, arguments, said):
  given = ["--config=configs/quickstart.py", f"--workdir={tmp_path / 'w'}", *arguments]
  assert compare_command.main(["compare", *given]) == 2
  error = capsys.readouterr().err
  assert said in error and error.count("\n") == 1
  assert not (tmp_path / "w").exists()
