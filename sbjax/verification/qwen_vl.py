"""Replays recorded forward passes of Qwen2.5-VL and Qwen3-VL, and their image pre-processing.

A forward pass is `NAME.io.npz` beside `NAME.safetensors` and `NAME.config.json`; the arrays have
the names of Hugging Face's inputs and outputs.
"""

import dataclasses
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np

from models.layers.dense import Tree, tree_of
from models.qwen_vl.checkpoint import load
from models.qwen_vl.model import forward
from models.qwen_vl.positions import Grid, Placed, Visual, place
from models.qwen_vl.preprocess import encode_image
from models.qwen_vl.presets import QwenVLConfig, VisionConfig, from_json, preset
from models.qwen_vl.vision import encode_slices
from sbjax.verification.archive import names, need, read, sample_picture
from sbjax.verification.result import Check, Comparison

TOLERANCE = 1e-4
LOGITS_TOLERANCE = 1e-3
_KNOWN = (
  "input_ids",
  r"(image|video)_grid_thw",
  "second_per_grid",
  r"pixel_values(_videos)?",
  r"(image|video)_embeds",
  r"(image|video)_deepstack_\d+",
  r"position_ids(_v5)?",
  r"rope_delta(_v5)?",
  "logits",
  r"hidden_\d+",  # between layers: tells where two ports part, and is not compared here
)
_PIXELS = {"image": "pixel_values", "video": "pixel_values_videos"}
_PREPROCESSED = re.compile(r"(q25|q3)_(\d+)x(\d+)_(grid|rows0_5|rowmean|rowstd)")
_MODELS = {"q25": "qwen2.5-vl-7b", "q3": "qwen3-vl-8b"}


def is_qwen_recording(path: pathlib.Path) -> bool:
  """Whether a file is a recorded forward pass.

  Raises:
    ValueError: when it is no `.npz` file.
  """
  return {"input_ids", "logits"} <= set(names(path))


def is_qwen_preprocessing(path: pathlib.Path) -> bool:
  """Whether a file is recorded pre-processing.

  Raises:
    ValueError: when it is no `.npz` file.
  """
  return any(_PREPROCESSED.fullmatch(name) for name in names(path))


def replay_qwen(path: pathlib.Path) -> list[Check]:
  """Differences of features, positions and logits, in float32 at the highest precision.

  Raises:
    ValueError: when a file is missing, damaged, or does not fit the others.
  """
  arrays = read(path, _KNOWN)
  stem = path.name.removesuffix(".npz").removesuffix(".io")
  config = _config(path.with_name(f"{stem}.config.json"))
  model = load(path.with_name(f"{stem}.safetensors"), config)
  with jax.default_matmul_precision("highest"):
    return _replay(path, arrays, config, tree_of(model))


def _config(path: pathlib.Path) -> QwenVLConfig:
  try:
    data = json.loads(path.read_text())
  except (OSError, ValueError) as error:
    raise ValueError(f"{path} cannot be read as JSON ({error}).") from error
  # The recordings were made with transformers 5, which goes on after the larger side of a grid.
  return dataclasses.replace(from_json(path.name, data), after_visual="grid")


def _replay(
  path: pathlib.Path, arrays: dict[str, np.ndarray], config: QwenVLConfig, p: Tree
) -> list[Check]:
  compared = Comparison(TOLERANCE)
  seen = {kind: _features(path, arrays, config, p, kind) for kind in _PIXELS}
  for kind, visuals in seen.items():
    if not visuals:
      continue
    tokens = np.concatenate([tokens for _, tokens, _ in visuals])
    deep = np.concatenate([deep for _, _, deep in visuals], axis=1)
    for key, ours in (
      (f"{kind}_embeds", tokens),
      *((f"{kind}_deepstack_{level}", levels) for level, levels in enumerate(deep)),
    ):
      if key in arrays:
        compared.add(key, ours, arrays[key], absolute=TOLERANCE)
  ids = need(path, arrays, "input_ids", 2).astype(np.int32)
  placed, features, deep = _sequences(path, config, ids, seen)
  for ending in ("", "_v5"):
    if f"position_ids{ending}" in arrays:
      ours = np.stack([one.positions for one in placed], axis=1)
      compared.add("position_ids", ours, arrays[f"position_ids{ending}"], absolute=0.0)
    if f"rope_delta{ending}" in arrays:
      delta = np.asarray([[int(one.positions.max()) + 1 - ids.shape[1]] for one in placed])
      compared.add("rope_delta", delta, arrays[f"rope_delta{ending}"], absolute=0.0)
  run = jax.jit(forward, static_argnames=("config",))
  ours = run(
    p,
    config=config,
    ids=jnp.asarray(ids),
    positions=jnp.asarray(np.stack([one.positions for one in placed])),
    features=jnp.asarray(features),
    visual_rows=jnp.asarray(np.stack([one.visual_rows for one in placed])),
    deep=jnp.asarray(deep),
  )
  logits = need(path, arrays, "logits", 3)
  compared.add("logits", np.asarray(ours), logits, absolute=LOGITS_TOLERANCE)
  return compared.checks()


