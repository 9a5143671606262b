"""One chunk of the full-size 1.3B transformer, forward and replayed: time, memory, planned memory.

    python -m benchmarks.full_size                       # CPU: reduced resolution
    python -m benchmarks.full_size --height=60 --width=104 --frames=21   # an accelerator: 480p

Random weights in the real width (1536, 12 heads) and depth (30 blocks), LoRA of rank 64 on every
linear map, one trained step. The functions are those of a worker (`sbjax.runtime.programs`), called
in this process. The chunk is the last one of the video, its cache full. Prints seconds of a second
call, the share of the device's peak where its name is known, what the formula plans, what the
compiler reports, and what was used: the process' peak on CPUs, the allocator's on accelerators.
"""

import argparse
import dataclasses
import gc
import os
import platform
import resource
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from configs import self_forcing
from models.wan.presets import PRESETS
from sbjax import config as config_lib
from sbjax.dataflow import memory_formula as formula
from sbjax.runtime.memory_plan import run_sizes
from sbjax.runtime.programs import Program, programs
from sbjax.runtime.recipe import Recipe, make_recipe

PEAK_TFLOPS = {"H200": 989.0, "H100": 989.0, "A100": 312.0}
"""Dense bfloat16, as NVIDIA states them; share of peak is left out for other devices."""

GIB = 2**30


def main() -> None:
  """Runs the benchmark."""
  on_cpu = jax.default_backend() == "cpu"
  parser = argparse.ArgumentParser(description="Full-size forward and replay of one chunk.")
  parser.add_argument("--height", type=int, default=16 if on_cpu else 60, help="latent rows")
  parser.add_argument("--width", type=int, default=16 if on_cpu else 104, help="latent columns")
  parser.add_argument("--frames", type=int, default=6 if on_cpu else 21, help="latent frames")
  parser.add_argument("--precision", default="mixed")
  parser.add_argument("--remat", default="block")
  parser.add_argument("--layers", type=int, default=30)
  parser.add_argument("--dtype", default="bfloat16", help="of the frozen weights")
  arguments = parser.parse_args()
  recipe = _recipe(arguments)
  sizes = run_sizes(recipe, on_cpu=on_cpu).chunk
  print(_machine(), flush=True)
  print(
    f"{formula.parameters(recipe.dit) / 1e9:.2f} billion weights in {arguments.dtype}, precision "
    f"{arguments.precision}, remat {arguments.remat}; a chunk of {sizes.tokens} tokens, "
    f"{sizes.slots} keys; adapter of {recipe.adapter_parameters / 1e6:.0f} million",
    flush=True,
  )
  made = programs(recipe, jnp.dtype(arguments.dtype), ("forward", "replay"))
  held = _held(made["replay"])
  passes: dict[str, Callable[[formula.ChunkSizes], formula.PassBytes]] = {
    "forward": formula.forward_pass,
    "replay": formula.replay_pass,
  }
  for kind, program in made.items():
    _measure(kind, program, held, passes[kind](sizes), _flops(sizes, kind), on_cpu)


def _recipe(asked: argparse.Namespace) -> Recipe:
  dit, sampler = PRESETS["self-forcing"]
  dit = dataclasses.replace(
    dit, precision=asked.precision, remat=asked.remat, num_layers=asked.layers
  )
  sampler = dataclasses.replace(
    sampler, latent_height=asked.height, latent_width=asked.width, cache_frames=asked.frames
  )
  config: Any = self_forcing.get_config()
  config.model.weights_dtype = asked.dtype
  config.model.frames = 4 * asked.frames - 3
  config.algorithm.train_steps = "window:1"
  return make_recipe(config_lib.convert(config), dit, sampler)


