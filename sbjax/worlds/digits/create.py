"""Re-creates the embedded world from nothing: `python -m sbjax.worlds.digits.create --out=DIR`.

Stages run in order and each leaves its result in the folder, so a broken-off run continues where it
was and `--stages=` repeats chosen ones:

  heldout   the kernel classifier (and digits.npz, the drawings, from scikit-learn)
  vae       the autoencoder, three legs
  encode    latents of the training videos and their statistics
  judge     the reward network
  dit       transformer and text encoder
  evaluate  the quality table in world.json

The folder then works as `--world` everywhere; the shipped weights are such a folder's files.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import sys
import time
from typing import Any

import jax
import numpy as np
from flax import nnx

from models.wan.presets import preset
from models.wan.umt5 import UMT5Encoder, umt5_preset
from models.wan.vae import WanVAE
from models.wan.vae_config import vae_preset
from models.wan.vae_keys import vae_keys
from models.weights import load_safetensors
from sbjax.worlds.digits import (
  data,
  evaluate,
  heldout,
  judge,
  train_dit,
  train_judge,
  train_vae,
  world,
)
from sbjax.worlds.digits.tokenizer import WordTokenizer, default_vocabulary

STAGES = ("heldout", "vae", "encode", "judge", "dit", "evaluate")
SHIPPED = (
  "dit.safetensors",
  "vae.safetensors",
  "text.safetensors",
  "judge.safetensors",
  "heldout.npz",
  "digits.npz",
  "world.json",
)
MAX_SHIPPED_BYTES = 12_000_000


def initial_sizes(z_dim: int) -> world.Sizes:
  """The networks' sizes before anything is trained: the models' presets at `z_dim` channels."""
  dit, sampler = preset("digits")
  vocabulary = len(default_vocabulary())
  text = umt5_preset("digits")
  if text.vocab_size < vocabulary:
    raise ValueError(f"vocab_size is {text.vocab_size}; the world has {vocabulary} words")
  return world.Sizes(
    dit=dataclasses.replace(dit, in_dim=z_dim + 2, out_dim=z_dim),
    # The window is the length of the training videos: longer ones roll on within what was learned.
    sampler=dataclasses.replace(
      sampler,
      latent_channels=z_dim,
      window_frames=sampler.max_frames,
      cache_frames=sampler.max_frames,
    ),
    vae=dataclasses.replace(vae_preset("digits"), z_dim=z_dim),
    text=text,
    judge=judge.JudgeConfig(),
  )


@dataclasses.dataclass
class Creation:
  """One run of the stages; `meta` is world.json, rewritten after each stage."""

  out: pathlib.Path
  seed: int
  effort: Effort
  sizes: world.Sizes
  meta: dict[str, Any]

  @property
  def work(self) -> str:
    """Where checkpoints that are not shipped go."""
    path = self.out / "work"
    path.mkdir(parents=True, exist_ok=True)
    return os.fspath(path)

  def write_meta(self) -> None:
    """Writes world.json, atomically."""
    self.meta["sizes"] = world.sizes_to_json(self.sizes)
    partial = self.out / "world.json.partial"
    partial.write_text(json.dumps(self.meta, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, self.out / "world.json")

  def images(self) -> data.DigitImages:
    """The drawings; read from scikit-learn once."""
    path = self.out / "digits.npz"
    if not path.exists():
      data.save_images(path, data.images_from_sklearn())
    return data.load_images(path)

  def vae(self) -> WanVAE:
    """The trained autoencoder."""
    module = WanVAE(self.sizes.vae, rngs=nnx.Rngs(self.seed))
    return load_safetensors(self.out / "vae.safetensors", module, vae_keys(self.sizes.vae))

  def tokenizer(self) -> WordTokenizer:
    """The world's tokenizer."""
    return WordTokenizer(tuple(self.meta["vocabulary"]), self.sizes.dit.text_len)


@dataclasses.dataclass(frozen=True)
class Effort:
  """How much each stage does."""

  vae_legs: tuple[train_vae.Leg, ...] = train_vae.LEGS
  training_videos: int = 2000
  judge_steps: int = 600
  judge_reconstructions: int = 160
  dit: train_dit.Schedule = dataclasses.field(default_factory=train_dit.Schedule)
  measured_videos: int = 240


def quick_effort() -> Effort:
  """A few steps of everything: shows that the command works, the world it makes is useless."""
  return Effort(
    vae_legs=tuple(dataclasses.replace(leg, steps=2) for leg in train_vae.LEGS),
    training_videos=16,
    judge_steps=2,
    judge_reconstructions=8,
    dit=train_dit.Schedule(steps=2),
    measured_videos=16,
  )


def run_heldout(run: Creation) -> None:
  """Fits the held-out classifier."""
  heldout.save(run.out / "heldout.npz", heldout.fit(run.images(), run.seed))


def run_vae(run: Creation) -> None:
  """Trains the autoencoder."""
  plain = dataclasses.replace(run.sizes.vae, latents_mean=(), latents_std=())
  vae = train_vae.train(plain, run.images(), run.work, run.seed, run.effort.vae_legs)
  world.save_models(run.out, vae=vae)


def run_encode(run: Creation) -> None:
  """Encodes the training videos and fixes the latents' statistics."""
  encoded, mean, std = train_dit.encode_videos(
    run.vae(), run.images(), run.tokenizer(), run.effort.training_videos, run.seed
  )
  np.savez(os.path.join(run.work, "latents.npz"), **encoded)  # pyright: ignore[reportArgumentType]
  run.sizes = dataclasses.replace(
    run.sizes,
    vae=dataclasses.replace(
      run.sizes.vae,
      latents_mean=tuple(round(float(m), 4) for m in mean),
      latents_std=tuple(round(float(s), 4) for s in std),
    ),
  )


