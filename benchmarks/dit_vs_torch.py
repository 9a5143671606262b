"""Gradient of a LoRA through a causal transformer chunk: ours on XLA's CPU against PyTorch's CPU.

    python benchmarks/dit_vs_torch.py [--pairs=7] [--threads=2] [--clock=wall]

Both sides run the same blocks with the same weights in float32: 512 wide, 8 heads, 4 blocks, ffn
2048, a chunk of 512 tokens with 1,536 tokens before it in the cache. The loss is a Gaussian score
of the flow; gradients go to a rank-16 LoRA on all ten linear maps of a block. Outputs and gradients
are compared first. Then both are timed in alternating pairs, so that a busy machine slows both.
PyTorch runs eagerly with its fused scaled-dot-product attention and fused norms. On a machine that
others use, `--threads=1 --clock=cpu` compares the processor time of one thread each: PyTorch's
threads wait for each other actively and lose far more than ours when they have to share cores.
"""

import argparse
import os
import pathlib
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))


def main() -> None:
  """Compares, times and prints."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.formatter_class = argparse.RawDescriptionHelpFormatter
  parser.add_argument("--pairs", type=int, default=7)
  parser.add_argument("--threads", type=int, default=2)
  parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
  options = parser.parse_args()
  clock = time.perf_counter if options.clock == "wall" else time.process_time
  # XLA sizes its thread pool by the cores that the process may use, once, when it starts.
  os.environ["JAX_PLATFORMS"] = "cpu"
  if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])

  ours, theirs, model = _sides(options.threads)
  score, gradient = ours()
  torch_score, torch_gradient = theirs()
  worst = 0.0
  for target, pair in gradient.items():
    for letter in "ab":
      reference = torch_gradient[target][letter]
      error = abs(pair[letter] - reference).max() / abs(reference).max()
      worst = max(worst, float(error))
  print(f"score: ours {score:.6f}, PyTorch {torch_score:.6f}")
  print(f"gradient: largest difference {worst:.1e} of the largest element of each tensor")
  if worst > 1e-4 or abs(score - torch_score) > 1e-5 * abs(torch_score):
    raise SystemExit("The two sides do not compute the same.")
  for _ in range(2):
    ours()
    theirs()
  times = [(_timed(ours, clock), _timed(theirs, clock)) for _ in range(options.pairs)]
  ratios = sorted(a / b for a, b in times)
  print(f"{model}")
  load = os.getloadavg()[0]
  print(f"machine: {_cpu()}, {options.threads} threads, {options.clock} time, load {load:.1f}")
  for name, column in (("ours", 0), ("PyTorch", 1)):
    column_s = sorted(t[column] for t in times)
    print(
      f"{name:8} median {statistics.median(column_s) * 1e3:7.1f} ms, "
      f"{column_s[0] * 1e3:.1f} to {column_s[-1] * 1e3:.1f}"
    )
  print(
    f"ratio ours / PyTorch: median {statistics.median(ratios):.3f} of {len(ratios)} pairs, "
    f"{ratios[0]:.3f} to {ratios[-1]:.3f}"
  )


def _timed(function: Callable[[], Any], clock: Callable[[], float]) -> float:
  start = clock()
  function()
  return clock() - start


def _cpu() -> str:
  try:
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
      if line.startswith("model name"):
        return line.split(":")[1].strip()
  except OSError:
    pass
  return platform.processor() or platform.machine()


def _sides(threads: int) -> tuple[Callable[[], Any], Callable[[], Any], str]:
  """Our gradient function, PyTorch's, and what they compute."""
  import jax
  import jax.numpy as jnp
  import numpy as np
  import torch
  from flax import nnx

  from models.layers.lora import LoRAConfig, init_lora
  from models.wan.cache import init_cache
  from models.wan.dit import CausalWanDiT
  from models.wan.presets import DiTConfig, SamplerConfig
  from models.wan.weights import DIT_KEYS
  from models.weights import parameters, to_official

  torch.set_num_threads(threads)
  cfg = DiTConfig(
    "benchmark", 512, 2048, 8, 4, text_dim=64, text_len=16, scan_unroll=4, remat="none"
  )
  sampler = SamplerConfig(
    frames_per_chunk=2, window_frames=8, cache_frames=8, latent_height=32, latent_width=32
  )
  lora_cfg = LoRAConfig(16, 16.0)
  model = CausalWanDiT(cfg, rngs=nnx.Rngs(0))
  model.head.kernel[...] = jax.random.normal(jax.random.key(1), model.head.kernel.shape) * 0.02
  lora = {
    target: {
      "a": pair["a"],
      "b": jax.random.normal(jax.random.key(i), pair["b"].shape) * 0.02,
    }
    for i, (target, pair) in enumerate(init_lora(lora_cfg, cfg, jax.random.key(2)).items())
  }
  keys = iter(jax.random.split(jax.random.key(3), 8))
  context = model.embed_text(jax.random.normal(next(keys), (1, cfg.text_len, cfg.text_dim)))
  empty = init_cache(cfg, sampler, 1)
  past = jax.random.normal(next(keys), (1, 6, 16, 32, 32))
  write = jax.jit(lambda x, cache, start: model.write_cache(x, context, cache, start))
  cache = empty
  for start in range(0, 6, 2):
    cache = write(past[:, start : start + 2], cache, jnp.int32(start))
  x = jax.random.normal(next(keys), (1, 2, 16, 32, 32))
  target = jax.random.normal(next(keys), (1, 2, 16, 32, 32))
  timestep = jnp.full((1, 2), 625.0)
  graphdef, state = nnx.split(model)

  @jax.jit
  def gradient(lora: Any, state: Any, cache: Any) -> Any:
    def score(lora: Any) -> Any:
      flow, _ = nnx.merge(graphdef, state)(
        x, timestep, context, cache, jnp.int32(6), lora=lora, lora_scale=lora_cfg.scale
      )
      return -0.5 * jnp.mean((flow - target) ** 2)

    return jax.value_and_grad(score)(lora)

  def ours() -> Any:
    value, tree = jax.block_until_ready(gradient(lora, state, cache))
    return float(value), jax.tree.map(np.asarray, tree)

  as_numpy = jax.tree.map(np.asarray, (lora, cache.k, cache.v, context, x, target))
  weights = {k: v.copy() for k, v in to_official(parameters(model), DIT_KEYS)}
  theirs = _torch_gradient(cfg, lora_cfg.scale, weights, *as_numpy)
  versions = f"jax {jax.__version__}, torch {torch.__version__}"
  sizes = f"{cfg.dim} wide, {cfg.num_layers} blocks, 512 tokens on 1536 cached"
  return ours, theirs, f"{sizes}; {versions}"


