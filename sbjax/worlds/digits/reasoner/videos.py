"""What the reasoner learns from: frames of drawn and generated videos, and what they show.

Of a drawn video the truth is known. Of a generated one it is what the world's own judge reads (the
reward of the quickstart), which is slower to learn from but is what reinforcement learning will
show. The held-out measure has no part in either.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib

import jax
import numpy as np
from jaxtyping import Float, Int, UInt8

from sbjax.rewards.digits_reasoner import FRAMES_PER_S, SEEN_FRAMES, seen
from sbjax.rewards.frames import evenly_spaced
from sbjax.rewards.generator import Frames
from sbjax.worlds.digits import data, judge, prompts, training, world
from sbjax.worlds.digits.evaluate import PER_CALL, video_sampler
from sbjax.worlds.digits.train_judge import blended_scenes, spoil

SHIFT_PX = 2


@dataclasses.dataclass(frozen=True)
class Clips:
  """The frames that the reasoner sees of some videos, and what they show.

  Attributes:
    frames: bytes.
    tables: how probable each class is, by head of the world's judge.
    asked: which of the 480 prompts a generated video was made for; -1 for a drawn one.
  """

  frames: UInt8[np.ndarray, "batch seen 64 64 3"]
  tables: dict[str, Float[np.ndarray, "batch classes"]]
  asked: Int[np.ndarray, " batch"]

  def __len__(self) -> int:
    return len(self.frames)

  def rows(self, chosen: Int[np.ndarray, " n"]) -> Clips:
    """Some of them."""
    tables = {name: table[chosen] for name, table in self.tables.items()}
    return Clips(self.frames[chosen], tables, self.asked[chosen])

  def views(self) -> list[Frames]:
    """What the reasoner sees of each."""
    times_s = tuple(i / FRAMES_PER_S for i in seen_frames(data.FRAMES))
    return [seen(frames, times_s) for frames in self.frames]


def join(first: Clips, second: Clips) -> Clips:
  """One after the other."""
  return Clips(
    np.concatenate([first.frames, second.frames]),
    {name: np.concatenate([first.tables[name], second.tables[name]]) for name in first.tables},
    np.concatenate([first.asked, second.asked]),
  )


def seen_frames(frames: int) -> list[int]:
  """The frames of a video that are looked at."""
  return evenly_spaced(frames, SEEN_FRAMES)


def drawn(
  rng: np.random.Generator,
  count: int,
  ink: Float[np.ndarray, "n 8 8"],
  labels: Int[np.ndarray, " n"],
  spoiled: bool = True,
) -> Clips:
  """Drawn videos of random prompts; spoiled as those that the world's judge learns from.

  Three in ten blend two drawings and one in five two colours, with tables to match.
  """
  clips = blended_scenes(rng, count, ink, labels, seen_frames(data.FRAMES))
  if spoiled:
    clips = spoil(rng, clips)
  nobody = np.full(count, -1, np.int32)
  return Clips(data.to_uint8(clips.frames), dict(clips.labels), nobody)


def generated(the_world: world.World, count: int, seed: int) -> Clips:
  """Videos of the base model for random prompts, read by the world's judge.

  Args:
    the_world: base model and judge.
    count: how many, a multiple of 8.
    seed: names prompts and noise.
  """
  listed = prompts.all_prompts()
  chosen = np.random.default_rng([seed, 71]).integers(0, len(listed), count)
  sample_some = video_sampler(the_world)
  progress = training.Progress("videos", count // PER_CALL)
  frames, tables = [], []
  for at in range(0, count, PER_CALL):
    texts = [listed[i] for i in chosen[at : at + PER_CALL]]
    videos = sample_some(texts, jax.random.fold_in(jax.random.key(seed), at))
    tables.append(judge.tables(the_world.judge, videos))
    frames.append(videos[:, seen_frames(videos.shape[1])])
    progress.update(at // PER_CALL, 0.0)
  return Clips(
    np.concatenate(frames),
    {n: np.concatenate([t[n] for t in tables]).astype(np.float32) for n in judge.HEADS},
    chosen.astype(np.int32),
  )


def save(path: str | os.PathLike[str], clips: Clips) -> None:
  """Writes clips as an npz of plain arrays."""
  partial = pathlib.Path(f"{os.fspath(path)}.partial.npz")
  named = {f"table_{name}": table for name, table in clips.tables.items()}
  np.savez(partial, frames=clips.frames, asked=clips.asked, **named)  # pyright: ignore
  os.replace(partial, path)


def load(path: str | os.PathLike[str]) -> Clips:
  """Reads what `save` wrote."""
  with np.load(path, allow_pickle=False) as stored:
    tables = {name: stored[f"table_{name}"] for name in judge.HEADS}
    return Clips(stored["frames"], tables, stored["asked"])


def shifted(
  rng: np.random.Generator, frames: UInt8[np.ndarray, "batch seen 64 64 3"]
) -> np.ndarray:
  """Each video moved by up to two pixels, edges repeated, and made up to a tenth darker."""
  margin = SHIFT_PX
  padded = np.pad(frames, ((0, 0), (0, 0), (margin, margin), (margin, margin), (0, 0)), "edge")
  size = frames.shape[2]
  out = np.empty_like(frames)
  for i, (row, column) in enumerate(rng.integers(0, 2 * margin + 1, (len(frames), 2))):
    out[i] = padded[i, :, row : row + size, column : column + size]
  gain = rng.uniform(0.9, 1.0, (len(frames), 1, 1, 1, 1)).astype(np.float32)
  return np.round(out * gain).astype(np.uint8)
