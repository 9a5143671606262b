"""The command that asks whether a loss of your own separates from its rewards.

    python -m sbjax.separate my_loss.py:loss

The loss is `loss(channels, old, statistics, advantages)` in jax.numpy: channels and old [N, U, J],
statistics [N, U, S], advantages [N] (or [N, M] with `--rewards=M`), and it returns a scalar.

Exit codes: 0 the report is printed; 1 the found form does not reproduce autodiff; 2 the command or
the loss cannot work, with one sentence on stderr.
"""

import argparse
import importlib.util
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

MAX_ERROR = 1e-9


class _Parser(argparse.ArgumentParser):
  """Says what is wrong in one sentence, without the usage text."""

  def error(self, message: str) -> NoReturn:
    """Ends the process with exit code 2."""
    self.exit(2, f"sbjax.separate: {message}.\n")


def load_loss(target: str) -> Callable[..., Any]:
  """Imports FILE.py and gives its function.

  Args:
    target: `FILE.py:FUNCTION`.

  Raises:
    ValueError: if there is no such file or function, or the file cannot be imported.
  """
  path, colon, name = target.rpartition(":")
  if not colon or not name or not path:
    raise ValueError(f"loss is {target!r}; write it as FILE.py:FUNCTION")
  file = pathlib.Path(path)
  if not file.is_file():
    raise ValueError(f"loss is {target!r}; there is no file {path!r}")
  spec = importlib.util.spec_from_file_location(file.stem, file)
  if spec is None or spec.loader is None:
    raise ValueError(f"loss is {target!r}; {path!r} is no Python file, use one that ends in .py")
  module = importlib.util.module_from_spec(spec)
  sys.path.insert(0, str(file.parent.resolve()))  # as if the user had started the file itself
  try:
    spec.loader.exec_module(module)
  except Exception as error:
    raise ValueError(f"importing {path!r} fails with {_described(error)}") from error
  loss = getattr(module, name, None)
  if not callable(loss):
    raise ValueError(f"loss is {target!r}; {path!r} has no function {name!r}")
  return loss


def _described(error: Exception) -> str:
  lines = str(error).strip().splitlines()
  return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the check, prints its report and gives the exit code."""
  parser = _Parser(prog="python -m sbjax.separate", description="Does a loss separate?")
  parser.add_argument("loss", metavar="FILE.py:FUNCTION")
  parser.add_argument("--candidates", type=int, default=4)
  parser.add_argument("--units", type=int, default=5, help="per candidate")
  parser.add_argument("--channels", type=int, default=1, help="per unit, the score first")
  parser.add_argument("--statistics", type=int, default=0, help="per unit")
  parser.add_argument("--rewards", type=int, default=1, help="advantage columns")
  parser.add_argument("--seed", type=int, default=0)
  options = parser.parse_args(arguments)
  # Imported late: a typing mistake is answered before JAX is loaded.
  from sbjax.separation.checker import Sizes, check_separation

  try:
    loss = load_loss(options.loss)
    sizes = Sizes(
      options.candidates, options.units, options.channels, options.statistics, options.rewards
    )
    found = check_separation(loss, sizes, seed=options.seed)
  except ValueError as error:
    print(f"sbjax.separate: {str(error).rstrip('.')}.", file=sys.stderr)
    return 2
  except Exception as error:
    # The loss is the user's code: whatever it raises is told, not traced.
    print(f"sbjax.separate: {options.loss!r} fails with {_described(error)}.", file=sys.stderr)
    return 2
  print(
    f"{'loss':<11}{options.loss}, {options.candidates} candidates, {options.units} units, "
    f"{options.channels} channels, {options.rewards} rewards"
  )
  print(found.text())
  return 0 if found.max_relative_error <= MAX_ERROR else 1


if __name__ == "__main__":
  sys.exit(main())
