"""The sizes of a model, read off the names and shapes of its tensors.

Two things no tensor tells: how many attention heads a transformer has, and how long its prompts
are. Every published Wan transformer has heads 128 wide and takes 512 tokens; a `config.json` beside
the weights that gives the number of heads is believed. No tensor is read here.
"""

import dataclasses
import json
import math
import pathlib
import re
from collections.abc import Mapping, Sequence

import numpy as np

from models.checkpoints.families import DIT, UMT5, VAE, Config
from models.checkpoints.opening import open_checkpoint
from models.checkpoints.stored import Checkpoint, StateDict
from models.checkpoints.wan import Path, find_weights
from models.wan.presets import DiTConfig
from models.wan.umt5 import UMT5Config
from models.weights import TensorKey, clean_key

HEAD_DIM = 128
_HEADS = ("num_heads", "num_attention_heads")  # as Wan and as diffusers call them


def dit_sizes(path: Path, *, part: str | None = None, name: str = "custom") -> DiTConfig:
  """The sizes of a Wan transformer in official or diffusers names.

  Args:
    path: file or folder.
    part: which state dictionary of a torch file.
    name: what messages are to call the model.

  Raises:
    ValueError: when it is no such model, or tensors that tell its sizes are not there.
  """
  checkpoint = open_checkpoint(path)
  tensors, _, layout = find_weights(checkpoint, part, DIT)
  shapes, layers = _ours(checkpoint, tensors, layout.table(None))
  dim, ffn_dim = shapes["blocks.ffn.up.kernel"]
  patch = 4  # 1 × 2 × 2 latent cells
  return DiTConfig(
    name,
    dim,
    ffn_dim,
    _heads(checkpoint, dim),
    layers,
    in_dim=shapes["patch_embedding.kernel"][0] // patch,
    out_dim=shapes["head.kernel"][1] // patch,
    text_dim=shapes["text_in.kernel"][0],
    freq_dim=shapes["time_in.kernel"][0],
  )


def umt5_sizes(path: Path) -> UMT5Config:
  """The sizes of a UMT5 encoder in official or Hugging Face names; errors as `dit_sizes`."""
  checkpoint = open_checkpoint(path)
  tensors, _, layout = find_weights(checkpoint, None, UMT5)
  shapes, layers = _ours(checkpoint, tensors, layout.table(None))
  vocab_size, dim = shapes["token_embedding"]
  num_buckets, heads = shapes["blocks.position"]
  dim_attn = shapes["blocks.q"][1]
  return UMT5Config(
    vocab_size,
    dim,
    dim_attn,
    heads,
    dim_attn // heads,
    shapes["blocks.gate"][1],
    layers,
    num_buckets,
  )


def vae_sizes(path: Path, *, name: str = "custom") -> Config:
  """The sizes of a Wan2.1 or Wan2.2 VAE in official names.

  Latents of as many channels as the published ones are normalised by their statistics, others by
  none: a file holds none.

  Raises:
    ValueError: as `dit_sizes`, and for diffusers names, which leave out what a level does.
  """
  checkpoint = open_checkpoint(path)
  tensors, _, layout = find_weights(checkpoint, None, VAE)
  if layout.name != "official":
    raise ValueError(
      f"{checkpoint.path} has diffusers' names, which do not tell a VAE's sizes; use official "
      "names, or a preset."
    )
  shapes = {clean_key(key): tensor.shape for key, tensor in tensors.items()}
  base_dim, pixel_channels = _shape(checkpoint, shapes, "encoder.conv1.weight")[:2]
  decoder_dim, z_dim = _shape(checkpoint, shapes, "decoder.conv1.weight")[:2]
  residual = any(key.startswith("encoder.downsamples.0.downsamples.") for key in shapes)
  widths, blocks, temporal = _levels(shapes, "encoder.downsamples", residual)
  _, decoder_blocks, _ = _levels(shapes, "decoder.upsamples", residual)
  if not widths or len(temporal) != len(widths) - 1 or pixel_channels % 3:
    raise ValueError(
      f"{checkpoint.path} has not the levels of a Wan autoencoder, so its sizes cannot be told."
    )
  decoder_base_dim = decoder_dim * base_dim // widths[-1]
  published = VAE.presets["wan2.2" if residual else "wan2.1"]
  sized = dataclasses.replace(
    published,
    name=name,
    base_dim=base_dim,
    decoder_base_dim=None if decoder_base_dim == base_dim else decoder_base_dim,
    dim_mult=tuple(width // base_dim for width in widths),
    num_res_blocks=blocks,
    decoder_extra_res_blocks=decoder_blocks - blocks,
    temporal_downsample=temporal,
    patch_px=math.isqrt(pixel_channels // 3),
  )
  if z_dim == published.z_dim:
    return sized
  return dataclasses.replace(sized, z_dim=z_dim, latents_mean=(), latents_std=())


def _levels(
  shapes: Mapping[str, tuple[int, ...]], stem: str, nested: bool
) -> tuple[list[int], int, tuple[bool, ...]]:
  """Width of each level, blocks of the first one, and whether each resampling changes time too.

  Rows are numbered through, or by level and inside it where they are `nested`.
  """
  inner = rf"\.{stem.rpartition('.')[2]}\.(\d+)" if nested else ""
  found = (re.match(rf"({stem}\.(\d+){inner})\.", name) for name in shapes)
  rows = sorted({(*map(int, m.groups()[1:]), m[1]) for m in found if m})
  widths: list[int] = []
  counts, temporal = [0], []
  for *_, row in rows:
    block = shapes.get(f"{row}.residual.6.weight")
    if block is None:
      temporal.append(f"{row}.time_conv.weight" in shapes)
      counts.append(0)
      continue
    counts[-1] += 1
    if counts[-1] == 1:
      widths.append(block[0])
  return widths, counts[0], tuple(temporal)


def _ours(
  checkpoint: Checkpoint, tensors: StateDict, table: Sequence[TensorKey]
) -> tuple[dict[str, tuple[int, ...]], int]:
  """Shapes by our parameter's path, of one layer where it is stacked; and the number of layers."""
  stored = {clean_key(name): tensor.shape for name, tensor in tensors.items()}
  shapes, layers = {}, 0
  for key in table:
    shape = _shape(checkpoint, stored, key.official.format(layer=0))
    # A zero-stride array costs nothing, so the transform itself can tell the shape.
    shapes[key.path] = key.transform.to_ours(np.broadcast_to(np.int8(0), shape)).shape
    if "{layer}" in key.official:
      while key.official.format(layer=layers) in stored:
        layers += 1
  return shapes, layers


def _shape(
  checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]], name: str
) -> tuple[int, ...]:
  if not shapes.get(name):
    raise ValueError(f"{checkpoint.path} lacks {name}, so the model's sizes cannot be told.")
  return shapes[name]


def _heads(checkpoint: Checkpoint, dim: int) -> int:
  path = pathlib.Path(checkpoint.path)
  file = (path if path.is_dir() else path.parent) / "config.json"
  if file.is_file():
    try:
      config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
      raise ValueError(f"{file} cannot be read as JSON ({error}).") from error
    for name in _HEADS:
      given = config.get(name) if isinstance(config, dict) else None
      if isinstance(given, int) and given > 0:
        return given
  if dim % HEAD_DIM:
    raise ValueError(
      f"{checkpoint.path} holds a transformer {dim} wide, which heads of {HEAD_DIM} do not divide; "
      "put a config.json with num_heads beside it."
    )
  return dim // HEAD_DIM
