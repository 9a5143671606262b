"""Sample videos of a step with what was asked and how they were judged."""

import json
import math
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import UInt8

from sbjax import files
from sbjax.report import video as video_lib
from sbjax.runtime.records import CandidateRecord


def step_folder(root: str | os.PathLike[str], step: int) -> pathlib.Path:
  """Gives a step's folder, e.g. `samples/step_000010`; names sort as steps do."""
  return pathlib.Path(root) / f"step_{step:06d}"


def chosen(candidates: Sequence[CandidateRecord], cap: int) -> tuple[CandidateRecord, ...]:
  """Picks the candidates whose videos are shown: evenly spread, so that prompts differ.

  Args:
    candidates: a step's candidates in order; those without a video are passed over.
    cap: how many at most.

  Returns:
    At most `cap` of them, in order; the choice depends on their number only.
  """
  shown = [c for c in candidates if c.video is not None]
  if len(shown) <= cap:
    return tuple(shown)
  return tuple(shown[i * len(shown) // cap] for i in range(cap))


def write_samples(
  root: str | os.PathLike[str],
  step: int,
  candidates: Sequence[CandidateRecord],
  *,
  fps: int,
  cap: int,
) -> pathlib.Path:
  """Writes `step_NNNNNN/candidate_MMM.mp4` and, last, `samples.jsonl` beside them.

  A line of it has index, prompt, seed, reward (null where judging failed), components, rationale
  and file. Writing a step again gives the same files.

  Args:
    root: the workdir's `samples`.
    step: RL step.
    candidates: the step's candidates; see `chosen`.
    fps: frames per second.
    cap: how many videos at most.

  Returns:
    The step's folder.

  Raises:
    OutputError: where a file cannot be written.
  """
  folder = step_folder(root, step)
  lines = []
  for candidate in chosen(candidates, cap):
    name = f"candidate_{candidate.index:03d}.mp4"
    assert candidate.video is not None  # `chosen` passes over the others
    video_lib.write_mp4(folder / name, video_lib.enlarged(candidate.video), fps)
    lines.append(json.dumps({**facts(candidate), "file": name}, ensure_ascii=False))
  files.atomic_write(folder / "samples.jsonl", "".join(f"{line}\n" for line in lines))
  return folder


def facts(candidate: CandidateRecord) -> dict[str, Any]:
  """Gives a candidate's record without its video, as JSON values (null for what is not finite)."""
  return {
    "index": candidate.index,
    "prompt": candidate.prompt,
    "seed": int(candidate.seed),
    "reward": _finite(candidate.reward),
    "components": {name: _finite(value) for name, value in candidate.components.items()},
    "rationale": candidate.rationale,
  }


def stacked(
  candidates: Sequence[CandidateRecord], cap: int | None = None
) -> UInt8[np.ndarray, "videos frames height width 3"] | None:
  """Stacks videos of one size for `Writer.write_videos`.

  Args:
    candidates: a step's candidates; those without a video are passed over.
    cap: where given, only the `chosen` ones.

  Returns:
    uint8 videos, or None where no candidate has kept its video.
  """
  shown = candidates if cap is None else chosen(candidates, cap)
  videos = [c.video for c in shown if c.video is not None]
  return np.stack(videos) if videos else None


def _finite(value: float | None) -> float | None:
  return float(value) if value is not None and math.isfinite(value) else None
