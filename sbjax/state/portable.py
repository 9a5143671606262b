"""Adapters of a run as trees, and adapters from elsewhere as a run's: files that others can use."""

import os
from typing import Any

import numpy as np

from models.layers.lora import LoRAConfig, lora_shapes
from models.wan.presets import preset
from sbjax.state.adapter import AdapterLayout, adapter_facts, load_adapter, save_adapter

Tree = dict[str, dict[str, np.ndarray]]


def layout_for(model: str, config: LoRAConfig) -> AdapterLayout:
  """Names and shapes of an adapter's tensors in the flat buffer, in JAX's order of keys.

  Args:
    model: a preset's name.
    config: rank and targets.

  Raises:
    ValueError: for an unknown preset.
  """
  shapes = lora_shapes(config, preset(model)[0])
  names = [(t, letter) for t in sorted(shapes) for letter in sorted(shapes[t])]
  return AdapterLayout(
    tuple(f"{t}.{letter}" for t, letter in names), tuple(shapes[t][letter] for t, letter in names)
  )


def read_tree(path: str | os.PathLike[str]) -> tuple[Tree, LoRAConfig, str]:
  """Reads a run's adapter file.

  Returns:
    The tree of `models.layers.lora`, float32; its settings; the model's name.

  Raises:
    ValueError: when it is no such file or does not fit the model that it names.
  """
  facts = adapter_facts(path)
  config, model = _settings(path, facts)
  layout = layout_for(model, config)
  flat, _ = load_adapter(path, layout)
  tensors = layout.split(flat)
  return {t: {x: tensors[f"{t}.{x}"] for x in "ab"} for t in config.resolved}, config, model


def save_tree(path: str | os.PathLike[str], tree: Tree, config: LoRAConfig, model: str) -> None:
  """Writes an adapter as a run does, for `sbjax.sample --adapter` and for training to go on.

  Raises:
    ValueError: for an unknown model, another shape or a value that is not finite.
    OutputError: when the file cannot be written.
  """
  layout = layout_for(model, config)
  flat = layout.join({f"{t}.{x}": np.asarray(tree[t][x]) for t in tree for x in "ab"})
  facts = {
    "model": model,
    "parameters": layout.size,
    "rank": config.rank,
    "alpha": config.alpha,
    "targets": list(config.resolved),
  }
  save_adapter(path, flat, layout, facts)


def _settings(path: str | os.PathLike[str], facts: dict[str, Any]) -> tuple[LoRAConfig, str]:
  try:
    return LoRAConfig(facts["rank"], facts["alpha"], tuple(facts["targets"])), facts["model"]
  except (KeyError, TypeError) as error:
    raise ValueError(f"adapter {path} does not say its {error}; restore it from its run") from error
