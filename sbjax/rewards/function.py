"""A user's own reward: one Python function, named in the config.

    # my_reward.py
    def brightness(video, prompt, seed):
      return float(video.mean()) / 255.0

    --config.reward.name=function --config.reward.function=my_reward.py:brightness
    --config.reward.components="('brightness',)" --config.reward.weights="(1.0,)"

The function takes `video`, uint8 [frames, height, width, 3]; `prompt`, a string; and `seed`, an
integer that names the video. It returns one number, or a dict of numbers by component. Raising, or
returning a number that is not finite, is a failure and never a zero: the call is tried again, and
if it fails again the candidate is left out and counted.
"""

import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from sbjax.rewards.protocol import Job, Verdict, Video

RewardFunction = Callable[[Video, str, int], float | Mapping[str, float]]


def load_function(name: str) -> RewardFunction:
  """Imports the function that a config names.

  Args:
    name: `module:function` or `path/file.py:function`.

  Raises:
    ValueError: the name is malformed, its module cannot be imported, or it is not a function of
      (video, prompt, seed).
  """
  where, colon, attribute = name.rpartition(":")
  if not colon or not where or not attribute:
    raise ValueError(
      f"reward.function is {name!r}; write module:function or path/file.py:function."
    )
  module = _import(where, name)
  function = getattr(module, attribute, None)
  if function is None:
    there = [n for n, v in vars(module).items() if inspect.isfunction(v) and not n.startswith("_")]
    raise ValueError(
      f"reward.function is {name!r}, but {where} has no {attribute!r}; "
      f"{'it has ' + ', '.join(there) if there else 'define it there'}."
    )
  if not callable(function):
    raise ValueError(
      f"reward.function is {name!r}, which is of type {type(function).__name__}; it must be a "
      "function of (video, prompt, seed)."
    )
  _check_signature(function, name)
  return cast(RewardFunction, function)


class FunctionJudge:
  """Judges every video by a user's function.

  Args:
    function: takes (video, prompt, seed); or its name, as in a config.
    components: names that its values get; a function that returns one number needs exactly one.

  Raises:
    ValueError: as `load_function`.
  """

  def __init__(self, function: RewardFunction | str, components: tuple[str, ...]):
    self._function = load_function(function) if isinstance(function, str) else function
    self._components = components

  def judge(self, jobs: Sequence[Job], videos: Mapping[int, Video]) -> list[Verdict]:
    """Answers jobs, in order; one job's failure does not touch the others."""
    return [self._judge(job, videos[job.candidates[0]]) for job in jobs]

  def _judge(self, job: Job, video: Video) -> Verdict:
    # A copy: a function that writes into its argument must not change what is saved and shown.
    try:
      answer = self._function(video.copy(), job.prompt, job.seed)
    except Exception as error:  # the function is the user's: whatever it raises is its failure
      return Verdict(None, "raised", f"{type(error).__name__}: {error}")
    return verdict(answer, self._components)


def verdict(answer: Any, components: tuple[str, ...]) -> Verdict:
  """Reads what a user's function returned.

  Args:
    answer: one number, or numbers by component; further keys are kept for the records.
    components: the names that the config weighs.

  Returns:
    A verdict; a failure with its cause where a value is missing or not a number. Whether numbers
    are finite is judged later, for every kind of reward alike.
  """
  if not isinstance(answer, Mapping):
    if len(components) != 1:
      return Verdict(
        None,
        "wrong_type",
        f"the function returned {_short(answer)}; {len(components)} components need a dict",
      )
    answer = {components[0]: answer}
  values = {}
  for name, value in answer.items():
    number = _number(value)
    if number is None and name in components:
      return Verdict(None, "wrong_type", f"component {name!r} is {_short(value)}, not a number")
    if number is not None:
      values[str(name)] = number
  return Verdict(values)


def _number(value: Any) -> float | None:
  # float() would also read strings, and a judge that answers in words has not given a number.
  if isinstance(value, str | bytes | bool):
    return None
  try:
    return float(value)
  except (TypeError, ValueError, OverflowError):
    return None


def _short(value: Any) -> str:
  text = repr(value)
  return text if len(text) <= 80 else f"{text[:77]}..."


def _import(where: str, name: str) -> Any:
  path = Path(where).resolve()
  if where.endswith(".py") and not path.is_file():
    raise ValueError(f"reward.function is {name!r}, but {where} is not a file; name one that is.")
  try:
    return _import_file(path) if where.endswith(".py") else importlib.import_module(where)
  except Exception as error:  # importing runs the user's code, which may raise anything
    reason = (str(error).splitlines() or ["no message"])[0].rstrip(".")
    raise ValueError(
      f"reward.function is {name!r}, but {where} cannot be imported ({type(error).__name__}: "
      f"{reason}); correct it or name another."
    ) from error


def _import_file(path: Path) -> Any:
  # The whole path is part of the module's name, so that two files called reward.py do not collide.
  name = "sbjax_user_reward_" + re.sub(r"\W", "_", str(path))
  spec = importlib.util.spec_from_file_location(name, path)
  if spec is None or spec.loader is None:
    raise ImportError(f"{path} is not a Python module")
  module = importlib.util.module_from_spec(spec)
  sys.modules[name] = module
  spec.loader.exec_module(module)
  return module


def _check_signature(function: Callable[..., Any], name: str) -> None:
  try:
    signature = inspect.signature(function)
  except ValueError:  # built-in functions may have none; they are found out when called
    return
  try:
    signature.bind(None, "", 0)
  except TypeError as error:
    raise ValueError(
      f"reward.function is {name!r}, which takes {signature}; it must take (video, prompt, seed)."
    ) from error
