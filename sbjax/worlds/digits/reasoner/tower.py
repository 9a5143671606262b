"""The first lesson: the vision tower alone learns to see digit, colour and motion.

Every slice of a video is a sample of its own. Its tokens, averaged, pass through linear readers
that are thrown away afterwards. A decoder that starts from such a tower only has to learn to say
what it sees.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float
from optax.contrib import MuonDimensionNumbers

from models.layers.dense import Dense, tree_of
from models.qwen_vl.model import QwenVL
from models.qwen_vl.preprocess import to_patches
from models.qwen_vl.presets import VisionConfig
from models.qwen_vl.vision import encode_slices
from sbjax.rewards.digits_reasoner import SIDE_PX
from sbjax.worlds.digits import judge, optim, training
from sbjax.worlds.digits.reasoner.videos import Clips

Batch = Callable[[np.random.Generator], Clips]


# Which half of a video's slices tells what: the first is whole frames, the second close-ups.
READ_FROM = {
  "digit": (0.0, 1.0),
  "colour": (1.0, 1.0),
  "direction": (1.0, 0.0),
  "speed": (1.0, 0.0),
}


def matrices(path: str, leaf: jax.Array) -> MuonDimensionNumbers | None:
  """Weights [out, in] as matrices; readers, tables, embeddings and vectors go to AdamW."""
  if leaf.ndim != 2 or any(name in path for name in ("table", "embed", "readers", "patch")):
    return None
  return MuonDimensionNumbers(1, 0)


def readers(config: VisionConfig, seed: int) -> dict[str, Any]:
  """A linear reader of the tower's result per head of the world's judge."""
  rngs = nnx.Rngs(seed)
  return {
    name: tree_of(Dense(config.out_dim, classes, bias=True, rngs=rngs))
    for name, classes in judge.HEADS.items()
  }


def loss(
  visual: Any,
  heads: Any,
  config: VisionConfig,
  patches: Float[Array, "slices patches width"],
  side: int,
  tables: dict[str, Float[Array, "batch classes"]],
) -> Float[Array, ""]:
  """Cross-entropy of all readers against the tables; slices stand video by video."""
  tokens = encode_slices(visual, config, patches, side, side).tokens.mean(axis=1)
  batch = next(iter(tables.values())).shape[0]
  tokens = tokens.reshape(batch, 2, -1, tokens.shape[-1])
  total = jnp.zeros((), jnp.float32)
  for name, table in tables.items():
    logits = tokens @ heads[name]["weight"].T + heads[name]["bias"][None, None, None]
    entropy = -jnp.sum(table[:, None, None] * jax.nn.log_softmax(logits, axis=-1), axis=-1)
    share = jnp.asarray(READ_FROM[name], jnp.float32)
    total += jnp.sum(entropy.mean(axis=(0, 2)) * share) / jnp.sum(share)
  return total


@dataclasses.dataclass(frozen=True)
class Schedule:
  """Steps, videos of one, and the peak of Muon's rate; AdamW's is `vector_share` of it."""

  steps: int = 300
  videos: int = 32
  peak: float = 1e-2
  vector_share: float = 0.2


def train(model: QwenVL, batch: Batch, seed: int, schedule: Schedule) -> None:
  """Trains `model.visual` in place; `batch` draws the videos of a step."""
  config = model.config.vision
  graph, state = nnx.split(model.visual)
  merge = optim.merger(graph, state)
  params = {"visual": optim.plain(state), "readers": readers(config, seed)}
  rate = optim.cosine(schedule.peak, schedule.steps, 20)
  optimiser = optim.muon_for(matrices, rate, lambda step: schedule.vector_share * rate(step))
  moments = optimiser.init(params)
  side = SIDE_PX // config.patch_px

  @jax.jit
  def step(params, moments, patches, tables):
    def objective(p):
      return loss(p["visual"], p["readers"], config, patches, side, tables)

    value, gradient = jax.value_and_grad(objective)(params)
    updates, moments = optimiser.update(gradient, moments, params)
    return optax.apply_updates(params, updates), moments, value

  rng = np.random.default_rng([seed, 81])
  progress = training.Progress("tower", schedule.steps)
  for number in range(schedule.steps):
    clips = batch(rng)
    patches = np.concatenate([to_patches(view.pixels, config)[0] for view in clips.views()])
    params, moments, value = step(params, moments, jnp.asarray(patches), clips.tables)
    progress.update(number, float(value))
  nnx.update(model.visual, nnx.state(merge(params["visual"]), nnx.Param))
