"""The training command refuses what cannot work: exit code 2, one sentence, no traceback, fast."""

import os
import pathlib
import subprocess
import sys
import time

import pytest

from sbjax import launch

ROOT = pathlib.Path(__file__).parents[1]
QUICKSTART = str(ROOT / "configs" / "quickstart.py")


@pytest.fixture(autouse=True)
def _no_training(monkeypatch):
  """A command that is not refused must not start a run here."""

  def run(settings, workdir):
    raise AssertionError(f"the command was not refused: {settings} {workdir}")

  monkeypatch.setattr(launch, "run", run)


def refusal(capsys, *arguments):
  """Runs the command in this process and gives the sentence on stderr."""
  code = launch.main(["sbjax.launch", *arguments])
  out, err = capsys.readouterr()
  assert code == 2
  assert out == ""
  assert "Traceback" not in err
  lines = err.strip().splitlines()
  assert len(lines) == 1, err
  assert lines[0].startswith("sbjax: ")
  return lines[0]


@pytest.mark.parametrize(
  ("arguments", "says"),
  [
    (["--config.total_step=2"], "no field total_step; did you mean total_steps?"),
    (["--config.algorithm.group_size=2"], "did you mean rollout.group_size?"),
    (["--config.total_steps=two"], "total_steps is 'two'; it must be an integer"),
    (["--config.total_steps=1.5"], "total_steps is '1.5'; it must be an integer"),
    (["--config.total_steps", "-1"], "total_steps is -1; it must be at least 1"),
    (["--config.optim.learning_rate=high"], "optim.learning_rate is 'high'; it must be a number"),
    (["--config.model=digits"], "model is a section"),
    (["--config.reward.weights=(1,0.5)"], "one weight for each of the 3 components"),
    (["--config.reward.weights=(1,x)"], "it must be a number"),
    (["--config.scheme=magic"], "use one of 'colocated', 'colocated_single_replay', "),
    (["--config.model.frames=32"], "21 or 33 would do"),
    (["--config.algorithm.minibatches=3"], "use 1, 2 or 4"),
    (["--config.lora.targets=('mlp.*',)"], "matches nothing"),
    (["--config.prompts.train=no.txt"], "prompts.train: 'no.txt' is not there"),
    (["--config.runtime.actor_workers=1000"], "1001 devices"),
    (["--config.runtime.gpus_per_worker=1", "--config.runtime.actor_workers=99"], "100 GPUs"),
    (["--config.seed"], "seed"),
    (["--workdirr=x"], "there is no flag --workdirr"),
    (["stray"], "'stray' is not a flag"),
  ],
)
def test_flags(capsys, tmp_path, arguments, says):
  assert says in refusal(
    capsys, f"--config={QUICKSTART}", f"--workdir={tmp_path / 'run'}", *arguments
  )
  # Refused before anything is written.
  assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
  ("arguments", "says"),
  [
    ([], "--config is missing"),
    (["--config=configs/quick.py"], "which is not a file"),
    (["--config="], "which is not a file"),
    ([f"--config={QUICKSTART}"], "--workdir is missing"),
    ([f"--config={QUICKSTART}", "--workdir="], "--workdir is missing"),
    (["--config.seed=1", f"--config={QUICKSTART}"], "--config must come before"),
    ([f"--config={QUICKSTART}:fast", "--workdir=x"], "cannot be loaded (TypeError"),
  ],
)
def test_config_and_workdir(capsys, arguments, says):
  assert says in refusal(capsys, *arguments)


@pytest.mark.parametrize(
  ("old", "new", "says"),
  [
    ("c.seed = 0", "c.sead = 0", "no field sead; did you mean seed?"),
    ("c.seed = 0", "pass", "lacks the field seed"),
    ("c.seed = 0", "c.seed = '0'", "seed is '0'; it must be an integer"),
    ("c.seed = 0", "c.seed = = 0", "SyntaxError"),
    ("c.seed = 0", "import no_such_module", "ModuleNotFoundError"),
    ("return c", "return None", "returns NoneType"),
    ("def get_config", "def other", "AttributeError"),
    (
      "c.reward.weights = (1.0, 0.25, 0.25)",
      "c.reward.weights = [1.0, 0.25, 0.25]",
      "write the tuple (1.0, 0.25, 0.25)",
    ),
  ],
)
def test_config_files(capsys, tmp_path, old, new, says):
  text = pathlib.Path(QUICKSTART).read_text()
  assert old in text
  path = tmp_path / "config.py"
  path.write_text(text.replace(old, new))
  assert says in refusal(capsys, f"--config={path}", f"--workdir={tmp_path / 'run'}")


def test_overriding_a_list_is_explained(capsys, tmp_path):
  path = tmp_path / "config.py"
  path.write_text(pathlib.Path(QUICKSTART).read_text().replace("(1.0, 0.25, 0.25)", "[1.0]"))
  text = refusal(capsys, f"--config={path}", "--config.reward.weights=(1,)", "--workdir=x")
  assert "reward.weights is a list in" in text and "write a tuple" in text


@pytest.mark.parametrize(
  ("data", "says"),
  [
    (b"", "is empty"),
    (b"a red seven moves left slowly\n\xe9t\xe9\n", "not UTF-8 at line 2"),
    (b"a red red red red red red red red red seven moves left slowly\n", "line 1: the prompt has"),
    (b"a red seven sings\n", "line 1: prompt 'a red seven sings' has the unknown word 'sings'"),
  ],
)
def test_prompt_files(capsys, tmp_path, data, says):
  path = tmp_path / "prompts.txt"
  path.write_bytes(data)
  assert says in refusal(
    capsys, f"--config={QUICKSTART}", "--workdir=x", f"--config.prompts.train={path}"
  )


def test_reward_functions(capsys, tmp_path):
  path = tmp_path / "reward.py"
  path.write_text("def two(video, prompt):\n  return 1.0\n")
  arguments = [f"--config={QUICKSTART}", "--workdir=x", "--config.reward.name=function"]
  assert "reward.function is ''" in refusal(capsys, *arguments)
  assert "must take (video, prompt, seed)" in refusal(
    capsys, *arguments, f"--config.reward.function={path}:two"
  )


def test_help_explains_the_command(capsys):
  assert launch.main(["sbjax.launch", "--help"]) == 0
  out = capsys.readouterr().out
  assert "--workdir" in out and "130" in out and "143" in out


@pytest.mark.parametrize(
  "arguments",
  [
    ["--config=configs/quickstart.py", "--workdir=unused", "--config.total_step=2"],
    ["--config=configs/none.py", "--workdir=unused"],
    ["--config=configs/quickstart.py", "--workdir=unused", "--config.lora.targets=('x',)"],
  ],
)
def test_the_real_command(arguments):
  start = time.monotonic()
  done = subprocess.run(
    [sys.executable, "-m", "sbjax.launch", *arguments],
    cwd=ROOT,
    env={k: v for k, v in os.environ.items() if k != "XLA_FLAGS"},
    capture_output=True,
    text=True,
    timeout=60,
    check=False,
  )
  assert done.returncode == 2
  assert done.stdout == ""
  assert len(done.stderr.strip().splitlines()) == 1
  # A quiet machine takes under two seconds, nearly all of it to import JAX.
  assert time.monotonic() - start < 20
