"""The command that makes videos: plain ones as they are generated, or adapters side by side.

    python -m sbjax.sample --config=configs/quickstart.py --out=runs/videos --prompts=FILE
    python -m sbjax.sample --checkpoint=runs/quickstart --out=runs/compared

Plain videos need no training run and no judge: an mp4 grows while its later chunks are generated,
and its prompt may change on the way. A comparison gives every prompt one video per seed under every
adapter, from the same noise, has them judged, and tells how adapters differ. docs/sampling.md says
more about both.

    --config=FILE       a config file or a run's config.json; default: the checkpoint's
    --config.FIELD=…    overrides, as for training
    --out=DIR           a new or empty folder
    --mode=MODE         videos or compare; default: compare with --checkpoint, --adapter or
                        --adapters, else videos
    --prompts=WHAT      world:eval, world:train, a text, CSV or JSONL file, or one prompt itself;
                        default: the config's prompts.eval
    --num_prompts=N     how many, from the front; default: all there are, but at most 64 to compare
                        and 16 otherwise
    --seeds=1,2         seeds of each prompt's videos; default: 1,2 to compare and 1 otherwise
    --checkpoint=DIR    a run's workdir: its newest checkpoint gives the adapters online and ema
    --adapter=FILE      an adapter.safetensors, called adapter
    --adapters=NAMES    which of base, online, ema, adapter; default to compare: all there are; for
                        videos one, by default the last of these that there is

For videos only:

    --switch=N:PROMPT   from the first chunk that starts at latent frame N or later the video shows
                        this prompt; may be repeated. A JSONL prompt file holds switches of its own:
                        {"prompt": "…", "switches": [{"frame": 12, "prompt": "…"}]}
    --interactive       with one prompt: a line typed meanwhile is the prompt from the next chunk
                        on, and the end of the input (Ctrl-D) ends the video

They are written as `video_000_seed_1.mp4` and so on, with `videos.jsonl` beside them.

To compare only:

    --videos=N          how many videos to write; default: 16

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
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from sbjax import checks, command, files
from sbjax import config as config_lib
from sbjax import prompts as prompts_lib
from sbjax.sampling import script as script_lib
from sbjax.sampling.script import Director, Script
from sbjax.settings import Settings

if TYPE_CHECKING:  # its imports are slow: a command that is refused never waits for them
  from sbjax.sampling.videos import VideoRequest

FLAGS = {
  "mode": "videos or compare",
  "checkpoint": "a run's workdir",
  "adapter": "an adapter file",
  "adapters": "which adapters",
  "prompts": "prompts or a file of them",
  "num_prompts": "how many prompts",
  "seeds": "seeds of each prompt's videos",
  "switch": "a prompt switch",
  "interactive": "whether lines are read meanwhile",
  "videos": "how many videos to write",
  "out": "folder for the results",
}
NAMES = ("base", "online", "ema", "adapter")
COMPARED_PROMPTS, COMPARED_SEEDS = 64, (1, 2)
PLAIN_PROMPTS, PLAIN_SEEDS = 16, (1,)
DEFAULT_VIDEOS = 16

FlatAdapter = Float[np.ndarray, " parameters"]


@dataclasses.dataclass(frozen=True)
class Request:
  """What is to be compared.

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


def read_request(argv: Sequence[str]) -> "Request | VideoRequest":
  """Reads the command line and loads prompts and adapters.

  Raises:
    ValueError: anything that cannot work.
  """
  argv, switches, interactive = _own_flags(argv)
  asked = config_lib.parse(_with_config(argv), FLAGS)
  values = asked.values
  compare = _compares(values, bool(switches or interactive))
  settings = config_lib.validate(asked.config) if compare else _alone(asked.config)
  command.prepare_environment(settings)
  if not values["out"]:
    raise ValueError("--out is missing; name a folder for the results.")
  out = Path(values["out"])
  if out.exists() and (not out.is_dir() or any(out.iterdir())):
    raise ValueError(f"--out is {values['out']!r}, which is not empty; name a new folder.")
  seeds = _seeds(values["seeds"]) or (COMPARED_SEEDS if compare else PLAIN_SEEDS)
  scripts = _scripts(settings, values, COMPARED_PROMPTS if compare else PLAIN_PROMPTS)
  if compare:
    if any(script.switches for script in scripts):
      raise ValueError(f"--prompts is {values['prompts']!r}, whose switches need --mode=videos.")
    videos = _count("videos", values["videos"], 0, DEFAULT_VIDEOS)
    adapters, step = _adapters(settings, values)
    prompts = tuple(script.prompt for script in scripts)
    return Request(settings, adapters, step, prompts, seeds, videos, out)
  return _videos(settings, values, scripts, switches, interactive, seeds, out)


def run(request: "Request | VideoRequest") -> int:
  """Makes the videos, has them judged where they are compared, and writes the results."""
  # Not at the top: a command that is refused never waits for these imports.
  if not isinstance(request, Request):
    from sbjax.sampling.videos import make_videos

    written = make_videos(request)
    print(f"{len(written)} videos: {request.out}")
    return command.EXIT_DONE
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


