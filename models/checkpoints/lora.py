"""LoRA adapters in the layouts of the PyTorch world.

| layout | file | names |
|---|---|---|
| `peft` | folder: `adapter_model.safetensors` and settings | `base_model.model.` + diffusers |
| `diffusers` | one safetensors file, settings in its metadata | `transformer.` + diffusers |
| `longlive` | torch file, part `generator_lora` | `base_model.model.` + official |

All hold `lora_A.weight` [rank, in] and `lora_B.weight` [out, rank] for each adapted linear map.
"""

import dataclasses
import json
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from models.checkpoints.identify import choose_part
from models.checkpoints.load import load_arrays
from models.checkpoints.opening import open_checkpoint
from models.checkpoints.stored import Checkpoint, StateDict
from models.checkpoints.write import NewTensor, write_safetensors, write_torch
from models.layers.lora import TARGETS, BlockSizes, LoRAConfig, LoRATree, lora_shapes
from models.wan.diffusers_keys import dit_diffusers_name
from models.wan.weights import lora_keys
from models.weights import TensorKey, clean_key, to_official

LAYOUTS = ("peft", "diffusers", "longlive")
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PART = "generator_lora"
_METADATA = "lora_adapter_metadata"  # where diffusers keeps an adapter's settings
_PEFT, _DIFFUSERS = "base_model.model.", "transformer."
_NAME = re.compile(r"(base_model\.model\.|transformer\.)blocks\.(\d+)\.(.+)\.lora_([AB])\.weight")
# Settings that change what an adapter computes, and the value that leaves it plain.
_PLAIN = {
  "use_rslora": (False, None),
  "use_dora": (False, None),
  "bias": ("none", None),
  "fan_in_fan_out": (False, None),
  "rank_pattern": ({}, None),
  "alpha_pattern": ({}, None),
  "modules_to_save": (None, []),
}


@dataclasses.dataclass(frozen=True)
class LoRAInfo:
  """What an adapter's names, shapes and settings say.

  Attributes:
    layout: one of `LAYOUTS`.
    rank: inner width.
    alpha: numerator of the scale alpha / rank, None where the file does not say.
    targets: adapted linear maps, in the order of a block.
    layers: number of blocks.
    dim, ffn_dim: widths of the model, None where no target tells.
  """

  layout: str
  rank: int
  alpha: float | None
  targets: tuple[str, ...]
  layers: int
  dim: int | None
  ffn_dim: int | None


def is_lora(tensors: StateDict) -> bool:
  """Whether most names are of an adapter."""
  hits = sum(".lora_A." in name or ".lora_B." in name for name in tensors)
  return hits > len(tensors) / 2


def lora_info(checkpoint: Checkpoint, part: str) -> LoRAInfo:
  """What the adapter in that part is. Reads no tensor.

  Raises:
    ValueError: for names or settings that are not understood, all listed.
  """
  tensors = _cleaned(checkpoint.parts[part])
  names = {_module(layout, t): (layout, t) for t in TARGETS for layout in ("official", "diffusers")}
  ranks: set[int] = set()
  found: dict[str, set[int]] = {}
  layouts: set[tuple[str, str]] = set()
  widths: dict[str, int] = {}
  unknown = []
  for name, tensor in tensors.items():
    match = _NAME.fullmatch(name)
    if match is None or match[3] not in names or len(tensor.shape) != 2:
      unknown.append(name)
      continue
    naming, target = names[match[3]]
    layouts.add((match[1], naming))
    found.setdefault(target, set()).add(int(match[2]))
    ranks.add(tensor.shape[0 if match[4] == "A" else 1])
    if match[4] == "A":
      widths[target] = tensor.shape[1]
  if unknown:
    raise ValueError(
      f"{checkpoint.path} has names that no adapter of a Wan transformer has: {', '.join(unknown)}."
    )
  known = {
    (_PEFT, "diffusers"): "peft",
    (_DIFFUSERS, "diffusers"): "diffusers",
    (_PEFT, "official"): "longlive",
  }
  layout = known.get(next(iter(layouts))) if len(layouts) == 1 else None
  if layout is None:
    raise ValueError(f"{checkpoint.path} mixes layouts; an adapter is in one of {LAYOUTS}.")
  if len(ranks) != 1:
    raise ValueError(f"{checkpoint.path} has ranks {sorted(ranks)}; all must be equal.")
  rank = ranks.pop()
  square = [width for target, width in widths.items() if target != "ffn.2"]
  return LoRAInfo(
    layout=layout,
    rank=rank,
    alpha=_alpha(checkpoint, rank),
    targets=tuple(t for t in TARGETS if t in found),
    layers=1 + max(max(layers) for layers in found.values()),
    dim=square[0] if square else None,
    ffn_dim=widths.get("ffn.2"),
  )


