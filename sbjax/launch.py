"""The command that trains.

    python -m sbjax.launch --config=configs/quickstart.py --workdir=runs/quickstart

Any field of the config is overridden as `--config.FIELD=VALUE`. Everything that a run writes goes
under `--workdir`.

Exit codes: 0 the run is complete; 1 the run failed; 2 the command, config or workdir cannot work,
with one sentence on stderr; 130 after SIGINT (Ctrl-C) and 143 after SIGTERM, once a checkpoint is
written and all workers have ended. A second signal ends the process at once.
"""

import sys
from collections.abc import Sequence

from sbjax import command
from sbjax import config as config_lib
from sbjax.settings import Settings

FLAGS = {"workdir": "folder for everything that the run writes"}


def main(argv: Sequence[str]) -> int:
  """Runs the command.

  Args:
    argv: program name and arguments.

  Returns:
    the exit code; see the module's docstring.
  """
  return command.answer(argv, str(__doc__), read_request, run)


def read_request(argv: Sequence[str]) -> tuple[Settings, str]:
  """Reads the command line: settings and workdir.

  Raises:
    ValueError: anything that cannot work.
  """
  asked = config_lib.parse(argv, FLAGS)
  workdir = asked.values["workdir"]
  if not workdir:
    raise ValueError("--workdir is missing; name a folder for the run, such as runs/quickstart.")
  return config_lib.validate(asked.config), workdir


def run(request: tuple[Settings, str]) -> int:
  """Trains, and gives the exit code."""
  settings, workdir = request
  command.prepare_environment(settings)
  # Not at the top: a command that is refused never waits for this import.
  from sbjax import train

  return train.train(settings, workdir)


if __name__ == "__main__":
  sys.exit(main(sys.argv))
