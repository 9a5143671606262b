"""The scripts in launch/ are valid, and what they would run are commands that exist."""

import os
import pathlib
import shlex
import subprocess
import sys

import pytest

from sbjax import config
from sbjax.launch import FLAGS

ROOT = pathlib.Path(__file__).parents[1]
SCRIPTS = sorted([*(ROOT / "launch").glob("*.sh"), *(ROOT / "launch").glob("*.sbatch")])
ASKED = ("--config=configs/quickstart.py", "--workdir=some folder", "--config.seed=3")


def dry_run(script, *words, **env):
  done = subprocess.run(
    ["bash", str(ROOT / "launch" / script), *words],
    cwd=ROOT,
    env={**os.environ, **env},
    capture_output=True,
    text=True,
    timeout=60,
    check=True,
  )
  return [shlex.split(line) for line in done.stdout.splitlines()]


def settings_of(lines):
  (words,) = [line for line in lines if "sbjax.launch" in line]
  assert words[:3] == ["python", "-m", "sbjax.launch"]
  asked = config.parse(words[2:], FLAGS)
  assert asked.values["workdir"] == "some folder"
  settings = config.convert(asked.config)
  assert settings.seed == 3
  return settings


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_valid_and_explain_themselves(script):
  subprocess.run(["bash", "-n", script], check=True, timeout=60)
  head = script.read_text().splitlines()[:12]
  assert head[0] == "#!/usr/bin/env bash"
  assert any(script.name in line for line in script.read_text().splitlines()[1:20])


def test_one_node():
  plain = settings_of(dry_run("single_node.sh", "--dry-run", *ASKED, GPUS="0"))
  assert plain.runtime.gpus_per_worker == 0
  shared = settings_of(dry_run("single_node.sh", "--dry-run", *ASKED, GPUS="8"))
  runtime = shared.runtime
  assert (runtime.gpus_per_worker, runtime.actor_workers, runtime.reward_workers) == (1, 6, 2)


def test_a_ray_cluster():
  lines = dry_run("ray_head.sh", "--dry-run", *ASKED, ADDRESS="10.0.0.1", SLOTS="4", NODES="3")
  assert lines[0][:3] == ["ray", "start", "--head"]
  assert '--resources={"actor": 4}' in lines[0]
  assert lines[1][1:] == ["launch/wait_for_nodes.py", "10.0.0.1:6379", "3", "600"]
  runtime = settings_of(lines).runtime
  assert runtime.ray_address == "10.0.0.1:6379"
  assert (runtime.actor_resource, runtime.reward_resource) == ("actor", "reward")
  (join,) = dry_run("ray_node.sh", "--dry-run", "10.0.0.1:6379", ROLE="reward", SLOTS="2")
  assert join[:3] == ["ray", "start", "--address=10.0.0.1:6379"]
  assert '--resources={"reward": 2}' in join


def test_slurm(tmp_path):
  scontrol = tmp_path / "scontrol"
  scontrol.write_text("#!/bin/sh\nprintf 'n1\\nn2\\nn3\\n'\n")
  scontrol.chmod(0o755)
  lines = dry_run(
    "slurm.sbatch",
    *ASKED,
    PATH=f"{tmp_path}:{os.environ['PATH']}",
    SLURM_JOB_NODELIST="n[1-3]",
    SLURM_JOB_ID="7",
    SLURM_SUBMIT_DIR=str(ROOT),
    ADDRESS="10.0.0.1",
    DRY_RUN="1",
  )
  joins = [line for line in lines if line[0] == "srun"]
  assert [("ROLE=actor" in j, "--nodelist=n2" in j) for j in joins] == [(1, 1), (0, 0)]
  assert all("n1:20007" in join for join in joins)
  assert settings_of(lines).runtime.ray_address == "10.0.0.1:20007"


def test_every_ray_option_exists():
  ray_help = subprocess.run(
    [sys.executable, "-m", "ray.scripts.scripts", "start", "--help"],
    capture_output=True,
    text=True,
    timeout=120,
    check=True,
  ).stdout
  used = set()
  for script, words in (("ray_head.sh", ASKED), ("ray_node.sh", ("10.0.0.1:6379",))):
    first = dry_run(script, "--dry-run", *words)[0]
    used |= {word.split("=")[0] for word in first if word.startswith("--")}
  assert used and all(option in ray_help for option in used), used
