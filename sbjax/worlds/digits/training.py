"""What the training stages share: progress lines with an ETA, and checkpoints of plain arrays."""

from __future__ import annotations

import dataclasses
import os
import time

import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass
class Progress:
  """Prints one line every `every` steps: mean loss since the last line, step time, time left."""

  name: str
  steps: int
  every: int = 25
  _started_s: float = dataclasses.field(default_factory=time.monotonic)
  _timed_steps: int = 0
  _losses: list[float] = dataclasses.field(default_factory=list)

  def update(self, step: int, loss: float) -> None:
    """Notes the loss of a finished step (from 0); the first step, which compiles, is not timed."""
    self._losses.append(loss)
    if step == 0:
      self._started_s = time.monotonic()
    else:
      self._timed_steps += 1
    if (step + 1) % self.every == 0 or step + 1 == self.steps:
      step_s = (time.monotonic() - self._started_s) / max(1, self._timed_steps)
      left_s = step_s * (self.steps - step - 1)
      print(
        f"{self.name} {step + 1}/{self.steps} loss {np.mean(self._losses):.4f} "
        f"{step_s:.2f} s/step, {left_s / 60:.1f} min left",
        flush=True,
      )
      self._losses.clear()


def save_tree(path: str | os.PathLike[str], tree: dict) -> None:
  """Stores nested dictionaries of arrays as an npz with "/" joined keys, atomically."""
  flat: dict[str, np.ndarray] = {}

  def walk(prefix: str, node: object) -> None:
    if isinstance(node, dict):
      for key, child in node.items():
        walk(f"{prefix}/{key}" if prefix else str(key), child)
    else:
      flat[prefix] = np.asarray(node)

  walk("", tree)
  partial = f"{os.fspath(path)}.partial.npz"
  np.savez(partial, **flat)  # pyright: ignore[reportArgumentType]
  os.replace(partial, path)


def load_tree(path: str | os.PathLike[str], like: dict) -> dict:
  """Reads what `save_tree` wrote into the structure of `like`.

  Raises:
    ValueError: if an array is missing or has another shape.
  """
  with np.load(path, allow_pickle=False) as stored:

    def walk(prefix: str, node: object) -> object:
      if isinstance(node, dict):
        return {k: walk(f"{prefix}/{k}" if prefix else str(k), v) for k, v in node.items()}
      if prefix not in stored or stored[prefix].shape != np.shape(node):  # pyright: ignore
        raise ValueError(
          f"checkpoint {os.fspath(path)!r} does not fit: {prefix} is not as expected"
        )
      return jnp.asarray(stored[prefix])

    result = walk("", like)
  assert isinstance(result, dict)
  return result
