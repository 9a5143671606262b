"""What a checkpoint is, whether it can be used, and what is missing."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from models.checkpoints.families import DIT
from models.checkpoints.identify import identify, quantised
from models.checkpoints.load import Progress, all_finite
from models.checkpoints.lora import is_lora, lora_info
from models.checkpoints.opening import open_checkpoint
from models.checkpoints.stored import Checkpoint, StateDict

UNKNOWN = "unknown"


@dataclasses.dataclass(frozen=True)
class Part:
  """One state dictionary of a checkpoint.

  Attributes:
    name: its key in the file; empty where the file is one flat dictionary.
    kind: the model it belongs to, "LoRA adapter" or "unknown".
    layout: how its tensors are named; empty where the kind is unknown.
    tensors: how many there are.
    size_bytes: of all of them.
    dtypes: their types.
    presets: sizes that it fits wholly.
    settings: of an adapter: rank, alpha, targets, layers.
    problems: names by what is wrong with them, against the closest preset.
    reason: why it cannot be used; None where it can.
  """

  name: str
  kind: str
  layout: str
  tensors: int
  size_bytes: int
  dtypes: tuple[str, ...]
  presets: tuple[str, ...]
  settings: Mapping[str, Any]
  problems: Mapping[str, tuple[str, ...]]
  reason: str | None


@dataclasses.dataclass(frozen=True)
class Description:
  """A whole checkpoint.

  Attributes:
    path: file or folder.
    container: how it is stored.
    facts: what lies beside the tensors.
    parts: its state dictionaries.
    reason: why none of it can be used; None where a part can.
  """

  path: str
  container: str
  facts: Mapping[str, Any]
  parts: tuple[Part, ...]
  reason: str | None


def describe(
  path: str | os.PathLike[str], *, values: bool = True, progress: Progress | None = None
) -> Description:
  """Looks at a checkpoint.

  Args:
    path: file, folder or index.
    values: also read the tensors of what would fit, to find numbers that are not finite.
    progress: called with bytes read and bytes in all.

  Raises:
    ValueError: when it is no checkpoint that can be opened.
  """
  checkpoint = open_checkpoint(path)
  parts = [_part(checkpoint, name) for name in checkpoint.parts]
  if values:
    total = sum(part.size_bytes for part in parts if part.reason is None)
    done = 0
    for i, part in enumerate(parts):
      if part.reason is not None:
        continue
      bad = []
      for name, tensor in checkpoint.parts[part.name].items():
        if not all_finite(tensor.view()):
          bad.append(name)
        done += tensor.size_bytes
        if progress is not None:
          progress(done, total)
      if bad:
        reason = f"values that are not finite: {', '.join(bad)}"
        problems = {"not finite": tuple(bad)}
        parts[i] = dataclasses.replace(part, problems=problems, presets=(), reason=reason)
  reasons = [f"{part.name or 'it'}: {part.reason}" for part in parts if part.reason]
  unusable = "; ".join(reasons) if len(reasons) == len(parts) else None
  return Description(
    checkpoint.path, checkpoint.container, checkpoint.facts, tuple(parts), unusable
  )


def _part(checkpoint: Checkpoint, name: str) -> Part:
  tensors = checkpoint.parts[name]
  whole = Part(
    name=name,
    kind=UNKNOWN,
    layout="",
    tensors=len(tensors),
    size_bytes=sum(t.size_bytes for t in tensors.values()),
    dtypes=tuple(sorted({t.dtype for t in tensors.values()})),
    presets=(),
    settings={},
    problems={},
    reason=None,
  )
  if is_lora(tensors):
    return _adapter(checkpoint, whole)
  refused = quantised(tensors)
  if refused is not None:
    return dataclasses.replace(whole, reason=refused)
  found = identify(tensors)
  if found is None:
    shown = ", ".join(list(tensors)[:3]) + (" …" if len(tensors) > 3 else "")
    return dataclasses.replace(whole, reason=f"tensors of no known model ({shown})")
  reason = None
  if not found.presets:
    reason = f"no preset fits; closest is {found.preset}, with {found.fit.text()}"
  return dataclasses.replace(
    whole,
    kind=found.family.name,
    layout=found.layout.name,
    presets=found.presets,
    problems=found.fit.problems,
    reason=reason,
  )


def _adapter(checkpoint: Checkpoint, part: Part) -> Part:
  part = dataclasses.replace(part, kind="LoRA adapter")
  try:
    info = lora_info(checkpoint, part.name)
  except ValueError as error:
    return dataclasses.replace(part, reason=str(error))
  settings = {
    "rank": info.rank,
    "alpha": info.alpha,
    "targets": list(info.targets),
    "layers": info.layers,
  }
  presets = tuple(
    name
    for name, dit in DIT.presets.items()
    if dit.num_layers == info.layers
    and info.dim in (dit.dim, None)
    and info.ffn_dim in (dit.ffn_dim, None)
  )
  reason = _incomplete(checkpoint.parts[part.name], info.layers, len(info.targets))
  if reason is None and not presets:
    reason = f"no preset has {info.layers} blocks of width {info.dim}"
  return dataclasses.replace(
    part, layout=info.layout, settings=settings, presets=presets, reason=reason
  )


def _incomplete(tensors: StateDict, layers: int, targets: int) -> str | None:
  wanted = 2 * layers * targets
  if len(tensors) == wanted:
    return None
  return f"{len(tensors)} tensors where {targets} linear maps of {layers} blocks have {wanted}"
