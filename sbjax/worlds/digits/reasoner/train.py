"""Trains the reasoner: first its tower alone, then its decoder on pairs of videos.

The decoder is most of the cost, and what it has to learn, which part of the prompt to look at for
which word, takes many small steps rather than few large ones. The tower stays as it is meanwhile.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from models.layers.dense import tree_of
from models.qwen_vl.model import QwenVL
from models.qwen_vl.presets import QwenVLConfig, TextConfig, VisionConfig
from models.qwen_vl.vision import encode_slices
from sbjax.rewards.digits_reasoner import SIDE_PX
from sbjax.worlds.digits import data, optim, prompts, training
from sbjax.worlds.digits.reasoner import pairs, text, tower, videos
from sbjax.worlds.digits.reasoner.videos import Clips

KEEP_EVERY = 100


def sizes() -> QwenVLConfig:
  """The reasoner's sizes: a Qwen3-VL to which a video is 16 tokens and the times of 4 slices."""
  ids = {token: i for i, token in enumerate(text.vocabulary())}
  return QwenVLConfig(
    "digits-reasoner",
    VisionConfig(
      "qwen3",
      depth=4,
      dim=128,
      num_heads=4,
      ffn_dim=384,
      out_dim=192,
      patch_px=8,
      temporal_patch=3,
      table_side=SIDE_PX // 8,
      deepstack=(1,),
    ),
    TextConfig(
      vocab_size=128,
      dim=192,
      ffn_dim=512,
      num_layers=4,
      num_heads=6,
      num_kv_heads=3,
      head_dim=32,
      mrope_section=(6, 5, 5),
      interleaved=True,
      rope_theta=1e4,
      qkv_bias=False,
      qk_norm=True,
      tied=True,
      max_positions=1024,
    ),
    image_token=ids["<|image_pad|>"],
    video_token=ids["<|video_pad|>"],
    vision_start=ids["<|vision_start|>"],
    vision_end=ids["<|vision_end|>"],
  )


@dataclasses.dataclass(frozen=True)
class Schedule:
  """The second lesson.

  Attributes:
    steps: how many.
    videos: of one step.
    peak, vector_peak: largest rates of Muon and AdamW.
    length: tokens of a sequence.
    alike: share of the steps in which pairs of twice the same video, all of them at first, give
      way to pairs of two: so the decoder learns to say what is there before it has to tell which
      of two is meant.
  """

  steps: int = 800
  videos: int = 16
  peak: float = 1e-2
  vector_peak: float = 2e-3
  length: int = 184
  alike: float = 0.3


def mixed_batch(images: data.DigitImages, cache: Clips, count: int) -> tower.Batch:
  """Draws batches: drawn videos of the reader half, and generated ones, which are shifted.

  Neighbours are of one kind: pairs are made of them. Half of the generated neighbours were made
  for prompts with the same digit, as a group's candidates are.
  """
  ink, labels = images.half("reader")
  listed = prompts.all_prompts()
  few = count // 4 * 2
  digit = prompts.parse_all(tuple(listed[i] for i in cache.asked))["digit"]

  def draw(rng: np.random.Generator) -> Clips:
    clips = videos.drawn(rng, count - few, ink, labels, spoiled=bool(rng.uniform() < 0.7))
    rows = rng.integers(0, len(cache), few)
    for at in range(0, few, 4):
      alike = np.flatnonzero(digit == digit[rows[at]])
      rows[at + 1] = rng.choice(alike)
    chosen = cache.rows(rows)
    moved = dataclasses.replace(chosen, frames=videos.shifted(rng, chosen.frames))
    return videos.join(clips, moved)

  return draw


def train_pairs(
  model: QwenVL,
  batch: tower.Batch,
  seed: int,
  schedule: Schedule,
  workdir: str,
  after: Callable[[int], None] | None = None,
) -> None:
  """Trains `model.text` in place; continues from the newest kept step of `workdir`."""
  config, tokenizer = model.config, text.tokenizer()
  visual = tree_of(model.visual)
  graph, state = nnx.split(model.text)
  merge = optim.merger(graph, state)
  params = optim.plain(state)
  kept = [
    number
    for number in (*range(KEEP_EVERY, schedule.steps, KEEP_EVERY), schedule.steps)
    if os.path.exists(os.path.join(workdir, f"pairs_{number}.npz"))
  ]
  start = max(kept, default=0)
  if start:
    params = training.load_tree(os.path.join(workdir, f"pairs_{start}.npz"), params)
    print(f"pairs: continues from step {start}", flush=True)
  rate = optim.cosine(1.0, schedule.steps, 20)
  optimiser = optim.muon_for(
    tower.matrices,
    lambda step: schedule.peak * rate(step + start),
    lambda step: schedule.vector_peak * rate(step + start),
  )
  moments = optimiser.init(params)
  side = SIDE_PX // config.vision.patch_px

  @jax.jit
  def step(params, moments, visual, patches, made):
    seen = encode_slices(visual, config.vision, patches, side, side)

    def objective(p):
      return pairs.loss(p, config, seen, made)

    (value, right), gradient = jax.value_and_grad(objective, has_aux=True)(params)
    updates, moments = optimiser.update(gradient, moments, params)
    return optax.apply_updates(params, updates), moments, value, right

  rng = np.random.default_rng([seed, 91, start])
  progress = training.Progress("pairs", schedule.steps - start)
  for number in range(start, schedule.steps):
    clips = batch(rng)
    encoded = [pairs.encoded(view, config) for view in clips.views()]
    asked = pairs.random_pairs(
      rng, clips, max(0.0, 1.0 - number / (schedule.alike * schedule.steps))
    )
    made = pairs.lesson(config, tokenizer, clips, encoded, asked, schedule.length)
    patches = jnp.asarray(np.concatenate([one.patches for one in encoded]))
    params, moments, value, _ = step(params, moments, visual, patches, made)
    progress.update(number - start, float(value))
    if (number + 1) % KEEP_EVERY == 0 or number + 1 == schedule.steps:
      training.save_tree(os.path.join(workdir, f"pairs_{number + 1}.npz"), params)
      nnx.update(model.text, nnx.state(merge(params), nnx.Param))
      if after is not None:
        after(number + 1)
  nnx.update(model.text, nnx.state(merge(params), nnx.Param))
