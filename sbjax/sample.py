"""The command that makes videos and compares adapters.

    python -m sbjax.sample --checkpoint=runs/quickstart --out=runs/quickstart/videos

Every prompt gets one video per seed under every adapter, from the same noise, so that adapters are
compared video by video.

    --config=FILE       a config file or a run's config.json; default: the checkpoint's
    --config.FIELD=…    overrides, as for training
    --checkpoint=DIR    a run's workdir: its newest checkpoint gives the adapters online and ema
    --adapter=FILE      an adapter.safetensors, evaluated under the name adapter
    --adapters=NAMES    which of base, online, ema, adapter; default: all there are
    --prompts=WHAT      world:eval, world:train, a text, CSV or JSONL file, or one prompt itself;
                        default: the config's prompts.eval
    --num_prompts=N     how many, from the front; default: 64, or all where there are fewer
    --seeds=1,2         seeds of each prompt's videos; default: 1,2
    --videos=N          how many videos to write; default: 16
    --out=DIR           a new or empty folder

It writes `evaluation.json` (every value, means, paired differences from the base adapter with their
standard errors and z) and, in a folder named by the step, videos with the adapters side by side,
`videos.jsonl`, `table.txt` and `means.png`. The table is printed too.

Exit codes: 0 done; 1 failed; 2 the command cannot work, with one sentence on stderr; 130 and 143
after SIGINT and SIGTERM.
"""

import dataclasses
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float

from sbjax import command, files
from sbjax import config as config_lib
from sbjax import prompts as prompts_lib
from sbjax.settings import Settings

FLAGS = {
  "checkpoint": "a run's workdir",
  "adapter": "an adapter file",
  "adapters": "which adapters",
  "prompts": "prompts or a file of them",
  "num_prompts": "how many prompts",
  "seeds": "seeds of each prompt's videos",
  "videos": "how many videos to write",
  "out": "folder for the results",
}
NAMES = ("base", "online", "ema", "adapter")
DEFAULT_PROMPTS = 64
DEFAULT_SEEDS = (1, 2)
DEFAULT_VIDEOS = 16

FlatAdapter = Float[np.ndarray, " parameters"]


@dataclasses.dataclass(frozen=True)
class Request:
  """What is to be sampled.

  Attributes:
    settings: model, reward and processes.
    adapters: flat adapter by name; None for the model as the run found it.
    step: RL steps behind the adapters.
    prompts: what is asked for.
    seeds: videos of each prompt.
    videos: how many are written.
    out: where to.
  """

  settings: Settings
  adapters: Mapping[str, FlatAdapter | None]
  step: int
  prompts: tuple[str, ...]
  seeds: tuple[int, ...]
  videos: int
  out: Path


def main(argv: Sequence[str]) -> int:
  """Runs the command.

  Args:
    argv: program name and arguments.

  Returns:
    the exit code; see the module's docstring.
  """
  return command.answer(argv, str(__doc__), read_request, run)


def read_request(argv: Sequence[str]) -> Request:
  """Reads the command line and loads prompts and adapters.

  Raises:
    ValueError: anything that cannot work.
  """
  asked = config_lib.parse(_with_config(argv), FLAGS)
  values = asked.values
  settings = config_lib.validate(asked.config)
  command.prepare_environment(settings)
  if not values["out"]:
    raise ValueError("--out is missing; name a folder for the results.")
  out = Path(values["out"])
  if out.exists() and (not out.is_dir() or any(out.iterdir())):
    raise ValueError(f"--out is {values['out']!r}, which is not empty; name a new folder.")
  prompts = _prompts(settings, values["prompts"], values["num_prompts"])
  seeds = _seeds(values["seeds"])
  videos = _count("videos", values["videos"], 0, DEFAULT_VIDEOS)
  adapters, step = _adapters(settings, values)
  return Request(settings, adapters, step, prompts, seeds, videos, out)


def run(request: Request) -> int:
  """Makes and judges the videos, writes the results, prints the table."""
  # Not at the top: a command that is refused never waits for these imports.
  from sbjax import evaluate
  from sbjax.report import evaluation

  result = evaluate.evaluate(
    request.settings,
    request.adapters,
    request.prompts,
    request.seeds,
    step=request.step,
    keep_videos=request.videos,
    log_dir=str(request.out / "logs"),
  )
  folder = evaluation.write_evaluation(
    request.out, result, fps=request.settings.report.fps, cap=request.videos
  )
  facts = {
    "prompts": list(request.prompts),
    "seeds": list(request.seeds),
    **evaluation.row(result),
    "config": dataclasses.asdict(request.settings),
  }
  files.atomic_write(request.out / "evaluation.json", json.dumps(facts, indent=1) + "\n")
  print(evaluation.table(result))
  print(f"values: {request.out / 'evaluation.json'}; videos: {folder}")
  return command.EXIT_DONE


