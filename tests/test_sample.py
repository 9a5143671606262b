"""The sampling command: what it is asked for, and what it writes."""

import json
import pathlib

import numpy as np
import pytest

from sbjax import config, sample
from sbjax.runtime.records import CandidateRecord, EvalResult
from sbjax.sampling.script import Script, Switch
from sbjax.sampling.videos import VideoRequest

ROOT = pathlib.Path(__file__).parents[1]
QUICKSTART = f"--config={ROOT / 'configs' / 'quickstart.py'}"
PROMPT = "a red seven moves left slowly"


def request(*arguments):
  return sample.read_request(["sbjax.sample", *arguments])


def test_defaults_of_a_comparison(tmp_path):
  asked = request(QUICKSTART, "--mode=compare", f"--out={tmp_path / 'out'}")
  assert isinstance(asked, sample.Request)
  assert len(asked.prompts) == 64 and len(set(asked.prompts)) == 64
  assert asked.seeds == (1, 2)
  assert asked.adapters == {"base": None}
  assert asked.step == 0
  assert not (tmp_path / "out").exists()


def test_one_prompt_and_seeds(tmp_path):
  asked = request(
    QUICKSTART,
    "--adapters=base",
    f"--out={tmp_path}",
    f"--prompts={PROMPT}",
    "--seeds=7,3",
    "--videos=0",
  )
  assert isinstance(asked, sample.Request)
  assert asked.prompts == (PROMPT,)
  assert asked.seeds == (7, 3)
  assert asked.videos == 0


def test_defaults_of_videos(tmp_path):
  asked = request(QUICKSTART, f"--out={tmp_path / 'out'}")
  assert isinstance(asked, VideoRequest)
  assert len(asked.scripts) == 16 and not any(script.switches for script in asked.scripts)
  assert asked.seeds == (1,) and asked.interactive is None
  assert asked.adapter is None and asked.adapter_name == "base"
  assert not (tmp_path / "out").exists()


def test_videos_need_neither_judge_nor_workers(tmp_path):
  """What a recipe needs to train and not to sample is not asked for."""
  asked = request(
    QUICKSTART,
    f"--out={tmp_path}",
    f"--prompts={PROMPT}",
    "--config.reward.name=unified_reward",
    "--config.prompts.train=missing.txt",
    "--config.runtime.actor_workers=400",
    "--config.runtime.chunk_blocks=3",
    "--config.model.frames=9",
  )
  assert isinstance(asked, VideoRequest)
  assert asked.settings.runtime.executor == "inline"


def test_switches_of_the_command_line_are_for_every_prompt(tmp_path):
  path = tmp_path / "two.txt"
  path.write_text(f"{PROMPT}\na green one moves down slowly\n")
  asked = request(
    QUICKSTART,
    f"--out={tmp_path / 'out'}",
    f"--prompts={path}",
    "--switch=2:a blue two moves up quickly",
    "--switch",
    "6: a red two moves up quickly",
  )
  switches = (Switch(2, "a blue two moves up quickly"), Switch(6, "a red two moves up quickly"))
  assert isinstance(asked, VideoRequest)
  assert asked.scripts == (
    Script(PROMPT, switches),
    Script("a green one moves down slowly", switches),
  )


def test_switches_of_a_file_are_played_and_not_compared(tmp_path, capsys):
  path = tmp_path / "scripts.jsonl"
  path.write_text(f'{{"prompt": "{PROMPT}", "switches": [{{"frame": 2, "prompt": "{PROMPT}"}}]}}\n')
  words = (QUICKSTART, f"--prompts={path}", f"--out={tmp_path / 'out'}")
  asked = request(*words)
  assert isinstance(asked, VideoRequest)
  assert asked.scripts == (Script(PROMPT, (Switch(2, PROMPT),)),)
  for more, says in (
    ("--mode=compare", "switches need"),
    (f"--switch=3:{PROMPT}", "one of the two"),
  ):
    assert sample.main(["sbjax.sample", *words, more]) == 2
    assert says in capsys.readouterr().err


def test_an_adapter_makes_videos_where_that_is_asked(tmp_path):
  from sbjax.runtime.roles import recipe_of
  from sbjax.state.adapter import save_adapter
  from sbjax.train import adapter_layout, model_facts

  recipe = recipe_of(config.validate(config.parse(["x", QUICKSTART], {}).config))
  flat = np.arange(recipe.adapter_parameters, dtype=np.float32)
  save_adapter(tmp_path / "a.safetensors", flat, adapter_layout(recipe), model_facts(recipe))
  words = (QUICKSTART, f"--adapter={tmp_path / 'a.safetensors'}", f"--prompts={PROMPT}")
  asked = request(*words, "--mode=videos", f"--out={tmp_path / 'out'}")
  assert isinstance(asked, VideoRequest) and asked.adapter is not None
  np.testing.assert_array_equal(asked.adapter, flat)
  assert asked.adapter_name == "adapter"
  asked = request(*words, f"--out={tmp_path / 'out'}")
  assert isinstance(asked, sample.Request) and list(asked.adapters) == ["base", "adapter"]


def test_prompts_of_a_file_are_taken_from_the_front(tmp_path):
  path = tmp_path / "my prompts.txt"
  path.write_text(f"{PROMPT}\na blue two moves up quickly\n{PROMPT}\n")
  out = f"--out={tmp_path / 'out'}"
  assert len(request(QUICKSTART, out, f"--prompts={path}").scripts) == 3
  asked = request(QUICKSTART, out, f"--prompts={path}", "--num_prompts=2")
  assert asked.scripts == (Script(PROMPT), Script("a blue two moves up quickly"))


