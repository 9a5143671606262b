"""Published weights as a world: sizes from files, loading, LongLive's adapter, refusals."""

import importlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh
from safetensors.numpy import save_file

from configs import longlive, quickstart, self_forcing
from models.checkpoints import sizes as stored_sizes
from models.checkpoints.families import DIT, UMT5
from models.checkpoints.wan import load_dit, load_vae
from models.wan.diffusers_keys import DIT_DIFFUSERS_KEYS
from models.wan.presets import PRESETS
from models.wan.umt5_keys import UMT5_HF_KEYS
from models.weights import parameters, to_official
from sbjax import config
from sbjax.sizes import model_sizes
from sbjax.worlds.decoding import frame_decoder, to_bytes
from sbjax.worlds.wan.sizes import check, wan_sizes
from sbjax.worlds.wan.world import load_transformer, load_world
from tests import tiny_wan

RECIPES = (
  "self_forcing",
  "longlive",
  "self_forcing_vr_thinker",
  "self_forcing_unified_reward_flex",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  made = tiny_wan.make(tmp_path_factory.mktemp("wan"))
  tiny_wan.lora(made / "lora.pt")
  (made / "long.txt").write_text("a cat " * 300)
  return made


def section(folder, **fields):
  """The config's section for the tiny files, checked field by field."""
  c = self_forcing.get_config()
  for name, value in {**tiny_wan.model_fields(folder), **fields}.items():
    c.model[name] = value
  return config.convert(c).model


def quiet(text):
  del text


def test_sizes_are_told_by_the_files_in_every_layout(folder, tmp_path):
  wan = tiny_wan.PATHS
  dit = stored_sizes.dit_sizes(folder / wan["checkpoint"], part="generator")
  assert dit == tiny_wan.DIT_CONFIG
  assert stored_sizes.umt5_sizes(folder / wan["text_encoder"]) == tiny_wan.UMT5_CONFIG
  assert stored_sizes.vae_sizes(folder / wan["vae"]) == tiny_wan.vae_config()
  for family, made, table, name in (
    (DIT, tiny_wan.DIT_CONFIG, DIT_DIFFUSERS_KEYS, "dit"),
    (UMT5, tiny_wan.UMT5_CONFIG, UMT5_HF_KEYS, "umt5"),
  ):
    ours = {path: np.zeros(like.shape, np.float32) for path, like in family.like(made).items()}
    file = tmp_path / f"{name}.safetensors"
    save_file({n: np.ascontiguousarray(a) for n, a in to_official(ours, table)}, file)
    assert getattr(stored_sizes, f"{name}_sizes")(file) == made
  # A config beside the weights tells the number of heads, which no tensor does.
  (tmp_path / "config.json").write_text('{"num_attention_heads": 4}')
  assert stored_sizes.dit_sizes(tmp_path / "dit.safetensors").num_heads == 4


def test_a_recipe_s_model_is_the_preset_at_its_resolution():
  for recipe, latents in ((self_forcing, 21), (longlive, 33)):
    model = config.convert(recipe.get_config()).model
    dit, sampler = PRESETS[model.name]
    assert (model.frames - 1) // 4 + 1 == latents
    assert (sampler.latent_height * 8, sampler.latent_width * 8) == (model.height_px, 832)
    assert dit.remat == model.remat


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_complete_but_for_the_paths(name):
  c = importlib.import_module(f"configs.{name}").get_config()
  settings = config.convert(c)
  assert settings.candidates == 12 and settings.algorithm.minibatches == 2
  assert (settings.runtime.actor_workers, settings.runtime.reward_workers) == (4, 2)
  with pytest.raises(ValueError, match=r"^model\.checkpoint is ''; .* needs the transformer's"):
    config.validate(c)


@pytest.mark.parametrize(
  ("fields", "says"),
  [
    ({"model.vae": ""}, "model.vae is ''; model 'custom' needs the video autoencoder's weights"),
    ({"model.tokenizer": "/none"}, "model.tokenizer is '/none', which does not exist"),
    ({"model.part": ""}, "model.checkpoint: {folder}/self_forcing_dmd.pt has several parts"),
    ({"model.part": "ema"}, "has no part 'ema'; it has 'generator', 'generator_ema', 'critic'"),
    ({"model.name": "self-forcing"}, "does not fit the model; missing: blocks.{{2-29}}."),
    ({"model.sampler": ""}, "model.sampler is ''; a custom model has none of its own"),
    ({"model.sampler": "digits"}, "model.sampler is 'digits'; use one of 'wan2.1-1.3b'"),
    ({"model.height_px": 40}, "model.height_px is 40; it must be a multiple of 16, so 32 or 48"),
    ({"model.precision": "fp8"}, "model.precision is 'fp8'; use"),
    ({"model.remat": "all"}, "model.remat is 'all'; use"),
    ({"model.adapter": "{folder}/none.pt"}, "none.pt', which does not exist; name a LoRA file"),
    ({"model.adapter": "{folder}/lora.pt"}, "does not say its alpha; set model.adapter_alpha"),
    ({"model.adapter_alpha": 2.0}, "model.adapter: adapter_alpha is 2 without an adapter"),
    ({"model.adapter": "{folder}/Wan2.1_VAE.pth"}, "holds 0 adapters of a generator"),
    ({"model.vae": "{folder}/self_forcing_dmd.pt"}, "model.vae: {folder}/self_forcing_dmd.pt has"),
    ({"prompts.train": "world:train"}, "which model 'custom' does not bring; name a text"),
    ({"prompts.train": ""}, "prompts.train is ''; name a text, CSV or JSONL file"),
    ({"reward.name": "world", "reward.function": ""}, "brings no judge 'world'"),
    ({"reward.function": ""}, "reward.function"),
    (
      {"prompts.overflow": "refuse", "prompts.train": "{folder}/long.txt"},
      "line 1: the prompt has",
    ),
  ],
)
def test_what_cannot_work_is_refused_in_one_sentence(folder, fields, says):
  c = self_forcing.get_config()
  given = {
    **{f"model.{name}": value for name, value in tiny_wan.model_fields(folder).items()},
    **tiny_wan.run_fields(folder),
    **fields,
  }
  for name, value in given.items():
    group, _, field = name.rpartition(".")
    value = value.format(folder=folder) if isinstance(value, str) else value
    (c[group] if group else c)[field] = value
  with pytest.raises(ValueError) as error:
    config.validate(c)
  assert says.format(folder=folder) in str(error.value) and "\n" not in str(error.value)


def test_the_embedded_world_takes_no_files_of_others():
  c = quickstart.get_config()
  c.model.vae = "Wan2.1_VAE.pth"
  with pytest.raises(ValueError, match=r"model\.vae is .*'digits' brings its own"):
    config.validate(c)


def test_precision_and_remat_reach_every_world():
  c = quickstart.get_config()
  c.model.precision, c.model.remat = "mixed", "block"
  dit, _ = model_sizes(config.convert(c))
  assert (dit.precision, dit.remat) == ("mixed", "block")


def test_a_config_without_the_new_fields_is_still_one():
  c = quickstart.get_config()
  for field in ("part", "vae", "weights_dtype", "height_px"):
    del c.model[field]
  assert config.convert(c) == config.convert(quickstart.get_config())


def test_the_named_part_is_loaded_in_the_asked_type(folder):
  world = load_world(section(folder, weights_dtype="bfloat16"), say=quiet)
  assert {a.dtype.name for a in parameters(world.dit).values()} == {"bfloat16"}
  assert {a.dtype.name for a in parameters(world.vae).values()} == {"bfloat16"}
  assert world.vae.dtype == jnp.bfloat16
  stored = tiny_wan.state(DIT, tiny_wan.DIT_CONFIG, 1)["blocks.1.ffn.0.weight"].T
  ours = parameters(world.dit)["blocks.ffn.up.kernel"][1]
  np.testing.assert_array_equal(ours, stored.astype(ml_dtypes.bfloat16))


def test_longlive_s_adapter_is_merged_into_the_frozen_weights(folder):
  tree = tiny_wan.lora(folder / "lora.pt")
  fields = {"adapter": str(folder / "lora.pt"), "adapter_alpha": 2.0}
  base = load_dit(folder / tiny_wan.PATHS["checkpoint"], tiny_wan.DIT_CONFIG, part="generator_ema")
  merged = load_transformer(section(folder, **fields))
  narrow = load_transformer(section(folder, **fields, weights_dtype="bfloat16"))
  for target, path in (("self_attn.q", "blocks.self_attn.q"), ("ffn.2", "blocks.ffn.down")):
    a, b = (tree[target][letter].astype(np.float64) for letter in "ab")
    name = f"{path}.kernel"
    expected = np.asarray(parameters(base)[name], np.float64) + 2.0 / 4 * a @ b
    np.testing.assert_allclose(parameters(merged)[name], expected, atol=1e-6)
    # Only the sum is rounded.
    once = np.asarray(parameters(merged)[name]).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(parameters(narrow)[name], once)
  np.testing.assert_array_equal(parameters(merged)["head.kernel"], parameters(base)["head.kernel"])


def test_weights_come_cut_over_the_mesh(folder):
  mesh = Mesh(np.array(jax.devices()[:2]).reshape(2, 1), ("fsdp", "seq"))
  fields = {"adapter": str(folder / "lora.pt"), "adapter_alpha": 4.0}
  whole = load_transformer(section(folder, **fields))
  cut = load_transformer(section(folder, **fields), mesh=mesh)
  assert cut.mesh is mesh
  kernel = parameters(cut)["blocks.ffn.up.kernel"]
  assert {s.data.shape for s in kernel.addressable_shards} == {(2, 128, 96)}
  for name, array in parameters(whole).items():
    np.testing.assert_allclose(parameters(cut)[name], array, atol=1e-6)


def test_a_video_is_decoded_latent_frame_by_latent_frame(folder):
  decode = frame_decoder(load_vae(folder / tiny_wan.PATHS["vae"], tiny_wan.vae_config()))
  latents = np.random.default_rng(0).standard_normal((3, 16, 2, 2)).astype(np.float32)
  video = decode(latents)
  assert video.shape == (9, 16, 16, 3) and video.dtype == np.uint8
  for count in (1, 2):  # what comes later changes nothing before it
    np.testing.assert_array_equal(decode(latents[:count]), video[: 4 * count - 3])
  assert not (video[1:5] == video[5:]).all()
  pixels = np.asarray([[[[-1.0, 0.999]]] * 3], np.float32)
  np.testing.assert_array_equal(to_bytes(jnp.asarray(pixels))[0, 0, :, 0], [0, 254])


def test_the_resolution_is_the_settings(folder):
  sizes = wan_sizes(section(folder, height_px=32, width_px=48))
  assert (sizes.sampler.latent_height, sizes.sampler.latent_width) == (4, 6)
  own = wan_sizes(section(folder, height_px=0, width_px=0, sampler="longlive-1.3b"))
  assert (own.sampler.latent_height, own.sampler.latent_width) == (60, 104)
  assert own.sampler.window_frames == 12 and own.sampler.sink_frames == 3
  check(section(folder))
