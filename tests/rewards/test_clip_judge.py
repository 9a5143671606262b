"""Judges of single frames on tiny random checkpoints in the layouts that are published."""

import io

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save_file

from models.clip.tokens import TextTokens
from sbjax.rewards import catalogue
from sbjax.rewards.clip_judge import ClipJudge
from sbjax.rewards.protocol import Job
from tests import tiny_clip
from tests.models.checkpoints.files import save_torch
from tests.rewards.test_combined import settings_with

RNG = np.random.default_rng(0)
VIDEOS = {i: RNG.integers(0, 256, (9, 20, 28, 3), dtype=np.uint8) for i in range(2)}
JOBS = (Job((0,), "A red seven.", 0), Job((1,), "two  BLUE dots", 0), Job((0,), "dots", 0))


def hps_settings(**changes):
  alone = {"judge__mode": "pointwise", "judge__endpoints": (), "judge__model": ""}
  return settings_with(name="hps_v21", components=("overall",), weights=(1.0,), **alone, **changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """As HPS v2.1 is published: a torch file with a `state_dict`, here in half precision."""
  path = tmp_path_factory.mktemp("hps")
  tiny_clip.write_tokenizer(path)
  tiny_clip.write_config(path)
  half = {name: x.astype(np.float16) for name, x in tiny_clip.tensors().items()}
  save_torch(path / "HPS_v2.1_compressed.pt", state_dict=half)
  return path


@pytest.fixture(scope="module")
def judge(folder):
  return ClipJudge(str(folder), hps=True, frames=4)


def test_a_verdict_is_the_mean_cosine_of_evenly_spaced_frames(judge):
  verdicts = judge.judge(JOBS, VIDEOS)
  for job, verdict in zip(JOBS, verdicts, strict=True):
    video = VIDEOS[job.candidates[0]]
    by_hand = [judge.cosines(video[i : i + 1], job.prompt)[0] for i in (0, 2, 5, 8)]
    assert dict(verdict.components or {}) == {"overall": pytest.approx(np.mean(by_hand), abs=1e-6)}
    assert f"{by_hand[0]:.3f}" in verdict.rationale
    assert judge.judge([job], VIDEOS) == [verdict]  # whatever else is asked
  assert len({v.rationale for v in verdicts}) == 3


def test_the_best_frames_count_and_a_jpeg_changes_little(folder, judge):
  found = judge.cosines(VIDEOS[0], "dots")
  best = ClipJudge(str(folder), hps=True, frames=4, best_share=0.5)
  value = (best.judge([JOBS[2]], VIDEOS)[0].components or {})["overall"]
  assert value == pytest.approx(np.sort(found)[2:].mean(), abs=1e-6)
  smooth = np.broadcast_to(np.arange(28, dtype=np.uint8)[None, None, :, None] * 9, (1, 20, 28, 3))
  through = ClipJudge(str(folder), hps=True, frames=4, jpeg=True).cosines(smooth, "dots")
  file = io.BytesIO()
  Image.fromarray(smooth[0]).save(file, "JPEG", quality=75)
  stored = np.asarray(Image.open(file))[None]
  np.testing.assert_array_equal(through, judge.cosines(stored, "dots"))
  assert 0 < np.abs(through - judge.cosines(smooth, "dots")).max() < 0.05


def test_bars_and_cuts_differ_unless_a_frame_is_square(folder, judge):
  cut = ClipJudge(str(folder), hps=False, frames=1)
  assert abs(cut.cosines(VIDEOS[0], "dots")[0] - judge.cosines(VIDEOS[0][:1], "dots")[0]) > 1e-4
  square = np.ascontiguousarray(VIDEOS[0][:1, :14, :14].repeat(2, 1).repeat(2, 2))
  np.testing.assert_allclose(cut.cosines(square, "dots"), judge.cosines(square, "dots"), atol=1e-6)


def test_a_text_is_lowered_cut_and_ends_with_its_end_token(folder):
  tokens = TextTokens(folder, tiny_clip.from_open_clip("tiny", tiny_clip.OPEN_CLIP))
  short, same, long = tokens(["A  b", "a b", "word " * 9])
  np.testing.assert_array_equal(short, same)
  assert (short[0], short[4], long[15]) == (256, 257, 257) and not short[5:].any()


def test_the_catalogue_builds_what_the_settings_name(folder, judge):
  settings = hps_settings(image__hps_checkpoint=str(folder), image__frames=4)
  catalogue.check(settings)
  built = catalogue.image_judge(settings.image, "hps_v21")
  assert built.judge(JOBS, VIDEOS) == judge.judge(JOBS, VIDEOS)


@pytest.mark.parametrize(
  ("spoil", "says"),
  [
    (lambda p: (p / "tokenizer.json").unlink(), "where tokenizer.json is missing"),
    (lambda p: (p / "w.safetensors").unlink(), "has 0 files of weights"),
    (lambda p: (p / "more.pt").touch(), "has 2 files of weights"),
    (lambda p: (p / "config.json").write_text("{"), "cannot be read"),
    (lambda p: (p / "config.json").write_text("{}"), "model_type is None; a CLIP has 'clip'"),
    (lambda p: (p / "open_clip_config.json").write_text("{}"), "it lacks 'vision_cfg'"),
  ],
)
def test_folders_that_cannot_work_are_refused_before_anything_compiles(tmp_path, spoil, says):
  tiny_clip.write_tokenizer(tmp_path)
  tiny_clip.write_config(tmp_path)
  save_file(tiny_clip.tensors(), tmp_path / "w.safetensors")
  spoil(tmp_path)
  with pytest.raises(ValueError, match=r"reward\.image\.hps_checkpoint") as refused:
    catalogue.check(hps_settings(image__hps_checkpoint=str(tmp_path)))
  assert says in str(refused.value) and "\n" not in str(refused.value)


def test_a_judge_needs_its_folder_and_a_folder_its_judge(tmp_path):
  with pytest.raises(ValueError, match="hps_checkpoint is ''; 'hps_v21' needs a folder"):
    catalogue.check(hps_settings())
  with pytest.raises(ValueError, match="but no judge of"):
    catalogue.check(settings_with(image__clip_checkpoint=str(tmp_path)))


def test_weights_that_do_not_fit_are_named(tmp_path):
  tiny_clip.write_tokenizer(tmp_path)
  tiny_clip.write_config(tmp_path)
  wrong = tiny_clip.tensors()
  wrong["extra"] = wrong.pop("ln_final.bias")
  save_file(wrong, tmp_path / "w.safetensors")
  with pytest.raises(ValueError, match=r"missing: ln_final\.bias; unknown: extra"):
    ClipJudge(str(tmp_path), hps=True, frames=4)
