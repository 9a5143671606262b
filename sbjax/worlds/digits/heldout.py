"""The held-out measure: a kernel classifier that is never a reward.

It differs from the judge in kind: an RBF support vector machine (one against the rest) on 14x14
intensity crops of single frames, fitted by scikit-learn when the world is created and evaluated
here in plain numpy. If a policy learns to please the judge without drawing better digits, this
measure does not follow.
"""

from __future__ import annotations

import dataclasses
import os
import zipfile

import numpy as np
from jaxtyping import Float, UInt8

from sbjax.worlds.digits import data, prompts

CROP_PX = 28
SCORED_FRAMES = 5
_KEYS = ("vectors", "coefficients", "intercepts", "gamma", "temperature")


@dataclasses.dataclass(frozen=True)
class HeldOut:
  """Support vectors [n, 196], one column of dual coefficients per digit, softmax temperature."""

  vectors: Float[np.ndarray, "n 196"]
  coefficients: Float[np.ndarray, "n 10"]
  intercepts: Float[np.ndarray, " 10"]
  gamma: float
  temperature: float


def crops(
  frames: Float[np.ndarray, "batch 64 64 3"] | UInt8[np.ndarray, "batch 64 64 3"],
) -> Float[np.ndarray, "batch 196"]:
  """Colour-blind features: 28 px around the centre of intensity, pooled to 14x14, peak 1."""
  intensity = np.asarray(frames, np.float32).max(-1)
  if frames.dtype == np.uint8:
    intensity = intensity / 255.0
  ink = np.maximum(intensity - 0.2, 0.0)
  mass = ink.sum((1, 2)) + 1e-6
  pixels = np.arange(data.CANVAS_PX, dtype=np.float32)
  row = (ink.sum(2) * pixels).sum(1) / mass
  column = (ink.sum(1) * pixels).sum(1) / mass
  pad = CROP_PX // 2
  padded = np.pad(ink, ((0, 0), (pad, pad), (pad, pad)))
  out = np.empty((len(ink), CROP_PX, CROP_PX), np.float32)
  for i, (r, c) in enumerate(
    zip(np.rint(row).astype(int), np.rint(column).astype(int), strict=True)
  ):
    out[i] = padded[i, r + 1 : r + 1 + CROP_PX, c + 1 : c + 1 + CROP_PX]
  pooled = out.reshape(-1, 14, 2, 14, 2).mean((2, 4))
  return pooled.reshape(len(ink), 196) / (pooled.max((1, 2))[:, None] + 1e-6)


def decision(
  model: HeldOut, features: Float[np.ndarray, "batch 196"]
) -> Float[np.ndarray, "batch 10"]:
  """One-against-the-rest margins."""
  squared = (
    (features**2).sum(1)[:, None] + (model.vectors**2).sum(1)[None] - 2 * features @ model.vectors.T
  )
  return np.exp(-model.gamma * squared) @ model.coefficients + model.intercepts[None]


def probabilities(
  model: HeldOut, features: Float[np.ndarray, "batch 196"]
) -> Float[np.ndarray, "batch 10"]:
  """Softmax of the margins at the fitted temperature."""
  scaled = decision(model, features) / model.temperature
  scaled = np.exp(scaled - scaled.max(1, keepdims=True))
  return scaled / scaled.sum(1, keepdims=True)


def scores(
  model: HeldOut, videos: UInt8[np.ndarray, "batch frames 64 64 3"], asked: list[str]
) -> dict[str, np.ndarray]:
  """How well the asked digit is read over five frames from first to last.

  Returns:
    "p": float64 [batch], the asked digit's probability averaged over the frames; "right": bool
    [batch], whether the averaged probabilities favour it; "read": int [batch], the digit read.
  """
  batch, frames = videos.shape[:2]
  if len(asked) != batch:
    raise ValueError(f"prompts has {len(asked)} entries for {batch} videos; it must have one each")
  chosen = np.unique(np.linspace(0, frames - 1, SCORED_FRAMES).round().astype(int))
  features = crops(videos[:, chosen].reshape(-1, *videos.shape[2:]))
  table = probabilities(model, features).reshape(batch, len(chosen), 10).mean(1)
  digit = prompts.parse_all(asked)["digit"]
  read = table.argmax(1)
  return {
    "p": table[np.arange(batch), digit].astype(np.float64),
    "right": read == digit,
    "read": read,
  }


