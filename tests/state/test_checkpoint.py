"""Checkpoints: bit-equal round trips, and what kills, full disks and damage leave."""

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from sbjax.runtime.records import TrainState
from sbjax.state.checkpoint import Checkpointer, CheckpointWriteError
from sbjax.state.checkpoint_read import CheckpointError, read_checkpoint, read_meta

ROOT = pathlib.Path(__file__).parents[2]
FINGERPRINT = {"model": "digits", "adapter_size": 1000, "lora_rank": 8, "lora_targets": ("*",)}


def state(step, size=1000):
  rng = np.random.default_rng(step)

  def flat():
    return rng.normal(size=size).astype(np.float32)

  special = flat()
  special[:3] = [np.inf, -0.0, 1e-42]  # bits that a careless route would change
  optimizer = (np.asarray(step, np.int32), flat(), np.zeros((0, 3), np.float32), flat())
  return TrainState(step, 2 * step, special, flat(), optimizer, 4 * step, step % 2)


def assert_same(a, b):
  for field in ("step", "version", "prompt_cursor", "skipped_in_row"):
    assert getattr(a, field) == getattr(b, field)
    assert type(getattr(a, field)) is int
  assert len(a.optimizer) == len(b.optimizer)
  for x, y in zip((a.adapter, a.ema, *a.optimizer), (b.adapter, b.ema, *b.optimizer), strict=True):
    assert isinstance(x, np.ndarray)
    assert (x.dtype, x.shape) == (y.dtype, y.shape)
    assert x.tobytes() == y.tobytes()


def open_checkpointer(folder, keep=3, **changes):
  return Checkpointer(folder, keep, FINGERPRINT | changes, {"config": "abc"})


def data_files(folder, step):
  """The large files of a step, where the arrays are."""
  found = [p for p in (folder / str(step)).rglob("*") if p.is_file() and p.stat().st_size > 2000]
  assert found
  return found