def read_lora(
  path: str | os.PathLike[str],
  dit: BlockSizes,
  *,
  part: str | None = None,
  alpha: float | None = None,
) -> tuple[LoRATree, LoRAConfig]:
  """An adapter (float32) and its settings, from a file in any of the layouts.

  Args:
    path: PEFT's folder, or a file.
    dit: sizes of the model that it adapts.
    part: of a torch file with several adapters; critics count only when asked for.
    alpha: where the file does not say, as LongLive's does not.

  Raises:
    ValueError: when the file cannot be used or says another alpha, with the reason.
  """
  checkpoint = open_checkpoint(path)
  adapters = [name for name, tensors in checkpoint.parts.items() if is_lora(tensors)]
  chosen = choose_part(checkpoint, part, "LoRA adapter", adapters)
  info = lora_info(checkpoint, chosen)
  given = alpha if info.alpha is None else info.alpha
  if given is None:
    raise ValueError(
      f"{checkpoint.path} does not say its alpha; give it (LongLive trained with alpha = rank, "
      f"here {info.rank})."
    )
  if alpha is not None and given != alpha:
    raise ValueError(f"alpha is {alpha}; {checkpoint.path} was trained with {given}.")
  config = LoRAConfig(info.rank, float(given), info.targets)
  shapes = lora_shapes(config, dit)
  like = {
    f"{target}.{letter}": jax.ShapeDtypeStruct(shape, np.float32)
    for target, pair in shapes.items()
    for letter, shape in pair.items()
  }
  table = layout_keys(info.layout, config)
  flat = load_arrays(checkpoint.path, _cleaned(checkpoint.parts[chosen]), table, like)
  return {t: {letter: flat[f"{t}.{letter}"] for letter in "ab"} for t in shapes}, config


def write_lora(
  path: str | os.PathLike[str],
  lora: Mapping[str, Mapping[str, Any]],
  config: LoRAConfig,
  layout: str,
  dtype: str = "float32",
) -> None:
  """Writes an adapter for PEFT, diffusers or LongLive.

  Args:
    path: a folder for "peft", else a file.
    lora: the tree of `models.layers.lora`.
    config: its settings.
    layout: one of `LAYOUTS`.
    dtype: "float32", "float16" or "bfloat16".

  Raises:
    ValueError: for an unknown layout, or a value that is not finite.
    OSError: when it cannot be written.
  """
  table = layout_keys(layout, config)
  flat = {f"{t}.{letter}": lora[t][letter] for t in config.resolved for letter in "ab"}
  tensors = [
    NewTensor(name, value.shape, dtype, lambda value=value: value)
    for name, value in to_official(flat, table)
  ]
  if layout == "longlive":
    write_torch(path, {PART: tensors})
    return
  settings = peft_settings(config)
  if layout == "diffusers":
    prefixed = {f"{_DIFFUSERS}{key}": value for key, value in settings.items()}
    metadata = {"format": "pt", _METADATA: json.dumps(prefixed, indent=2, sort_keys=True)}
    write_safetensors(path, tensors, metadata)
    return
  folder = pathlib.Path(path)
  write_safetensors(folder / WEIGHTS_FILE, tensors, {"format": "pt"})
  (folder / CONFIG_FILE).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def layout_keys(layout: str, config: LoRAConfig) -> tuple[TensorKey, ...]:
  """The key table of an adapter in that layout.

  Raises:
    ValueError: for an unknown layout.
  """
  table = lora_keys(config)
  if layout == "longlive":
    return table
  if layout not in LAYOUTS:
    raise ValueError(f"layout is {layout!r}; an adapter is written as one of {', '.join(LAYOUTS)}.")
  prefix = _PEFT if layout == "peft" else _DIFFUSERS
  return tuple(
    dataclasses.replace(key, official=prefix + dit_diffusers_name(key.official.removeprefix(_PEFT)))
    for key in table
  )


def peft_settings(config: LoRAConfig) -> dict[str, Any]:
  """What PEFT must know to apply an adapter to diffusers' transformer."""
  return {
    "peft_type": "LORA",
    "r": config.rank,
    "lora_alpha": int(config.alpha) if float(config.alpha).is_integer() else config.alpha,
    "lora_dropout": 0.0,
    "target_modules": [_module("diffusers", target) for target in config.resolved],
    "bias": "none",
    "fan_in_fan_out": False,
    "init_lora_weights": True,
    "inference_mode": True,
    "use_rslora": False,
    "use_dora": False,
  }


def _module(naming: str, target: str) -> str:
  """Name of an adapted linear map inside a block."""
  if naming == "official":
    return target
  return dit_diffusers_name(f"blocks.0.{target}.").removeprefix("blocks.0.").rstrip(".")


def _cleaned(tensors: StateDict) -> StateDict:
  # PEFT keeps the adapter's own name ("default") in memory, and some trainers write it too.
  return {clean_key(n).replace(".default.weight", ".weight"): t for n, t in tensors.items()}


def _alpha(checkpoint: Checkpoint, rank: int) -> float | None:
  """Alpha by the settings beside the adapter; refuses settings that mean another computation."""
  path = pathlib.Path(checkpoint.path)
  file = (path if path.is_dir() else path.parent) / CONFIG_FILE
  try:
    if _METADATA in checkpoint.facts:
      packed = json.loads(checkpoint.facts[_METADATA])
      settings = {key.removeprefix(_DIFFUSERS): value for key, value in packed.items()}
    elif file.is_file():
      settings = json.loads(file.read_text(encoding="utf-8"))
    else:
      return None
    given, alpha = settings["r"], float(settings["lora_alpha"])
  except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
    raise ValueError(f"{checkpoint.path} has settings that cannot be read ({error}).") from error
  for key, plain in _PLAIN.items():
    if key in settings and settings[key] not in plain:
      raise ValueError(
        f"{checkpoint.path} has {key} {settings[key]!r}, which is not supported; use {plain[0]!r}."
      )
  if given != rank:
    raise ValueError(f"{checkpoint.path} has rank {rank} where its settings say {given}.")
  return alpha
