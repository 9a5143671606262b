"""Small random weights in the published layouts: what a user's folder of Wan files looks like."""

import dataclasses
import json
import pathlib
import pickle
from collections.abc import Mapping

import ml_dtypes
import numpy as np
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from models.checkpoints.families import DIT, UMT5, VAE
from models.checkpoints.lora import layout_keys
from models.checkpoints.stored import DTYPES
from models.checkpoints.write import NewTensor, write_torch
from models.layers.lora import LoRAConfig, lora_shapes
from models.wan.presets import DiTConfig
from models.wan.umt5 import UMT5Config
from models.weights import to_official
from tests.models.checkpoints.files import pickle_of, rezipped

DIT_CONFIG = DiTConfig("custom", 128, 192, 1, 2, text_dim=32, freq_dim=16)
UMT5_CONFIG = UMT5Config(48, 32, 32, 2, 16, 48, 2)
VAE_FIELDS = {
  "base_dim": 4,
  "dim_mult": (1, 1, 1, 1),
  "num_res_blocks": 1,
  "decoder_extra_res_blocks": 0,
}
WORDS = tuple("a the red blue cat dog runs jumps over and sleeps slowly on grass".split())  # noqa: SIM905
PROMPTS = ("a red cat runs", "the blue dog sleeps on grass", "a dog jumps over the cat")
PATHS = {
  "checkpoint": "self_forcing_dmd.pt",
  "vae": "Wan2.1_VAE.pth",
  "text_encoder": "models_t5_umt5-xxl-enc-bf16.pth",
  "tokenizer": "google/umt5-xxl",
}


def vae_config():
  return dataclasses.replace(VAE.presets["wan2.1"], name="custom", **VAE_FIELDS)


def state(family, config, seed: int, std: float = 0.1) -> dict[str, np.ndarray]:
  """Random tensors of a model under official names; norms are about one."""
  random = np.random.default_rng(seed)
  ours = {}
  for path, like in family.like(config).items():
    norm = path.endswith(("scale", "gamma", "norm1", "norm2", "norm"))
    ours[path] = (float(norm) + std * random.standard_normal(like.shape)).astype(np.float32)
  table = family.layouts[0].table(config)
  return {name: np.ascontiguousarray(array) for name, array in to_official(ours, table)}


def tensors(stored: Mapping[str, np.ndarray], dtype=np.float32, prefix: str = ""):
  names = {kind: name for name, kind in DTYPES.items()}
  return [
    NewTensor(prefix + n, a.shape, names[np.dtype(dtype)], lambda a=a: a.astype(dtype))
    for n, a in stored.items()
  ]


def write_flat(path: pathlib.Path, stored: list[NewTensor]) -> None:
  """A torch file that is one flat dictionary of tensors, as Wan's `.pth` files are."""
  write_torch(path, {"": stored})
  outer = pickle.EMPTY_DICT + pickle.MARK + pickle.BINUNICODE + b"\0\0\0\0"
  ends = pickle.SETITEMS * 2 + pickle.STOP
  program = pickle_of(path)
  assert program.count(outer) == 1 and program.endswith(ends)
  flat = program.replace(outer, b"").removesuffix(ends) + pickle.SETITEMS + pickle.STOP
  rezipped(path, {"data.pkl": flat})


