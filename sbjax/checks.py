"""Which settings can work together: every refusal before anything compiles.

Each function looks at one thing and raises a `ValueError` of one sentence that names the field, its
value and what would do. The cheap ones come first.
"""

import math
import os
import re
from collections.abc import Callable
from pathlib import Path

from sbjax import prompts as prompts_lib
from sbjax.rewards import catalogue, function
from sbjax.settings import Settings
from sbjax.sizes import model_sizes
from sbjax.world_table import world_of

# The Wan2.1 video autoencoder turns the first frame into one latent frame and every further four
# frames into another.
FRAMES_PER_LATENT = 4
# Rotary tables hold this many latent frames.
MAX_LATENT_FRAMES = 1024

# On CPUs a device is a worker's share of the cores. More workers than cores are useful for tests;
# far more only wait for each other and fill the memory.
CPU_DEVICES_PER_CORE = 4

_TRAIN_STEPS = re.compile(r"all|fraction:(?P<fraction>[0-9.eE+-]+)|window:(?P<window>[0-9]+)")


def check(settings: Settings) -> None:
  """Refuses settings that cannot work together.

  Raises:
    ValueError: one sentence with the field, its value and what would do.
  """
  for look in CHECKS:
    look(settings)


def model(settings: Settings) -> None:
  """The model is known, its weights are there and fit."""
  world_of(settings.model.name).check(settings.model)
  model_sizes(settings)


def frames(settings: Settings) -> None:
  """The video is a whole number of chunks."""
  asked = settings.model.frames
  _, sampler = model_sizes(settings)
  per_chunk = FRAMES_PER_LATENT * sampler.frames_per_chunk
  # n chunks hold n·per_chunk latent-frame strides, and the first latent frame is a single frame.
  missing = FRAMES_PER_LATENT - 1
  if (asked + missing) % per_chunk:
    below = (asked + missing) // per_chunk * per_chunk - missing
    nearest = [n for n in (below, below + per_chunk) if n > 0]
    raise ValueError(
      f"model.frames is {asked}; a video of n chunks has {per_chunk}n − {missing} frames, so "
      f"{' or '.join(map(str, nearest))} would do."
    )
  latent = (asked + missing) // FRAMES_PER_LATENT
  if latent > MAX_LATENT_FRAMES:
    most = MAX_LATENT_FRAMES // sampler.frames_per_chunk * per_chunk - missing
    raise ValueError(f"model.frames is {asked}; at most {most} frames have a position.")
  chunks = latent // sampler.frames_per_chunk
  if settings.runtime.chunk_blocks > chunks:
    raise ValueError(
      f"runtime.chunk_blocks is {settings.runtime.chunk_blocks}; {asked} frames are {chunks} "
      f"chunks, so use at most {chunks}."
    )


def groups(settings: Settings) -> None:
  """Groups fit mini-batches, and best-of-N fits groups."""
  rollout, algorithm = settings.rollout, settings.algorithm
  prompts, size, parts = rollout.prompts_per_step, rollout.group_size, algorithm.minibatches
  if algorithm.minibatch_order == "group_major" and prompts % parts:
    divisors = [n for n in range(1, prompts + 1) if prompts % n == 0]
    raise ValueError(
      f"algorithm.minibatches is {parts}; rollout.prompts_per_step is {prompts} and groups must "
      f"not straddle mini-batches, so use {_either(divisors)}."
    )
  if settings.candidates % parts:
    divisors = [n for n in range(1, settings.candidates + 1) if settings.candidates % n == 0]
    raise ValueError(
      f"algorithm.minibatches is {parts}; it must divide the {settings.candidates} candidates of a "
      f"step, so use {_either(divisors)}."
    )
  if size < 2:
    raise ValueError(
      f"rollout.group_size is {size}; a group is compared within itself, so use at least 2."
    )
  if rollout.best_of and (rollout.best_of % 2 or rollout.best_of > size):
    raise ValueError(
      f"rollout.best_of is {rollout.best_of}; it must be even and at most rollout.group_size "
      f"({size}), or 0 to train on all."
    )