def fit(images: data.DigitImages, seed: int, copies: int = 4) -> HeldOut:
  """Fits the classifier on the reader half with scikit-learn; the temperature on a fifth of it.

  Each image is drawn `copies` times with random place, gain, blur and noise.
  """
  from sklearn.svm import SVC

  ink, labels = images.half("reader")
  rng = np.random.default_rng([seed, 21])
  order = rng.permutation(len(labels))
  validation = np.zeros(len(labels), bool)
  validation[order[: len(labels) // 5]] = True

  def dataset(chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    picked = np.repeat(np.flatnonzero(chosen), copies)
    centres = rng.uniform(16, 48, size=(len(picked), 1, 2)).astype(np.float32)
    alpha = data.ink_on_canvas(ink[picked], centres)[:, 0]
    gain = rng.uniform(0.6, 1.0, size=(len(picked), 1, 1)).astype(np.float32)
    frames = np.repeat((gain * blur(alpha, rng))[..., None], 3, axis=-1)
    frames = frames + rng.normal(0, 0.03, frames.shape).astype(np.float32)
    return crops(np.clip(frames, 0, 1)), labels[picked]

  def fit_on(chosen: np.ndarray) -> HeldOut:
    features, digits = dataset(chosen)
    gamma = 1.0 / (features.shape[1] * features.var())
    dense = np.zeros((len(features), 10), np.float32)
    intercepts = np.zeros(10, np.float32)
    for digit in range(10):
      machine = SVC(C=10.0, gamma=gamma).fit(features, np.where(digits == digit, 1, -1))
      dense[machine.support_, digit] = machine.dual_coef_[0]
      intercepts[digit] = machine.intercept_[0]
    used = np.flatnonzero((dense != 0).any(1))
    # Bytes hold the vectors: fitted and shipped numbers then differ by less than 1/500.
    vectors = np.round(features[used] * 255).astype(np.uint8).astype(np.float32) / 255
    return HeldOut(vectors, dense[used], intercepts, float(gamma), 1.0)

  part = fit_on(~validation)
  features, digits = dataset(validation)
  temperatures = np.geomspace(0.02, 2.0, 60)
  losses = []
  for temperature in temperatures:
    table = probabilities(dataclasses.replace(part, temperature=float(temperature)), features)
    losses.append(-np.log(table[np.arange(len(digits)), digits] + 1e-12).mean())
  best = float(temperatures[int(np.argmin(losses))])
  return dataclasses.replace(fit_on(np.ones(len(labels), bool)), temperature=best)


def blur(
  pictures: Float[np.ndarray, "batch h w"], rng: np.random.Generator
) -> Float[np.ndarray, "batch h w"]:
  """Mixes each picture with its 3x3 box blur (applied twice) by a random share."""
  soft = pictures
  for _ in range(2):
    for axis in (1, 2):
      soft = (np.roll(soft, 1, axis) + soft + np.roll(soft, -1, axis)) / 3
  share = rng.uniform(0, 1, size=(len(pictures), 1, 1)).astype(np.float32)
  return (1 - share) * pictures + share * soft


def save(path: str | os.PathLike[str], model: HeldOut) -> None:
  """Stores the classifier as an npz without pickled objects."""
  np.savez_compressed(
    path,
    vectors=np.round(model.vectors * 255).astype(np.uint8),
    coefficients=model.coefficients.astype(np.float32),
    intercepts=model.intercepts.astype(np.float32),
    gamma=np.float64(model.gamma),
    temperature=np.float64(model.temperature),
  )


def load(path: str | os.PathLike[str]) -> HeldOut:
  """Reads what `save` wrote.

  Raises:
    ValueError: if the file is damaged or holds something else.
  """
  name = os.fspath(path)
  try:
    with np.load(path, allow_pickle=False) as stored:
      vectors, coefficients, intercepts, gamma, temperature = (stored[key] for key in _KEYS)
  except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile) as error:
    raise ValueError(f"held-out measure file {name!r} cannot be read: {error}") from error
  shapes_fit = (
    vectors.ndim == 2
    and vectors.shape[1] == 196
    and coefficients.shape == (len(vectors), 10)
    and intercepts.shape == (10,)
    and gamma.shape == temperature.shape == ()
  )
  if not shapes_fit:
    raise ValueError(f"held-out measure file {name!r} has arrays of the wrong shapes")
  return HeldOut(
    vectors=vectors.astype(np.float32) / 255,
    coefficients=coefficients.astype(np.float32),
    intercepts=intercepts.astype(np.float32),
    gamma=float(gamma),
    temperature=float(temperature),
  )