def _torch_gradient(
  cfg: Any, scale: float, weights: Any, lora: Any, k: Any, v: Any, context: Any, x: Any, target: Any
) -> Callable[[], Any]:
  """The same chunk, written for PyTorch's eager mode with its own fused operations."""
  import numpy as np
  import torch
  from torch.nn import functional as F

  from models.layers.rope import rope_tables

  w = {name: torch.from_numpy(np.ascontiguousarray(a)) for name, a in weights.items()}
  adapters = {
    name: {letter: torch.tensor(pair[letter], requires_grad=True) for letter in "ab"}
    for name, pair in lora.items()
  }
  past_k, past_v = (torch.tensor(a[:, :, :, :1536]) for a in (k, v))
  text, latents, goal = (torch.tensor(a) for a in (context, x, target))
  heads, head_dim = cfg.num_heads, cfg.head_dim
  import jax.numpy as jnp

  cos, sin = rope_tables(jnp.arange(6, 8, dtype=jnp.int32), 16, 16, head_dim, cfg.rope_theta)
  turn = torch.view_as_complex(
    torch.tensor(np.stack([np.asarray(cos)[:, ::2], np.asarray(sin)[:, 1::2]], axis=-1))
  )

  def plain(name: str, value: torch.Tensor) -> torch.Tensor:
    return F.linear(value, w[f"{name}.weight"], w[f"{name}.bias"])

  def adapted(layer: int, name: str, value: torch.Tensor) -> torch.Tensor:
    pair = adapters[name]
    update = (value @ pair["a"][layer]) @ pair["b"][layer]
    return plain(f"blocks.{layer}.{name}", value) + scale * update

  def split(value: torch.Tensor) -> torch.Tensor:
    return value.view(1, -1, heads, head_dim).transpose(1, 2)

  def rotate(value: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(value.reshape(1, heads, -1, head_dim // 2, 2))
    return torch.view_as_real(pairs * turn).flatten(3)

  def normed(layer: int, group: str, name: str, value: torch.Tensor) -> torch.Tensor:
    weight = w[f"blocks.{layer}.{group}.norm_{name}.weight"]
    return split(F.rms_norm(adapted(layer, f"{group}.{name}", value), (cfg.dim,), weight, cfg.eps))

  def merge(value: torch.Tensor) -> torch.Tensor:
    return value.transpose(1, 2).reshape(1, -1, cfg.dim)

  def norm(value: torch.Tensor, *affine: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(value, (cfg.dim,), *affine, eps=cfg.eps)

  with torch.no_grad():
    half = cfg.freq_dim // 2
    angle = 625.0 * 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    sinusoid = torch.cat([angle.cos(), angle.sin()]).float()[None]
    e = plain("time_embedding.2", F.silu(plain("time_embedding.0", sinusoid)))
    e0 = plain("time_projection.1", F.silu(e)).view(1, 6, cfg.dim)
    patches = latents.view(1, 2, 16, 16, 2, 16, 2).permute(0, 1, 3, 5, 2, 4, 6).reshape(1, 512, 64)
    embedding = w["patch_embedding.weight"].reshape(cfg.dim, -1)
    tokens = F.linear(patches, embedding, w["patch_embedding.bias"])

  def run() -> Any:
    for pair in adapters.values():
      for tensor in pair.values():
        tensor.grad = None
    h = tokens
    for i in range(cfg.num_layers):
      shift1, scale1, gate1, shift2, scale2, gate2 = (
        (w[f"blocks.{i}.modulation"] + e0)[:, j : j + 1] for j in range(6)
      )
      y = norm(h) * (1 + scale1) + shift1
      q, key = (rotate(normed(i, "self_attn", n, y)) for n in "qk")
      value = split(adapted(i, "self_attn.v", y))
      attended = F.scaled_dot_product_attention(
        q, torch.cat([past_k[i], key], 2), torch.cat([past_v[i], value], 2)
      )
      h = h + adapted(i, "self_attn.o", merge(attended)) * gate1
      y = norm(h, w[f"blocks.{i}.norm3.weight"], w[f"blocks.{i}.norm3.bias"])
      attended = F.scaled_dot_product_attention(
        normed(i, "cross_attn", "q", y),
        normed(i, "cross_attn", "k", text),
        split(adapted(i, "cross_attn.v", text)),
      )
      h = h + adapted(i, "cross_attn.o", merge(attended))
      y = norm(h) * (1 + scale2) + shift2
      y = adapted(i, "ffn.2", F.gelu(adapted(i, "ffn.0", y), approximate="tanh"))
      h = h + y * gate2
    shift, scale_ = ((w["head.modulation"] + e[:, None])[:, j : j + 1] for j in range(2))
    out = plain("head.head", norm(h) * (1 + scale_) + shift)
    flow = out.view(1, 2, 16, 16, 2, 2, 16).permute(0, 1, 6, 2, 4, 3, 5).reshape(1, 2, 16, 32, 32)
    score = -0.5 * ((flow - goal) ** 2).mean()
    score.backward()
    return score.item(), {
      name: {letter: np.asarray(tensor.grad) for letter, tensor in pair.items()}
      for name, pair in adapters.items()
    }

  return run


if __name__ == "__main__":
  main()