def transition(settings: Settings) -> None:
  """The way of exploring suits the model and its noise level."""
  rollout = settings.rollout
  name, level = rollout.transition, rollout.noise_level
  if name == "ddim":
    raise ValueError(
      f"rollout.transition is 'ddim', which needs a model that predicts noise; "
      f"{settings.model.name!r} predicts a velocity, so use 'renoise', 'dance_sde', 'sde' or 'cps'."
    )
  if name == "renoise" and level != 1.0:
    raise ValueError(
      f"rollout.noise_level is {level}; 'renoise' has no noise level, so leave it at 1.0 or use "
      "rollout.transition 'cps' or 'dance_sde'."
    )
  if name == "cps" and level > 1.0:
    raise ValueError(f"rollout.noise_level is {level}; 'cps' takes values above 0 and at most 1.")
  _, sampler = model_sizes(settings)
  # The last step goes to sigma 0 and draws nothing.
  stochastic = len(sampler.denoising_steps) - 1
  text = settings.algorithm.train_steps
  match = _TRAIN_STEPS.fullmatch(text)
  if not match:
    raise ValueError(f"algorithm.train_steps is {text!r}; use 'all', 'fraction:0.5' or 'window:2'.")
  if match["window"] is not None and not 1 <= int(match["window"]) <= stochastic:
    raise ValueError(
      f"algorithm.train_steps is {text!r}; {settings.model.name!r} has {stochastic} stochastic "
      f"steps, so use a window of 1 to {stochastic}."
    )
  if match["fraction"] is not None:
    fraction = _number(match["fraction"])
    if fraction is None or not 0.0 < fraction <= 1.0 or int(stochastic * fraction) < 1:
      raise ValueError(
        f"algorithm.train_steps is {text!r}; of {stochastic} stochastic steps at least one must "
        f"remain, so use a fraction from {math.ceil(1000 / stochastic) / 1000} to 1."
      )


def algorithm(settings: Settings) -> None:
  """Clip ranges, dual clip and the objective's needs."""
  algo, name = settings.algorithm, settings.algorithm.name
  if algo.dual_clip and algo.dual_clip <= 1.0 + algo.clip_high:
    raise ValueError(
      f"algorithm.dual_clip is {algo.dual_clip}; it bounds the ratio from above, so use a value "
      f"above 1 + algorithm.clip_high ({1.0 + algo.clip_high}), such as 3, or 0 for none."
    )
  if name == "kvpo" and algo.minibatch_order == "reference" and algo.minibatches > 1:
    raise ValueError(
      "algorithm.minibatch_order is 'reference', which cuts through groups; 'kvpo' compares the "
      "candidates of a whole group, so use 'group_major'."
    )
  if name == "grpo_guard" and settings.rollout.transition != "sde":
    raise ValueError(
      f"rollout.transition is {settings.rollout.transition!r}; algorithm 'grpo_guard' is derived "
      "for 'sde', so use that."
    )


def advantage(settings: Settings) -> None:
  """Rewards can be combined as asked."""
  combine, name = settings.advantage.combine, settings.algorithm.name
  one_column = ("diffusion_nft", "kvpo")
  if combine == "separate_loss" and name in one_column:
    raise ValueError(
      f"advantage.combine is 'separate_loss'; algorithm {name!r} takes one advantage a candidate, "
      "so use 'adv_sum', 'raw_sum' or 'gdpo'."
    )
  if combine == "separate_loss" and min(settings.reward.weights, default=0.0) < 0.0:
    raise ValueError(
      f"reward.weights is {settings.reward.weights!r}; advantage.combine 'separate_loss' weighs "
      "losses, so use weights of at least 0."
    )
  if settings.advantage.baseline == "anchor":
    raise ValueError(
      "advantage.baseline is 'anchor'; no transition here generates an anchor candidate, so use "
      "'group_mean'."
    )


def reward(settings: Settings) -> None:
  """Components, weights and judges go together, and a user's function can be called."""
  r = settings.reward
  if len(r.components) != len(r.weights) or not r.components:
    raise ValueError(
      f"reward.weights is {r.weights!r}; it must have one weight for each of the "
      f"{len(r.components)} components {r.components!r}, at least one."
    )
  if len(set(r.components)) != len(r.components):
    raise ValueError(f"reward.components is {r.components!r}; name each component once.")
  if not any(r.weights):
    raise ValueError(f"reward.weights is {r.weights!r}; at least one weight must not be 0.")
  if "world" in r.judges and not world_of(settings.model.name).embedded:
    raise ValueError(
      f"reward.name is {r.name!r}, with {r.also!r} beside it; model {settings.model.name!r} "
      "brings no judge 'world', so use 'function' or a vision-language judge."
    )
  catalogue.check(r)
  if "function" in r.judges:
    function.load_function(r.function)
  elif r.function:
    raise ValueError(
      f"reward.function is {r.function!r} but reward.name is {r.name!r}; set reward.name to "
      "'function' to use it."
    )


def prompts(settings: Settings) -> None:
  """The prompts can be read, and the model and its judge can use them."""
  prompts_lib.from_settings(settings)


def evaluation(settings: Settings) -> None:
  """Evaluated videos have distinct seeds, and samples exist."""
  seeds = settings.eval.seeds
  if settings.eval.every and (not seeds or len(set(seeds)) != len(seeds)):
    raise ValueError(f"eval.seeds is {seeds!r}; name at least one seed, each once.")
  if settings.report.samples_every and settings.report.samples > settings.candidates:
    raise ValueError(
      f"report.samples is {settings.report.samples}; a step makes {settings.candidates} videos, "
      "so use at most that."
    )