def tokenizer(folder: pathlib.Path) -> None:
  """A folder as `google/umt5-xxl`: pieces after a blank mark, an end mark behind every prompt."""
  folder.mkdir(parents=True, exist_ok=True)
  pieces = ["<pad>", "</s>", "<unk>", "\u2581", *(f"\u2581{word}" for word in WORDS), *"acdegnorst"]
  vocabulary = [(piece, -float(i > 3) * (1 + i / 10)) for i, piece in enumerate(pieces)]
  made = Tokenizer(models.Unigram(vocabulary, unk_id=2, byte_fallback=False))
  made.normalizer = normalizers.Sequence([normalizers.NFKC()])
  made.pre_tokenizer = pre_tokenizers.Metaspace()
  made.post_processor = processors.TemplateProcessing(
    single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
  )
  made.save(str(folder / "tokenizer.json"))
  settings = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": "</s>",
    "pad_token": "<pad>",
  }
  (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def make(folder: pathlib.Path) -> pathlib.Path:
  """Writes all files and gives the folder."""
  folder.mkdir(parents=True, exist_ok=True)
  generator = tensors(state(DIT, DIT_CONFIG, 0), prefix="model._fsdp_wrapped_module.")
  ema = tensors(state(DIT, DIT_CONFIG, 1), prefix="model._fsdp_wrapped_module.")
  critic = tensors(state(DIT, DIT_CONFIG, 2), prefix="model.")
  parts = {"generator": generator, "generator_ema": ema, "critic": critic}
  write_torch(folder / PATHS["checkpoint"], parts)
  write_flat(folder / PATHS["vae"], tensors(state(VAE, vae_config(), 3)))
  bfloat16 = tensors(state(UMT5, UMT5_CONFIG, 4), ml_dtypes.bfloat16)
  write_flat(folder / PATHS["text_encoder"], bfloat16)
  tokenizer(folder / PATHS["tokenizer"])
  (folder / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
  (folder / "brightness.py").write_text(
    "def score(video, prompt, seed):\n  return float(video.mean()) / 255.0\n"
  )
  return folder


def lora(path: pathlib.Path, rank: int = 4) -> dict[str, dict[str, np.ndarray]]:
  """Writes an adapter as LongLive's `lora.pt`, with a critic's beside it; gives the generator's."""
  random = np.random.default_rng(5)
  config = LoRAConfig(rank, float(rank))
  trees = [
    {
      target: {k: random.standard_normal(s).astype(np.float32) * 0.05 for k, s in pair.items()}
      for target, pair in lora_shapes(config, DIT_CONFIG).items()
    }
    for _ in range(2)
  ]
  parts = {}
  for name, tree in zip(("generator_lora", "critic_lora"), trees, strict=True):
    flat = {f"{t}.{letter}": tree[t][letter] for t in tree for letter in "ab"}
    stored = dict(to_official(flat, layout_keys("longlive", config)))
    parts[name] = tensors(stored)
  write_torch(path, parts)
  return trees[0]


def model_fields(folder: pathlib.Path) -> dict[str, object]:
  """The config's section `model` for these files, at the smallest video."""
  return {
    "name": "custom",
    "sampler": "self-forcing",
    "frames": 9,
    "height_px": 16,
    "width_px": 16,
    "weights_dtype": "float32",
    "precision": "fp32",
    "remat": "none",
    "embeddings": str(folder / "embeddings"),
    **{field: str(folder / path) for field, path in PATHS.items()},
  }


def run_fields(folder: pathlib.Path) -> dict[str, object]:
  """Further fields, for a step of seconds in this process."""
  return {
    "total_steps": 2,
    "prompts.train": str(folder / "prompts.txt"),
    "prompts.eval": str(folder / "prompts.txt"),
    "reward.function": f"{folder / 'brightness.py'}:score",
    "lora.rank": 2,
    "rollout.prompts_per_step": 1,
    "rollout.group_size": 2,
    "algorithm.minibatches": 1,
    "optim.learning_rate": 0.01,
    "runtime.executor": "inline",
    "runtime.gpus_per_worker": 0,
    "runtime.actor_workers": 1,
    "runtime.reward_workers": 0,
    "runtime.chunk_blocks": 1,
    "runtime.plan": "fixed",
    "eval.every": 0,
    "checkpoint.every": 1,
    "report.samples_every": 0,
  }


def flags(folder: pathlib.Path) -> list[str]:
  """The same as the words of a command line."""
  fields = {f"model.{name}": value for name, value in model_fields(folder).items()}
  return [f"--config.{name}={value}" for name, value in (fields | run_fields(folder)).items()]
