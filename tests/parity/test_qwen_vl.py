"""Qwen-VL against Hugging Face's models on random weights, through their own checkpoint files.

Logits of whole sequences, 64 greedy tokens of mixed requests alone and together, and recordings
made here of sizes that no other test has.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.generate.engine import Engine
from models.generate.request import EngineConfig, Request
from models.layers.dense import tree_of
from models.qwen_vl.chat import Prompt, visual_ids
from models.qwen_vl.checkpoint import load
from models.qwen_vl.model import forward
from models.qwen_vl.positions import place
from models.qwen_vl.preprocess import Limits, encode_image, encode_video
from models.qwen_vl.vision import encode_slices
from sbjax import verify
from tests.tiny_judge import encode_text

torch = pytest.importorskip("torch", reason="needs the extra `parity`")
transformers = pytest.importorskip("transformers", reason="needs the extra `parity`")

pytestmark = pytest.mark.parity

VOCAB = 200
LIMITS = Limits(1, 10**6)
MARKS = {"image": 190, "video": 191, "vision_start": 192, "vision_end": 193}
# family, tied, width, heads, key-value heads, patch
CASES = (("qwen2.5", False, 48, 6, 2, 14), ("qwen3", True, 64, 4, 4, 16))


def _theirs(family, tied, dim, heads, kv_heads, patch):
  torch.manual_seed(0)
  half = dim // heads // 2
  section = [half - 2 * (half // 4), half // 4, half // 4]
  rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": section}
  text = {
    "vocab_size": VOCAB,
    "hidden_size": dim,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": heads,
    "num_key_value_heads": kv_heads,
    "max_position_embeddings": 2048,
    "rope_parameters": rope,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
  }
  vision = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_heads": 4,
    "out_hidden_size": dim,
    "patch_size": patch,
  }
  if family == "qwen2.5":
    vision |= {"window_size": 112, "fullatt_block_indexes": [1]}
    kinds = transformers.Qwen2_5_VLConfig, transformers.Qwen2_5_VLForConditionalGeneration
  else:
    text["head_dim"] = dim // heads
    text["rope_parameters"]["mrope_interleaved"] = True
    vision |= {"num_position_embeddings": 25, "deepstack_visual_indexes": [0, 2]}
    kinds = transformers.Qwen3VLConfig, transformers.Qwen3VLForConditionalGeneration
  ids = {f"{name}_token_id": number for name, number in MARKS.items()}
  config = kinds[0](text_config=text, vision_config=vision, tie_word_embeddings=tied, **ids)
  model = kinds[1](config).eval()
  for parameter in model.parameters():
    if parameter.ndim > 1:
      torch.nn.init.normal_(parameter, std=1.2 * parameter[0].numel() ** -0.5)
    else:
      torch.nn.init.normal_(parameter, mean=float(parameter.mean() > 0.5), std=0.1)
  return model


@pytest.fixture(scope="module", params=CASES, ids=[case[0] for case in CASES])
def pair(request, tmp_path_factory):
  """Their model, our sizes and parameters, and the folder that holds the weights."""
  theirs = _theirs(*request.param)
  folder = tmp_path_factory.mktemp(request.param[0])
  theirs.save_pretrained(folder)
  ours = load(folder)
  return theirs, dataclasses.replace(ours.config, after_visual="grid"), tree_of(ours), folder


def _prompt(config, *parts, seed):
  rng = np.random.default_rng(seed)
  ids, visuals = [], []
  for part in parts:
    if isinstance(part, int):
      ids += rng.integers(3, 180, part).tolist()
      continue
    kind, frames, height, width = part
    pixels = rng.integers(0, 256, (frames, height, width, 3), dtype=np.uint8)
    if kind == "image":
      made = encode_image(pixels[0], config.vision, LIMITS)
    else:
      # More than a second apart: time positions of Qwen2.5 then outrun its grid.
      made = encode_video(pixels, config.vision, np.arange(frames) * 1.5, LIMITS)
    ids += visual_ids(config, encode_text, made)
    visuals.append(made)
  return Prompt(np.asarray(ids, np.int32), tuple(visuals))


def _prompts(config):
  return [
    _prompt(config, 7, seed=1),
    _prompt(config, 5, ("image", 1, 70, 150), 5, seed=2),
    _prompt(config, 9, ("video", 7, 60, 60), 4, seed=3),
    _prompt(config, 60, seed=4),
    _prompt(
      config, 3, ("image", 1, 130, 60), ("video", 2, 90, 40), ("image", 1, 30, 30), 8, seed=5
    ),
  ]


def _inputs(config, prompt):
  """Their arguments."""
  ids = torch.tensor(prompt.ids[None].astype(np.int64))
  kind = (prompt.ids == config.image_token) + 2 * (prompt.ids == config.video_token)
  made = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
  if prompt.visuals:
    made["mm_token_type_ids"] = torch.tensor(kind[None])
  for video, pixels, grid in (
    (False, "pixel_values", "image_grid_thw"),
    (True, "pixel_values_videos", "video_grid_thw"),
  ):
    chosen = [v for v in prompt.visuals if v.visual.video is video]
    if chosen:
      flat = [v.patches.reshape(-1, config.vision.patch_width) for v in chosen]
      made[pixels] = torch.tensor(np.concatenate(flat))
      made[grid] = torch.tensor([list(v.visual.grid) for v in chosen])
      if video and config.family == "qwen2.5":
        made["second_per_grid_ts"] = torch.tensor([v.visual.seconds_per_slice for v in chosen])
  return made


def test_logits_of_whole_sequences_agree(pair):
  theirs, config, p, _ = pair
  for prompt in _prompts(config)[1:3]:
    visuals = [v.visual for v in prompt.visuals]
    placed = place(config, prompt.ids, visuals)
    (encoded,) = prompt.visuals
    grid = encoded.visual.grid
    made = encode_slices(
      p["visual"], config.vision, jnp.asarray(encoded.patches), grid.height, grid.width
    )
    ours = jax.jit(forward, static_argnames="config")(
      p,
      config=config,
      ids=jnp.asarray(prompt.ids)[None],
      positions=jnp.asarray(placed.positions)[None],
      features=made.tokens.reshape(-1, config.text.dim),
      visual_rows=jnp.asarray(placed.visual_rows)[None],
      deep=made.deep.reshape(made.deep.shape[0], placed.visual_rows.max() + 1, config.text.dim),
    )
    with torch.no_grad():
      reference = theirs(**_inputs(config, prompt)).logits.numpy()
    assert np.abs(reference).max() > 1
    np.testing.assert_allclose(np.asarray(ours), reference, atol=1e-3)


def test_64_greedy_tokens_agree_alone_and_together(pair):
  theirs, config, p, _ = pair
  prompts = _prompts(config)
  sizes = EngineConfig(
    slots=2, max_length=256, slot_buckets=(2,), length_buckets=(512,), chunk_buckets=(256,)
  )
  requests = [Request(prompt, 64) for prompt in prompts]
  together = Engine(p, config, sizes).generate(requests)
  for request, result in zip(requests, together, strict=True):
    alone = Engine(p, config, sizes).generate([request])[0]
    with torch.no_grad():
      made = theirs.generate(
        **_inputs(config, request.prompt), max_new_tokens=64, min_new_tokens=64, do_sample=False
      )
    reference = made[0, len(request.prompt.ids) :].tolist()
    assert len(set(reference)) > 5
    assert result.tokens.tolist() == reference
    assert alone.tokens.tolist() == reference


def test_verify_passes_on_a_recording_of_other_sizes_and_finds_a_wrong_number(
  pair, tmp_path, capsys
):
  theirs, config, _, folder = pair
  prompt = _prompt(config, 4, ("image", 1, 100, 140), 2, ("video", 4, 60, 100), 3, seed=6)
  with torch.no_grad():
    given = _inputs(config, prompt)
    logits = theirs(**given).logits.numpy()
  given.pop("attention_mask"), given.pop("mm_token_type_ids")
  arrays = {name: value.numpy() for name, value in given.items()}
  if "second_per_grid_ts" in arrays:
    arrays["second_per_grid"] = arrays.pop("second_per_grid_ts")
  (tmp_path / "x.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
  data = json.loads((folder / "config.json").read_text())
  (tmp_path / "x.config.json").write_text(json.dumps(data))

  def outcome(**changed):
    np.savez(tmp_path / "x.io.npz", **{**arrays, "logits": logits, **changed})
    return verify.main([str(tmp_path)])

  assert outcome() == 0
  wrong = logits.copy()
  wrong[0, 5, 7] += 0.01
  assert outcome(logits=wrong) == 1
  assert "logits" in next(x for x in capsys.readouterr().out.splitlines() if "BEYOND" in x)
  assert outcome(surprise=np.ones(3)) == 2
  assert "'surprise' that is not known" in capsys.readouterr().err
