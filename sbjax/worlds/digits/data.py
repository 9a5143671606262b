"""Real videos of the digits world: handwritten 8x8 digits that move over a 64x64 canvas.

Everything is numpy and a pure function of its seed. The digit images are the UCI "optical
recognition of handwritten digits" set as scikit-learn ships it; they are stored with the weights,
so scikit-learn is needed only where the world is created anew.
"""

from __future__ import annotations

import dataclasses
import os
import zipfile

import numpy as np
from jaxtyping import Bool, Float, Int, UInt8

from sbjax.worlds.digits import prompts as prompts_lib

CANVAS_PX = 64
DIGIT_PX = 28
FRAMES = 33
MAX_FRAMES = 81
BACKGROUND = 0.05
JITTER_PX = 3
GENERATOR_IMAGES = 898
HALVES_SEED = 7


@dataclasses.dataclass(frozen=True)
class DigitImages:
  """The handwritten digits: ink in [0, 1], labels, and which half each image belongs to."""

  ink: Float[np.ndarray, "images 8 8"]
  labels: Int[np.ndarray, " images"]
  generator: Bool[np.ndarray, " images"]

  def half(self, name: str) -> tuple[Float[np.ndarray, "n 8 8"], Int[np.ndarray, " n"]]:
    """Ink and labels of the "generator" half (videos) or the "reader" half (classifiers)."""
    if name not in ("generator", "reader"):
      raise ValueError(f"half is {name!r}; it must be 'generator' or 'reader'")
    chosen = self.generator if name == "generator" else ~self.generator
    return self.ink[chosen], self.labels[chosen]


def _halves(count: int) -> Bool[np.ndarray, " images"]:
  order = np.random.default_rng(HALVES_SEED).permutation(count)
  generator = np.zeros(count, bool)
  generator[order[:GENERATOR_IMAGES]] = True
  return generator


def images_from_sklearn() -> DigitImages:
  """Reads the digit images from scikit-learn (extra `world`)."""
  from sklearn.datasets import load_digits

  flat, target = load_digits(return_X_y=True)
  images, labels = np.asarray(flat).reshape(-1, 8, 8), np.asarray(target)
  return DigitImages(
    ink=(images / 16.0).astype(np.float32),
    labels=labels.astype(np.int32),
    generator=_halves(len(labels)),
  )


def save_images(path: str | os.PathLike[str], images: DigitImages) -> None:
  """Stores the images in an npz without pickled objects (about 60 kB)."""
  np.savez_compressed(
    path,
    ink_sixteenths=np.round(images.ink * 16).astype(np.uint8),
    labels=images.labels.astype(np.uint8),
  )


def load_images(path: str | os.PathLike[str]) -> DigitImages:
  """Reads what `save_images` wrote.

  Raises:
    ValueError: if the file is not such an npz.
  """
  try:
    with np.load(path, allow_pickle=False) as stored:
      ink, labels = stored["ink_sixteenths"], stored["labels"]
  except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile) as error:
    raise ValueError(f"digit images file {os.fspath(path)!r} cannot be read: {error}") from error
  if ink.ndim != 3 or ink.shape[1:] != (8, 8) or labels.shape != ink.shape[:1] or ink.max() > 16:
    raise ValueError(f"digit images file {os.fspath(path)!r} does not hold 8x8 digit images")
  return DigitImages(
    ink=(ink / 16.0).astype(np.float32),
    labels=labels.astype(np.int32),
    generator=_halves(len(labels)),
  )


def path_centres(
  start: Float[np.ndarray, "batch 2"], velocity: Float[np.ndarray, "batch 2"], frames: int
) -> Float[np.ndarray, "batch frames 2"]:
  """Centre of the digit (row, column; px from the top left edge) in every frame.

  The digit reflects at the walls: its 28 px box stays on the canvas for any number of frames.
  """
  low, high = DIGIT_PX / 2, CANVAS_PX - DIGIT_PX / 2
  span = high - low
  time = np.arange(frames, dtype=np.float32)[None, :, None]
  free = start[:, None, :] + velocity[:, None, :] * time - low
  folded = np.mod(free, 2 * span)
  return (low + np.minimum(folded, 2 * span - folded)).astype(np.float32)


def ink_on_canvas(
  ink: Float[np.ndarray, "batch 8 8"], centres: Float[np.ndarray, "batch frames 2"]
) -> Float[np.ndarray, "batch frames 64 64"]:
  """Coverage in [0, 1] of every pixel: the 8x8 ink drawn bilinearly at 28 px, contrast raised.

  A hat function per axis does magnification and sub-pixel position at once; beyond the image's edge
  the ink fades to nothing over one source pixel.
  """
  pixels = np.arange(CANVAS_PX, dtype=np.float32) + 0.5
  cells = (pixels - centres[..., None]) / (DIGIT_PX / 8) + 3.5
  hats = np.maximum(0.0, 1.0 - np.abs(cells[..., None] - np.arange(8, dtype=np.float32)))
  rows, columns = hats[:, :, 0], hats[:, :, 1]
  drawn = rows @ ink[:, None] @ np.swapaxes(columns, -1, -2)
  return np.clip(1.35 * drawn - 0.1, 0.0, 1.0)


