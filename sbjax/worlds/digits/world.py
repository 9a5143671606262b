"""Loads the embedded world: its models, judges, prompts and real videos."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float, UInt8

from models.wan.dit import CausalWanDiT
from models.wan.presets import DiTConfig, SamplerConfig
from models.wan.umt5 import UMT5Config, UMT5Encoder, encode_tokens
from models.wan.umt5_keys import UMT5_KEYS
from models.wan.vae import VAEConfig, WanVAE
from models.wan.vae_keys import vae_keys
from models.wan.weights import DIT_KEYS
from models.weights import TensorKey, read_tensors, save_safetensors
from sbjax.worlds.digits import data, heldout, judge, prompts
from sbjax.worlds.digits.sample import conditioning_channels
from sbjax.worlds.digits.tokenizer import WordTokenizer

WEIGHTS = pathlib.Path(__file__).parent / "weights"
FORMAT = "sbjax-digits-world-1"


@dataclasses.dataclass(frozen=True)
class World:
  """Everything of the world that a training run needs.

  Attributes:
    dit, vae, text, judge: modules with their weights, float32.
    dit_config, sampler: sizes of the transformer and of its sampler.
    tokenizer: words to ids.
    heldout: the classifier that is never a reward.
    images: the handwritten digits behind real videos.
    conditioning_channels: [2, height, width], to be concatenated after the latent channels.
    train_prompts, eval_prompts: 240 each, disjoint.
    meta: world.json: how it was made and what was measured.
  """

  dit: CausalWanDiT
  vae: WanVAE
  text: UMT5Encoder
  judge: judge.Judge
  dit_config: DiTConfig
  sampler: SamplerConfig
  tokenizer: WordTokenizer
  heldout: heldout.HeldOut
  images: data.DigitImages
  conditioning_channels: Float[np.ndarray, "2 height width"]
  train_prompts: tuple[str, ...]
  eval_prompts: tuple[str, ...]
  meta: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Sizes:
  """Configurations of all networks of the world, as world.json stores them."""

  dit: DiTConfig
  sampler: SamplerConfig
  vae: VAEConfig
  text: UMT5Config
  judge: judge.JudgeConfig


def sizes_to_json(sizes: Sizes) -> dict[str, Any]:
  """The configurations as JSON values."""
  return dataclasses.asdict(sizes)


def sizes_from_json(stored: dict[str, Any]) -> Sizes:
  """The inverse of `sizes_to_json`; unknown or missing fields raise TypeError or KeyError."""

  def build(cls: Any, values: dict[str, Any]) -> Any:
    return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})

  return Sizes(
    dit=build(DiTConfig, stored["dit"]),
    sampler=build(SamplerConfig, stored["sampler"]),
    vae=build(VAEConfig, stored["vae"]),
    text=build(UMT5Config, stored["text"]),
    judge=build(judge.JudgeConfig, stored["judge"]),
  )


def judge_keys(module: judge.Judge) -> list[TensorKey]:
  """The judge is our own: its file's keys are its attribute paths."""
  flat = nnx.to_flat_state(nnx.state(module, nnx.Param))
  return [TensorKey(_dotted(path), _dotted(path)) for path, _ in flat]


def _folder(path: str | os.PathLike[str] | None) -> pathlib.Path:
  folder = WEIGHTS if path is None else pathlib.Path(path)
  if not (folder / "world.json").is_file():
    raise ValueError(
      f"world folder {os.fspath(folder)!r} has no world.json; give the output folder of "
      f"`python -m sbjax.worlds.digits.create`"
    )
  return folder


def _read_meta(folder: pathlib.Path) -> dict[str, Any]:
  name = os.fspath(folder / "world.json")
  try:
    meta = json.loads((folder / "world.json").read_text(encoding="utf-8"))
  except (OSError, ValueError) as error:
    raise ValueError(f"world file {name!r} cannot be read: {error}") from error
  if not isinstance(meta, dict) or meta.get("format") != FORMAT:
    raise ValueError(f"world file {name!r} is not of format {FORMAT!r}")
  return meta


def _read_sizes(folder: pathlib.Path, meta: dict[str, Any]) -> Sizes:
  try:
    return sizes_from_json(meta["sizes"])
  except (KeyError, TypeError) as error:
    raise ValueError(
      f"world file {os.fspath(folder / 'world.json')!r} has unusable sizes: {error}"
    ) from error


def model_sizes(path: str | os.PathLike[str] | None = None) -> tuple[DiTConfig, SamplerConfig]:
  """Sizes of the world's transformer and sampler, without loading weights.

  Raises:
    ValueError: if the folder holds no readable world.
  """
  folder = _folder(path)
  sizes = _read_sizes(folder, _read_meta(folder))
  return sizes.dit, sizes.sampler


