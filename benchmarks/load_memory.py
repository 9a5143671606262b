"""What loading a large checkpoint costs in memory beside the loaded arrays.

    python -m benchmarks.load_memory [--gigabytes=3] [--shards=12] [--folder=/tmp] [--to=bfloat16]

Writes a transformer of Wan2.1-1.3B's width, with as many blocks as the size asks for, in float32:
as one safetensors file, as that many shards, and as a torch file. Each is then loaded in a process
of its own, on one device and cut over a 2 × 2 mesh, while a thread samples the process's anonymous
memory (`RssAnon` of /proc/self/status) every 2 ms. Excess is the peak, less what was there before,
less the loaded arrays; the bound is the largest tensor as loaded plus 128 MB. Exit code 1 where the
excess is beyond it.
"""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import threading
import time

ALLOWANCE_BYTES = 128_000_000
_STEM = "diffusion_pytorch_model"


def main() -> int:
  """Runs the benchmark and gives its exit code."""
  parser = argparse.ArgumentParser(description="Measures the memory that loading takes.")
  parser.add_argument("--gigabytes", type=float, default=3.0)
  parser.add_argument("--shards", type=int, default=12)
  parser.add_argument("--folder", default=tempfile.gettempdir())
  parser.add_argument("--to", default="bfloat16", choices=("bfloat16", "float32"))
  parser.add_argument("--measure", help=argparse.SUPPRESS)
  parser.add_argument("--layers", type=int, default=0, help=argparse.SUPPRESS)
  parser.add_argument("--mesh", action="store_true", help=argparse.SUPPRESS)
  asked = parser.parse_args()
  if asked.measure:
    print(json.dumps(_measure(asked.measure, asked.layers, asked.to, asked.mesh)))
    return 0
  folder = pathlib.Path(tempfile.mkdtemp(prefix="load_memory-", dir=asked.folder))
  try:
    layers, paths = _write(folder, asked.gigabytes, asked.shards)
    return 0 if all([_child(path, layers, asked.to) for path in paths]) else 1
  finally:
    shutil.rmtree(folder)


def _config(layers: int):
  from models.wan.presets import DiTConfig

  return DiTConfig("synthetic", dim=1536, ffn_dim=8960, num_heads=12, num_layers=layers)


def _write(folder: pathlib.Path, gigabytes: float, shards: int) -> tuple[int, list[pathlib.Path]]:
  import numpy as np

  from models.checkpoints.families import DIT
  from models.checkpoints.write import (
    NewTensor,
    split_shards,
    write_safetensors,
    write_shards,
    write_torch,
  )
  from models.wan.weights import DIT_KEYS
  from models.weights import slots

  # Repeated, because drawing gigabytes would take longer than all the rest.
  drawn = np.random.default_rng(0).standard_normal(1 << 20, np.float32) * np.float32(0.02)

  def tensors(layers: int) -> list[NewTensor]:
    like = DIT.like(_config(layers))
    found = slots(DIT_KEYS, {name: array.shape for name, array in like.items()})

    def maker(shape: tuple[int, ...]):
      return lambda: np.resize(drawn, shape)

    shapes = {name: slot.official_shape for name, slot in found.items()}
    return [NewTensor(name, shape, "float32", maker(shape)) for name, shape in shapes.items()]

  def size_bytes(layers: int) -> int:
    return sum(tensor.size_bytes for tensor in tensors(layers))

  block_bytes = size_bytes(2) - size_bytes(1)
  layers = 1 + max(0, -int(-(gigabytes * 1e9 - size_bytes(1)) // block_bytes))
  new = tensors(layers)
  total = sum(tensor.size_bytes for tensor in new)
  print(f"writing {total / 1e9:.3f} GB: {layers} blocks, {len(new)} tensors", flush=True)
  one = folder / "one" / f"{_STEM}.safetensors"
  write_safetensors(one, new)
  limit = total // shards
  while len(split_shards(new, limit)) > shards:  # tensors do not divide evenly
    limit += limit // 100
  write_shards(folder / "shards", _STEM, new, limit)
  torch = folder / "self_forcing.pt"
  write_torch(torch, {"generator_ema": new})
  return layers, [one, folder / "shards", torch]


def _child(path: pathlib.Path, layers: int, to: str) -> bool:
  """Measures in a process of its own, prints, and tells whether it is within the bound."""
  well = True
  for mesh in (False, True):
    arguments = [f"--measure={path}", f"--layers={layers}", f"--to={to}"]
    arguments += ["--mesh"] if mesh else []
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    if mesh:
      environment["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
    done = subprocess.run(
      [sys.executable, "-m", "benchmarks.load_memory", *arguments],
      env=environment,
      stdout=subprocess.PIPE,
      text=True,
      check=True,
      timeout=1800,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    within = found["excess_bytes"] <= found["bound_bytes"]
    well &= within
    where = "2 x 2 mesh" if mesh else "one device"
    files = len(list(path.glob("*.safetensors"))) if path.is_dir() else 1
    print(
      f"{path.name:<36}{files:>3} files, {where:<11} to {to:<9} "
      f"loaded {found['loaded_bytes'] / 1e9:.3f} GB in {found['seconds']:.1f} s, "
      f"excess {found['excess_bytes'] / 1e6:.1f} MB, bound {found['bound_bytes'] / 1e6:.1f} MB "
      f"(largest tensor {found['largest_bytes'] / 1e6:.1f} MB)  "
      f"{'ok' if within else 'BEYOND THE BOUND'}",
      flush=True,
    )
  return well


def _measure(path: str, layers: int, to: str, cut: bool) -> dict[str, float]:
  import jax
  import jax.numpy as jnp
  import numpy as np
  from jax.sharding import Mesh

  from models.checkpoints.wan import load_dit
  from models.weights import parameters

  mesh = None
  if cut:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("fsdp", "seq"))
  jax.block_until_ready(jnp.zeros(1))  # what the backend takes at its start is not the loader's
  config = _config(layers)
  before = _anonymous_bytes()
  peak = [before]
  end = threading.Event()

  def sample() -> None:
    while not end.is_set():
      peak[0] = max(peak[0], _anonymous_bytes())
      time.sleep(0.002)

  sampler = threading.Thread(target=sample)
  sampler.start()
  start_s = time.perf_counter()
  model = load_dit(path, config, param_dtype=jnp.dtype(to), mesh=mesh)
  seconds = time.perf_counter() - start_s
  end.set()
  sampler.join()
  arrays = parameters(model).values()
  loaded = sum(s.data.nbytes for array in arrays for s in array.addressable_shards)
  # The largest tensor of the file, in the type that it is loaded into.
  largest = max(config.dim * config.ffn_dim, config.dim * config.text_dim) * jnp.dtype(to).itemsize
  return {
    "seconds": seconds,
    "loaded_bytes": loaded,
    "largest_bytes": largest,
    "bound_bytes": largest + ALLOWANCE_BYTES,
    "excess_bytes": peak[0] - before - loaded,
  }


def _anonymous_bytes() -> int:
  with open("/proc/self/status", encoding="ascii") as file:
    for line in file:
      if line.startswith("RssAnon:"):
        return 1024 * int(line.split()[1])
  raise RuntimeError("/proc/self/status has no RssAnon; this benchmark needs Linux 4.5 or newer.")


if __name__ == "__main__":
  sys.exit(main())
