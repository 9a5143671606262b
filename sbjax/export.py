"""The command that writes adapters and weights for the PyTorch world, and back.

    python -m sbjax.export --adapter=runs/a/adapter.safetensors --layout=peft --out=adapter_peft
    python -m sbjax.export --adapter=FILE --base=WEIGHTS --layout=diffusers --out=merged

Without `--base` the adapter alone is written; `--adapter` may also be in PEFT's, diffusers' or
LongLive's layout.

    --layout=peft       a folder that PEFT loads into diffusers' WanTransformer3DModel
    --layout=diffusers  one file for diffusers' load_lora_adapter
    --layout=longlive   a torch file with `generator_lora`
    --layout=sbjax      an adapter of a run; needs --preset

With `--base` weights are written as safetensors into a folder, the adapter merged where one is
given. `--base` is a safetensors file, folder of shards or torch file, in any layout that is read.

    --layout=official | diffusers | huggingface (UMT5)
    --dtype=float32 | bfloat16 | float16          default: as in the base
    --part=NAME         state dictionary of a torch file, such as generator_ema
    --preset=NAME       its sizes; default: what fits

    --adapter_part=NAME, --alpha=A   where an adapter's file leaves them open
    --out=PATH          a new file or folder

Exit codes: 0 written; 1 failed; 2 it cannot work, with one sentence on stderr.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from sbjax import command, files

DTYPES = ("float32", "bfloat16", "float16")


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the command and gives its exit code."""
  parser = argparse.ArgumentParser(prog="python -m sbjax.export", description=__doc__)
  parser.formatter_class = argparse.RawDescriptionHelpFormatter
  parser.add_argument("--adapter")
  parser.add_argument("--adapter_part")
  parser.add_argument("--alpha", type=float)
  parser.add_argument("--base")
  parser.add_argument("--part")
  parser.add_argument("--preset")
  parser.add_argument("--layout", required=True)
  parser.add_argument("--dtype", choices=DTYPES)
  parser.add_argument("--out", required=True)
  asked = parser.parse_args(arguments)
  return command.guarded(lambda: export(asked))


def export(asked: argparse.Namespace) -> int:
  """Writes what is asked for.

  Raises:
    ValueError: anything that cannot work.
    OutputError: when a file cannot be written.
  """
  import jax

  jax.config.update("jax_platforms", "cpu")
  if os.path.exists(asked.out):
    raise ValueError(f"--out is {asked.out!r}, which exists; name a new file or folder.")
  if not asked.adapter and not asked.base:
    raise ValueError("--adapter and --base are missing; name at least one of them.")
  with files.writing(asked.out):
    written = _weights(asked) if asked.base else _adapter(asked)
  for path in written:
    print(f"wrote {path}")
  return command.EXIT_DONE


def _weights(asked: argparse.Namespace) -> list[str]:
  from models.checkpoints import families
  from models.checkpoints.convert import convert
  from models.checkpoints.identify import identify
  from models.checkpoints.opening import open_checkpoint
  from models.checkpoints.wan import find_weights
  from sbjax.report.transfer import transfer

  checkpoint = open_checkpoint(asked.base)
  tensors, family, _ = find_weights(checkpoint, asked.part)
  name = asked.preset
  if name is None:
    found = identify(tensors)
    if found is None or not found.presets:
      text = found.fit.text() if found else "unknown names"
      raise ValueError(f"{asked.base} fits no preset ({text}); name one with --preset.")
    name = found.presets[0]
  if name not in family.presets:
    known = ", ".join(family.presets)
    raise ValueError(f"--preset is {name!r}; a {family.name} has {known}.")
  config = family.presets[name]
  lora, scale = None, 1.0
  if asked.adapter:
    if family is not families.DIT:
      raise ValueError(f"--base is a {family.name}; an adapter belongs to a Wan transformer.")
    lora, settings, _ = _read(asked, config)
    scale = settings.scale
  with transfer("writing") as progress:
    return convert(
      asked.base,
      asked.out,
      family,
      config,
      asked.layout,
      part=asked.part,
      dtype=asked.dtype,
      lora=lora,
      lora_scale=scale,
      progress=progress,
    )


def _adapter(asked: argparse.Namespace) -> list[str]:
  from models.checkpoints import families, lora
  from sbjax.state.portable import save_tree

  dit = families.DIT.presets.get(asked.preset)
  if asked.preset and dit is None:
    raise ValueError(f"--preset is {asked.preset!r}; use one of {', '.join(families.DIT.presets)}.")
  tree, config, model = _read(asked, dit)
  if asked.layout == "sbjax":
    if asked.dtype not in (None, "float32"):
      raise ValueError(f"--dtype is {asked.dtype!r}; an adapter of a run is float32.")
    save_tree(asked.out, tree, config, model)
  else:
    lora.write_lora(asked.out, tree, config, asked.layout, asked.dtype or "float32")
  return [asked.out]


def _read(asked: argparse.Namespace, dit: Any) -> tuple[Any, Any, str]:
  """The adapter as a tree, its settings, and the name of the model that it is for."""
  from models.checkpoints import families, lora
  from models.checkpoints.opening import open_checkpoint
  from sbjax.state.portable import read_tree

  checkpoint = open_checkpoint(asked.adapter)
  if checkpoint.facts.get("format") == "sbjax-adapter-1":
    tree, config, model = read_tree(asked.adapter)
    if dit is not None and (dit.dim, dit.num_layers) != _sizes(families.DIT.presets[model]):
      raise ValueError(f"--adapter is for {model!r}, which has other sizes than {dit.name!r}.")
    return tree, config, model
  if dit is None:
    raise ValueError(
      f"--preset is missing; {asked.adapter} does not name its model, so name one of "
      f"{', '.join(families.DIT.presets)}."
    )
  tree, config = lora.read_lora(asked.adapter, dit, part=asked.adapter_part, alpha=asked.alpha)
  return tree, config, asked.preset or dit.name


def _sizes(dit: Any) -> tuple[int, int]:
  return dit.dim, dit.num_layers


if __name__ == "__main__":
  sys.exit(main())
