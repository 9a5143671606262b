"""Opens whatever holds a checkpoint, by its content rather than by its name."""

import os
import pathlib

from models.checkpoints.safetensors_file import open_safetensors, open_shards
from models.checkpoints.stored import Checkpoint
from models.checkpoints.torch_file import PICKLE_MAGIC, ZIP_MAGIC, open_torch


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
  """Opens a safetensors file, a folder or index of its shards, or a torch file; reads no tensor.

  Raises:
    ValueError: when it cannot be used, with the reason.
  """
  path = pathlib.Path(path)
  if path.is_dir():
    return open_shards(path)
  if not path.is_file():
    raise ValueError(f"{path} does not exist; name a checkpoint file or folder.")
  if path.suffix == ".json":
    return open_shards(path)
  with path.open("rb") as file:
    head = file.read(4)
  if head == ZIP_MAGIC or (head[:1] == PICKLE_MAGIC and path.suffix != ".safetensors"):
    return open_torch(path)
  return open_safetensors(path)
