"""Videos as files, and the sample folder of a step."""

import json

import imageio.v3 as iio
import imageio_ffmpeg
import numpy as np
import pytest

from sbjax import files
from sbjax.report import samples, video
from sbjax.runtime.records import CandidateRecord


def clip(frames=6, height=16, width=24, seed=0):
  """A smooth video, so that lossy coding keeps it."""
  t, y, x = np.meshgrid(*(np.linspace(0, 1, n) for n in (frames, height, width)), indexing="ij")
  values = np.stack([x, y, 0.5 + 0.5 * np.sin(6 * t + seed)], axis=-1)
  return (255 * values).astype(np.uint8)


def test_tiny_videos_are_enlarged_by_repeating_pixels():
  small, large = clip(), clip(2, 161, 201)
  assert video.enlarged(small).shape == (6, 64, 96, 3)
  np.testing.assert_array_equal(video.enlarged(small)[:, 2::4, 1::4], small)
  assert video.enlarged(large) is large


@pytest.mark.parametrize("shape", [(6, 16, 24), (6, 17, 23)])
def test_mp4_holds_the_frames(tmp_path, shape):
  frames = clip(*shape)
  video.write_mp4(tmp_path / "a.mp4", frames, fps=8)
  count, seconds = imageio_ffmpeg.count_frames_and_secs(str(tmp_path / "a.mp4"))
  assert count == 6
  assert seconds == pytest.approx(6 / 8, abs=0.02)
  back = np.stack(list(iio.imiter(tmp_path / "a.mp4", plugin="FFMPEG")))
  even = tuple(side + side % 2 for side in shape[1:])
  assert back.shape == (6, *even, 3)
  assert np.abs(back[:, : shape[1], : shape[2]].astype(int) - frames).mean() < 12
  assert [p.name for p in tmp_path.iterdir()] == ["a.mp4"]  # no temporary file stays


def test_mp4_into_a_place_that_cannot_be_written(tmp_path):
  (tmp_path / "file").write_text("")
  with pytest.raises(files.OutputError, match="cannot write"):
    video.write_mp4(tmp_path / "file" / "a.mp4", clip(), fps=8)


@pytest.mark.parametrize("bad", [clip().astype(np.float32), clip()[0], clip()[:0], clip()[..., :2]])
def test_what_is_no_video_is_refused(tmp_path, bad):
  with pytest.raises(ValueError, match="give uint8 frames"):
    video.write_mp4(tmp_path / "a.mp4", bad, fps=8)
  with pytest.raises(ValueError, match="give uint8 frames"):
    video.enlarged(bad)


def test_gif_moves():
  frames = iio.imread(video.gif_bytes(clip(), fps=10), extension=".gif")
  assert frames.shape[0] == 6


def test_grid_and_side_by_side():
  videos = np.stack([clip(seed=s) for s in range(3)])
  tiles = video.grid(videos)
  assert tiles.shape == (6, 32, 48, 3)
  np.testing.assert_array_equal(tiles[:, :16, 24:], videos[1])
  assert not tiles[:, 16:, 24:].any()
  joined = video.side_by_side(list(videos[:2]), ["base", "online"])
  assert joined.shape == (6, 64 + 20, 2 * 96 + 4, 3)
  np.testing.assert_array_equal(joined[:, 20:, :96], video.enlarged(videos[0]))
  assert joined[:, :20, :96].min() < 100  # the label is drawn
  with pytest.raises(ValueError, match="one label to each"):
    video.side_by_side(list(videos), ["base"])
  with pytest.raises(ValueError, match="one shape"):
    video.side_by_side([clip(), clip(height=8)], ["a", "b"])


def candidate(index, with_video=True, reward: float | None = 0.5):
  return CandidateRecord(
    index=index,
    prompt=f"a red {index}",
    seed=100 + index,
    reward=reward,
    components={"digit": 0.25} if reward is not None else {},
    rationale="looks like a three" if reward is not None else "raised: no judge",
    video=clip(seed=index) if with_video else None,
  )


def test_chosen_spreads_over_the_candidates_and_never_exceeds_the_cap():
  many = [candidate(i) for i in range(12)]
  assert [c.index for c in samples.chosen(many, 4)] == [0, 3, 6, 9]
  assert samples.chosen(many, 0) == ()
  few = [candidate(0, with_video=False), candidate(1), candidate(2)]
  assert [c.index for c in samples.chosen(few, 4)] == [1, 2]
  assert samples.stacked(few, 4).shape == (2, 6, 16, 24, 3)
  assert samples.stacked(few[:1], 4) is None


def test_samples_of_a_step(tmp_path):
  candidates = [candidate(0), candidate(1, reward=None), candidate(2, with_video=False)]
  folder = samples.write_samples(tmp_path, 10, candidates, fps=8, cap=4)
  assert folder == tmp_path / "step_000010"
  lines = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
  assert lines[0] == {
    "index": 0,
    "prompt": "a red 0",
    "seed": 100,
    "reward": 0.5,
    "components": {"digit": 0.25},
    "rationale": "looks like a three",
    "file": "candidate_000.mp4",
  }
  assert lines[1]["reward"] is None
  assert lines[1]["rationale"] == "raised: no judge"
  assert {p.name for p in folder.iterdir()} == {"samples.jsonl", *(x["file"] for x in lines)}
  # A resumed run that repeats the step leaves the same folder.
  again = samples.write_samples(tmp_path, 10, candidates, fps=8, cap=4)
  assert [json.loads(line) for line in (again / "samples.jsonl").read_text().splitlines()] == lines
