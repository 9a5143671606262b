"""Workdirs: who owns them, what a resumed run may change, disks that refuse."""

import contextlib
import copy
import errno
import json
import os
import pathlib
import shutil
import tempfile

import pytest

from sbjax import files
from sbjax.state import workdir as workdir_lib
from sbjax.state.workdir import fingerprint, open_workdir

CONFIG = {
  "seed": 0,
  "total_steps": 60,
  "resume": "never",
  "scheme": "stagebreaker",
  "model": {"name": "digits", "frames": 33},
  "lora": {"rank": 8, "targets": ("*",)},
  "algorithm": {"name": "dance_grpo", "clip_low": 5e-5},
  "reward": {"retries": 2, "max_failed_frac": 0.25},
  "runtime": {"actor_workers": 1, "chunk_blocks": 2, "mesh": (1, 1)},
  "eval": {"every": 30},
  "report": {"fps": 16},
}


def changed(**changes):
  config = copy.deepcopy(CONFIG)
  for name, value in changes.items():
    section, _, field = name.rpartition("__")
    (config[section] if section else config)[field] = value
  return config


def start(path, config=CONFIG, resume="never", mode="merged", **more):
  workdir = open_workdir(path, config, resume=resume, replay_mode=mode, **more)
  workdir.close()
  return workdir


def test_a_new_workdir_records_the_run(tmp_path):
  command = ("python", "-m", "sbjax.launch", "--workdir=a b")
  workdir = start(tmp_path / "a" / "b", command=command, versions={"jax": "0.10"})
  assert not workdir.resumed
  config = json.loads(workdir.config.read_text())
  assert config["lora"]["targets"] == ["*"]
  assert workdir.command.read_text() == "python -m sbjax.launch '--workdir=a b'\n"
  run = json.loads(workdir.run.read_text())
  assert run["fingerprint"] == fingerprint(CONFIG)
  assert run["starts"][0]["versions"] == {"jax": "0.10"}
  assert all(path.startswith(str(tmp_path)) for path in workdir.outputs().values())


def test_a_workdir_with_a_run_is_refused_unless_resumed(tmp_path):
  start(tmp_path)
  (tmp_path / "metrics.jsonl").write_text("{}\n")
  with pytest.raises(ValueError, match=r"holds a run already .* --config\.resume=auto"):
    start(tmp_path)
  again = start(tmp_path, changed(resume="auto"), resume="auto")
  assert again.resumed
  assert len(json.loads(again.run.read_text())["starts"]) == 2
  assert len(again.command.read_text().splitlines()) == 2


def test_a_start_that_failed_before_its_first_step_is_no_run(tmp_path):
  start(tmp_path)
  again = start(tmp_path, changed(total_steps=7))
  assert not again.resumed
  assert json.loads(again.config.read_text())["total_steps"] == 7
  assert len(json.loads(again.run.read_text())["starts"]) == 1


def test_files_of_the_user_are_no_run(tmp_path):
  (tmp_path / "slurm-17.out").write_text("")
  (tmp_path / "config.json").write_text("{}")  # a start that was killed before run.json
  assert not start(tmp_path).resumed


def test_resume_auto_begins_where_there_is_nothing(tmp_path):
  assert not start(tmp_path, resume="auto").resumed


@pytest.mark.parametrize(
  "changes",
  [
    {"total_steps": 100},
    {"scheme": "merged_replay"},
    {"runtime__actor_workers": 3},
    {"eval__every": 10},
    {"report__fps": 8},
    {"reward__retries": 5},
  ],
)
def test_what_a_resumed_run_may_change(tmp_path, changes):
  start(tmp_path)
  workdir = start(tmp_path, changed(**changes), resume="auto")
  assert workdir.notes == ()
  assert fingerprint(changed(**changes)) == fingerprint(CONFIG)
  (name, value) = next(iter(changes.items()))
  recorded = json.loads(workdir.run.read_text())["starts"][1]["changed"]
  assert recorded[name.replace("__", ".")]["to"] == value