@pytest.mark.parametrize(
  ("arguments", "says"),
  [
    (["--out="], "--out is missing"),
    (["--out={here}/full"], "which is not empty"),
    (["--out={here}/full/file"], "which is not empty"),
    (["--out={here}/x", "--prompts=none.txt"], "'none.txt' is not there"),
    (["--out={here}/x", "--prompts=a red cat moves left slowly"], "unknown word 'cat'"),
    (["--out={here}/x", "--prompts=world:all"], "not a set of prompts"),
    (["--out={here}/x", f"--prompts={PROMPT}", "--num_prompts=2"], "there are 1"),
    (["--out={here}/x", "--num_prompts=0"], "--num_prompts is '0'"),
    (["--out={here}/x", "--num_prompts=x"], "--num_prompts is 'x'"),
    (["--out={here}/x", "--mode=compare", "--videos=-1"], "--videos is '-1'"),
    (["--out={here}/x", "--videos=1"], "goes with --mode=compare"),
    (["--out={here}/x", "--mode=both"], "--mode is 'both'"),
    (["--out={here}/x", "--mode=compare", "--interactive"], "need --mode=videos"),
    (["--out={here}/x", "--interactive"], "makes one video, not 16"),
    (["--out={here}/x", "--interactive=yes"], "without a value"),
    (["--out={here}/x", f"--prompts={PROMPT}", "--interactive", "--switch=3:" + PROMPT], "no --sw"),
    (["--out={here}/x", "--switch=late"], "--switch is 'late'"),
    (["--out={here}/x", "--switch=3:a red cat moves left slowly"], "unknown word 'cat'"),
    (["--out={here}/x", "--switch=7:" + PROMPT], "the last chunk starts at 6"),
    (["--out={here}/x", "--switch=0:" + PROMPT], "use 1 to 6"),
    (["--out={here}/x", "--switch=4:" + PROMPT, "--switch=6:" + PROMPT], "takes effect at 6"),
    (["--out={here}/x", "--config.model.frames=34"], "model.frames is 34"),
    (["--out={here}/x", "--seeds=a"], "--seeds is 'a'"),
    (["--out={here}/x", "--seeds="], "--seeds is ''"),
    (["--out={here}/x", "--seeds=1,1"], "different integers"),
    (["--out={here}/x", "--seeds=-1"], "different integers"),
    (["--out={here}/x", "--adapters=best"], "--adapters has 'best'"),
    (["--out={here}/x", "--adapters=base,online"], "needs --checkpoint"),
    (["--out={here}/x", "--adapters=adapter"], "needs --adapter"),
    (["--out={here}/x", "--adapters=,"], "--adapters is empty"),
    (["--out={here}/x", "--prompt=a"], "there is no flag --prompt"),
  ],
)
def test_what_cannot_work_is_refused(tmp_path, capsys, arguments, says):
  (tmp_path / "full").mkdir()
  (tmp_path / "full" / "file").write_text("x")
  arguments = [a.format(here=tmp_path) for a in arguments]
  assert sample.main(["sbjax.sample", QUICKSTART, *arguments]) == 2
  out, err = capsys.readouterr()
  assert out == ""
  assert len(err.strip().splitlines()) == 1 and "Traceback" not in err
  assert says in err


def test_a_checkpoint_that_is_no_workdir_is_refused(tmp_path, capsys):
  assert sample.main(["sbjax.sample", f"--checkpoint={tmp_path}", f"--out={tmp_path}/x"]) == 2
  assert "which holds no config.json" in capsys.readouterr().err
  assert sample.main(["sbjax.sample", f"--out={tmp_path}/x"]) == 2
  assert "--config is missing" in capsys.readouterr().err


def test_results_are_written(tmp_path, monkeypatch, capsys):
  """With an evaluation that needs no model."""
  from sbjax import evaluate

  def fake(settings, adapters, prompts, seeds, *, step, keep_videos, log_dir):
    assert (step, keep_videos) == (40, 1)
    count = len(prompts) * len(seeds)
    scores, records = {}, {}
    for shift, name in enumerate(adapters):
      values = np.arange(count, dtype=np.float64) / 10 + shift * (1 + np.arange(count) % 2)
      scores[name] = {"reward": values, "heldout": values}
      records[name] = tuple(
        CandidateRecord(
          i, PROMPT, 5, float(v), {}, "", np.zeros((9, 16, 16, 3), np.uint8) if i < 1 else None
        )
        for i, v in enumerate(values)
      )
    return EvalResult(step, scores, records)

  monkeypatch.setattr(evaluate, "evaluate", fake)
  out = f"--out={tmp_path / 'out'}"
  asked = request(QUICKSTART, "--mode=compare", out, "--num_prompts=3", "--videos=1")
  assert isinstance(asked, sample.Request)
  flat = np.zeros(4, np.float32)
  asked = sample.dataclasses.replace(asked, adapters={"base": None, "online": flat}, step=40)
  assert sample.run(asked) == 0
  stored = json.loads((tmp_path / "out" / "evaluation.json").read_text())
  assert stored["prompts"] == list(asked.prompts) and stored["seeds"] == [1, 2]
  assert stored["config"]["model"]["name"] == "digits"
  (reward,) = [p for p in stored["paired"] if p["component"] == "reward"]
  assert reward["difference"] == pytest.approx(1.5)
  # Differences 1, 2, 1, 2, 1, 2: their standard deviation is sqrt(0.3), over sqrt(6) videos.
  assert reward["standard_error"] == pytest.approx(np.sqrt(0.3 / 6))
  assert reward["z"] == pytest.approx(1.5 / np.sqrt(0.05))
  assert len(list((tmp_path / "out").rglob("*.mp4"))) == 1
  assert "online" in capsys.readouterr().out
