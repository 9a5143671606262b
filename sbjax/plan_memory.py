"""The command that says what a run's workers need in memory, and how large it may be.

    python -m sbjax.plan_memory --config=configs/self_forcing.py --device_gb=72,141
    python -m sbjax.plan_memory --config=configs/self_forcing.py --json

Files of weights need not be there where the model is a preset. Fields are overridden as
`--config.FIELD=VALUE`.

    --device_gb=72,141   memory of a device in GB (10^9 bytes), one or several; default: what this
                         machine's accelerator says, or none
    --host_gb=N          host memory of a worker, where folded gradients lie; default: as the device
    --judge=NAME         preset of the judge; default: the configured checkpoint's, or the published
                         one's
    --judge_dtype=NAME   float32 or bfloat16; default: reward.judge.weights_dtype
    --compile=auto       yes: ask the compiler for the work of each pass; no: the formula; auto: ask
                         it where there is an accelerator
    --json               the same for programs

Numbers of the formula are marked "estimated", those of the compiler "compiled". Exit codes: 0 it
fits every device that was asked about, or none was; 1 it does not fit one; 2 the command or config
cannot work.
"""

import json
import sys
from collections.abc import Sequence
from typing import Any

from sbjax import command
from sbjax import config as config_lib
from sbjax.settings import Settings

FLAGS = {
  "device_gb": "memory of a device in GB, such as 72 or 72,141",
  "host_gb": "host memory of a worker in GB",
  "judge": "preset of the judge",
  "judge_dtype": "float32 or bfloat16",
  "compile": "auto, yes or no",
  "json": "true prints JSON",
}


def main(argv: Sequence[str]) -> int:
  """Runs the command and gives its exit code."""
  # A flag without a value is what one writes for a switch.
  argv = ["--json=true" if word == "--json" else word for word in argv]
  return command.answer(argv, str(__doc__), read_request, run)


def read_request(argv: Sequence[str]) -> tuple[Settings, dict[str, Any]]:
  """Reads the command line: settings and options.

  Raises:
    ValueError: anything that cannot work.
  """
  asked = config_lib.parse(argv, FLAGS)
  values = {name: value or "" for name, value in asked.values.items()}
  options: dict[str, Any] = {
    "device_gb": [_number("device_gb", part) for part in values["device_gb"].split(",") if part],
    "host_gb": _number("host_gb", values["host_gb"]) if values["host_gb"] else 0.0,
    "judge": values["judge"],
    "judge_dtype": values["judge_dtype"]
    and _choice("judge_dtype", values["judge_dtype"], "float32", "bfloat16"),
    "compile": _choice("compile", values["compile"], "auto", "yes", "no"),
    "json": _choice("json", values["json"], "false", "true") == "true",
  }
  return config_lib.convert(asked.config), options


def _number(name: str, text: str) -> float:
  try:
    number = float(text)
  except ValueError:
    number = 0.0
  if not 0 < number < 1e6:
    raise ValueError(f"--{name} has {text!r}; give GB as a number above 0, such as 72.")
  return number


def _choice(name: str, text: str, *known: str) -> str:
  if text and text not in known:
    raise ValueError(f"--{name} is {text!r}; use {' or '.join(known)}.")
  return text or known[0]


def run(request: tuple[Settings, dict[str, Any]]) -> int:
  """Prints the plan, and gives the exit code."""
  settings, options = request
  # Not at the top: a command that is refused never waits for JAX.
  from sbjax.report import memory_report
  from sbjax.runtime import memory_plan

  recipe = memory_plan.planned_recipe(settings)
  found = memory_report.plan(recipe, options)
  if options["json"]:
    print(json.dumps(found, indent=2))
  else:
    print(memory_report.text(found))
  return command.EXIT_DONE if found["fits"] else command.EXIT_FAILED


if __name__ == "__main__":
  sys.exit(main(sys.argv))
