"""The what-if command: table, files, refusals, and that it starts without JAX."""

import json
import subprocess
import sys

import imageio.v3 as iio
import pytest

from sbjax import simulate
from sbjax.dataflow.costs import StepCosts, WorkerCosts
from sbjax.dataflow.judge_costs import JudgeRow
from sbjax.dataflow.profile import profile_of_costs, read_profile

SMALL = ("--candidates=8", "--actors=2", "--rewards=1", "--budget_s=0.05")


def run(capsys, *arguments):
  code = simulate.main(arguments)
  said = capsys.readouterr()
  return code, said.out, said.err


def test_it_imports_no_jax_and_no_matplotlib():
  code = (
    "import sys; from sbjax import simulate; "
    f"simulate.main(['--paper', '--schemes=colocated', *{SMALL!r}]); "
    "print([m for m in ('jax', 'flax', 'ray', 'optax', 'matplotlib') if m in sys.modules])"
  )
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
  assert done.stdout.splitlines()[-1] == "[]"
  assert "colocated" in done.stdout


def test_paper_table_has_a_line_for_every_scheme_and_setting(capsys):
  code, out, _ = run(capsys, "--paper", "--judge_scale=1,3", *SMALL)
  assert code == 0
  head, columns, *lines = out.splitlines()
  assert "paper" in head and "actors 2" in head and "judge_scale" not in head
  assert columns.split()[0] == "judge_scale"
  assert len(lines) == 2 * 7
  assert [line.split()[0] for line in lines] == ["1.0"] * 7 + ["3.0"] * 7


def test_files_hold_every_figure(capsys, tmp_path):
  out = tmp_path / "out"
  schemes = "--schemes=colocated,async_reward,stagebreaker"
  code, said, _ = run(capsys, "--paper", schemes, f"--out={out}", *SMALL)
  assert code == 0 and str(out) in said
  (cell,) = json.loads((out / "simulated.json").read_text())
  assert cell["setting"]["candidates"] == 8
  assert list(cell["schemes"]) == ["colocated", "async_reward", "stagebreaker"]
  figures = cell["schemes"].values()
  assert [f["replays_per_candidate"] for f in figures] == [2.0, 2.0, 1.0]
  assert all(f["lower_bound_s"] <= f["step_s"] and f["gap"] >= 0 for f in figures)
  assert cell["schemes"]["async_reward"]["wait_for_reward_frac"] > 0.05
  assert cell["schemes"]["stagebreaker"]["speedup_vs_colocated"] > 0
  assert iio.imread(out / "timelines.png").std() > 10


def profile(tmp_path, emulated=False):
  worker = WorkerCosts(
    generate_s=1.0,
    fused_s=0.5,
    decode_s=0.2,
    judge_s=((1, 0.5), (4, 1.0)),
    forward_s=0.3,
    backward_s=0.9,
    replay_s=0.9,
  )
  costs = StepCosts({"actor": worker, "reward": worker, "both": worker})
  devices = {"actor": "cpu", "reward": "cpu"}
  made = profile_of_costs(costs, 33, 64, 64, config="x", devices=devices, emulated=emulated)
  path = tmp_path / "profile.json"
  made.write(path)
  return path


def judged_profile(tmp_path):
  """A profile whose judge takes .01 s a frame, a millisecond a prompt token, .02 s a step."""
  path = profile(tmp_path)
  rows = [
    JudgeRow(jobs, frames, 100, 32, jobs * (0.01 * frames + 0.1), 32 * 0.02, "reward", 8)
    for jobs in (1, 4)
    for frames in (0, 4)
  ]
  read_profile(path).with_judges(rows).write(path)
  return path


def test_longer_answers_of_a_judge_make_a_longer_step(capsys, tmp_path):
  source = f"--profile={judged_profile(tmp_path)}"
  given = ("--frames=33", "--schemes=async_reward", *SMALL)
  code, out, _ = run(capsys, source, "--dialogue=4/100/32,4/100/320", *given)
  assert code == 0
  columns, *lines = out.splitlines()[1:]
  assert columns.split()[0] == "dialogue"
  assert [line.split()[0] for line in lines] == ["4/100/32", "4/100/320"]
  short_s, long_s = (float(line.split()[2]) for line in lines)
  assert long_s > short_s + 0.02 * (320 - 32)


