"""Makes the reasoner anew: `python -m sbjax.worlds.digits.reasoner.create --out=DIR --seed=0`.

Stages run in order and each leaves its result in the folder's `work`, so a run that was broken off
continues where it was:

  videos     videos of the base model, and what the world's judge reads in them
  tower      the vision tower alone
  pairs      the decoder, on what the tower sees
  agreement  how often it is right, and agrees with itself

The folder is then a judge in the Hugging Face layout: `--config.reward.judge.checkpoint=DIR`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
from typing import Any

import numpy as np
from flax import nnx

from models.qwen_vl import checkpoint
from models.qwen_vl.model import QwenVL
from models.qwen_vl.presets import QwenVLConfig
from sbjax.worlds.digits import training, world
from sbjax.worlds.digits.reasoner import agreement, text, tower, train, videos
from sbjax.worlds.digits.reasoner.videos import Clips

MAX_SHIPPED_BYTES = 15_000_000
CHUNK = 1200


@dataclasses.dataclass(frozen=True)
class Effort:
  """How much each stage does."""

  videos: int = 1200
  tower: tower.Schedule = dataclasses.field(default_factory=tower.Schedule)
  pairs: train.Schedule = dataclasses.field(default_factory=train.Schedule)
  measured: int = 400


def quick_effort() -> Effort:
  """A few steps of everything: shows that the command works, the judge it makes is useless."""
  return Effort(16, tower.Schedule(steps=2, videos=4), train.Schedule(steps=2, videos=4), 6)


def to_json(config: QwenVLConfig) -> dict[str, Any]:
  """The sizes as a Hugging Face `config.json`; Qwen3-VL only."""
  vision, decoder = config.vision, config.text
  return {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "image_token_id": config.image_token,
    "video_token_id": config.video_token,
    "vision_start_token_id": config.vision_start,
    "vision_end_token_id": config.vision_end,
    "tie_word_embeddings": decoder.tied,
    "text_config": {
      "model_type": "qwen3_vl_text",
      "attention_bias": False,
      "head_dim": decoder.head_dim,
      "hidden_size": decoder.dim,
      "intermediate_size": decoder.ffn_dim,
      "max_position_embeddings": decoder.max_positions,
      "num_attention_heads": decoder.num_heads,
      "num_hidden_layers": decoder.num_layers,
      "num_key_value_heads": decoder.num_kv_heads,
      "rms_norm_eps": decoder.eps,
      "rope_parameters": {
        "mrope_section": list(decoder.mrope_section),
        "rope_theta": decoder.rope_theta,
        "rope_type": "default",
      },
      "vocab_size": decoder.vocab_size,
    },
    "vision_config": {
      "model_type": "qwen3_vl_vision",
      "deepstack_visual_indexes": list(vision.deepstack),
      "depth": vision.depth,
      "hidden_act": "gelu_pytorch_tanh",
      "hidden_size": vision.dim,
      "in_channels": vision.in_channels,
      "intermediate_size": vision.ffn_dim,
      "num_heads": vision.num_heads,
      "num_position_embeddings": vision.table_side**2,
      "out_hidden_size": vision.out_dim,
      "patch_size": vision.patch_px,
      "spatial_merge_size": vision.merge,
      "temporal_patch_size": vision.temporal_patch,
    },
  }


def write_folder(out: pathlib.Path, model: QwenVL) -> None:
  """The judge as a folder: weights in float16, sizes, tokenizer."""
  out.mkdir(parents=True, exist_ok=True)
  checkpoint.save(out / "model.safetensors", model, dtype=np.float16)
  (out / "config.json").write_text(json.dumps(to_json(model.config), indent=2) + "\n")
  text.tokenizer().save(str(out / "tokenizer.json"))
  (out / "tokenizer_config.json").write_text(
    json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}) + "\n"
  )


def cached_videos(work: pathlib.Path, the_world: world.World, count: int, seed: int) -> Clips:
  """The base model's videos; those that were made before are read."""
  found: Clips | None = None
  for number, at in enumerate(range(0, count, CHUNK)):
    path = work / f"videos_{number}.npz"
    if not path.exists():
      made = videos.generated(the_world, min(CHUNK, count - at), 1000 * seed + number)
      videos.save(path, made)
    some = videos.load(path)
    found = some if found is None else videos.join(found, some)
  assert found is not None
  return found


def create(out: pathlib.Path, seed: int, effort: Effort, the_world: world.World) -> dict[str, Any]:
  """Runs the stages that are not done; gives seed and agreement table."""
  work = out / "work"
  work.mkdir(parents=True, exist_ok=True)
  cache = cached_videos(work, the_world, effort.videos, seed)
  model = QwenVL(train.sizes(), rngs=nnx.Rngs(seed))
  tower_file = work / "tower.npz"
  if tower_file.exists():
    trained = training.load_tree(tower_file, nnx.to_pure_dict(nnx.state(model.visual, nnx.Param)))
    filled = nnx.state(model.visual, nnx.Param)
    nnx.replace_by_pure_dict(filled, trained)
    nnx.update(model.visual, filled)
  else:
    shown = train.mixed_batch(the_world.images, cache, effort.tower.videos)
    tower.train(model, shown, seed, effort.tower)
    training.save_tree(tower_file, nnx.to_pure_dict(nnx.state(model.visual, nnx.Param)))
  mixed = train.mixed_batch(the_world.images, cache, effort.pairs.videos)
  train.train_pairs(
    model, mixed, seed, effort.pairs, str(work), lambda step: write_folder(out, model)
  )
  write_folder(out, model)
  return {"seed": seed, "agreement": agreement.measure_both(out, the_world, effort.measured)}


def main() -> None:
  """The command."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--out", required=True, type=pathlib.Path, help="folder of the new judge")
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--world", default=None, help="world folder; the shipped one by default")
  parser.add_argument("--quick", action="store_true", help="a few steps of each stage")
  asked = parser.parse_args()
  effort = quick_effort() if asked.quick else Effort()
  made = create(asked.out, asked.seed, effort, world.load_world(asked.world))
  (asked.out / "reasoner.json").write_text(json.dumps(made, indent=2) + "\n")
  print(json.dumps(made, indent=2))
  size = sum(file.stat().st_size for file in asked.out.iterdir() if file.is_file())
  if size > MAX_SHIPPED_BYTES:
    raise ValueError(f"the judge has {size} bytes; at most {MAX_SHIPPED_BYTES} may ship")


if __name__ == "__main__":
  main()