def lora(settings: Settings) -> None:
  """The adapter's patterns match some of a block's linear maps."""
  # It is defined beside the layers, whose module imports JAX: this look comes last.
  from models.layers import lora as lora_lib

  asked = settings.lora
  try:
    lora_lib.LoRAConfig(asked.rank, asked.alpha, asked.targets)
  except ValueError as error:
    raise ValueError(f"lora.{error}") from error
  dit, _ = model_sizes(settings)
  if asked.rank > dit.dim:
    raise ValueError(
      f"lora.rank is {asked.rank}; the model is {dit.dim} wide, so use at most that."
    )


def objective(settings: Settings) -> None:
  """Objective and advantages can be built from the settings."""
  # As the layers, these import JAX.
  from sbjax.algorithms import advantages, objectives, selection

  _, sampler = model_sizes(settings)
  trained = selection.trained_steps(
    settings.algorithm.train_steps,
    len(sampler.denoising_steps) - 1,
    seed=settings.seed,
    step=0,
    candidate=0,
    group=0,
  )
  objectives.from_settings(settings, len(trained))
  advantages.from_settings(settings)


def devices(settings: Settings) -> None:
  """There are as many devices as the workers ask for."""
  r = settings.runtime
  if r.mesh[0] * r.mesh[1] != r.devices_per_worker:
    raise ValueError(
      f"runtime.mesh is {r.mesh!r}; its product must be runtime.devices_per_worker "
      f"({r.devices_per_worker})."
    )
  if r.gpus_per_worker not in (0, r.devices_per_worker):
    raise ValueError(
      f"runtime.gpus_per_worker is {r.gpus_per_worker}; a worker uses all of its GPUs, so it must "
      f"be runtime.devices_per_worker ({r.devices_per_worker}), or 0 to run on CPUs."
    )
  workers = 1 if r.executor == "inline" else r.actor_workers + r.reward_workers
  if r.ray_address:  # what a cluster has is asked of Ray when the run connects to it
    if r.ray_address != "auto" and not re.fullmatch(r"[^/:]+:\d{1,5}", r.ray_address):
      raise ValueError(
        f"runtime.ray_address is {r.ray_address!r}; use 'host:port' of the cluster's head, such as "
        "'10.0.0.1:6379', or 'auto'."
      )
    return
  for field, name in (("actor", r.actor_resource), ("reward", r.reward_resource)):
    if name:
      raise ValueError(
        f"runtime.{field}_resource is {name!r}; it names nodes of a cluster, so set "
        "runtime.ray_address too, or leave it empty."
      )
  if r.gpus_per_worker:
    enough_gpus(workers, r.gpus_per_worker, visible_gpus())
  else:
    enough_cores(workers, r.devices_per_worker, len(os.sched_getaffinity(0)))


def enough_gpus(workers: int, gpus_per_worker: int, available: int) -> None:
  """Refuses more GPUs than there are.

  Raises:
    ValueError: `workers` × `gpus_per_worker` is more than `available`.
  """
  asked = workers * gpus_per_worker
  if asked > available:
    raise ValueError(
      f"runtime.gpus_per_worker is {gpus_per_worker}; {workers} workers ask for {asked} GPUs and "
      f"{available} are visible, so use fewer workers or GPUs, or 0 to run on CPUs."
    )


def enough_cores(workers: int, devices_per_worker: int, cores: int) -> None:
  """Refuses far more CPU devices than there are cores; some more share the cores.

  Raises:
    ValueError: more than `CPU_DEVICES_PER_CORE` devices for each of the `cores`.
  """
  asked, most = workers * devices_per_worker, cores * CPU_DEVICES_PER_CORE
  if asked > most:
    raise ValueError(
      f"runtime.actor_workers and reward_workers ask for {asked} devices on {cores} CPU cores, "
      f"which carry at most {most}; use fewer workers or runtime.devices_per_worker."
    )


def visible_gpus() -> int:
  """Counts this machine's GPUs without JAX, as `CUDA_VISIBLE_DEVICES` restricts them."""
  present = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
  visible = os.environ.get("CUDA_VISIBLE_DEVICES")
  if visible is None:
    return present
  return min(present, len([part for part in visible.split(",") if part.strip() not in ("", "-1")]))


def _either(numbers: list[int]) -> str:
  return (
    str(numbers[0])
    if len(numbers) == 1
    else f"{', '.join(map(str, numbers[:-1]))} or {numbers[-1]}"
  )


def _number(text: str) -> float | None:
  try:
    return float(text)
  except ValueError:
    return None


CHECKS: tuple[Callable[[Settings], None], ...] = (
  model,
  frames,
  groups,
  transition,
  algorithm,
  advantage,
  reward,
  evaluation,
  devices,
  prompts,
  lora,
  objective,
)
