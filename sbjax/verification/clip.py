"""Replays recorded features of a CLIP model in open_clip's layout, and HPS's pre-processing.

A model is `NAME.io.npz` beside `NAME.safetensors`. All sizes but the numbers of heads stand in the
weights' shapes; those are found by trying every divisor of a tower's width, of which a wrong one is
far beyond any tolerance.
"""

import dataclasses
import functools
import pathlib
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from models.clip.checkpoint import load
from models.clip.model import encode_images, encode_texts, score
from models.clip.preprocess import fitted_size, preprocess
from models.clip.presets import CLIPConfig
from models.layers.dense import tree_of
from sbjax.verification.archive import names, need, read, sample_picture
from sbjax.verification.result import Check, Comparison

TOLERANCE = 1e-4
_KNOWN = ("image", "text", "image_features", "text_features", "score")
_PREPROCESSED = re.compile(r"(\d+)x(\d+)_(hw|tl16_inside|br16_inside|rowmean|colmean)")
_SIDE_PX = 224


def is_clip_recording(path: pathlib.Path) -> bool:
  """Whether a file is a recorded pair of images and texts.

  Raises:
    ValueError: when it is no `.npz` file.
  """
  return {"image", "text", "score"} <= set(names(path))


def is_hps_preprocessing(path: pathlib.Path) -> bool:
  """Whether a file is recorded pre-processing.

  Raises:
    ValueError: when it is no `.npz` file.
  """
  return any(_PREPROCESSED.fullmatch(name) for name in names(path))


def replay_clip(path: pathlib.Path) -> list[Check]:
  """Differences of features and scores, in float32 at the highest precision.

  Raises:
    ValueError: when a file is missing, damaged, or does not fit the others.
  """
  arrays = read(path, _KNOWN)
  images = jnp.asarray(need(path, arrays, "image", 4), jnp.float32)
  texts = jnp.asarray(need(path, arrays, "text", 2), jnp.int32)
  references = [need(path, arrays, f"{kind}_features", 2) for kind in ("image", "text")]
  stem = path.name.removesuffix(".npz").removesuffix(".io")
  weights = path.with_name(f"{stem}.safetensors")
  config = _config(weights)
  p = tree_of(load(weights, config))
  with jax.default_matmul_precision("highest"):
    found = [
      _best(functools.partial(encode, p), config, f"{tower}_heads", given, reference)
      for encode, tower, given, reference in (
        (encode_images, "vision", images, references[0]),
        (encode_texts, "text", texts, references[1]),
      )
    ]
    cosine = score(*found)
  compared = Comparison(TOLERANCE)
  compared.add("image_features", np.asarray(found[0]), references[0], absolute=TOLERANCE)
  compared.add("text_features", np.asarray(found[1]), references[1], absolute=TOLERANCE)
  compared.add("score", np.asarray(cosine), need(path, arrays, "score", 1), absolute=TOLERANCE)
  return compared.checks()


def _best(
  encode: Callable[..., jax.Array],
  config: CLIPConfig,
  field: str,
  given: jax.Array,
  reference: np.ndarray,
) -> jax.Array:
  """Features under the number of heads that fits best."""
  dim = getattr(config, field.replace("heads", "dim"))
  tried = []
  for heads in (n for n in range(1, dim + 1) if dim % n == 0):
    # Not compiled as a whole: the parts that do not depend on the heads are compiled once.
    features = encode(dataclasses.replace(config, **{field: heads}), given)
    tried.append((float(np.abs(np.asarray(features) - reference).max()), heads, features))
    if tried[-1][0] <= TOLERANCE:
      break
  return min(tried, key=lambda t: t[:2])[2]


def _config(path: pathlib.Path) -> CLIPConfig:
  try:
    with safe_open(path, framework="numpy") as opened:
      shapes = {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118
  except (SafetensorError, OSError) as error:
    raise ValueError(f"{path} cannot be read as a safetensors file ({error}).") from error

  def layers(root: str) -> int:
    found = [re.fullmatch(rf"{root}\.resblocks\.(\d+)\.ln_1\.weight", name) for name in shapes]
    return len([match for match in found if match])

  try:
    patch_px = shapes["visual.conv1.weight"][-1]
    side = round((shapes["visual.positional_embedding"][0] - 1) ** 0.5)
    return CLIPConfig(
      path.name,
      side * patch_px,
      patch_px,
      shapes["visual.conv1.weight"][0],
      layers(r"visual\.transformer"),
      1,
      shapes["visual.transformer.resblocks.0.mlp.c_fc.weight"][0],
      shapes["token_embedding.weight"][1],
      layers("transformer"),
      1,
      shapes["transformer.resblocks.0.mlp.c_fc.weight"][0],
      shapes["positional_embedding"][0],
      shapes["token_embedding.weight"][0],
      shapes["visual.proj"][1],
    )
  except KeyError as error:
    raise ValueError(f"{path} lacks the tensor {error}; it is no CLIP of open_clip's.") from error


def replay_hps_preprocessing(path: pathlib.Path) -> list[Check]:
  """Differences of place and size, of two corners and of the means of rows and columns.

  Raises:
    ValueError: when the file is damaged or has a key that is not known.
  """
  arrays = read(path, (_PREPROCESSED.pattern,))
  compared = Comparison(TOLERANCE)
  for key, reference in arrays.items():
    height, width, what = _PREPROCESSED.fullmatch(key).groups()  # type: ignore[union-attr]
    picture = sample_picture(int(height), int(width))
    rows, columns = fitted_size(int(height), int(width), _SIDE_PX)
    top, left = (_SIDE_PX - rows) // 2, (_SIDE_PX - columns) // 2
    square = np.asarray(preprocess(jnp.asarray(picture[None]), side=_SIDE_PX))[0]
    inside = square[:, top : top + rows, left : left + columns]
    ours = {
      "hw": np.asarray([rows, columns, top, left]),
      "tl16_inside": inside[:, :16, :16],
      "br16_inside": inside[:, -16:, -16:],
      "rowmean": square.mean(axis=(0, 2)),
      "colmean": square.mean(axis=(0, 1)),
    }[what]
    compared.add(key, ours, reference, absolute=0.0 if what == "hw" else TOLERANCE)
  return compared.checks()
