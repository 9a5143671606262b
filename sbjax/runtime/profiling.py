"""Profiles of a run: which settings they belong to, from a warm-up, from steps."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from sbjax.dataflow.plan import WorkerSlot
from sbjax.dataflow.profile import Profile, read_profile
from sbjax.runtime.recipe import Recipe
from sbjax.settings import Settings
from sbjax.sizes import model_sizes


def fingerprint(settings: Settings) -> str:
  """Names the settings that a task's time depends on; the video's length is in the rows instead.

  How many candidates, workers and mini-batches there are, rates, weights and folders change no
  task, so one profile serves every scheme and batch; the model's sizes do.
  """
  dit, sampler = model_sizes(settings)
  runtime, reward = settings.runtime, settings.reward
  parts = {
    "model": [
      dataclasses.asdict(dit),
      # Resolution and length are in the rows.
      dataclasses.asdict(
        dataclasses.replace(sampler, latent_height=0, latent_width=0, max_frames=0)
      ),
      settings.model.weights_dtype,
    ],
    "lora": dataclasses.asdict(settings.lora),
    "transition": settings.rollout.transition,
    "algorithm": [
      settings.algorithm.name,
      settings.algorithm.train_steps,
      settings.algorithm.kl_coef > 0,
      settings.advantage.combine == "separate_loss",
    ],
    "reward": [
      reward.judges,
      reward.function,
      reward.components,
      reward.views,
      dataclasses.asdict(reward.judge),
    ],
    "runtime": [
      runtime.devices_per_worker,
      runtime.mesh,
      runtime.gpus_per_worker,
      runtime.cores_per_worker,
      runtime.chunk_blocks,
    ],
  }
  text = json.dumps(parts, sort_keys=True)
  return f"{settings.model.name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def devices_of(
  facts: Mapping[str, Mapping[str, Any]], slots: Sequence[WorkerSlot]
) -> dict[str, str]:
  """Kind of worker -> what it runs on, from what the workers say of themselves.

  Args:
    facts: worker -> its facts, as `load` gives them.
    slots: the workers.
  """
  out = {}
  for slot in slots:
    if slot.name in facts:
      known = facts[slot.name]
      out.setdefault(slot.kind, f"{known['devices']} x {known['platform']} {known['device']}")
  return out


def video_size(recipe: Recipe, pixel_stride: int) -> tuple[int, int, int]:
  """(frames, height, width) of a run's videos in pixels."""
  geometry = recipe.geometry
  frames = recipe.settings.model.frames
  return frames, geometry.height * pixel_stride, geometry.width * pixel_stride


def profile_for(settings: Settings) -> Profile | None:
  """Reads the profile that a run names, None where it measures itself.

  Raises:
    ValueError: it cannot be read, or was measured with another configuration.
  """
  if not settings.runtime.profile:
    return None
  profile = read_profile(settings.runtime.profile)
  profile.check(fingerprint(settings), {})
  return profile
