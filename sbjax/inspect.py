"""The command that tells what a checkpoint is and whether it can be used.

    python -m sbjax.inspect FILE [--json] [--headers]

FILE is a safetensors file, a folder of shards or its index, a PyTorch `.pt` or `.pth` file, PEFT's
adapter folder, or an adapter of a run. It prints what the tensors are, in which layout, which
presets they fit, and what is missing, unknown or misshapen against the closest one. Nothing in the
file is run. All values are read, to find numbers that are not finite; `--headers` leaves that out.

Exit codes: 0 it can be used; 1 it cannot, with the reason; 2 the command line cannot work.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sbjax import command

if TYPE_CHECKING:
  from models.checkpoints.describe import Description, Part


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the command and gives its exit code."""
  parser = argparse.ArgumentParser(prog="python -m sbjax.inspect", description=__doc__)
  parser.formatter_class = argparse.RawDescriptionHelpFormatter
  parser.add_argument("file", metavar="FILE")
  parser.add_argument("--json", action="store_true", help="print one JSON object")
  parser.add_argument("--headers", action="store_true", help="read names and shapes only")
  asked = parser.parse_args(arguments)
  return command.guarded(lambda: inspect(asked.file, as_json=asked.json, values=not asked.headers))


def inspect(path: str, *, as_json: bool, values: bool) -> int:
  """Prints what is at `path` and gives the exit code."""
  try:
    found = _adapter_of_a_run(path) or _described(path, values)
  except ValueError as error:
    found = {"path": path, "usable": False, "reason": str(error), "parts": []}
  if as_json:
    print(json.dumps(found, indent=1))
  else:
    print(_text(found))
  return command.EXIT_DONE if found["usable"] else command.EXIT_FAILED


def _described(path: str, values: bool) -> dict[str, Any]:
  import jax

  from sbjax.report.transfer import transfer

  jax.config.update("jax_platforms", "cpu")  # shapes are worked out, nothing is computed
  from models.checkpoints.describe import describe

  with transfer("reading") as progress:
    found: Description = describe(path, values=values, progress=progress)
  return {
    "path": found.path,
    "container": found.container,
    "usable": found.reason is None,
    "reason": found.reason,
    "facts": dict(found.facts),
    "parts": [_row(part) for part in found.parts],
  }


def _row(part: "Part") -> dict[str, Any]:
  return {**dataclasses.asdict(part), "usable": part.reason is None}


def _adapter_of_a_run(path: str) -> dict[str, Any] | None:
  """The same for a file that a run wrote, None for any other."""
  import safetensors

  try:
    with safetensors.safe_open(path, framework="np") as file:
      if (file.metadata() or {}).get("format") != "sbjax-adapter-1":
        return None
  except (safetensors.SafetensorError, OSError):
    return None  # what it is instead, and what is wrong with it, is found out next
  from sbjax.state.adapter import adapter_facts
  from sbjax.state.portable import read_tree

  tree, _, model = read_tree(path)
  arrays = [array for pair in tree.values() for array in pair.values()]
  part = {
    "name": "",
    "kind": "adapter of a run",
    "layout": "sbjax",
    "tensors": len(arrays),
    "size_bytes": sum(array.nbytes for array in arrays),
    "dtypes": ["float32"],
    "presets": [model],
    "settings": adapter_facts(path),
    "problems": {},
    "reason": None,
    "usable": True,
  }
  container = {"path": path, "container": "safetensors", "usable": True, "reason": None}
  return {**container, "facts": {}, "parts": [part]}


def _text(found: dict[str, Any]) -> str:
  lines = [f"{'file':<11}{found['path']}"]
  if "container" in found:
    lines.append(f"{'container':<11}{found['container']}")
  for key, value in found.get("facts", {}).items():
    text = str(value)
    lines.append(f"{'fact':<11}{key} = {text if len(text) <= 60 else text[:60] + ' …'}")
  for part in found["parts"]:
    layout = f", {part['layout']} layout" if part["layout"] else ""
    lines.append(f"{'part':<11}{part['name'] or '(all of it)'}: {part['kind']}{layout}")
    size = f"{part['tensors']} tensors, {part['size_bytes'] / 1e9:.3f} GB"
    lines.append(f"{'':<11}{size}, {', '.join(part['dtypes'])}")
    if part["settings"]:
      settings = ", ".join(f"{key} {value}" for key, value in part["settings"].items())
      lines.append(f"{'':<11}{settings}")
    if part["usable"]:
      lines.append(f"{'':<11}fits {', '.join(part['presets'])}")
    else:
      lines.append(f"{'':<11}cannot be used: {part['reason']}")
  lines.append(f"{'verdict':<11}{'can be used' if found['usable'] else 'cannot be used'}")
  if not found["usable"] and not found["parts"]:
    lines.append(f"{'reason':<11}{found['reason']}")
  return "\n".join(lines)


if __name__ == "__main__":
  sys.exit(main())