def _with_config(argv: Sequence[str]) -> list[str]:
  """Lets a checkpoint's own config stand in for a missing `--config`."""
  argv = list(argv)
  checkpoint = None
  for i, word in enumerate(argv[1:], 1):
    name, equals, value = word.lstrip("-").partition("=")
    if name == "config":
      return argv
    if name == "checkpoint":
      checkpoint = value if equals else "".join(argv[i + 1 : i + 2])
  if not checkpoint:
    return argv
  path = Path(checkpoint) / "config.json"
  if not path.is_file():
    raise ValueError(
      f"--checkpoint is {checkpoint!r}, which holds no config.json; name the workdir of a run."
    )
  return [argv[0], f"--config={path}", *argv[1:]]


def _prompts(settings: Settings, what: str | None, number: str | None) -> tuple[str, ...]:
  if what and _is_text(what):
    prompts_lib.acceptance(settings)(what)
    every: tuple[str, ...] = (what,)
  else:
    source = what or settings.prompts.eval
    every = prompts_lib.load(source, prompts_lib.acceptance(settings)).prompts
  asked = _count("num_prompts", number, 1, min(DEFAULT_PROMPTS, len(every)))
  if asked > len(every):
    raise ValueError(f"--num_prompts is {asked}; there are {len(every)}, so use at most that.")
  return every[:asked]


def _is_text(what: str) -> bool:
  """Tells a prompt from the name of a file that may be missing: a prompt has words."""
  return not what.startswith("world:") and not os.path.exists(what) and " " in what.strip()


def _seeds(text: str | None) -> tuple[int, ...]:
  if text is None:
    return DEFAULT_SEEDS
  try:
    seeds = tuple(int(part) for part in text.strip("()").split(",") if part.strip())
  except ValueError as error:
    raise ValueError(f"--seeds is {text!r}; write integers, such as 1,2.") from error
  if not seeds or len(set(seeds)) != len(seeds) or min(seeds) < 0 or max(seeds) >= 2**31:
    raise ValueError(f"--seeds is {text!r}; write different integers of at least 0, such as 1,2.")
  return seeds


def _count(name: str, text: str | None, least: int, default: int) -> int:
  if text is None:
    return default
  if not text.isdecimal() or int(text) < least:
    raise ValueError(f"--{name} is {text!r}; it must be an integer of at least {least}.")
  return int(text)


def _adapters(
  settings: Settings, values: Mapping[str, str | None]
) -> tuple[dict[str, FlatAdapter | None], int]:
  found: dict[str, FlatAdapter | None] = {"base": None}
  step = 0
  if values["checkpoint"]:
    online, ema, step = _from_checkpoint(settings, values["checkpoint"])
    found |= {"online": online, "ema": ema}
  if values["adapter"]:
    found["adapter"], step = _from_file(settings, values["adapter"], step)
  if values["adapters"] is None:
    return found, step
  names = [name.strip() for name in values["adapters"].split(",") if name.strip()]
  for name in names:
    if name not in NAMES:
      raise ValueError(f"--adapters has {name!r}; use some of {', '.join(NAMES)}.")
    if name not in found:
      source = "--adapter" if name == "adapter" else "--checkpoint"
      raise ValueError(f"--adapters has {name!r}, which needs {source}; add it.")
  if not names:
    raise ValueError("--adapters is empty; leave it out or use some of " + ", ".join(NAMES) + ".")
  return {name: found[name] for name in dict.fromkeys(names)}, step


def _from_checkpoint(settings: Settings, path: str) -> tuple[FlatAdapter, FlatAdapter, int]:
  from sbjax.runtime.roles import recipe_of
  from sbjax.state.checkpoint import read_checkpoint
  from sbjax.train import model_facts

  state = read_checkpoint(Path(path) / "checkpoints", None, model_facts(recipe_of(settings)))
  return state.adapter, state.ema, state.step


def _from_file(settings: Settings, path: str, step: int) -> tuple[FlatAdapter, int]:
  from sbjax.runtime.roles import recipe_of
  from sbjax.state.adapter import load_adapter
  from sbjax.train import adapter_layout, model_facts

  recipe = recipe_of(settings)
  flat, facts = load_adapter(path, adapter_layout(recipe), model_facts(recipe))
  return flat, int(facts.get("step", step))


if __name__ == "__main__":
  sys.exit(main(sys.argv))
