"""Measures the world: what judge and held-out classifier say about its videos.

`python -m sbjax.worlds.digits.evaluate [--world=DIR] [--videos=240]` prints the table of README.md.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import UInt8

from sbjax.worlds.digits import data, heldout, judge, prompts, sample, world

PER_CALL = 8


def video_sampler(
  the_world: world.World,
) -> Callable[[Sequence[str], jax.Array], UInt8[np.ndarray, "batch frames 64 64 3"]]:
  """The base model as a function of at most eight prompts and a key; it is compiled once."""
  dit_graph, dit_state = nnx.split(the_world.dit)
  vae_graph, vae_state = nnx.split(the_world.vae)

  @jax.jit
  def run(dit_state, vae_state, embeds, key):
    dit, vae = nnx.merge(dit_graph, dit_state), nnx.merge(vae_graph, vae_state)
    return vae.decode(sample.sample_latents(dit, the_world.sampler, embeds, key))

  def sample_some(asked: Sequence[str], key: jax.Array) -> np.ndarray:
    rows = np.resize(np.arange(len(asked)), PER_CALL)
    embeds = world.encode_prompts(the_world, list(asked))[rows]
    pixels = run(dit_state, vae_state, jnp.asarray(embeds), key)
    return sample.pixels_to_uint8(pixels)[: len(asked)]

  return sample_some


def sample_videos(
  the_world: world.World, asked: list[str], seed: int
) -> UInt8[np.ndarray, "batch frames 64 64 3"]:
  """One video of the base model per prompt, in batches of eight."""
  sample_some = video_sampler(the_world)
  return np.concatenate(
    [
      sample_some(asked[i : i + PER_CALL], jax.random.fold_in(jax.random.key(seed), i))
      for i in range(0, len(asked), PER_CALL)
    ]
  )


def real_videos(
  images: data.DigitImages, asked: list[str], seed: int, half: str = "generator"
) -> UInt8[np.ndarray, "batch frames 64 64 3"]:
  """One real video per prompt."""
  return np.stack([data.render(images, text, seed + i, half=half) for i, text in enumerate(asked)])


def reconstruct(
  the_world: world.World, videos: UInt8[np.ndarray, "batch frames 64 64 3"]
) -> UInt8[np.ndarray, "batch frames 64 64 3"]:
  """The videos through the autoencoder and back."""
  graph, state = nnx.split(the_world.vae)

  @jax.jit
  def through(state, pixels):
    vae = nnx.merge(graph, state)
    return vae.decode(vae.encode_latents(pixels))

  pixels = np.moveaxis(videos, -1, 2).astype(np.float32) / 127.5 - 1
  parts = [through(state, jnp.asarray(pixels[i : i + 4])) for i in range(0, len(pixels), 4)]
  return sample.pixels_to_uint8(np.concatenate(parts))


def measure(
  the_judge: judge.Judge,
  measure_model: heldout.HeldOut,
  videos: UInt8[np.ndarray, "batch frames 64 64 3"],
  asked: list[str],
) -> dict[str, Any]:
  """Shares read as asked and mean probabilities, overall; the held-out digit also by digit.

  "colour_by_frame" is the judge's colour on the first, middle and last six frames.
  """
  batch = len(videos)
  parts = [judge.tables(the_judge, videos[i : i + PER_CALL]) for i in range(0, batch, PER_CALL)]
  tables = {name: np.concatenate([part[name] for part in parts]) for name in judge.HEADS}
  wanted = prompts.parse_all(asked)
  rows = np.arange(batch)
  independent = heldout.scores(measure_model, videos, asked)
  result: dict[str, Any] = {
    "videos": batch,
    "heldout_digit_right": float(independent["right"].mean()),
    "heldout_digit_p": float(independent["p"].mean()),
    "judge_agrees_with_heldout": float((tables["digit"].argmax(1) == independent["read"]).mean()),
  }
  for name in judge.HEADS:
    result[f"judge_{name}_right"] = float((tables[name].argmax(1) == wanted[name]).mean())
    result[f"judge_{name}_p"] = float(tables[name][rows, wanted[name]].mean())
  frames = videos.shape[1]
  result["colour_by_frame"] = []
  for first in (0, (frames - 6) // 2, frames - 6):
    colour = np.concatenate(
      [
        judge.tables(the_judge, videos[i : i + PER_CALL, first : first + 6])["colour"]
        for i in range(0, batch, PER_CALL)
      ]
    )
    result["colour_by_frame"].append(float((colour.argmax(1) == wanted["colour"]).mean()))
  result["heldout_digit_right_by_digit"] = {
    name: float(independent["right"][wanted["digit"] == i].mean())
    for i, name in enumerate(prompts.DIGITS)
    if (wanted["digit"] == i).any()
  }
  return result


def measure_world(the_world: world.World, videos: int = 240, seed: int = 1000) -> dict[str, Any]:
  """The quality table: real videos of both halves, reconstructions, and the base model.

  The base model is measured on training and on held-out prompts separately.
  """
  few = list(the_world.eval_prompts[: min(videos, 96)])
  readers = (the_world.judge, the_world.heldout)
  real = real_videos(the_world.images, few, seed)
  return {
    "real videos, unseen drawings": measure(*readers, real, few),
    "reconstructions": measure(*readers, reconstruct(the_world, real), few),
    "base model, training prompts": measure(
      *readers,
      sample_videos(the_world, list(the_world.train_prompts[: videos // 2]), seed),
      list(the_world.train_prompts[: videos // 2]),
    ),
    "base model, unseen prompts": measure(
      *readers,
      sample_videos(the_world, list(the_world.eval_prompts[: videos // 2]), seed + 1),
      list(the_world.eval_prompts[: videos // 2]),
    ),
  }


def main() -> None:
  """The command."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--world", default=None, help="world folder; the shipped one by default")
  parser.add_argument("--videos", type=int, default=240, help="videos of the base model")
  parser.add_argument("--seed", type=int, default=1000)
  arguments = parser.parse_args()
  print(
    json.dumps(
      measure_world(world.load_world(arguments.world), arguments.videos, arguments.seed), indent=2
    )
  )


if __name__ == "__main__":
  main()
