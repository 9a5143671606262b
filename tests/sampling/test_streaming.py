"""Chunks, streamed decoding and the growing file, on a tiny random model."""

import time

import imageio_ffmpeg
import jax
import numpy as np
import pytest

from sbjax import files
from sbjax.sampling.chunks import generate_chunks
from sbjax.sampling.mp4 import GrowingMp4
from sbjax.sampling.script import Cue, Script, Switch, director_of
from sbjax.sampling.streaming import stream_video
from sbjax.worlds.decoding import to_bytes
from tests.sampling import tiny

SEED = 1234
TIMEOUT_S = 300.0
PIXEL_FRAMES = tiny.VAE.pixel_frames(tiny.FRAMES)


@pytest.fixture(scope="module")
def models():
  return tiny.models()


@pytest.fixture(scope="module")
def plain(models):
  """The chunks of a video without a switch."""
  return list(chunks_of(models, director_of(Script(tiny.OLD), 1)))


def chunks_of(models, director):
  return generate_chunks(models.generator, director, chunks=tiny.FRAMES, seed=SEED)


def latents_of(chunks):
  return np.concatenate([np.asarray(chunk.latents) for chunk in chunks])


def test_a_switch_to_the_same_prompt_changes_nothing(models, plain):
  """Frame 3 lies within the window of 4, so that the cache holds every frame as it was written.

  What differs is rounding: the cache is written by another compiled program, 1e-5 apart at most,
  and four chunks are generated on it.
  """
  switched = list(chunks_of(models, lambda frame: Cue(tiny.OLD, frame == 3)))
  np.testing.assert_array_equal(latents_of(switched[:3]), latents_of(plain[:3]))
  np.testing.assert_allclose(latents_of(switched), latents_of(plain), rtol=0, atol=1e-4)


def test_a_switch_shows_from_its_chunk_on(models, plain):
  script = Script(tiny.OLD, (Switch(5, tiny.NEW),))
  switched = list(chunks_of(models, director_of(script, 1)))
  assert [c.prompt for c in switched] == [tiny.OLD] * 5 + [tiny.NEW] * 2
  assert [(c.index, c.start_frame) for c in switched] == [(i, i) for i in range(tiny.FRAMES)]
  np.testing.assert_array_equal(latents_of(switched[:5]), latents_of(plain[:5]))
  for new, old in zip(switched[5:], plain[5:], strict=True):
    assert np.abs(np.asarray(new.latents - old.latents)).max() > 1e-3
  # Not only the prompt of the chunk is new: so are the keys of the frames before it.
  kept = list(chunks_of(models, lambda frame: Cue(tiny.NEW if frame >= 5 else tiny.OLD)))
  assert [c.prompt for c in kept] == [c.prompt for c in switched]
  assert np.abs(latents_of(kept[5:]) - latents_of(switched[5:])).max() > 1e-3


def test_the_director_ends_the_video(models, plain):
  ended = list(chunks_of(models, lambda frame: Cue(tiny.OLD) if frame < 2 else None))
  np.testing.assert_array_equal(latents_of(ended), latents_of(plain[:2]))


def test_streamed_frames_are_those_of_decoding_at_once(models, plain):
  cache, pieces = None, []
  for chunk in plain:
    frames, cache = models.decode(chunk.latents, cache)
    pieces.append(frames)
  assert [len(frames) for frames in pieces] == [1] + [2] * (tiny.FRAMES - 1)
  vae = tiny.vae()
  at_once = jax.jit(lambda z: to_bytes(vae.decode(z)[0]))(latents_of(plain)[None])
  difference = np.abs(np.concatenate(pieces).astype(int) - np.asarray(at_once))
  # Pixels agree to about 1e-6; truncation to bytes makes 1 of that where it straddles a border.
  assert difference.max() <= 1 and (difference > 0).mean() < 1e-3
  assert np.asarray(at_once).std() > 20  # a picture, not one colour


