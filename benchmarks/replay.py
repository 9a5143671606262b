"""What replays cost on the embedded world's model: merged against two-pass, in pairs.

    python -m benchmarks.replay [--rounds=15] [--config=configs/quickstart.py]

Every round runs all five pieces one after the other, so that a slow moment of the machine falls on
all of them; ratios are taken within a round. Prints medians, quartiles and the machine, and the two
figures that StageBreaker §4.3 is about: what merging saves, in forward replays, and the cost of a
merged replay relative to a two-pass one.
"""

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from sbjax import config as config_lib
from sbjax.compilation import cache_dir, use_cache
from sbjax.rollout import generate, replay_inputs
from sbjax.runtime.early import unit_scalars
from sbjax.runtime.roles import Roles, build_roles
from sbjax.separation import buffers, replay


def main() -> None:
  """Runs the benchmark."""
  parser = argparse.ArgumentParser(description="Times merged and two-pass replay.")
  parser.add_argument("--config", default="configs/quickstart.py")
  parser.add_argument("--rounds", type=int, default=15)
  parser.add_argument("--core", type=int, default=0, help="the core to run on; -1: all")
  arguments = parser.parse_args()
  if arguments.core >= 0:
    # JAX has not started yet: its thread pool will have this one core, as a worker's has.
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[arguments.core]})
  use_cache(cache_dir())
  command = config_lib.parse(["replay", f"--config={arguments.config}"], {})
  roles = build_roles(config_lib.validate(command.config))
  pieces = _pieces(roles)
  for run in pieces.values():
    run()
  times: dict[str, list[float]] = {name: [] for name in pieces}
  for _ in range(arguments.rounds):
    for name, run in pieces.items():
      start = time.perf_counter()
      run()
      times[name].append(1e3 * (time.perf_counter() - start))
  _report(times, roles, arguments.core)


def _pieces(roles: Roles) -> dict[str, Callable[[], object]]:
  recipe, adapter = roles.recipe, roles.initial
  embeds = roles.embed(["a red seven moves left slowly"])[0]
  conditioning = roles.condition(roles.frozen, jnp.asarray(embeds))
  geometry = recipe.geometry
  trajectory = generate(
    roles.rollout,
    adapter,
    roles.frozen,
    conditioning,
    embeds,
    chunks=geometry.chunks,
    frames_per_chunk=geometry.frames_per_chunk,
    seed=1,
    seed_initial=1,
    version="v0",
  )
  inputs = replay_inputs(
    roles.rollout,
    trajectory,
    conditioning,
    tuple(range(recipe.trained)),
    geometry.frames_per_chunk,
  )
  chunks = range(geometry.chunks)
  objective = recipe.objective
  cache = roles.replay.init_cache()
  for chunk in chunks[:-1]:
    cache = roles.replay.write_cache(
      adapter,
      roles.frozen,
      cache,
      inputs.clean[chunk],
      conditioning,
      jnp.asarray(chunk * geometry.frames_per_chunk, jnp.int32),
    )
  last = (
    adapter,
    roles.frozen,
    cache,
    inputs.points[-1],
    conditioning,
    jnp.asarray(chunks[-1] * geometry.frames_per_chunk, jnp.int32),
  )
  rest = (roles.replay, adapter, roles.frozen, inputs)

  def forward_replay():
    scores = replay.score(*rest, chunks)
    return {
      "channels": np.stack([np.asarray(scores[c].channels) for c in chunks]),
      "statistics": np.stack([np.asarray(scores[c].statistics) for c in chunks]),
    }

  def merged():
    scores, units = replay.replay(*rest, recipe.blocks, recipe.reduce_weights)
    scalars = {
      "channels": np.stack([np.asarray(scores[c].channels) for c in chunks]),
      "statistics": np.stack([np.asarray(scores[c].statistics) for c in chunks]),
    }
    early = objective.early(*unit_scalars(recipe, scalars, trajectory.old_scores))
    return [buffers.fold(u, early) for u in units]

  def two_pass():
    early = objective.early(*unit_scalars(recipe, forward_replay(), trajectory.old_scores))
    weights = np.einsum("buj,cuk->ckj", early, recipe.reduce_weights)
    _, folded = replay.replay_folded(*rest, recipe.blocks, weights)
    return [buffers.flatten(g) for g in folded]

  return {
    "forward (one chunk)": lambda: jax.block_until_ready(roles.replay.score_chunk(*last)),
    "value_and_grad (one chunk)": lambda: jax.block_until_ready(roles.replay.replay_chunk(*last)),
    "forward replay": forward_replay,
    "merged replay": merged,
    "two-pass replay": two_pass,
  }


def _report(times: dict[str, list[float]], roles: Roles, core: int) -> None:
  geometry = roles.recipe.geometry
  print(
    f"machine: {platform.machine()}, {os.cpu_count()} cores, "
    f"{'one core' if core >= 0 else 'all cores'}, JAX {jax.__version__} on "
    f"{jax.devices()[0].device_kind}"
  )
  print(
    f"model: {roles.recipe.dit.name}, {geometry.chunks} chunks of {geometry.tokens_per_chunk} "
    f"tokens, {roles.recipe.trained} trained steps, LoRA rank {roles.recipe.lora.rank}"
  )
  for name, values in times.items():
    print(f"{name:28s} {_spread(values)} ms")
  rows = list(zip(*times.values(), strict=True))
  saved = [(two - one) / forward for _, _, forward, one, two in rows]
  ratio = [one / two for _, _, _, one, two in rows]
  backward = [grad / forward for forward, grad, _, _, _ in rows]
  print(f"value_and_grad / forward                        {_spread(backward)}")
  print(f"(two-pass - merged) / forward replay            {_spread(saved)}")
  print(f"merged / two-pass                               {_spread(ratio)}")


def _spread(values: list[float]) -> str:
  low, middle, high = statistics.quantiles(values, n=4)
  return f"{middle:9.3f}  (quartiles {low:.3f} to {high:.3f})"


if __name__ == "__main__":
  main()
