"""How far the memory formula is from XLA's own account, on the CPU, at small sizes.

    python -m benchmarks.memory_formula

Compiles forward, rollout, both replays and the decoder at several sizes and remat policies without
running them, and prints what XLA takes (arguments, results, work), the formula's figure, and their
difference as a share of XLA's.
"""

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from configs import quickstart
from models.wan.presets import DiTConfig, SamplerConfig
from models.wan.vae_config import VAEConfig
from sbjax import config as config_lib
from sbjax.dataflow import memory_formula as formula
from sbjax.dataflow import memory_models as models
from sbjax.report.console import Progress
from sbjax.runtime.memory_plan import run_sizes
from sbjax.runtime.programs import Program, decode_program, programs
from sbjax.runtime.recipe import Recipe, make_recipe

SIZES: Mapping[str, Mapping[str, Any]] = {
  "small": dict(dim=96, ffn_dim=256, num_heads=3, num_layers=3, cells=(32, 16), cache=6),
  "wide": dict(dim=192, ffn_dim=512, num_heads=2, num_layers=4, cells=(24, 16), cache=9),
  "long": dict(dim=96, ffn_dim=768, num_heads=6, num_layers=2, cells=(24, 16), cache=12),
}
DECODES = {
  "one frame": (VAEConfig("a", 8, z_dim=8), 8, 8, 1),
  "large image": (VAEConfig("b", 8, z_dim=8), 16, 12, 1),
  "wide": (VAEConfig("c", 24, z_dim=8), 12, 8, 1),
  "three frames": (VAEConfig("d", 16, z_dim=8), 8, 8, 3),
}
PASSES = {
  "generate": formula.generate_pass,
  "forward": formula.forward_pass,
  "replay": formula.replay_pass,
  "folded": formula.folded_pass,
}


def small_recipe(size: str, remat: str = "none", precision: str = "fp32") -> Recipe:
  """A recipe of one of `SIZES` with an adapter on every linear map."""
  given = dict(SIZES[size])
  cells, cache = given.pop("cells"), given.pop("cache")
  dit = DiTConfig(size, text_dim=32, text_len=16, remat=remat, precision=precision, **given)
  sampler = SamplerConfig(
    cache_frames=cache,
    window_frames=cache,
    latent_height=cells[0],
    latent_width=cells[1],
    max_frames=6,
  )
  config: Any = quickstart.get_config()
  config.model.frames = 21
  config.lora.targets = ("*",)
  return make_recipe(config_lib.convert(config), dit, sampler)


def reported_bytes(program: Program) -> int:
  """Arguments, results and work of a program as XLA reports them."""
  # What is kept how long does not depend on how well the machine code is optimised.
  options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
  found = program.lower().compile(compiler_options=options).memory_analysis()
  sizes = (found.argument_size_in_bytes, found.output_size_in_bytes, found.temp_size_in_bytes)
  return sum(sizes) - found.alias_size_in_bytes


def compare_pass(size: str, kind: str, remat: str) -> tuple[int, int]:
  """XLA's bytes and the formula's of one chunk."""
  recipe = small_recipe(size, remat)
  reported = reported_bytes(programs(recipe, jnp.float32, (kind,))[kind])
  return reported, PASSES[kind](run_sizes(recipe, on_cpu=True).chunk).total


def compare_decode(name: str) -> tuple[int, int]:
  """XLA's bytes and the formula's of a call of the decoder; its arguments are its decoder half."""
  vae, height, width, frames = DECODES[name]
  sizes = models.DecodeSizes(vae, height, width, frames, False, 4, True, True)
  program = decode_program(sizes)
  reported = reported_bytes(program)
  caches = 2 * models.decoder_cache_bytes(sizes)
  latents = 4 * frames * vae.z_dim * height * width
  pixels = models.video_bytes(vae, frames + 1, height, width) - 3 * height * width * 64
  weights = 4 * models.decoder_parameters(vae)
  return reported, weights + caches + latents + pixels + models.decode_working(sizes)


def rows() -> Iterable[tuple[str, int, int]]:
  """Every comparison: its name, XLA's bytes, the formula's."""
  cases = [(s, k, "none") for s in SIZES for k in ("generate", "forward")]
  cases += [
    (s, k, r) for s in SIZES for k in ("replay", "folded") for r in ("none", "dots", "block")
  ]
  with Progress("compiled programs", len(cases) + len(DECODES), stream=sys.stderr) as progress:
    for size, kind, remat in cases:
      yield (f"{kind}, {size}, remat {remat}", *compare_pass(size, kind, remat))
      progress.advance(kind)
    for name in DECODES:
      yield (f"decode, {name}", *compare_decode(name))
      progress.advance("decode")


def main() -> None:
  """Prints the table."""
  print(f"JAX {jax.__version__} on {jax.devices()[0].device_kind}, float32; MiB")
  print(f"{'program':34s}{'XLA':>9s}{'formula':>9s}{'off by':>9s}")
  worst = 0.0
  for name, reported, estimated in rows():
    off = estimated / reported - 1
    worst = max(worst, abs(off))
    print(f"{name:34s}{reported / 2**20:9.2f}{estimated / 2**20:9.2f}{off:+9.1%}", flush=True)
  print(f"largest difference {worst:.1%}")


if __name__ == "__main__":
  main()
