"""Qwen-VL: positions, pre-processing, cache, checkpoints, sharding."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh

from models.generate.steps import Chunk
from models.layers.dense import tree_of
from models.qwen_vl.cache import Extend, cache_bytes, empty_cache
from models.qwen_vl.chat import chat_prompt
from models.qwen_vl.checkpoint import keys, load, save
from models.qwen_vl.model import QwenVL, forward
from models.qwen_vl.positions import Grid, Visual, merge_order, place, rotary_axes, windows
from models.qwen_vl.preprocess import (
  IMAGE_LIMITS,
  Limits,
  encode_image,
  resize,
  sample_frames,
  slice_times,
  smart_size,
  smart_video_size,
  to_patches,
)
from models.qwen_vl.presets import PRESETS, from_json, preset
from models.qwen_vl.sharding import parameter_shardings
from models.qwen_vl.text import decode, embed_tokens, logits
from models.weights import parameters, write_tensors
from tests.tiny_judge import encode_text, prompt, tiny_config, tiny_model, with_rule

FAMILIES = ("qwen2.5", "qwen3")


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request):
  return tiny_model(request.param)


def _logits(config, p, asked, features, deep):
  placed = place(config, asked.ids, [v.visual for v in asked.visuals])
  return jax.jit(forward, static_argnames="config")(
    p,
    config=config,
    ids=jnp.asarray(asked.ids)[None],
    positions=jnp.asarray(placed.positions)[None],
    features=features,
    visual_rows=jnp.asarray(placed.visual_rows)[None],
    deep=deep,
  )


def test_text_counts_on_all_axes_and_a_visual_spreads():
  config = tiny_config("qwen2.5")
  ids = np.array([1, 2, 92, *[90] * 6, 93, 3], np.int32)
  placed = place(config, ids, [Visual(Grid(1, 4, 6))])
  assert placed.positions[:, :3].tolist() == [[0, 1, 2]] * 3
  assert placed.positions[:, 3:9].tolist() == [
    [3] * 6,
    [3, 3, 3, 4, 4, 4],
    [3, 4, 5, 3, 4, 5],
  ]
  assert placed.positions[:, 9:].tolist() == [[6, 7]] * 3
  assert placed.next_position == 8
  assert placed.visual_rows.tolist() == [-1, -1, -1, 0, 1, 2, 3, 4, 5, -1, -1]


def test_after_a_long_video_text_goes_on_by_the_chosen_rule():
  config = tiny_config("qwen2.5")
  ids = np.array([1, *[91] * 4, 2], np.int32)
  video = [Visual(Grid(4, 2, 2), True, 1.6)]
  largest = place(config, ids, video)
  assert largest.positions[0].tolist() == [0, 1, 4, 7, 10, 11]
  grid = place(with_rule(config, "grid"), ids, video)
  assert grid.positions[0].tolist() == [0, 1, 4, 7, 10, 2]
  assert (largest.next_position, grid.next_position) == (12, 3)


def test_a_qwen3_video_stands_one_slice_a_run():
  config = tiny_config("qwen3")
  ids = np.array([1, 91, 91, 2, 91, 91, 3], np.int32)
  placed = place(config, ids, [Visual(Grid(2, 2, 4), True)])
  assert placed.positions[0].tolist() == [0, 1, 1, 3, 4, 4, 6]
  assert placed.visual_rows.tolist() == [-1, 0, 1, -1, 2, 3, -1]


@pytest.mark.parametrize(
  ("ids", "visuals", "told"),
  [
    ([1, 90], [], "no visual is left"),
    ([1, 90, 2], [Visual(Grid(1, 2, 4))], "needs 2 placeholders"),
    ([1, 2], [Visual(Grid(1, 2, 2))], "too few placeholders"),
    ([91, 1], [Visual(Grid(1, 2, 2))], "needs 1 placeholders of id 90"),
  ],
)
def test_placeholders_must_fit_the_visuals(ids, visuals, told):
  with pytest.raises(ValueError, match=told):
    place(tiny_config("qwen2.5"), np.array(ids, np.int32), visuals)


def test_rotary_axes_take_turns_or_stand_in_runs():
  chunked, _ = rotary_axes(preset("qwen2.5-vl-7b").text)
  assert chunked.tolist() == [0] * 16 + [1] * 24 + [2] * 24
  turns, _ = rotary_axes(preset("qwen3-vl-8b").text)
  assert turns[:7].tolist() == [0, 1, 2, 0, 1, 2, 0]
  assert turns[60:].tolist() == [0] * 4
  assert np.bincount(turns).tolist() == [24, 20, 20]


@given(height=st.integers(1, 9), width=st.integers(1, 9))
@settings(max_examples=30, deadline=None)
def test_windows_hold_every_patch_once(height, width):
  config = tiny_config("qwen2.5").vision
  view = windows(config, 2 * height, 2 * width)
  patches = 4 * height * width
  assert sorted(view.members[view.filled]) == list(range(patches))
  assert np.array_equal(view.members.reshape(-1)[view.place], np.arange(patches))
  side = config.window_px // config.patch_px
  rows, columns = (merge_order(x, 2) for x in np.indices((2 * height, 2 * width)))
  for members, filled in zip(view.members, view.filled, strict=True):
    place_of = np.stack([rows[members[filled]] // side, columns[members[filled]] // side])
    assert (place_of == place_of[:, :1]).all()


@pytest.mark.parametrize(
  ("source", "old", "narrow", "new"),
  [
    ((240, 416), (252, 420), (364, 616), (256, 416)),
    ((360, 640), (364, 644), (364, 644), (352, 640)),
    ((480, 832), (476, 840), (476, 840), (480, 832)),
    ((512, 512), (504, 504), (504, 504), (512, 512)),
    ((720, 1280), (728, 1288), (728, 1288), (704, 1280)),
  ],
)
def test_sizes_are_those_of_the_processors(source, old, narrow, new):
  assert smart_size(*source, 28, IMAGE_LIMITS["qwen2.5"]) == old
  assert smart_size(*source, 28, Limits(256 * 28**2, 1280 * 28**2)) == narrow
  assert smart_size(*source, 32, IMAGE_LIMITS["qwen3"]) == new


@given(
  height=st.integers(8, 2000),
  width=st.integers(8, 2000),
  frames=st.integers(1, 40),
  small=st.integers(1, 10**5),
)
@settings(max_examples=50, deadline=None)
def test_sizes_are_multiples_within_the_limits(height, width, frames, small):
  limits = Limits(small, 40 * small + 10**4)
  if max(height, width) > 200 * min(height, width):
    return
  rows, columns = smart_size(height, width, 8, limits)
  assert rows % 8 == 0 and columns % 8 == 0
  assert rows * columns >= limits.min_px
  # A side of one token cannot shrink, so a very long image may stay too large.
  assert rows * columns <= limits.max_px or min(rows, columns) == 8
  rows, columns = smart_video_size(frames, height, width, 8, limits)
  assert rows % 8 == 0 and columns % 8 == 0 and min(rows, columns) > 0


def test_an_image_too_long_is_refused():
  with pytest.raises(ValueError, match="no side may be more than 200 times"):
    smart_size(10, 2010, 28, IMAGE_LIMITS["qwen2.5"])
  with pytest.raises(ValueError, match="8-bit RGB"):
    encode_image(np.zeros((4, 4, 3), np.float32), tiny_config("qwen3").vision)


def test_patches_hold_the_pixels_of_their_place():
  config = tiny_config("qwen3").vision
  frames = np.random.default_rng(0).integers(0, 256, (3, 16, 24, 3), dtype=np.uint8)
  patches, grid = to_patches(frames, config)
  assert grid == (2, 4, 6)
  index = int(np.flatnonzero(merge_order(np.arange(24).reshape(4, 6), 2) == 2 * 6 + 5)[0])
  cube = patches[1, index].reshape(3, 2, 4, 4)
  wanted = frames[2, 8:12, 20:24].transpose(2, 0, 1) / 127.5 - 1
  np.testing.assert_allclose(cube[:, 0], wanted, atol=1e-6)
  np.testing.assert_array_equal(cube[:, 1], cube[:, 0])  # the odd frame is repeated
  assert resize(frames, 16, 24) is frames


def test_frames_and_times():
  assert sample_frames("qwen3", 81, 16.0).tolist() == [0, 9, 18, 27, 36, 44, 53, 62, 71, 80]
  assert sample_frames("qwen2.5", 81, 16.0).tolist() == [0, 8, 16, 24, 32, 40, 48, 56, 64, 72]
  assert slice_times(np.array([0.0, 0.5, 1.0]), 2) == (0.25, 1.0)
  with pytest.raises(ValueError, match="needs two frames"):
    sample_frames("qwen3", 1, 16.0)


def test_a_chat_has_its_turns_and_marks():
  config = tiny_config("qwen3")
  video = prompt(config, "video", 1).visuals[0]
  asked = chat_prompt(config, encode_text, [("user", ["look", video, "judge"])])
  text = encode_text
  per_slice = [92, *[91] * 4, 93]
  assert asked.ids.tolist() == [
    *text("<|im_start|>user\nlook"),
    *text("<0.2 seconds>"),
    *per_slice,
    *text("<1.0 seconds>"),
    *per_slice,
    *text("judge<|im_end|>\n<|im_start|>assistant\n"),
  ]


def test_decoding_with_a_cache_equals_one_forward_pass(tiny):
  config, _, p = tiny
  asked = prompt(config, 5, "image", 3, "video", 9)
  rng = np.random.default_rng(3)
  rows = sum(v.visual.grid.tokens(2) for v in asked.visuals)
  features = jnp.asarray(rng.standard_normal((rows, 16)), jnp.float32)
  levels = len(config.vision.deepstack)
  deep = jnp.asarray(rng.standard_normal((levels, rows, 16)), jnp.float32)
  whole = _logits(config, p, asked, features, deep)[0]
  placed = place(config, asked.ids, [v.visual for v in asked.visuals])
  seen = placed.visual_rows >= 0
  picked = np.maximum(placed.visual_rows, 0)
  cache, at = empty_cache(config.text, 3, 64), 0

  @jax.jit
  def run(p, cache, chunk):
    extend = Extend(cache, chunk.start, chunk.rows)
    x = jnp.where(chunk.is_visual[:, :, None], chunk.features, embed_tokens(p, chunk.ids))
    hidden = decode(p, config.text, x, chunk.positions, extend, chunk.deep)
    return extend.cache, logits(p, config.text, hidden)

  for size in (12, 12, len(asked.ids) - 25, 1):
    span = slice(at, at + size)
    chunk = Chunk(
      jnp.asarray(asked.ids[span])[None],
      jnp.asarray(placed.positions[:, span])[None],
      jnp.array([1], jnp.int32),
      jnp.array([at], jnp.int32),
      features[picked[span]][None],
      jnp.asarray(seen[span])[None],
      (deep[:, picked[span]] * seen[span][None, :, None].astype(np.float32))[:, None],
    )
    cache, hidden = run(p["text"], cache, chunk)
    np.testing.assert_allclose(hidden[0], whole[span], atol=3e-5)
    at += size
  assert cache_bytes(config.text, 3, 64) == sum(a.nbytes for half in cache for a in half)


def test_padding_at_the_front_changes_nothing():
  config, _, p = tiny_model("qwen3", layers=1)
  ids = jnp.asarray(np.random.default_rng(0).integers(1, 80, (1, 9)), jnp.int32)
  positions = jnp.broadcast_to(jnp.arange(9, dtype=jnp.int32), (1, 3, 9))
  run = jax.jit(forward, static_argnames="config")
  alone = run(p, config=config, ids=ids, positions=positions)
  pad = ((0, 0), (4, 0))
  attended = jnp.pad(jnp.ones((1, 9), bool), pad)
  padded = run(
    p,
    config=config,
    ids=jnp.pad(ids, pad),
    positions=jnp.pad(positions, ((0, 0), *pad)),
    attended=attended,
  )
  np.testing.assert_allclose(padded[:, 4:], alone, atol=1e-5)
  assert np.isfinite(np.asarray(padded)).all()


def test_both_name_layouts_load(tiny, tmp_path):
  config, model, _ = tiny
  for nested in (False, True):
    write_tensors(tmp_path / "a.safetensors", parameters(model), keys(config, nested=nested))
    loaded = parameters(load(tmp_path, config))
    for name, value in parameters(model).items():
      np.testing.assert_array_equal(loaded[name], value)


def test_a_saved_model_has_the_hubs_names_and_is_refused_when_it_does_not_fit(tmp_path):
  config, model, _ = tiny_model("qwen2.5", tied=False)
  save(tmp_path / "a.safetensors", model)
  names = [key.official for key in keys(config)]
  assert "visual.merger.mlp.0.weight" in names and "lm_head.weight" in names
  assert "model.layers.1.self_attn.q_proj.bias" in names
  with pytest.raises(ValueError, match=r"does not fit the model; .*missing"):
    load(tmp_path, tiny_config("qwen2.5", layers=3, tied=False))
  with pytest.raises(ValueError, match=r"has no config\.json"):
    load(tmp_path)
  (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
  with pytest.raises(ValueError, match="model_type 'llama'"):
    load(tmp_path)


def test_an_old_config_with_the_decoders_fields_on_top_is_read():
  data = {
    "model_type": "qwen2_5_vl",
    "vocab_size": 152_064,
    "hidden_size": 3584,
    "intermediate_size": 18_944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "rope_theta": 1e6,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128_000,
    "tie_word_embeddings": False,
    "image_token_id": 151_655,
    "video_token_id": 151_656,
    "vision_start_token_id": 151_652,
    "vision_end_token_id": 151_653,
    "vision_config": {
      "depth": 32,
      "hidden_size": 1280,
      "num_heads": 16,
      "intermediate_size": 3420,
      "out_hidden_size": 3584,
      "patch_size": 14,
      "window_size": 112,
      "fullatt_block_indexes": [7, 15, 23, 31],
      "tokens_per_second": 2,
    },
  }
  assert from_json("qwen2.5-vl-7b", data) == PRESETS["qwen2.5-vl-7b"]
  del data["vision_config"]["depth"]
  with pytest.raises(ValueError, match="lacks the config field 'depth'"):
    from_json("x", data)


def _count(config):
  model = nnx.eval_shape(lambda: QwenVL(config, rngs=nnx.Rngs(0)))
  return sum(int(np.prod(a.shape)) for a in parameters(model).values())


@pytest.mark.parametrize(("name", "billions"), [("qwen2.5-vl-7b", 8.29), ("qwen3-vl-4b", 4.44)])
def test_presets_have_the_published_number_of_parameters(name, billions):
  config = PRESETS[name]

  # One layer more or less of each part gives all of them.
  def shallow(depth, layers):
    vision = dataclasses.replace(config.vision, depth=depth, full_blocks=(), deepstack=())
    text = dataclasses.replace(config.text, num_layers=layers)
    return _count(dataclasses.replace(config, vision=vision, text=text))

  base = shallow(1, 1)
  total = base + (shallow(2, 1) - base) * (config.vision.depth - 1)
  total += (shallow(1, 2) - base) * (config.text.num_layers - 1)
  levels, joined = len(config.vision.deepstack), 4 * config.vision.dim
  merger = 2 * joined + joined * (joined + 1) + config.vision.out_dim * (joined + 1)
  assert round((total + levels * merger) / 1e9, 2) == billions


def test_a_sharded_model_gives_the_same(tmp_path):
  config, model, p = tiny_model("qwen3", layers=1)
  mesh = Mesh(np.asarray(jax.devices()).reshape(2, 2), ("fsdp", "seq"))
  save(tmp_path / "a.safetensors", model)
  cut = load(tmp_path / "a.safetensors", config, mesh=mesh)
  kernel = parameters(cut)["text.layers.0.o.weight"]
  assert kernel.sharding.spec == jax.sharding.PartitionSpec(None, "fsdp")
  assert kernel.addressable_shards[0].data.shape == (16, 16)
  ids = jnp.asarray(np.random.default_rng(0).integers(1, 80, (2, 8)), jnp.int32)
  positions = jnp.broadcast_to(jnp.arange(8, dtype=jnp.int32), (2, 3, 8))
  run = jax.jit(forward, static_argnames="config")
  np.testing.assert_allclose(
    run(tree_of(cut), config=config, ids=ids, positions=positions),
    run(p, config=config, ids=ids, positions=positions),
    atol=1e-5,
  )
  with pytest.raises(ValueError, match="must have 'fsdp' and 'seq'"):
    parameter_shardings({}, Mesh(np.asarray(jax.devices()), ("data",)))


def test_settings_that_cannot_work_are_refused():
  with pytest.raises(ValueError, match=r"use one of qwen2\.5-vl-32b"):
    preset("qwen")
  text = tiny_config("qwen3").text
  with pytest.raises(ValueError, match="must add up to half of head_dim"):
    dataclasses.replace(text, head_dim=16)
  with pytest.raises(ValueError, match="must divide num_heads"):
    dataclasses.replace(text, num_kv_heads=3)