@pytest.mark.parametrize(
  ("changes", "sentence"),
  [
    ({"seed": 1}, "holds another run: seed is 0 there and 1 here"),
    ({"model__name": "wan"}, "model.name is 'digits' there and 'wan' here"),
    ({"model__frames": 45}, "model.frames is 33"),
    ({"lora__targets": ("q", "k")}, "lora.targets"),
    ({"algorithm__clip_low": 1e-4}, "algorithm.clip_low"),
    ({"reward__max_failed_frac": 0.5}, "reward.max_failed_frac"),
    ({"runtime__chunk_blocks": 1}, "runtime.chunk_blocks"),
    ({"added": 3}, "added is None there and 3 here"),
  ],
)
def test_what_it_may_not_change(tmp_path, changes, sentence):
  start(tmp_path)
  before = (tmp_path / "run.json").read_bytes(), (tmp_path / "config.json").read_bytes()
  with pytest.raises(ValueError, match=sentence) as caught:
    start(tmp_path, changed(**changes), resume="auto")
  assert "\n" not in str(caught.value)
  assert fingerprint(changed(**changes)) != fingerprint(CONFIG)
  after = (tmp_path / "run.json").read_bytes(), (tmp_path / "config.json").read_bytes()
  assert after == before


def test_another_replay_mode_is_refused_by_name(tmp_path):
  start(tmp_path)
  with pytest.raises(ValueError, match=r"'stagebreaker' \(merged replay\), which 'colocated'"):
    start(tmp_path, changed(scheme="colocated"), resume="auto", mode="two_pass")


def test_another_mesh_is_allowed_with_a_note(tmp_path):
  start(tmp_path)
  workdir = start(tmp_path, changed(runtime__mesh=(2, 1)), resume="auto")
  assert len(workdir.notes) == 1
  assert "runtime.mesh" in workdir.notes[0] and "not bit by bit" in workdir.notes[0]


def test_two_runs_do_not_share_a_workdir(tmp_path):
  first = open_workdir(tmp_path, CONFIG, resume="never")
  with pytest.raises(ValueError, match="in use by a run that has not ended"):
    open_workdir(tmp_path, CONFIG, resume="auto")
  first.close()
  start(tmp_path, resume="auto", mode="")


def test_an_unreadable_run_is_refused(tmp_path):
  start(tmp_path)
  (tmp_path / "run.json").write_text("{")
  with pytest.raises(ValueError, match=r"no readable run\.json"):
    start(tmp_path, resume="auto")
  (tmp_path / "run.json").write_text('{"name": "something else"}')
  with pytest.raises(ValueError, match="holds no run of sbjax"):
    start(tmp_path, resume="auto")
  (tmp_path / "run.json").unlink()
  (tmp_path / "metrics.jsonl").write_text("")
  with pytest.raises(ValueError, match=r"no readable run\.json"):
    start(tmp_path, resume="auto")


def test_a_file_is_no_workdir(tmp_path):
  (tmp_path / "a").write_text("")
  with pytest.raises(ValueError, match="is a file; name a folder"):
    start(tmp_path / "a")
  with pytest.raises(files.OutputError, match=r"cannot write .*Not a directory"):
    start(tmp_path / "a" / "b")


def test_a_disk_without_space_is_refused(tmp_path, monkeypatch):
  usage = shutil.disk_usage(tmp_path)._replace(free=5 * 2**20)
  monkeypatch.setattr(workdir_lib.shutil, "disk_usage", lambda path: usage)
  with pytest.raises(files.OutputError, match="5 MB left; free 64 MB"):
    start(tmp_path)
  assert list(tmp_path.iterdir()) == []


@contextlib.contextmanager
def without_privileges():
  """Root may write anywhere, so the test becomes nobody for a moment."""
  root = os.geteuid() == 0
  if root:
    os.seteuid(65534)
  try:
    yield
  finally:
    if root:
      os.seteuid(0)


def test_a_folder_that_cannot_be_written_is_refused():
  folder = pathlib.Path(tempfile.mkdtemp())
  try:
    folder.chmod(0o555)
    with without_privileges():
      for path in (folder, folder / "run"):
        with pytest.raises(files.OutputError, match="Permission denied") as caught:
          start(path)
        assert "\n" not in str(caught.value)
  finally:
    folder.chmod(0o755)
    shutil.rmtree(folder)


def test_a_write_is_whole_or_not_at_all(tmp_path, monkeypatch):
  path = tmp_path / "a.json"
  files.atomic_write(path, "old")

  def full(descriptor):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  monkeypatch.setattr(files.os, "fsync", full)
  with pytest.raises(files.OutputError, match=r"cannot write .*a\.json: No space left") as caught:
    files.atomic_write(path, "new")
  assert caught.value.errno == errno.ENOSPC
  assert path.read_text() == "old"
  assert [p.name for p in tmp_path.iterdir()] == ["a.json"]
  monkeypatch.undo()
  files.atomic_write(path, b"new")
  assert path.read_text() == "new"
