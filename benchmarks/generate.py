"""The generation engine against `transformers.generate`, and against the machine's memory.

    python benchmarks/generate.py [--size=judge] [--pairs=5] [--threads=2] [--clock=wall]

Sizes: `judge`, about that of the world's judge (2 M parameters); `large`, a little over 250 M
parameters and 1 GB. Both sides run the same random Qwen3-VL weights in float32, greedily, on the
same requests: text of mixed lengths and answers of mixed lengths, the longest at least twice the
mean.
transformers takes them in batches in the order in which they come, padded on the left, and runs
each batch to its longest answer; that is what `generate` does with answers that end at different
times. Only tokens that were asked for count, on both sides. All tokens are compared; first tokens
must be equal, and how many answers are equal to their end is printed (random weights give near
ties, which the last bit of a sum may decide).

Printed: tokens per second and the ratio (pairs alternate, so that a busy machine slows both);
decoding in batches of 16 against decoding single requests, and the same with their prompts; the
share of the memory's read bandwidth, measured beside it, at which a single request decodes.
`--clock=cpu` counts processor time, which a busy machine changes little, with `--threads=1` only.
"""

import argparse
import os
import pathlib
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import numpy as np

# width, feed-forward width, layers, heads, key-value heads, head width, vocabulary
SIZES = {
  "judge": (192, 512, 4, 6, 2, 32, 1024),
  "large": (1024, 4096, 14, 16, 8, 64, 16_384),
  "smoke": (32, 48, 1, 2, 1, 16, 128),
}
SLOTS = 16
SHORT, LONG = 16, 96  # tokens of answers whose difference in time is decoding alone


