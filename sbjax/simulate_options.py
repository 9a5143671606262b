"""The options of `sbjax.simulate`."""

import argparse
import math
from collections.abc import Callable
from typing import Any, NoReturn

DIALOGUE = "measured"
"""A judge's dialogues as the profile's run has them."""

_ABOUT = """Answers what-if questions about a step without running one.

Options that take several values with commas between make a table of all combinations. Seconds come
from a profile file of `sbjax.profile`, or with `--paper` from the paper's ratios, in units of one
rollout of 21 latent frames at 480p."""


class _Parser(argparse.ArgumentParser):
  """Says what is wrong in one sentence, without the usage text."""

  def error(self, message: str) -> NoReturn:
    """Ends the process with exit code 2."""
    self.exit(2, f"sbjax.simulate: {message}.\n")


def _list_of(kind: Callable[[str], Any], low: float) -> Callable[[str], tuple[Any, ...]]:
  def read(text: str) -> tuple[Any, ...]:
    try:
      values = tuple(kind(part) for part in text.split(","))
    except ValueError:
      values = ()
    fit = all(low <= value < math.inf for value in values)  # false for nan as well
    if not values or not fit or len(set(values)) < len(values):
      what = "whole numbers" if kind is int else "numbers"
      bound = f"from {low:g}" if kind is int else f"of at least {low:g}"
      raise argparse.ArgumentTypeError(f"{text!r}; use different {what} {bound}, as 1,2")
    return values

  return read


def _seconds(text: str) -> float:
  try:
    value = float(text)
  except ValueError:
    value = math.nan
  if not 0.0 <= value < math.inf:
    raise argparse.ArgumentTypeError(f"{text!r}; use seconds of at least 0, as 1.5")
  return value


def dialogue_of(text: str) -> tuple[int, int, int]:
  """Reads `frames/prompt tokens/answer tokens`.

  Raises:
    ValueError: for anything else.
  """
  frames, prompt_tokens, new_tokens = map(int, text.split("/"))
  if frames < 0 or prompt_tokens < 1 or new_tokens < 1:
    raise ValueError(f"{text!r} has too small a number")
  return frames, prompt_tokens, new_tokens


def _dialogues(text: str) -> tuple[str, ...]:
  values = tuple(text.split(","))
  try:
    for value in values:
      if value != DIALOGUE:
        dialogue_of(value)
  except ValueError:
    values = ()
  if not values or len(set(values)) < len(values):
    raise argparse.ArgumentTypeError(
      f"{text!r}; use different frames/prompt tokens/answer tokens, as 8/1200/512,{DIALOGUE}"
    )
  return values


def _names(text: str) -> tuple[str, ...]:
  return tuple(part.strip() for part in text.split(","))


def parser() -> argparse.ArgumentParser:
  """The command's options; their help text is its documentation."""
  parser = _Parser(
    prog="python -m sbjax.simulate",
    description=_ABOUT,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  source = parser.add_mutually_exclusive_group(required=True)
  source.add_argument("--profile", metavar="FILE", help="what sbjax.profile has measured")
  source.add_argument("--paper", action="store_true", help="the paper's ratios")
  count, whole, scale = _list_of(int, 1), _list_of(int, 0), _list_of(float, 0.001)
  parser.add_argument("--schemes", type=_names, default=("all",), help="all, or names")
  parser.add_argument("--actors", type=count, default=(4,), help="actor workers")
  parser.add_argument("--rewards", type=whole, default=(2,), help="reward workers")
  parser.add_argument("--candidates", type=count, default=(24,), help="of a step")
  parser.add_argument("--minibatches", type=count, default=(2,), help="updates of a step")
  parser.add_argument(
    "--frames",
    type=count,
    help="latent frames with --paper (21), pixel frames with --profile (the longest measured)",
  )
  parser.add_argument("--chunk_frames", type=int, default=3, help="latent frames of a chunk")
  parser.add_argument(
    "--judge_scale", type=scale, default=(1.0,), help="3: a judge of 3 x the time"
  )
  parser.add_argument(
    "--dialogue",
    type=_dialogues,
    default=(DIALOGUE,),
    help="with --profile: a judge's dialogues as frames/prompt tokens/answer tokens, 8/1200/512",
  )
  for group in ("actor", "reward"):
    text = f"seconds on {group} devices are multiplied by this: 0.5 is a device twice as fast"
    parser.add_argument(f"--{group}_scale", type=scale, default=(1.0,), help=text)
  parser.add_argument("--judge", type=_names, help="with --paper: vr_thinker, unified_reward_flex")
  parser.add_argument("--algorithm", type=_names, help="with --paper: dancegrpo, kvpo")
  parser.add_argument("--resolution", type=_names, help="with --paper: 480p, 360p")
  parser.add_argument("--model", type=_names, help="with --paper: 1.3B, 5B")
  parser.add_argument("--budget_s", type=_seconds, default=1.0, help="search per plan, seconds")
  parser.add_argument("--out", metavar="DIR", help="new or empty folder for pictures and JSON")
  return parser