def step_s(out):
  return float(out.splitlines()[2].split()[1])


def test_a_profile_gives_its_own_times(capsys, tmp_path):
  path = profile(tmp_path)
  given = (f"--profile={path}", "--schemes=colocated", "--minibatches=1", "--rewards=0", *SMALL[:2])
  code, out, _ = run(capsys, *given)
  assert code == 0 and "profile of cpu" in out
  # Two workers, four candidates each: generate, decode, one judge task of four, forward, backward.
  assert step_s(out) == pytest.approx(4 * (1.0 + 0.2 + 0.3 + 0.9) + 1.0, rel=1e-3)
  _, slower, _ = run(capsys, *given, "--judge_scale=3")
  assert step_s(slower) == pytest.approx(step_s(out) + 2.0, rel=1e-3)
  _, faster, _ = run(capsys, *given, "--actor_scale=0.5")
  assert step_s(faster) == pytest.approx(step_s(out) / 2, rel=1e-3)


def test_unequal_devices_keep_their_speed_when_groups_are_not_separate():
  slots = simulate.device_slots(simulate.SCHEMES["colocated"], 2, 1)
  assert [slot.kind for slot in slots] == ["both, actor", "both, actor", "both, reward"]
  slots = simulate.device_slots(simulate.SCHEMES["stagebreaker"], 2, 1)
  assert [slot.kind for slot in slots] == ["actor", "actor", "reward"]


def test_emulated_profiles_say_so_on_every_line(capsys, tmp_path):
  path = profile(tmp_path, emulated=True)
  code, out, _ = run(capsys, f"--profile={path}", "--schemes=colocated", *SMALL)
  assert code == 0
  assert [line for line in out.splitlines() if "emulated" not in line] == []


@pytest.mark.parametrize(
  ("arguments", "said"),
  [
    (["--paper", "--schemes=stagebraker"], "--schemes has 'stagebraker'; use all, or some of"),
    (["--paper", "--rewards=0"], "--rewards is 0, but scheme"),
    (["--paper", "--candidates=24", "--minibatches=5"], "minibatches=5"),
    (["--paper", "--judge=gpt"], "judge='gpt'"),
    (["--paper", "--frames=20"], "20"),
    (["--profile=nowhere.json"], "nowhere.json"),
    (["--paper", "--out=tests"], "not empty"),
    ([], "one of the arguments"),
    (["--paper", "--actors=0"], "'0'; use different whole numbers from 1"),
    (["--paper", "--judge_scale=1,x"], "'1,x'; use different numbers"),
    (["--paper", "--judge_scale=inf"], "'inf'; use different numbers"),
    (["--paper", "--actor_scale=nan"], "'nan'; use different numbers"),
    (["--paper", "--budget_s=inf"], "'inf'; use seconds"),
    (["--paper", "--budget_s=-1"], "'-1'; use seconds"),
    (["--paper", "--dialogue=8/100/50"], "--dialogue goes with --profile"),
    (["--paper", "--dialogue=8/100"], "'8/100'; use different frames/prompt tokens/answer"),
  ],
)
def test_what_cannot_work_is_one_sentence(capsys, arguments, said):
  try:
    code = simulate.main(arguments)
  except SystemExit as end:
    code = end.code
  error = capsys.readouterr().err
  assert code == 2
  assert said in error and error.count("\n") == 1


def test_dialogues_of_a_judge_that_does_not_generate_are_no_question(capsys, tmp_path):
  code, _, error = run(capsys, f"--profile={profile(tmp_path)}", "--dialogue=8/100/50", *SMALL)
  assert code == 2 and "the profile has no judges" in error and error.count("\n") == 1


def test_judge_is_no_question_for_a_profile(capsys, tmp_path):
  code, _, error = run(capsys, f"--profile={profile(tmp_path)}", "--judge=vr_thinker")
  assert code == 2 and "--judge goes with --paper" in error
