"""Metrics files: what is written, what a resumed run leaves, what a full disk does."""

import errno
import json
import pathlib
import struct
import tempfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboardX.proto.event_pb2 import Event

from sbjax import files
from sbjax.report import writers


def read_events(folder):
  """Reads TensorBoard's record files: length, its checksum, an event, its checksum."""
  events = []
  for path in sorted(pathlib.Path(folder).iterdir()):
    data = path.read_bytes()
    while data:
      (length,) = struct.unpack("<Q", data[:8])
      events.append(Event.FromString(data[12 : 12 + length]))
      data = data[16 + length :]
  return events


def test_jsonl_keeps_precision_and_writes_what_is_not_finite_as_null(tmp_path):
  writer = writers.JsonlWriter(tmp_path / "m.jsonl")
  value = 0.1 + 0.2
  writer.write_scalars(3, {"a": value, "b": np.float32(0.5), "c": float("nan"), "d": float("inf")})
  # Visible before any flush: a run that is killed now has its line.
  (line,) = (tmp_path / "m.jsonl").read_text().splitlines()
  assert json.loads(line) == {"step": 3, "a": value, "b": 0.5, "c": None, "d": None}
  writer.close()


def test_jsonl_appends_without_resume(tmp_path):
  for step in (1, 2):
    writer = writers.JsonlWriter(tmp_path / "m.jsonl")
    writer.write_scalars(step, {"a": 1})
    writer.close()
  assert [row["step"] for row in writers.read_jsonl(tmp_path / "m.jsonl")] == [1, 2]


@settings(max_examples=40, deadline=None)
@given(
  steps=st.lists(st.integers(1, 9), max_size=8).map(sorted),
  cut=st.integers(0, 400),
  resumed=st.integers(0, 9),
)
def test_resume_leaves_the_lines_of_an_undisturbed_run(steps, cut, resumed):
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / "m.jsonl"
    whole = [json.dumps({"step": s, "x": s / 3}) for s in steps]
    text = "".join(f"{line}\n" for line in whole)[:cut]  # the killed run's last line may be broken
    path.write_text(text)
    complete = [s for s, end in zip(steps, _ends(whole), strict=True) if end <= len(text)]
    writer = writers.JsonlWriter(path, resume_step=resumed)
    writer.write_scalars(resumed + 1, {"x": 7})
    writer.close()
    rows = writers.read_jsonl(path)
    assert [r["step"] for r in rows] == [s for s in complete if s <= resumed] + [resumed + 1]
    assert all(r["x"] == r["step"] / 3 for r in rows[:-1])


def _ends(lines):
  """Where each line is complete: its newline may be missing, but it is then cut off the text."""
  position, ends = 0, []
  for line in lines:
    ends.append(position + len(line))
    position += len(line) + 1
  return ends


def test_a_broken_line_in_the_middle_is_refused(tmp_path):
  path = tmp_path / "m.jsonl"
  path.write_text('{"step": 1}\n{"step\n{"step": 3}\n')
  with pytest.raises(ValueError, match=r"line 2 of .*m\.jsonl is not JSON"):
    writers.JsonlWriter(path, resume_step=3)
  assert path.read_text().count("\n") == 3


def test_a_full_disk_raises_at_the_write():
  writer = writers.JsonlWriter("/dev/full")
  with pytest.raises(files.OutputError, match=r"cannot write /dev/full: No space left") as caught:
    writer.write_scalars(1, {"a": 1.0})
  assert caught.value.errno == errno.ENOSPC
  assert "\n" not in str(caught.value)


def test_tensorboard_has_scalars_texts_settings_and_moving_pictures(tmp_path):
  writer = writers.TensorBoardWriter(tmp_path, fps=8)
  writer.write_scalars(4, {"actor/lr": 0.25})
  videos = np.random.default_rng(0).integers(0, 255, (3, 5, 32, 48, 3), dtype=np.uint8)
  writer.write_videos(4, {"samples": videos})
  writer.write_texts(4, {"table": "a | b"})
  writer.write_hparams({"optim": {"b1": 0.9}, "targets": ("q", "k")})
  writer.close()
  writer.close()
  values = {v.tag: (e.step, v) for e in read_events(tmp_path) for v in e.summary.value}
  assert values["actor/lr"][0] == 4
  assert values["actor/lr"][1].simple_value == 0.25
  image = values["samples"][1].image
  assert image.encoded_image_string[:6] == b"GIF89a"
  # Three videos in a 2 x 2 grid, enlarged four times.
  assert (image.height, image.width) == (2 * 32 * 4, 2 * 48 * 4)
  assert "table/text_summary" in values
  assert "_hparams_/session_start_info" in values


def test_tensorboard_hides_steps_after_the_resumed_one(tmp_path):
  for resume in (None, 2):
    writer = writers.TensorBoardWriter(tmp_path, resume_step=resume)
    writer.write_scalars(3, {"a": 1.0})
    writer.close()
  assert len(list(tmp_path.iterdir())) == 2  # within the same second, yet no file was overwritten
  starts = [e for e in read_events(tmp_path) if e.HasField("session_log")]
  assert [(e.step, e.session_log.status) for e in starts] == [(3, 1)]


class Recorder:
  """A tracker as a user would add it; fails on demand."""

  made: list["Recorder"] = []  # noqa: RUF012 - how the test finds what the factory made

  def __init__(self, workdir, config):
    self.workdir, self.config, self.calls = workdir, config, []
    Recorder.made.append(self)

  def _call(self, *args):
    self.calls.append(args)
    if self.config.get("fail"):
      raise ConnectionError("no route to the tracker")

  write_scalars = write_videos = write_texts = write_hparams = flush = close = _call


def broken(workdir, config):
  return Recorder(workdir, {"fail": True})


def test_extra_writers_get_everything(tmp_path):
  Recorder.made.clear()
  writer = writers.open_writer(
    metrics=tmp_path / "m.jsonl",
    tensorboard=tmp_path / "tb",
    extra=(f"{__name__}:Recorder",),
    workdir="here",
    config={"seed": 3},
  )
  writer.write_scalars(1, {"a": 2.0})
  writer.close()
  (tracker,) = Recorder.made
  assert (tracker.workdir, tracker.config) == ("here", {"seed": 3})
  assert tracker.calls == [(1, {"a": 2.0}), ()]


def test_a_tracker_that_fails_is_named_once_and_left_out(tmp_path, capsys):
  Recorder.made.clear()
  writer = writers.open_writer(
    metrics=tmp_path / "m.jsonl", tensorboard=tmp_path / "tb", extra=(f"{__name__}:broken",)
  )
  for step in (1, 2):
    writer.write_scalars(step, {"a": 2.0})
  writer.close()
  assert len(Recorder.made[0].calls) == 1
  assert capsys.readouterr().err.count("no route to the tracker") == 1
  assert len(writers.read_jsonl(tmp_path / "m.jsonl")) == 2


@pytest.mark.parametrize("name", ["nowhere:f", "json:nothing", "json", "json:__name__", ":f"])
def test_a_writer_that_cannot_be_made_is_refused(tmp_path, name):
  with pytest.raises(ValueError, match=r"report\.writers has '.*module:function"):
    writers.open_writer(metrics=tmp_path / "m", tensorboard=tmp_path / "tb", extra=(name,))


def test_flatten_joins_names():
  assert writers.flatten({"a": {"b": {"c": 1}}, "d": 2}) == {"a.b.c": 1, "d": 2}