def load_world(path: str | os.PathLike[str] | None = None) -> World:
  """Loads the shipped world, or one that `create` made.

  Raises:
    ValueError: if a file is missing, damaged or belongs to another world.
  """
  folder = _folder(path)
  meta = _read_meta(folder)
  sizes = _read_sizes(folder, meta)
  try:
    vocabulary = tuple(str(word) for word in meta["vocabulary"])
  except (KeyError, TypeError) as error:
    raise ValueError(
      f"world file {os.fspath(folder / 'world.json')!r} has no vocabulary list"
    ) from error
  sampler = sizes.sampler
  train_prompts, eval_prompts = prompts.split_prompts()
  return World(
    dit=_load(folder / "dit.safetensors", lambda r: CausalWanDiT(sizes.dit, rngs=r), DIT_KEYS),
    vae=_load(folder / "vae.safetensors", lambda r: WanVAE(sizes.vae, rngs=r), vae_keys(sizes.vae)),
    text=_load(folder / "text.safetensors", lambda r: UMT5Encoder(sizes.text, rngs=r), UMT5_KEYS),
    judge=_load(folder / "judge.safetensors", lambda r: judge.Judge(sizes.judge, rngs=r), None),
    dit_config=sizes.dit,
    sampler=sampler,
    tokenizer=WordTokenizer(vocabulary, sizes.dit.text_len),
    heldout=heldout.load(folder / "heldout.npz"),
    images=data.load_images(folder / "digits.npz"),
    conditioning_channels=np.asarray(
      conditioning_channels(sampler.latent_height, sampler.latent_width)
    ),
    train_prompts=train_prompts,
    eval_prompts=eval_prompts,
    meta=meta,
  )


def _load(path: pathlib.Path, build: Callable[[nnx.Rngs], Any], table: Any) -> Any:
  """Builds a module without drawing initial weights, and fills it from a file.

  `table` is the file's key table; None for a module whose keys are its own attribute paths.
  """
  graphdef, state = nnx.split(nnx.eval_shape(lambda: build(nnx.Rngs(0))))
  like = {_dotted(path): leaf for path, leaf in nnx.to_flat_state(state)}
  table = [TensorKey(name, name) for name in like] if table is None else table
  arrays = read_tensors(path, table, like)
  filled = [
    (path, leaf.replace(jnp.asarray(arrays[_dotted(path)])))
    for path, leaf in nnx.to_flat_state(state)
  ]
  return nnx.merge(graphdef, nnx.from_flat_state(filled))


def _dotted(path: tuple[Any, ...]) -> str:
  return ".".join(str(part) for part in path)


def save_models(
  folder: str | os.PathLike[str],
  dit: CausalWanDiT | None = None,
  vae: WanVAE | None = None,
  text: UMT5Encoder | None = None,
  judge_module: judge.Judge | None = None,
) -> None:
  """Writes the given networks in float16 under official key names."""
  folder = pathlib.Path(folder)
  if dit is not None:
    save_safetensors(folder / "dit.safetensors", dit, DIT_KEYS, np.float16)
  if vae is not None:
    save_safetensors(folder / "vae.safetensors", vae, vae_keys(vae.config), np.float16)
  if text is not None:
    save_safetensors(folder / "text.safetensors", text, UMT5_KEYS, np.float16)
  if judge_module is not None:
    keys = judge_keys(judge_module)
    save_safetensors(folder / "judge.safetensors", judge_module, keys, np.float16)


def encode_prompts(
  world: World, texts: list[str] | tuple[str, ...], prompt_overflow: str = "refuse"
) -> Float[np.ndarray, "batch text_len text_dim"]:
  """Prompt embeddings; rows past a prompt's end are zero, as Wan's text encoder leaves them.

  Every prompt is encoded on its own, so that its embedding does not depend on its neighbours.

  Raises:
    ValueError: as `WordTokenizer`.
  """
  ids, mask = world.tokenizer(texts, prompt_overflow)
  rows = [
    _encode(world.text, jnp.asarray(ids[i : i + 1]), jnp.asarray(mask[i : i + 1], jnp.int32))
    for i in range(len(texts))
  ]
  return np.concatenate([np.asarray(row, np.float32) for row in rows])


_encode = jax.jit(encode_tokens)


def render(
  world: World, prompt: str, seed: int, frames: int = data.FRAMES
) -> UInt8[np.ndarray, "frames 64 64 3"]:
  """A real video of the prompt from the generator half of the drawings; see `data.render`."""
  return data.render(world.images, prompt, seed, frames)


def judge_videos(
  world: World,
  videos: UInt8[np.ndarray, "batch frames 64 64 3"],
  asked: list[str] | tuple[str, ...],
  views: int = judge.DEFAULT_VIEWS,
) -> dict[str, Float[np.ndarray, " batch"]]:
  """Probabilities that digit, colour and motion are as asked; see `judge.judge_videos`."""
  return judge.judge_videos(world.judge, videos, asked, views)


def heldout_scores(
  world: World,
  videos: UInt8[np.ndarray, "batch frames 64 64 3"],
  asked: list[str] | tuple[str, ...],
) -> dict[str, np.ndarray]:
  """What the held-out classifier reads; see `heldout.scores`. Never a reward."""
  return heldout.scores(world.heldout, videos, list(asked))
