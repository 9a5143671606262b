"""The shipped world loads and is small, its judges read real videos, its base model errs."""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from sbjax.worlds.digits import evaluate, heldout, judge, prompts, sample, train_dit, world
from sbjax.worlds.digits.create import MAX_SHIPPED_BYTES, SHIPPED

READ_VIDEOS = 40


@pytest.fixture(scope="module")
def loaded():
  return world.load_world()


@pytest.fixture(scope="module")
def unseen_drawings(loaded):
  """Real videos of drawings that neither judge nor held-out classifier was fitted to."""
  asked = list(loaded.eval_prompts[:READ_VIDEOS])
  return evaluate.real_videos(loaded.images, asked, seed=300), asked


def test_shipped_files_are_all_there_and_small():
  sizes = {path.name: path.stat().st_size for path in world.WEIGHTS.iterdir() if path.is_file()}
  assert set(sizes) == set(SHIPPED)
  assert sum(sizes.values()) <= MAX_SHIPPED_BYTES


def test_weights_use_official_names():
  dit = load_file(world.WEIGHTS / "dit.safetensors")
  assert dit["blocks.0.self_attn.q.weight"].dtype == np.float16
  assert "encoder.conv1.weight" in load_file(world.WEIGHTS / "vae.safetensors")
  assert "blocks.0.pos_embedding.embedding.weight" in load_file(world.WEIGHTS / "text.safetensors")


def test_sizes_are_known_without_weights(loaded):
  dit, sampler = world.model_sizes()
  assert (dit, sampler) == (loaded.dit_config, loaded.sampler)
  assert dit.in_dim == sampler.latent_channels + 2 == loaded.vae.config.z_dim + 2
  assert loaded.conditioning_channels.shape == (2, sampler.latent_height, sampler.latent_width)


def test_judge_reads_real_videos(loaded, unseen_drawings):
  videos, asked = unseen_drawings
  tables = [judge.tables(loaded.judge, videos[i : i + 8]) for i in range(0, READ_VIDEOS, 8)]
  wanted = prompts.parse_all(asked)
  for name in judge.HEADS:
    read = np.concatenate([table[name] for table in tables]).argmax(1)
    assert (read == wanted[name]).mean() >= 0.95, name


def test_judge_rewards_what_was_asked_and_nothing_else(loaded, unseen_drawings):
  videos, asked = unseen_drawings
  wanted = prompts.parse(asked[0])
  scores = {}
  for change, other in (
    ("none", wanted),
    (
      "digit",
      prompts.Asked((wanted.digit + 3) % 10, wanted.colour, wanted.direction, wanted.speed),
    ),
    (
      "colour",
      prompts.Asked(wanted.digit, (wanted.colour + 1) % 6, wanted.direction, wanted.speed),
    ),
    ("motion", prompts.Asked(wanted.digit, wanted.colour, wanted.direction ^ 1, wanted.speed)),
  ):
    scores[change] = world.judge_videos(loaded, videos[:1], [prompts.sentence(other)])
  for component in ("digit", "colour", "motion"):
    assert scores["none"][component][0] > 0.7
    for change in ("digit", "colour", "motion"):
      as_asked = scores[change][component][0] > 0.5
      assert as_asked == (change != component), (change, component)


def test_judge_takes_long_videos(loaded):
  prompt = loaded.eval_prompts[0]
  video = world.render(loaded, prompt, seed=1, frames=81)[None]
  scores = world.judge_videos(loaded, video, [prompt])
  assert min(float(value[0]) for value in scores.values()) > 0.5


def test_judge_does_not_depend_on_the_batch(loaded, unseen_drawings):
  videos, asked = unseen_drawings
  together = world.judge_videos(loaded, videos[:3], asked[:3])
  alone = world.judge_videos(loaded, videos[2:3], asked[2:3])
  for name, value in alone.items():
    np.testing.assert_allclose(value[0], together[name][2], atol=1e-5)


@pytest.mark.parametrize(
  ("videos", "message"),
  [
    (np.zeros((1, 33, 64, 64, 3), np.float32), "float32"),
    (np.zeros((1, 33, 32, 64, 3), np.uint8), "uint8 "),
    (np.zeros((1, 4, 64, 64, 3), np.uint8), "4 frames"),
    (np.zeros((2, 33, 64, 64, 3), np.uint8), "1 entries for 2 videos"),
  ],
)
def test_judge_refuses_other_inputs(loaded, videos, message):
  with pytest.raises(ValueError, match=message):
    world.judge_videos(loaded, videos, [loaded.eval_prompts[0]])


