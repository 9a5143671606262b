"""What a folder with a CLIP checkpoint holds. No JAX: the checks of a config ask it."""

import json
import os
import pathlib

from models.clip.presets import CLIPConfig, from_huggingface, from_open_clip, preset

WEIGHTS = (".safetensors", ".pt", ".bin", ".pth")


def config_of(path: str | os.PathLike) -> CLIPConfig:
  """Sizes of a model in a folder: its `config.json` or `open_clip_config.json`, else ViT-H/14's.

  HPS v2.1 is published as its weights alone, and is a ViT-H/14.

  Raises:
    ValueError: a config that cannot be read or used.
  """
  for name, read in (
    ("config.json", from_huggingface),
    ("open_clip_config.json", from_open_clip),
  ):
    file = pathlib.Path(path, name)
    if file.is_file():
      try:
        return read(str(file), json.loads(file.read_text()))
      except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{file} cannot be read ({error}).") from error
  return preset("vit-h-14")


def weights_of(path: str | os.PathLike) -> pathlib.Path:
  """The one file of weights in a folder.

  Raises:
    ValueError: there is none, or several.
  """
  folder = pathlib.Path(path)
  files = sorted(p for p in folder.glob("*") if p.suffix in WEIGHTS and p.is_file())
  if len(files) != 1:
    raise ValueError(
      f"{folder} has {len(files)} files of weights ({', '.join(WEIGHTS)}); leave one there."
    )
  return files[0]