def damage(folder, step):
  for path in data_files(folder, step):
    os.truncate(path, path.stat().st_size // 2)


def test_round_trip_is_bit_equal_and_survives_later_changes_of_the_arrays(tmp_path):
  saved = state(2)
  expected = dataclasses.replace(state(2))
  with open_checkpointer(tmp_path) as checkpointer:
    assert checkpointer.latest_step() is None
    checkpointer.save(saved)
    saved.adapter[:] = 0  # while it is being written in the background
    saved.optimizer[1][:] = 0
  with open_checkpointer(tmp_path) as checkpointer:
    assert checkpointer.latest_step() == 2
    assert_same(checkpointer.restore(), expected)
  assert_same(read_checkpoint(tmp_path), expected)
  meta = read_meta(tmp_path)
  assert meta["details"] == {"config": "abc"}
  assert {"jax", "orbax", "python"} <= set(meta["versions"])


def test_only_the_newest_stay(tmp_path):
  with open_checkpointer(tmp_path, keep=2) as checkpointer:
    for step in (1, 3, 4, 9):
      checkpointer.save(state(step))
    checkpointer.wait()
    assert checkpointer.steps() == (4, 9)
    assert_same(checkpointer.restore(4), state(4))
    with pytest.raises(CheckpointError, match="no checkpoint of step 3; it has 4, 9"):
      checkpointer.restore(3)


def test_saving_a_saved_or_restored_step_again_changes_nothing(tmp_path):
  with open_checkpointer(tmp_path) as checkpointer:
    checkpointer.save(state(5))
    checkpointer.save(state(5))
  with open_checkpointer(tmp_path) as checkpointer:
    checkpointer.restore()
    checkpointer.save(state(5))
    checkpointer.save(state(6))
  assert_same(read_checkpoint(tmp_path, 5), state(5))
  assert_same(read_checkpoint(tmp_path, 6), state(6))


@pytest.mark.parametrize(
  ("changes", "sentence"),
  [
    ({"model": "wan"}, "of another model: model is 'digits' there and 'wan' here"),
    ({"lora_rank": 4}, "lora_rank is 8 there and 4 here"),
    ({"lora_targets": ("self_attn.q",)}, r"lora_targets is \['\*'\] there"),
    ({"extra": 1}, "extra is None there and 1 here"),
  ],
)
def test_a_checkpoint_of_another_model_is_refused(tmp_path, changes, sentence):
  with open_checkpointer(tmp_path) as checkpointer:
    checkpointer.save(state(1))
  with (
    open_checkpointer(tmp_path, **changes) as checkpointer,
    pytest.raises(CheckpointError, match=sentence) as caught,
  ):
    checkpointer.restore()
  assert "\n" not in str(caught.value)


@pytest.mark.parametrize("how", ["truncated", "zeros", "gone", "metadata"])
def test_a_damaged_newest_checkpoint_is_named_and_passed_over(tmp_path, capfd, how):
  with open_checkpointer(tmp_path) as checkpointer:
    for step in (1, 2):
      checkpointer.save(state(step))
  paths = data_files(tmp_path, 2)
  if how == "truncated":
    damage(tmp_path, 2)
  elif how == "zeros":
    for path in paths:
      path.write_bytes(bytes(path.stat().st_size))
  elif how == "gone":
    for path in paths:
      path.unlink()
  else:
    (tmp_path / "2" / "meta" / "metadata").write_text('{"step"')
  with open_checkpointer(tmp_path) as checkpointer:
    assert_same(checkpointer.restore(), state(1))
    error = capfd.readouterr().err
    assert "2 is damaged" in error and "taking step 1" in error
    assert "Traceback" not in error
    with pytest.raises(CheckpointError, match="2 is damaged"):
      checkpointer.restore(2)
    # The run goes on; the damaged folder stays, under a name that nothing takes for a step.
    checkpointer.restore(1)
    checkpointer.save(state(2))
  assert_same(read_checkpoint(tmp_path, 2), state(2))
  assert (tmp_path / "aside-2-0").is_dir()


def test_where_all_are_damaged_there_is_nothing_to_take(tmp_path):
  with open_checkpointer(tmp_path) as checkpointer:
    checkpointer.save(state(1))
  damage(tmp_path, 1)
  with pytest.raises(CheckpointError, match="1 is damaged"):
    read_checkpoint(tmp_path)


def test_a_changed_number_is_noticed(tmp_path):
  with open_checkpointer(tmp_path) as checkpointer:
    checkpointer.save(state(1))
  path = tmp_path / "1" / "meta" / "metadata"
  meta = json.loads(path.read_text())
  meta["arrays"]["ema"]["crc32"] += 1
  path.write_text(json.dumps(meta))
  with pytest.raises(CheckpointError, match="array ema is not what was saved"):
    read_checkpoint(tmp_path)


def test_no_checkpoint_and_no_folder(tmp_path):
  with pytest.raises(CheckpointError, match="no complete checkpoint"):
    read_checkpoint(tmp_path / "none")
  with pytest.raises(CheckpointError, match="no complete checkpoint"):
    read_meta(tmp_path)
  (tmp_path / "file").write_text("")
  with pytest.raises(CheckpointWriteError, match="cannot open checkpoints"):
    open_checkpointer(tmp_path / "file" / "checkpoints")
  with pytest.raises(CheckpointError, match=r"checkpoint\.keep is 0"):
    open_checkpointer(tmp_path, keep=0)


def test_no_pickle_is_read(tmp_path, monkeypatch):
  import pickle

  with open_checkpointer(tmp_path) as checkpointer:
    checkpointer.save(state(1))

  def refuse(*args, **kwargs):
    raise AssertionError("pickle was called")

  for name in ("load", "loads", "Unpickler"):
    monkeypatch.setattr(pickle, name, refuse)
  monkeypatch.setattr(np, "load", refuse)
  assert_same(read_checkpoint(tmp_path), state(1))


CHILD = """
import resource, signal, sys
import numpy as np
sys.path[:0] = [{root!r}, {here!r}]
from test_checkpoint import open_checkpointer, state
from sbjax import files
from sbjax.report.writers import TensorBoardWriter
folder = {folder!r}
checkpointer = open_checkpointer(folder, keep=2)
for step in (1, 2):
  checkpointer.save(state(step))
checkpointer.wait()
"""


def child(folder, body):
  here = str(pathlib.Path(__file__).parent)
  head = CHILD.format(root=str(ROOT), here=here, folder=str(folder))
  return subprocess.Popen(
    [sys.executable, "-c", head + textwrap.dedent(body)],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


def test_a_kill_in_the_middle_of_a_save_leaves_the_last_good_step(tmp_path):
  process = child(
    tmp_path,
    """
    checkpointer.save(state(3, size=10_000_000))
    print("saving", flush=True)
    checkpointer.wait()
    print("saved", flush=True)
    """,
  )
  assert process.stdout is not None
  assert process.stdout.readline() == "saving\n"
  process.send_signal(signal.SIGKILL)
  output, _ = process.communicate()
  assert output == ""  # it was killed before the save had ended
  assert read_meta(tmp_path)["step"] == 2
  left = {p.name for p in tmp_path.iterdir()} - {"1", "2"}
  with open_checkpointer(tmp_path) as checkpointer:
    assert_same(checkpointer.restore(), state(2))
    checkpointer.save(state(3))
  assert left  # a temporary folder, which the next start has removed
  assert {p.name for p in tmp_path.iterdir()} == {"1", "2", "3"}


def test_a_disk_that_refuses_is_told_at_the_next_call_and_at_the_end(tmp_path):
  # A limit on file sizes refuses writes at the same place as a full disk, TensorStore's included.
  process = child(
    tmp_path,
    """
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    unlimited = resource.RLIM_INFINITY
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, unlimited))
    checkpointer.save(state(3, size=100_000))
    try:
      checkpointer.save(state(4))
    except files.OutputError as error:
      print(type(error).__name__, error, flush=True)
    board = TensorBoardWriter(folder + "/../tensorboard")
    try:
      board.write_texts(1, {"long": "x" * 200_000})
    except files.OutputError as error:
      print("TensorBoard", error, flush=True)
    print(checkpointer.steps(), flush=True)

    resource.setrlimit(resource.RLIMIT_FSIZE, (unlimited, unlimited))
    checkpointer.save(state(4))
    checkpointer.wait()
    print(checkpointer.steps(), flush=True)

    # Ten bytes: the small JSON files fail as well, which Orbax tells twice.
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, unlimited))
    try:
      with checkpointer:
        checkpointer.save(state(5))
    except files.OutputError as error:
      print(type(error).__name__, error, flush=True)
    """,
  )
  output, error = process.communicate()
  assert process.returncode == 0, error
  assert "Traceback" not in error
  lines = output.splitlines()
  assert len(lines) == 5
  assert lines[0].startswith("CheckpointWriteError cannot write checkpoint 3 to ")
  assert "File too large (step 2 is intact)" in lines[0]
  assert "TensorBoard cannot write" in lines[1] and "File too large" in lines[1]
  assert lines[2:4] == ["(1, 2)", "(2, 4)"]
  assert lines[4].startswith("CheckpointWriteError cannot write checkpoint 5 to ")
  assert "File too large (step 4 is intact)" in lines[4]
  assert_same(read_checkpoint(tmp_path, 2), state(2))
  assert_same(read_checkpoint(tmp_path, 4), state(4))
