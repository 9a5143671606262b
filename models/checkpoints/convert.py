"""Weights from one layout to another, with an adapter merged or without, file to file."""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from models.checkpoints.families import Config, Family
from models.checkpoints.fit import fit
from models.checkpoints.load import Progress, refuse_misfit
from models.checkpoints.opening import open_checkpoint
from models.checkpoints.stored import StoredTensor
from models.checkpoints.wan import find_weights
from models.checkpoints.write import NewTensor, write_shards
from models.weights import TensorKey

STEMS: Mapping[str, str] = {"official": "diffusion_pytorch_model", "huggingface": "model"}
MAX_SHARD_BYTES = 10 << 30
_FFN = {"ffn.0": "ffn.up", "ffn.2": "ffn.down"}


def convert(
  source: str | os.PathLike[str],
  folder: str | os.PathLike[str],
  family: Family,
  config: Config,
  layout: str,
  *,
  part: str | None = None,
  dtype: str | None = None,
  lora: Mapping[str, Mapping[str, Any]] | None = None,
  lora_scale: float = 1.0,
  max_shard_bytes: int = MAX_SHARD_BYTES,
  progress: Progress | None = None,
) -> list[str]:
  """Writes a model's weights as safetensors in that layout, one tensor at a time.

  Without adapter and in the same type every tensor keeps its bits.

  Args:
    source: weights in any layout that is read.
    folder: where the files go.
    family, config: the model and its sizes.
    layout: name of a layout of the family.
    part: which state dictionary of a torch file.
    dtype: type to write; each tensor's own by default.
    lora: an adapter of the Wan transformer to merge: W + lora_scale · A B, in float32.
    lora_scale: alpha / rank.
    max_shard_bytes: what one file holds at most.
    progress: called with bytes done and bytes in all.

  Returns:
    The files that were written.

  Raises:
    ValueError: when the source cannot be used or a value is not finite.
    OSError: when a file cannot be written.
  """
  checkpoint = open_checkpoint(source)
  tensors, _, theirs = find_weights(checkpoint, part, family)
  table = theirs.table(config)
  found = fit(tensors, table, family.like(config), theirs.aliases)
  refuse_misfit(checkpoint.path, found)
  names = {(slot.key.path, slot.layer): name for name, slot in found.places.items()}
  stored = {place: tensors[name] for place, name in names.items()}
  target = family.layout(layout)
  depths = {path: like.shape[0] for path, like in family.like(config).items() if like.shape}
  new = [
    NewTensor(
      name=name,
      shape=stored[path, layer].shape,
      dtype=dtype or stored[path, layer].dtype,
      make=_maker(stored[path, layer], _update(lora, path, layer), lora_scale),
      origin=f"{names[path, layer]} of {checkpoint.path}",
    )
    for name, path, layer in _names(target.table(config), depths)
  ]
  stem = STEMS.get(layout, "diffusion_pytorch_model")
  metadata = {"format": "pt"}  # transformers and diffusers ask for it
  files = write_shards(folder, stem, new, max_shard_bytes, metadata, progress)
  return [str(file) for file in files]


def _names(
  table: Sequence[TensorKey], depths: Mapping[str, int]
) -> Iterator[tuple[str, str, int | None]]:
  for key in table:
    if "{layer}" not in key.official:
      yield key.official, key.path, None
    else:
      for layer in range(depths[key.path]):
        yield key.official.format(layer=layer), key.path, layer


def _update(
  lora: Mapping[str, Mapping[str, Any]] | None, path: str, layer: int | None
) -> tuple[np.ndarray, np.ndarray] | None:
  """A and B that adapt that parameter's layer, if any do."""
  for target, pair in (lora or {}).items():
    if path == f"blocks.{_FFN.get(target, target)}.kernel":
      return np.asarray(pair["a"][layer]), np.asarray(pair["b"][layer])
  return None


def _maker(stored: StoredTensor, update: tuple[np.ndarray, np.ndarray] | None, lora_scale: float):
  def make() -> np.ndarray:
    if update is None:
      return stored.view()
    a, b = update
    # A file's kernel is [out, in], ours and the product are [in, out].
    return stored.view().astype(np.float32) + np.float32(lora_scale) * (a @ b).T

  return make