def test_heldout_measure_reads_real_videos_and_differs_in_kind(loaded, unseen_drawings):
  videos, asked = unseen_drawings
  scores = world.heldout_scores(loaded, videos, asked)
  assert scores["right"].mean() >= 0.95
  assert ((scores["p"] > 0) & (scores["p"] < 1)).all()
  # Kernel evaluations on intensity crops: grey videos read the same, no network is involved.
  grey = np.repeat(videos.max(-1, keepdims=True), 3, axis=-1)
  np.testing.assert_array_equal(world.heldout_scores(loaded, grey, asked)["p"], scores["p"])
  assert loaded.heldout.vectors.shape[1] == 196


def test_prompt_embeddings_are_zero_past_the_prompt_and_independent(loaded):
  pair = [loaded.train_prompts[0], loaded.eval_prompts[0]]
  both = world.encode_prompts(loaded, pair)
  np.testing.assert_array_equal(both[1:], world.encode_prompts(loaded, pair[1:]))
  assert both.shape == (2, loaded.dit_config.text_len, loaded.dit_config.text_dim)
  assert (both[:, 7:] == 0).all() and (both[:, :7] != 0).any(-1).all()


def test_coordinates_tell_the_canvas():
  planes = np.asarray(sample.conditioning_channels(8, 8))
  assert planes[0, 0, 3] == -1 and planes[0, 7, 3] == 1 and planes[1, 3, 0] == -1
  full = sample.with_conditioning(jnp.zeros((2, 3, 5, 8, 8)))
  assert full.shape == (2, 3, 7, 8, 8)
  np.testing.assert_array_equal(full[1, 2, 5:], planes)


def test_sigmas_prefer_the_sampler_and_stay_in_range(loaded):
  import jax

  sigma = np.asarray(train_dit.draw_sigmas(jax.random.key(0), (4000,), loaded.sampler))
  listed = np.isin(sigma, train_dit.denoising_schedule(loaded.sampler)[1])
  assert 0.55 < listed.mean() < 0.65
  assert sigma.min() > 0 and sigma.max() <= 1


def copy_world(folder):
  shutil.copytree(world.WEIGHTS, folder)
  return folder


@pytest.mark.parametrize(
  "name", ["dit.safetensors", "vae.safetensors", "heldout.npz", "digits.npz"]
)
def test_a_truncated_file_is_refused_by_name(tmp_path, name):
  folder = copy_world(tmp_path / "world")
  content = (folder / name).read_bytes()
  (folder / name).write_bytes(content[: len(content) // 2])
  with pytest.raises(ValueError, match=name):
    world.load_world(folder)


def test_foreign_weights_are_refused(tmp_path):
  folder = copy_world(tmp_path / "world")
  save_file({"something.else": np.zeros(3, np.float16)}, folder / "judge.safetensors")
  with pytest.raises(ValueError, match=r"something\.else"):
    world.load_world(folder)


@pytest.mark.parametrize("content", ["{", "[]", '{"format": "another"}'])
def test_a_damaged_description_is_refused(tmp_path, content):
  (tmp_path / "world.json").write_text(content)
  with pytest.raises(ValueError, match=r"world\.json"):
    world.load_world(tmp_path)


def test_a_folder_without_a_world_is_refused(tmp_path):
  with pytest.raises(ValueError, match=r"no world\.json"):
    world.load_world(tmp_path)
  (tmp_path / "world.json").write_text(json.dumps({"format": world.FORMAT, "sizes": {"dit": {}}}))
  with pytest.raises(ValueError, match="unusable sizes"):
    world.model_sizes(tmp_path)


def test_a_damaged_heldout_measure_is_refused(tmp_path, loaded):
  heldout.save(tmp_path / "good.npz", loaded.heldout)
  again = heldout.load(tmp_path / "good.npz")
  np.testing.assert_allclose(again.vectors, loaded.heldout.vectors, atol=1e-7)
  np.savez(tmp_path / "bad.npz", vectors=np.zeros((3, 196)))
  with pytest.raises(ValueError, match=r"bad\.npz"):
    heldout.load(tmp_path / "bad.npz")


@pytest.mark.slow
def test_base_model_draws_the_right_digit_in_half_to_nine_tenths_of_its_videos(loaded):
  asked = [str(p) for p in loaded.eval_prompts[:32]]
  videos = evaluate.sample_videos(loaded, asked, seed=5)
  right = world.heldout_scores(loaded, videos, asked)["right"].mean()
  assert 0.5 <= right <= 0.9
  scores = world.judge_videos(loaded, videos[:8], asked[:8])
  assert scores["colour"].mean() > 0.8 and scores["motion"].mean() > 0.7