def _held(program: Program) -> tuple[Any, ...]:
  """Arguments as a worker would hold them, random; the chunk is the last of its video."""
  generator = np.random.default_rng(0)

  def array(leaf: Any) -> jax.Array:
    if jnp.issubdtype(leaf.dtype, jnp.integer):
      return jnp.zeros(leaf.shape, leaf.dtype)
    if leaf.size > 1 << 20:  # large leaves are drawn on the device, in small pieces
      return jax.jit(_draw, static_argnums=(0, 1))(leaf.shape, leaf.dtype)
    return jnp.asarray(0.02 * generator.standard_normal(leaf.shape), leaf.dtype)

  arguments = jax.tree.map(array, program.arguments)
  adapter, frozen, cache, point, conditioning, _ = arguments
  tokens = cache.k.shape[3]
  chunk = point.x.shape[1]
  frames = tokens // cache.tokens_per_frame
  past = jnp.asarray((frames - chunk) * cache.tokens_per_frame, jnp.int32)
  cache = dataclasses.replace(cache, global_end=past, local_end=past)
  scale = jax.tree.map(lambda _: jnp.asarray([0.9], jnp.float32), point.sigma)
  point = dataclasses.replace(point, timestep=900.0 * scale, sigma=scale, sigma_next=scale - 0.2)
  return adapter, frozen, cache, point, conditioning, jnp.asarray(frames - chunk, jnp.int32)


def _draw(shape: tuple[int, ...], dtype: Any) -> jax.Array:
  """Cheap numbers of the right size: what they are does not matter to time or memory."""
  index = jax.lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)
  return (0.02 * jnp.sin(index.astype(jnp.float32))).astype(dtype)


def _measure(
  kind: str,
  program: Program,
  arguments: tuple[Any, ...],
  planned: formula.PassBytes,
  flops: float,
  on_cpu: bool,
) -> None:
  compiled = program.lower().compile()
  found = compiled.memory_analysis()
  reported = found.argument_size_in_bytes + found.output_size_in_bytes + found.temp_size_in_bytes
  seconds = []
  for _ in range(2):
    start = time.perf_counter()
    result = jax.block_until_ready(compiled(*arguments))
    seconds.append(time.perf_counter() - start)
    finite = all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(result))
    del result
    gc.collect()
  assert finite, f"{kind} gave numbers that are not finite"
  device = jax.devices()[0]
  used = (device.memory_stats() or {}).get("peak_bytes_in_use", 0) if not on_cpu else 0
  print(f"{kind}: {seconds[-1]:.2f} s, {flops / 1e12:.2f} TFLOP", end="")
  peak = next((v for k, v in PEAK_TFLOPS.items() if k in device.device_kind), None)
  rate = flops / seconds[-1] / 1e12
  print(f", {rate:.2f} TFLOP/s" + (f", {rate / peak:.0%} of peak" if peak else ""))
  print(
    f"  planned {planned.total / GIB:.2f} GiB (weights {planned.weights / GIB:.2f}, cache "
    f"{planned.cache / GIB:.2f}, work {planned.working / GIB:.2f}), compiler {reported / GIB:.2f} "
    f"(work {found.temp_size_in_bytes / GIB:.2f}), planned / compiler "
    f"{planned.total / reported:.3f}"
  )
  if used:
    print(f"  used {used / GIB:.2f} GiB, planned / used {planned.total / used:.3f}", flush=True)
  else:
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"  peak of the process so far {rss / GIB:.2f} GiB", flush=True)


def _flops(sizes: formula.ChunkSizes, kind: str) -> float:
  """Products alone: 2 · multiply-adds of a forward pass; a gradient over the adapter with the
  block computed again takes three times as many (forward twice, the gradient of the activations).
  """
  dit = sizes.dit
  linear = dit.num_layers * (6 * dit.dim**2 + 2 * dit.dim * dit.ffn_dim) * sizes.tokens
  linear += dit.num_layers * 2 * dit.dim**2 * dit.text_len
  attention = 2 * dit.num_layers * dit.dim * sizes.tokens * (sizes.slots + dit.text_len)
  forward = 2.0 * (linear + attention)
  return forward if kind == "forward" else (4.0 if dit.remat == "block" else 3.0) * forward


def _machine() -> str:
  device = jax.devices()[0]
  return (
    f"machine: {platform.machine()}, {os.cpu_count()} cores, JAX {jax.__version__} on "
    f"{device.platform} {device.device_kind}"
  )


if __name__ == "__main__":
  main()