def draw(
  ink: Float[np.ndarray, "batch 8 8"],
  colours: Float[np.ndarray, "batch 3"],
  centres: Float[np.ndarray, "batch frames 2"],
) -> Float[np.ndarray, "batch frames 64 64 3"]:
  """Videos in [0, 1]: coloured ink over a nearly black canvas."""
  alpha = ink_on_canvas(ink, centres)[..., None]
  return BACKGROUND + alpha * (colours[:, None, None, None, :] - BACKGROUND)


@dataclasses.dataclass(frozen=True)
class Scenes:
  """Everything that determines a batch of real videos."""

  image: Int[np.ndarray, " batch"]
  digit: Int[np.ndarray, " batch"]
  colour: Int[np.ndarray, " batch"]
  direction: Int[np.ndarray, " batch"]
  speed: Int[np.ndarray, " batch"]
  start: Float[np.ndarray, "batch 2"]

  @property
  def velocity(self) -> Float[np.ndarray, "batch 2"]:
    """Pixels per frame (row, column)."""
    steps = prompts_lib.DIRECTION_STEPS[self.direction]
    return steps * prompts_lib.SPEED_PX[self.speed][:, None]

  def prompts(self) -> list[str]:
    """The sentence of each scene."""
    return [
      prompts_lib.sentence(prompts_lib.Asked(int(d), int(c), int(r), int(s)))
      for d, c, r, s in zip(self.digit, self.colour, self.direction, self.speed, strict=True)
    ]


def scenes_for(
  rng: np.random.Generator, asked: dict[str, np.ndarray], labels: Int[np.ndarray, " n"]
) -> Scenes:
  """Draws handwriting and starting place for the asked attributes.

  The first 33 frames are centred on the canvas up to a small whole-pixel jitter, which is cut where
  the path would touch a wall.
  """
  batch = len(asked["digit"])
  image = np.array([rng.choice(np.flatnonzero(labels == d)) for d in asked["digit"]], np.int32)
  steps = prompts_lib.DIRECTION_STEPS[asked["direction"]]
  travel = steps * prompts_lib.SPEED_PX[asked["speed"]][:, None] * (FRAMES - 1)
  slack = CANVAS_PX / 2 - DIGIT_PX / 2 - np.abs(travel) / 2
  reach = np.minimum(JITTER_PX, slack).astype(np.int64)
  jitter = rng.integers(-reach, reach + 1, size=(batch, 2))
  start = (CANVAS_PX / 2 - travel / 2 + jitter).astype(np.float32)
  return Scenes(image=image, start=start, **asked)


def random_scenes(rng: np.random.Generator, batch: int, labels: Int[np.ndarray, " n"]) -> Scenes:
  """Scenes of uniformly random prompts."""
  asked = {
    "digit": rng.integers(0, 10, batch).astype(np.int32),
    "colour": rng.integers(0, len(prompts_lib.COLOURS), batch).astype(np.int32),
    "direction": rng.integers(0, len(prompts_lib.DIRECTIONS), batch).astype(np.int32),
    "speed": rng.integers(0, len(prompts_lib.SPEEDS), batch).astype(np.int32),
  }
  return scenes_for(rng, asked, labels)


def draw_scenes(
  scenes: Scenes, ink: Float[np.ndarray, "n 8 8"], frames: int = FRAMES
) -> Float[np.ndarray, "batch frames 64 64 3"]:
  """The scenes as videos in [0, 1]."""
  centres = path_centres(scenes.start, scenes.velocity, frames)
  return draw(ink[scenes.image], prompts_lib.PALETTE[scenes.colour], centres)


def to_uint8(videos: Float[np.ndarray, "*shape"]) -> UInt8[np.ndarray, "*shape"]:
  """Videos in [0, 1] to bytes, rounded."""
  return np.round(np.clip(videos, 0.0, 1.0) * 255.0).astype(np.uint8)


def render(
  images: DigitImages, prompt: str, seed: int, frames: int = FRAMES, half: str = "generator"
) -> UInt8[np.ndarray, "frames 64 64 3"]:
  """A real video of what the prompt asks; the seed chooses handwriting and start.

  Raises:
    ValueError: if the prompt cannot be read or frames is not in 1..81.
  """
  if not 1 <= frames <= MAX_FRAMES:
    raise ValueError(f"frames is {frames}; the world has videos of 1 to {MAX_FRAMES} frames")
  ink, labels = images.half(half)
  rng = np.random.default_rng([seed, 11])
  scenes = scenes_for(rng, prompts_lib.parse_all([prompt]), labels)
  return to_uint8(draw_scenes(scenes, ink, frames)[0])