def _own_flags(argv: Sequence[str]) -> tuple[list[str], list[str], bool]:
  """Takes out what the flag library has no form for: a flag that repeats, and one without value.

  Gives the rest, the switches and whether the command is interactive.
  """
  rest: list[str] = []
  switches: list[str] = []
  interactive = False
  words = iter(argv)
  for word in words:
    name, equals, value = word.partition("=")
    if name in ("--switch", "-switch"):
      switches.append(value if equals else next(words, ""))
    elif name in ("--interactive", "-interactive"):
      if equals:
        raise ValueError(f"--interactive is {value!r}; write it without a value.")
      interactive = True
    else:
      rest.append(word)
  return rest, switches, interactive


def _compares(values: Mapping[str, str | None], streams: bool) -> bool:
  mode = values["mode"]
  if mode is None:
    given = any(values[name] for name in ("checkpoint", "adapter", "adapters"))
    mode = "compare" if given and not streams else "videos"
  if mode not in ("videos", "compare"):
    raise ValueError(f"--mode is {mode!r}; use videos or compare.")
  if mode == "compare" and streams:
    raise ValueError("--mode is 'compare'; --switch and --interactive need --mode=videos.")
  if mode == "videos" and values["videos"] is not None:
    raise ValueError(
      f"--videos is {values['videos']!r}, which goes with --mode=compare; use --num_prompts."
    )
  return mode == "compare"


def _alone(config: Any) -> Settings:
  """The settings as one process that only makes videos needs them, checked as far as it uses them.

  A recipe's judge, its training prompts and its other workers need not be there.
  """
  settings = config_lib.convert(config)
  runtime = dataclasses.replace(
    settings.runtime,
    executor="inline",
    ray_address="",
    actor_resource="",
    reward_resource="",
    chunk_blocks=1,
  )
  settings = dataclasses.replace(settings, runtime=runtime)
  for look in (checks.model, checks.frames, checks.transition, checks.devices, checks.lora):
    look(settings)
  return settings


def _videos(
  settings: Settings,
  values: Mapping[str, str | None],
  scripts: tuple[Script, ...],
  switches: Sequence[str],
  interactive: bool,
  seeds: tuple[int, ...],
  out: Path,
) -> "VideoRequest":
  from sbjax.sampling import interactive as interactive_lib
  from sbjax.sampling.models import video_size
  from sbjax.sampling.videos import VideoRequest

  accept = prompts_lib.acceptance(settings)
  if switches:
    common = tuple(script_lib.read_switch(text) for text in switches)
    for switch in common:
      accept(switch.prompt)
    if any(script.switches for script in scripts):
      raise ValueError("--switch is given, but the prompt file has switches; use one of the two.")
    scripts = tuple(dataclasses.replace(script, switches=common) for script in scripts)
  sampler, chunks = video_size(settings)
  for script in scripts:
    script_lib.check(script, chunks * sampler.frames_per_chunk, sampler.frames_per_chunk)
  if interactive and (len(scripts) * len(seeds) > 1 or scripts[0].switches):
    raise ValueError(
      f"--interactive makes one video, not {len(scripts) * len(seeds)}, and has no other switches; "
      "give one prompt, such as --prompts='a prompt', one seed and no --switch."
    )
  adapters, _ = _adapters(settings, values)
  if values["adapters"] is not None and len(adapters) > 1:
    raise ValueError(f"--adapters is {values['adapters']!r}; a video has one, so name one.")
  name = list(adapters)[-1]

  def typed(script: Script) -> Director:
    # On a terminal the line that shows progress, or the one that was typed, is not at its end.
    start = "\n" if sys.stdout.isatty() else ""
    return interactive_lib.TypedPrompts(script.prompt, accept, lambda said: print(start + said))

  return VideoRequest(
    settings, adapters[name], name, scripts, seeds, typed if interactive else None, out
  )


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


def _scripts(settings: Settings, values: Mapping[str, str | None], most: int) -> tuple[Script, ...]:
  what = values["prompts"]
  accept = prompts_lib.acceptance(settings)
  if what and _is_text(what):
    accept(what)
    every: tuple[Script, ...] = (Script(what.strip()),)
  elif what or settings.prompts.eval:
    every = script_lib.load(what or settings.prompts.eval, accept)
  else:
    raise ValueError("--prompts is missing; name a file of prompts, or write one prompt.")
  asked = _count("num_prompts", values["num_prompts"], 1, min(most, len(every)))
  if asked > len(every):
    raise ValueError(f"--num_prompts is {asked}; there are {len(every)}, so use at most that.")
  return every[:asked]


def _is_text(what: str) -> bool:
  """Tells a prompt from the name of a file that may be missing: a prompt has words."""
  return not what.startswith("world:") and not os.path.exists(what) and " " in what.strip()


def _seeds(text: str | None) -> tuple[int, ...] | None:
  if text is None:
    return None
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
  from sbjax.state.checkpoint_read import read_checkpoint
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