def main() -> None:
  """Compares, times and prints."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.formatter_class = argparse.RawDescriptionHelpFormatter
  parser.add_argument("--size", choices=sorted(SIZES), default="judge")
  parser.add_argument("--requests", type=int, default=48)
  parser.add_argument("--pairs", type=int, default=5)
  parser.add_argument("--threads", type=int, default=2)
  parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
  options = parser.parse_args()
  if options.clock == "cpu" and options.threads != 1:
    parser.error("--clock=cpu needs --threads=1")
  clock = time.perf_counter if options.clock == "wall" else time.process_time
  os.environ["JAX_PLATFORMS"] = "cpu"
  # XLA sizes its thread pool by the cores that the process may use, once, when it starts.
  if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])

  prompts, lengths = workload(options.requests, SIZES[options.size][-1])
  theirs, p, config = models(options.size, options.threads)
  print(f"machine: {_cpu()}, {options.threads} threads, {options.clock} time, ", end="")
  print(f"load {os.getloadavg()[0]:.1f}")
  weights = sum(x.size for x in _leaves(p["text"]))
  print(f"{options.size}: {weights / 1e6:.1f} M parameters in the decoder, {weights * 4e-9:.2f} GB")
  mean = statistics.mean(lengths)
  print(
    f"{len(prompts)} requests, prompts of {min(map(len, prompts))} to {max(map(len, prompts))} "
    f"tokens, answers of {min(lengths)} to {max(lengths)}, longest / mean {max(lengths) / mean:.1f}"
  )

  ours = engine_runner(p, config, SLOTS)
  found, wanted = ours(prompts, lengths), transformers_runner(theirs, prompts, lengths)
  if [tokens[0] for tokens in found] != [tokens[0] for tokens in wanted]:
    raise SystemExit("The two sides do not give the same tokens.")
  ours(prompts, lengths)  # from the size of cache that it is left with, other shapes compile
  equal = sum(a == b for a, b in zip(found, wanted, strict=True))
  print(f"answers that are equal to their last token: {equal} of {len(prompts)}", flush=True)
  total = sum(lengths)
  pairs = [
    (
      total / _timed(lambda: ours(prompts, lengths), clock),
      total / _timed(lambda: transformers_runner(theirs, prompts, lengths), clock),
    )
    for _ in range(options.pairs)
  ]
  _print("engine against transformers, tokens per second", pairs)
  batches(p, config, options, clock, prompts)
  bandwidth(p, config, options, clock, prompts[0], weights)


def workload(count: int, vocab: int) -> tuple[list[list[int]], list[int]]:
  """Prompts and lengths of answers; most answers are short and some are long."""
  rng = np.random.default_rng(0)
  prompts = [rng.integers(3, vocab - 16, n).tolist() for n in rng.integers(16, 120, count)]
  lengths = np.clip(np.round(16 * rng.lognormal(0.0, 0.8, count)), 4, 96).astype(int).tolist()
  lengths[0] = 96
  return prompts, lengths


def models(size: str, threads: int) -> tuple[Any, Any, Any]:
  """Their model, our parameters and sizes, with the same weights."""
  import torch
  import transformers

  from models.layers.dense import tree_of
  from models.qwen_vl.checkpoint import load

  torch.set_num_threads(threads)
  torch.manual_seed(0)
  dim, ffn_dim, layers, heads, kv_heads, head_dim, vocab = SIZES[size]
  half = head_dim // 2
  section = [half - 2 * (half // 4), half // 4, half // 4]
  rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": section}
  marks = ("image", "video", "vision_start", "vision_end")
  settings: dict[str, Any] = {
    "text_config": {
      "vocab_size": vocab,
      "hidden_size": dim,
      "intermediate_size": ffn_dim,
      "num_hidden_layers": layers,
      "num_attention_heads": heads,
      "num_key_value_heads": kv_heads,
      "head_dim": head_dim,
      "rope_parameters": {**rope, "mrope_interleaved": True},
      "max_position_embeddings": 4096,
      "bos_token_id": 1,
      "eos_token_id": 2,
      "pad_token_id": 0,
    },
    "vision_config": {
      "depth": 1,
      "hidden_size": 32,
      "intermediate_size": 32,
      "num_heads": 2,
      "out_hidden_size": dim,
      "patch_size": 16,
      "num_position_embeddings": 16,
      "deepstack_visual_indexes": [0],
    },
    "tie_word_embeddings": False,
    **{f"{name}_token_id": vocab - 1 - i for i, name in enumerate(marks)},
  }
  theirs = transformers.Qwen3VLForConditionalGeneration(
    transformers.Qwen3VLConfig(**settings)
  ).eval()
  with tempfile.TemporaryDirectory() as folder:
    theirs.save_pretrained(folder)
    ours = load(folder)
  return theirs, tree_of(ours), ours.config


def engine_runner(
  p: Any, config: Any, slots: int
) -> Callable[[list[list[int]], list[int]], list[list[int]]]:
  """Runs requests on one engine; what it kept for later requests is not used."""
  from models.generate.engine import Engine
  from models.generate.request import EngineConfig, Request
  from models.qwen_vl.chat import Prompt

  sizes = EngineConfig(slots=slots, max_length=512, prefix_bytes=0, slot_buckets=_buckets(slots))
  engine = Engine(p, config, sizes)

  def run(prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
    requests = [
      Request(Prompt(np.asarray(ids, np.int32)), length)
      for ids, length in zip(prompts, lengths, strict=True)
    ]
    return [result.tokens.tolist() for result in engine.generate(requests)]

  return run


def _buckets(slots: int) -> tuple[int, ...]:
  return tuple(n for n in (1, 4, 8, 16) if n <= slots)


def transformers_runner(
  theirs: Any, prompts: list[list[int]], lengths: list[int]
) -> list[list[int]]:
  """Runs requests in batches, each to its longest answer."""
  import torch

  found = []
  for at in range(0, len(prompts), SLOTS):
    some, most = prompts[at : at + SLOTS], max(lengths[at : at + SLOTS])
    width = max(map(len, some))
    ids = torch.zeros((len(some), width), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(some):
      ids[row, width - len(prompt) :] = torch.tensor(prompt)
      mask[row, width - len(prompt) :] = 1
    with torch.inference_mode():
      made = theirs.generate(
        ids, attention_mask=mask, max_new_tokens=most, min_new_tokens=most, do_sample=False
      )
    new = made[:, width:].tolist()
    found += [row[:n] for row, n in zip(new, lengths[at : at + SLOTS], strict=True)]
  return found


def batches(
  p: Any, config: Any, options: Any, clock: Callable[[], float], prompts: list[list[int]]
) -> None:
  """16 requests of one length together, and some of them one after the other."""
  some, single = prompts[:SLOTS], prompts[: SLOTS // 4]
  together, alone = engine_runner(p, config, SLOTS), engine_runner(p, config, 1)
  decode, whole = [], []
  for pair in range(options.pairs + 2):
    short_s, long_s, one_short_s, one_long_s = (
      _timed(lambda r=run, q=asked, n=n: r(q, [n] * len(q)), clock)
      for run, asked in ((together, some), (alone, single))
      for n in (SHORT, LONG)
    )
    if pair > 1:  # the first two compile
      decode.append(
        tuple(
          x * (LONG - SHORT) / s
          for x, s in ((len(some), long_s - short_s), (len(single), one_long_s - one_short_s))
        )
      )
      whole.append((len(some) * LONG / long_s, len(single) * LONG / one_long_s))
  _print(f"batch {len(some)} against batch 1, decoded tokens per second", decode)
  _print(f"the same with prompts, answers of {LONG} tokens", whole)


def bandwidth(
  p: Any,
  config: Any,
  options: Any,
  clock: Callable[[], float],
  prompt: list[int],
  weights: int,
) -> None:
  """Bytes of weights that decoding one request reads a second, beside plain reading."""
  import torch

  run = engine_runner(p, config, 1)
  for tokens in (SHORT, LONG, SHORT, LONG):
    run([prompt], [tokens])
  embedding = p["text"]["embed"].size  # one row of it is read a step
  read_bytes = 4 * (weights - embedding)
  data = torch.ones(max(read_bytes // 4, 1))
  data.sum()
  pairs = []
  for _ in range(options.pairs):
    # The prompt and the first burst cost the same in both runs.
    short, long = (_timed(lambda n=n: run([prompt], [n]), clock) for n in (SHORT, LONG))
    decoded = (LONG - SHORT) * read_bytes / (long - short) / 1e9
    plain = max(read_bytes / _timed(lambda: data.sum(), clock) / 1e9 for _ in range(3))
    pairs.append((decoded, plain))
  _print("batch-1 decode against reading memory, GB per second", pairs)


def _print(what: str, pairs: list[tuple[float, float]]) -> None:
  ratios = sorted(a / b for a, b in pairs)
  left, right = (statistics.median(column) for column in zip(*pairs, strict=True))
  print(
    f"{what}: {left:.1f} and {right:.1f}; ratio median {statistics.median(ratios):.2f} of "
    f"{len(ratios)} pairs, {ratios[0]:.2f} to {ratios[-1]:.2f}",
    flush=True,
  )


def _timed(function: Callable[[], Any], clock: Callable[[], float]) -> float:
  start = clock()
  function()
  return clock() - start


def _leaves(tree: Any) -> list[Any]:
  import jax

  return jax.tree.leaves(tree)


def _cpu() -> str:
  try:
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
      if line.startswith("model name"):
        return line.split(":")[1].strip()
  except OSError:
    pass
  return platform.processor() or platform.machine()


if __name__ == "__main__":
  main()