def fragments(path):
  """Whole frames in an mp4 that may still be growing: its media boxes, one for each."""
  data = path.read_bytes() if path.exists() else b""
  count = at = 0
  while at + 8 <= len(data):
    size = int.from_bytes(data[at : at + 4], "big")
    count += data[at + 4 : at + 8] == b"mdat" and at + size <= len(data)
    at += size
  return count


def until(condition, what):
  end = time.monotonic() + 60
  while not condition():
    assert time.monotonic() < end, what
    time.sleep(0.02)


def test_the_file_grows_while_later_chunks_are_generated(models, plain, tmp_path):
  path = tmp_path / "new" / "a.mp4"
  events = []

  def director(frame):
    if frame == tiny.FRAMES - 1:
      # The last chunk is not begun yet, and those before the two in work are on disk.
      until(lambda: fragments(path) >= 5, "the first three chunks do not reach the disk")
      assert imageio_ffmpeg.count_frames_and_secs(str(path))[0] >= 5
    return Cue(tiny.OLD)

  chunks = chunks_of(models, director)
  frames = stream_video(chunks, models.decode, path, 8, timeout_s=TIMEOUT_S, tell=events.append)
  assert frames == PIXEL_FRAMES
  assert fragments(path) == imageio_ffmpeg.count_frames_and_secs(str(path))[0] == PIXEL_FRAMES
  order = [(event.kind, event.chunk) for event in events]
  for chunk in range(tiny.FRAMES):
    assert order.index(("generated", chunk)) < order.index(("written", chunk))
    # No more than two chunks wait for the decoder.
    if chunk + 3 < tiny.FRAMES:
      assert order.index(("written", chunk)) < order.index(("generated", chunk + 3))
  assert [e.frames for e in events if e.kind == "written"] == [1, 3, 5, 7, 9, 11, 13]


def test_what_was_generated_stays_when_the_rest_fails(models, plain, tmp_path):
  def broken():
    yield from plain[:3]
    raise RuntimeError("the device is gone")

  with pytest.raises(RuntimeError, match="the device is gone"):
    stream_video(
      broken(), models.decode, tmp_path / "a.mp4", 8, timeout_s=TIMEOUT_S, tell=lambda event: None
    )
  written, _ = imageio_ffmpeg.count_frames_and_secs(str(tmp_path / "a.mp4"))
  assert written in (1, 3, 5)  # whole chunks


def test_no_chunk_makes_no_file(models, tmp_path):
  path = tmp_path / "a.mp4"
  assert stream_video([], models.decode, path, 8, timeout_s=1, tell=lambda event: None) == 0
  assert not path.exists()


def test_a_place_that_cannot_be_written_is_one_sentence(models, plain, tmp_path):
  (tmp_path / "file").write_text("")
  (tmp_path / "folder.mp4").mkdir()
  for path in (tmp_path / "file" / "a.mp4", tmp_path / "folder.mp4"):
    with pytest.raises(files.OutputError, match="cannot write") as caught:
      stream_video(plain, models.decode, path, 8, timeout_s=TIMEOUT_S, tell=lambda event: None)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("size", [(16, 24), (161, 163)])
def test_the_frames_are_in_the_file(tmp_path, size):
  import imageio.v3 as iio

  y, x = np.meshgrid(*(np.linspace(0, 1, n) for n in size), indexing="ij")
  frames = np.stack([255 * np.stack([x, y, x * 0 + t / 5], -1) for t in range(6)]).astype(np.uint8)
  with GrowingMp4(tmp_path / "a.mp4", 8) as file:
    file.write(frames[:1])
    file.write(frames[1:])
    assert file.frames == 6
  back = np.stack(list(iio.imiter(tmp_path / "a.mp4", plugin="FFMPEG")))
  shown = frames if size[0] > 160 else frames.repeat(4, 1).repeat(4, 2)
  assert back.shape == (6, *(side + side % 2 for side in shown.shape[1:3]), 3)
  assert np.abs(back[:, : shown.shape[1], : shown.shape[2]].astype(int) - shown).mean() < 12
