"""Facts of the renderer and of the splits."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbjax.worlds.digits import data, prompts
from sbjax.worlds.digits.world import WEIGHTS


@pytest.fixture(scope="module")
def images():
  return data.load_images(WEIGHTS / "digits.npz")


def centre_of_ink(frame: np.ndarray) -> np.ndarray:
  ink = np.maximum(frame.max(-1).astype(np.float64) - 255 * data.BACKGROUND - 3, 0)
  pixels = np.arange(64) + 0.5
  return np.array([(ink.sum(1) * pixels).sum(), (ink.sum(0) * pixels).sum()]) / ink.sum()


@pytest.mark.parametrize("direction", range(4))
@pytest.mark.parametrize("speed", range(2))
def test_ink_moves_as_the_prompt_says(images, direction, speed):
  video = data.render(images, prompts.sentence(prompts.Asked(3, 1, direction, speed)), seed=5)
  moved = centre_of_ink(video[32]) - centre_of_ink(video[0])
  wanted = prompts.DIRECTION_STEPS[direction] * prompts.SPEED_PX[speed] * 32
  np.testing.assert_allclose(moved, wanted, atol=0.1)


@pytest.mark.parametrize("colour", range(6))
def test_the_brightest_pixel_has_the_asked_colour(images, colour):
  video = data.render(images, prompts.sentence(prompts.Asked(0, colour, 0, 0)), seed=2)
  for frame in (video[0], video[32]):
    brightest = frame.reshape(-1, 3)[frame.sum(-1).argmax()] / 255
    nearest = ((brightest[None] - prompts.PALETTE) ** 2).sum(-1).argmin()
    assert nearest == colour
  background = data.to_uint8(np.float32(data.BACKGROUND))
  assert (video[:, 0, 0] == background).all(), "the corner is never reached in 33 frames"


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_the_digit_stays_on_the_canvas(seed):
  rng = np.random.default_rng(seed)
  scenes = data.random_scenes(rng, 8, np.arange(100) % 10)
  low, high = data.DIGIT_PX / 2, data.CANVAS_PX - data.DIGIT_PX / 2
  centres = data.path_centres(scenes.start, scenes.velocity, data.MAX_FRAMES)
  assert centres.min() >= low and centres.max() <= high
  steps = np.diff(centres[:, : data.FRAMES], axis=1)
  expected = np.broadcast_to(scenes.velocity[:, None], steps.shape)
  np.testing.assert_allclose(steps, expected, atol=1e-4, err_msg="no wall within 33 frames")
  fast = np.abs(np.diff(centres, axis=1)).max(axis=(1, 2))
  np.testing.assert_allclose(fast, prompts.SPEED_PX[scenes.speed], atol=1e-4)


def test_a_wall_reflects():
  centres = data.path_centres(np.array([[32.0, 47.0]]), np.array([[0.0, 1.0]]), 10)[0, :, 1]
  np.testing.assert_allclose(centres, [47, 48, 49, 50, 49, 48, 47, 46, 45, 44])


def test_a_long_video_continues_the_short_one(images):
  prompt = prompts.all_prompts()[123]
  np.testing.assert_array_equal(
    data.render(images, prompt, 4, frames=81)[:33], data.render(images, prompt, 4)
  )


def test_render_is_a_function_of_its_seed(images):
  prompt = prompts.all_prompts()[77]
  first, again, other = (data.render(images, prompt, seed) for seed in (1, 1, 2))
  np.testing.assert_array_equal(first, again)
  assert (first != other).any()


@pytest.mark.parametrize("frames", [0, 82])
def test_render_refuses_lengths_outside_the_world(images, frames):
  with pytest.raises(ValueError, match=f"frames is {frames}"):
    data.render(images, prompts.all_prompts()[0], 0, frames=frames)


def test_halves_share_no_drawing(images):
  generator, reader = images.half("generator")[0], images.half("reader")[0]
  assert (len(generator), len(reader)) == (898, 899)
  shared = {a.tobytes() for a in generator} & {a.tobytes() for a in reader}
  assert not shared
  with pytest.raises(ValueError, match="half is 'all'"):
    images.half("all")


def test_shipped_drawings_are_those_of_scikit_learn(images):
  fresh = pytest.importorskip("sklearn.datasets").load_digits()
  np.testing.assert_array_equal(images.ink * 16, fresh.images)
  np.testing.assert_array_equal(images.labels, fresh.target)


def test_prompt_halves_are_disjoint_complete_and_balanced():
  seen, unseen = prompts.split_prompts()
  assert len(seen) == len(unseen) == 240
  assert set(seen) | set(unseen) == set(prompts.all_prompts())
  for half in (seen, unseen):
    assert (np.bincount(prompts.parse_all(half)["digit"]) == 24).all()
  assert prompts.split_prompts() == (seen, unseen)


@given(
  digit=st.integers(0, 9),
  colour=st.integers(0, 5),
  direction=st.integers(0, 3),
  speed=st.integers(0, 1),
)
def test_a_prompt_reads_back(digit, colour, direction, speed):
  asked = prompts.Asked(digit, colour, direction, speed)
  assert prompts.parse(prompts.sentence(asked)) == asked
  shuffled = " ".join(reversed(prompts.sentence(asked).upper().split())) + "."
  assert prompts.parse(shuffled) == asked


@pytest.mark.parametrize(
  ("prompt", "attribute"),
  [
    ("a red seven moves left", "speed"),
    ("a red blue seven moves left slowly", "colour"),
    ("a red moves left slowly", "digit"),
  ],
)
def test_a_prompt_must_name_everything_once(prompt, attribute):
  with pytest.raises(ValueError, match=f"words for the {attribute}"):
    prompts.parse(prompt)


def test_scenes_tell_their_prompts():
  scenes = data.random_scenes(np.random.default_rng(0), 20, np.arange(100) % 10)
  read = prompts.parse_all(scenes.prompts())
  for field in dataclasses.fields(prompts.Asked):
    np.testing.assert_array_equal(read[field.name], getattr(scenes, field.name))


def test_a_foreign_image_file_is_refused(tmp_path):
  for name, content in (("text.npz", b"no zip"), ("empty.npz", b"")):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=name):
      data.load_images(tmp_path / name)
