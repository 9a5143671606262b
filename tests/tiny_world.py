"""A digits world of tiny random networks: everything that the shipped one has, in a second."""

import json
import pathlib
from typing import Any

import jax
import numpy as np
from flax import nnx

from models.wan.dit import CausalWanDiT
from models.wan.presets import DiTConfig, SamplerConfig
from models.wan.umt5 import UMT5Config, UMT5Encoder
from models.wan.vae import VAEConfig, WanVAE
from sbjax.worlds.digits import data, heldout, judge, world
from sbjax.worlds.digits.tokenizer import default_vocabulary

DIT = DiTConfig(
  "digits", 32, 64, 2, 2, in_dim=6, out_dim=4, text_dim=16, text_len=12, scan_unroll=2
)
SAMPLER = SamplerConfig(
  latent_channels=4, latent_height=8, latent_width=8, cache_frames=9, max_frames=9
)
SIZES = world.Sizes(
  dit=DIT,
  sampler=SAMPLER,
  vae=VAEConfig("digits", 4, 4, (1, 1, 1, 1), 1, 0),
  text=UMT5Config(64, 16, 16, 2, 8, 16, 1),
  judge=judge.JudgeConfig((4, 4, 4, 4), 8),
)


def make(folder: pathlib.Path) -> pathlib.Path:
  """Writes the world's files and gives the folder."""
  folder.mkdir(parents=True, exist_ok=True)
  rng = np.random.default_rng(0)
  world.save_models(
    folder,
    _random(rng, CausalWanDiT, DIT),
    _random(rng, WanVAE, SIZES.vae),
    _random(rng, UMT5Encoder, SIZES.text),
    _random(rng, judge.Judge, SIZES.judge),
  )
  vectors = rng.uniform(size=(20, 196)).astype(np.float32)
  coefficients = rng.normal(size=(20, 10)).astype(np.float32)
  model = heldout.HeldOut(vectors, coefficients, np.zeros(10, np.float32), 0.05, 1.0)
  heldout.save(folder / "heldout.npz", model)
  ink = (rng.integers(0, 17, size=(40, 8, 8)) / 16).astype(np.float32)
  labels = np.arange(40, dtype=np.int32) % 10
  data.save_images(folder / "digits.npz", data.DigitImages(ink, labels, np.arange(40) < 20))
  meta = {
    "format": world.FORMAT,
    "sizes": world.sizes_to_json(SIZES),
    "vocabulary": list(default_vocabulary()),
  }
  (folder / "world.json").write_text(json.dumps(meta))
  return folder


def _random(rng: np.random.Generator, build: Any, config: Any) -> Any:
  """A module with random weights; drawn by NumPy, for JAX would compile every initialiser."""
  module = nnx.eval_shape(lambda: build(config, rngs=nnx.Rngs(0)))
  graphdef, state = nnx.split(module)

  def draw(path: Any, leaf: Any) -> np.ndarray:
    around = 1.0 if "scale" in str(path[-1]) or "scale" in str(path[-2]) else 0.0
    return (around + 0.2 * rng.normal(size=leaf.shape)).astype(np.float32)

  return nnx.merge(graphdef, jax.tree_util.tree_map_with_path(draw, state))