def _features(
  path: pathlib.Path, arrays: dict[str, np.ndarray], config: QwenVLConfig, p: Tree, kind: str
) -> list[tuple[Visual, np.ndarray, np.ndarray]]:
  """Size, features and deepstack levels of each image, or of each video."""
  if f"{kind}_grid_thw" not in arrays:
    return []
  vision = config.vision
  grids = need(path, arrays, f"{kind}_grid_thw", 2)
  pixels = need(path, arrays, _PIXELS[kind], 2)
  _check_pixels(path, grids, pixels, vision)
  seconds = arrays.get("second_per_grid", np.ones(len(grids)))
  run = jax.jit(encode_slices, static_argnames=("config", "height", "width"))
  found, at = [], 0
  for index, row in enumerate(grids):
    grid = Grid(*(int(n) for n in row))
    end = at + grid.slices * grid.height * grid.width
    patches = jnp.asarray(pixels[at:end].reshape(grid.slices, -1, vision.patch_width))
    made = run(p["visual"], config=vision, patches=patches, height=grid.height, width=grid.width)
    tokens = np.asarray(made.tokens).reshape(-1, vision.out_dim)
    deep = np.asarray(made.deep).reshape(len(made.deep), *tokens.shape)
    visual = Visual(grid, kind == "video", float(seconds[index]) if kind == "video" else 1.0)
    found.append((visual, tokens, deep))
    at = end
  return found


def _check_pixels(
  path: pathlib.Path, grids: np.ndarray, pixels: np.ndarray, vision: VisionConfig
) -> None:
  if grids.shape[1] != 3 or (grids < 1).any() or (grids[:, 1:] % vision.merge).any():
    raise ValueError(f"{path} has grids {grids.tolist()}; their sides must merge by two.")
  wanted = (int(grids.prod(axis=1).sum()), vision.patch_width)
  if pixels.shape != wanted:
    raise ValueError(f"{path} has pixels of shape {pixels.shape}; the grids ask for {wanted}.")


def _sequences(
  path: pathlib.Path,
  config: QwenVLConfig,
  ids: np.ndarray,
  seen: dict[str, list[tuple[Visual, np.ndarray, np.ndarray]]],
) -> tuple[list[Placed], np.ndarray, np.ndarray]:
  """Places of every sequence, with rows that count through the features of the whole batch."""
  left = {kind: list(visuals) for kind, visuals in seen.items()}
  placed, tokens, deep, offset = [], [], [], 0
  merge = config.vision.merge
  for row in ids:
    visuals, at = [], 0
    while at < len(row):
      kind = {config.image_token: "image", config.video_token: "video"}.get(int(row[at]))
      if kind is None:
        at += 1
        continue
      if not left[kind]:
        raise ValueError(f"{path} has more {kind} placeholders than {kind}s.")
      visual, features, levels = left[kind].pop(0)
      visuals.append(visual)
      tokens.append(features)
      deep.append(levels)
      # A Qwen3 video stands in several runs; its placeholders are counted, wherever they are.
      places = np.flatnonzero(row[at:] == row[at])
      at += int(places[min(visual.grid.tokens(merge), len(places)) - 1]) + 1
    one = place(config, row, visuals)
    rows = np.where(one.visual_rows >= 0, one.visual_rows + offset, -1).astype(np.int32)
    offset += sum(visual.grid.tokens(merge) for visual in visuals)
    placed.append(one._replace(visual_rows=rows))
  if any(left.values()):
    raise ValueError(f"{path} has more grids than its input_ids have placeholders for.")
  levels, dim = len(config.vision.deepstack), config.text.dim
  none = np.zeros((1, dim), np.float32), np.zeros((levels, 1, dim), np.float32)
  return placed, np.concatenate(tokens or [none[0]]), np.concatenate(deep or [none[1]], axis=1)


def replay_qwen_preprocessing(path: pathlib.Path) -> list[Check]:
  """Differences of grids, of the first patches and of every patch's mean and deviation.

  Raises:
    ValueError: when the file is damaged or has a key that is not known.
  """
  arrays = read(path, (_PREPROCESSED.pattern,))
  compared = Comparison(TOLERANCE)
  for key, reference in arrays.items():
    model, height, width, what = _PREPROCESSED.fullmatch(key).groups()  # type: ignore[union-attr]
    picture = sample_picture(int(height), int(width))
    encoded = encode_image(picture, preset(_MODELS[model]).vision)
    patches = encoded.patches[0]
    ours = {
      "grid": np.asarray([encoded.visual.grid]),
      "rows0_5": patches[:6],
      "rowmean": patches.mean(axis=1),
      "rowstd": patches.std(axis=1),
    }[what]
    compared.add(key, ours, reference, absolute=0.0 if what == "grid" else TOLERANCE)
  return compared.checks()