def run_judge(run: Creation) -> None:
  """Trains the judge."""
  module = train_judge.train(
    run.images(),
    run.vae(),
    run.seed,
    steps=run.effort.judge_steps,
    reconstructed=run.effort.judge_reconstructions,
  )
  world.save_models(run.out, judge_module=module)


def load_latents(run: Creation) -> train_dit.Latents:
  """The encoded videos, normalised by the world's statistics.

  Raises:
    ValueError: if the encode stage has not run.
  """
  path = os.path.join(run.work, "latents.npz")
  if not os.path.exists(path) or not run.sizes.vae.latents_mean:
    raise ValueError("stages lacks 'encode' before 'dit'; run it first")
  with np.load(path, allow_pickle=False) as stored:
    mean = np.array(run.sizes.vae.latents_mean, np.float32)[:, None, None]
    std = np.array(run.sizes.vae.latents_std, np.float32)[:, None, None]
    return train_dit.Latents((stored["latents"] - mean) / std, stored["ids"], stored["mask"])


def run_dit(run: Creation) -> None:
  """Trains transformer and text encoder."""

  def keep(step: int, dit: Any, text: UMT5Encoder) -> None:
    folder = pathlib.Path(run.work) / f"step_{step}"
    folder.mkdir(exist_ok=True)
    world.save_models(folder, dit=dit, text=text)

  dit, text = train_dit.train(
    run.sizes.dit,
    run.sizes.text,
    run.sizes.sampler,
    load_latents(run),
    run.work,
    run.seed,
    run.effort.dit,
    keep,
  )
  world.save_models(run.out, dit=dit, text=text)
  run.meta["dit_steps"] = run.effort.dit.steps


def run_evaluate(run: Creation) -> None:
  """Measures the finished world and checks its size."""
  run.write_meta()
  run.meta["quality"] = evaluate.measure_world(
    world.load_world(run.out), run.effort.measured_videos
  )
  print(json.dumps(run.meta["quality"], indent=2), flush=True)
  run.write_meta()
  total = sum((run.out / name).stat().st_size for name in SHIPPED)
  if total > MAX_SHIPPED_BYTES:
    raise ValueError(f"shipped files have {total} bytes; at most {MAX_SHIPPED_BYTES} may ship")


def start(
  out: pathlib.Path,
  seed: int,
  z_dim: int,
  effort: Effort,
) -> Creation:
  """A new run, or the one that `out` already holds.

  Raises:
    ValueError: if `out` was begun with another seed or size.
  """
  out.mkdir(parents=True, exist_ok=True)
  path = out / "world.json"
  if path.exists():
    meta = json.loads(path.read_text(encoding="utf-8"))
    sizes = world.sizes_from_json(meta["sizes"])
    if (meta["seed"], sizes.vae.z_dim) != (seed, z_dim):
      raise ValueError(
        f"out is {os.fspath(out)!r}, begun with seed {meta['seed']} and z_dim {sizes.vae.z_dim}; "
        f"use those or another folder"
      )
    return Creation(out, seed, effort, sizes, meta)
  meta = {
    "format": world.FORMAT,
    "seed": seed,
    "vocabulary": list(default_vocabulary()),
    "timings_s": {},
  }
  return Creation(out, seed, effort, initial_sizes(z_dim), meta)


def main() -> None:
  """The command."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--out", required=True, type=pathlib.Path, help="folder of the new world")
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--z_dim", type=int, default=8, help="latent channels")
  parser.add_argument("--dit_steps", type=int, default=train_dit.Schedule.steps)
  parser.add_argument(
    "--quick", action="store_true", help="a few steps a stage, to try the command"
  )
  parser.add_argument("--stages", default="", help="comma separated; all unfinished by default")
  arguments = parser.parse_args()
  chosen = tuple(name for name in arguments.stages.split(",") if name)
  unknown = [name for name in chosen if name not in STAGES]
  if unknown:
    parser.error(f"stages has {unknown[0]!r}; known are {', '.join(STAGES)}")
  try:
    effort = (
      quick_effort() if arguments.quick else Effort(dit=train_dit.Schedule(arguments.dit_steps))
    )
    run = start(arguments.out, arguments.seed, arguments.z_dim, effort)
  except ValueError as error:
    parser.error(str(error))
  run.meta["command"] = " ".join(["python -m sbjax.worlds.digits.create", *sys.argv[1:]])
  run.meta["jax"] = jax.__version__
  actions = {
    "heldout": run_heldout,
    "vae": run_vae,
    "encode": run_encode,
    "judge": run_judge,
    "dit": run_dit,
    "evaluate": run_evaluate,
  }
  for name in chosen or STAGES:
    if not chosen and name in run.meta["timings_s"]:
      print(f"{name}: done before", flush=True)
      continue
    print(f"{name}: begins", flush=True)
    began_s = time.monotonic()
    actions[name](run)
    run.meta["timings_s"][name] = round(time.monotonic() - began_s, 1)
    run.write_meta()
    print(f"{name}: {run.meta['timings_s'][name]:.0f} s", flush=True)
  print(f"all: {sum(run.meta['timings_s'].values()) / 60:.1f} min", flush=True)


if __name__ == "__main__":
  main()
