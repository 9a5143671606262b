"""The next chunk of several prompts as one compiled call takes it."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from models.generate.rows import Row
from models.generate.steps import Chunk
from models.qwen_vl.presets import QwenVLConfig


def chunk_of(
  rows: Sequence[Row],
  at: Sequence[int],
  model: QwenVLConfig,
  *,
  batch: int,
  tokens: int,
  always_visual: bool,
) -> Chunk:
  """The next chunk of each row; a batch that is not full repeats its first.

  Args:
    rows: requests whose prompts are being filled.
    at: their places in the cache.
    model: the sizes.
    batch: prompts of the call, at least as many as rows.
    tokens: of a prompt; what a row lacks beyond them is left for later.
    always_visual: whether chunks of text too have the shape of those that show something.
  """
  ids = np.zeros((batch, tokens), np.int32)
  positions = np.zeros((batch, 3, tokens), np.int32)
  visual = np.full((batch, tokens), -1, np.int32)
  which = [*range(len(rows)), *[0] * (batch - len(rows))]
  for i, j in enumerate(which):
    row = rows[j]
    count = min(row.to_fill, tokens)
    span = slice(row.filled, row.filled + count)
    ids[i, :count] = row.request.prompt.ids[span]
    positions[i, :, :count] = row.placed.positions[:, span]
    visual[i, :count] = row.placed.visual_rows[span]
  places = np.asarray([at[j] for j in which], np.int32)
  start = np.asarray([rows[j].filled for j in which], np.int32)
  # Left on the host: a compiled call takes arrays of the host faster than each can be moved there.
  text: Any = (ids, positions, places, start)
  if not always_visual and not (visual >= 0).any():
    return Chunk(*text)
  levels, dim = len(model.vision.deepstack), model.text.dim
  features = np.zeros((batch, tokens, dim), np.float32)
  deep = np.zeros((levels, batch, tokens, dim), np.float32)
  for i, j in enumerate(which):
    row = rows[j]
    if row.features is not None and row.deep is not None:
      seen = np.flatnonzero(visual[i] >= 0)
      features[i, seen] = row.features[visual[i, seen]]
      deep[:, i, seen] = row.deep[:, visual[i, seen]]
  shown: Any = (features, visual >= 0, deep if levels else None)
  return Chunk(*text, *shown)
