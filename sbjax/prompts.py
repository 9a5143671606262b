"""Prompt sets: where prompts come from, and which ones a step uses.

A source is `world:train` or `world:eval` (the embedded world's own halves) or a file: text with one
prompt a line, CSV with a column `prompt`, or JSONL with a key `prompt`. The order is a function of
the seed and of how many prompts were consumed, so that a resumed run continues where it was.
"""

import csv
import dataclasses
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from sbjax.settings import Settings
from sbjax.world_table import world_of
from sbjax.worlds.digits import prompts as digits

WORLD_SPLITS = ("world:train", "world:eval")


@dataclasses.dataclass(frozen=True)
class PromptSet:
  """Prompts in the order of their source; the same prompt may occur more than once.

  Attributes:
    source: where they came from, as the config named it.
    prompts: at least one.
  """

  source: str
  prompts: tuple[str, ...]

  def take(self, seed: int, cursor: int, count: int) -> tuple[str, ...]:
    """Gives the next `count` prompts after `cursor` were consumed.

    Every epoch uses each prompt once, in an order of its own that the seed and the epoch's number
    decide; a step may begin in one epoch and end in the next.

    Args:
      seed: the run's seed.
      cursor: prompts consumed so far in the run.
      count: prompts wanted.
    """
    size = len(self.prompts)
    return tuple(
      self.prompts[_order(seed, position // size, size)[position % size]]
      for position in range(cursor, cursor + count)
    )


def load(source: str, accept: Callable[[str], None] | None = None) -> PromptSet:
  """Reads a prompt set.

  Args:
    source: `world:train`, `world:eval` or a file's path.
    accept: called with every prompt; raises `ValueError` for one that cannot be used (too long for
      the text encoder, for instance).

  Raises:
    ValueError: unknown world split, missing, unreadable, non-UTF-8 or empty file, a file without
      prompts in it, or a prompt that `accept` refuses; with file and line.
  """
  prompts = []
  for place, prompt in _read(source):
    if accept is not None:
      try:
        accept(prompt)
      except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
    prompts.append(prompt)
  if not prompts:
    raise ValueError(f"{source} holds no prompts; it needs at least one.")
  return PromptSet(source, tuple(prompts))


def from_settings(settings: Settings) -> tuple[PromptSet, PromptSet]:
  """Reads the training and the evaluation prompts and checks that model and judge can use them.

  Raises:
    ValueError: as `load`, with the name of the field in front; or fewer evaluation prompts than
      asked.
  """
  accept = acceptance(settings)
  sets = []
  for field in ("train", "eval"):
    source = getattr(settings.prompts, field)
    if not source:
      raise ValueError(f"prompts.{field} is ''; name a text, CSV or JSONL file of prompts.")
    if source in WORLD_SPLITS and not world_of(settings.model.name).embedded:
      raise ValueError(
        f"prompts.{field} is {source!r}, which model {settings.model.name!r} does not bring; name "
        "a text, CSV or JSONL file of prompts."
      )
    try:
      sets.append(load(source, accept))
    except ValueError as error:
      raise ValueError(f"prompts.{field}: {error}") from error
  train, held_out = sets
  if settings.eval.every and settings.eval.prompts > len(held_out.prompts):
    raise ValueError(
      f"eval.prompts is {settings.eval.prompts}; {held_out.source} holds {len(held_out.prompts)} "
      "prompts, so use at most that."
    )
  return train, held_out


def acceptance(settings: Settings) -> Callable[[str], None]:
  """Gives the check that a prompt must pass: it raises `ValueError` for one that cannot be used.

  The text encoder must know its words and take its length, and the world's judge must find in it
  what to look for.
  """
  model = settings.model
  encodes = world_of(model.name).acceptance(model, settings.prompts.overflow)

  def accept(prompt: str) -> None:
    encodes(prompt)
    # Its judge reads off the prompt what to look for.
    if "world" in settings.reward.judges:
      digits.parse(prompt)

  return accept


def _order(seed: int, epoch: int, size: int) -> np.ndarray:
  return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(size)


def _read(source: str) -> Iterator[tuple[str, str]]:
  """Yields (place, prompt); the place names file and line for error messages."""
  if source.startswith("world:"):
    if source not in WORLD_SPLITS:
      raise ValueError(f"{source!r} is not a set of prompts; use {' or '.join(WORLD_SPLITS)}.")
    for prompt in digits.split_prompts()[WORLD_SPLITS.index(source)]:
      yield source, prompt
    return
  text = _text(source)
  suffix = Path(source).suffix.lower()
  lines = _csv(text, source) if suffix == ".csv" else enumerate(io.StringIO(text), 1)
  for number, line in lines:
    place = f"{source} line {number}"
    prompt = line.strip()
    if prompt and suffix in (".jsonl", ".json"):
      prompt = _json_prompt(prompt, place)
    # Blank lines are allowed in a text or JSONL file: editors leave one at the end.
    if prompt:
      yield place, prompt
    elif suffix == ".csv":
      raise ValueError(f"{place} has an empty prompt; fill it or remove the row.")


def _text(source: str) -> str:
  try:
    data = Path(source).read_bytes()
  except FileNotFoundError as error:
    raise ValueError(
      f"{source!r} is not there; name a text, CSV or JSONL file, or {' or '.join(WORLD_SPLITS)}."
    ) from error
  except OSError as error:
    raise ValueError(f"{source!r} cannot be read ({error.strerror}).") from error
  if not data.strip():
    raise ValueError(f"{source} is empty; it needs at least one prompt.")
  try:
    # A byte-order mark is not part of the first prompt.
    return data.decode("utf-8-sig")
  except UnicodeDecodeError as error:
    line = data.count(b"\n", 0, error.start) + 1
    raise ValueError(f"{source} is not UTF-8 at line {line}; save it as UTF-8.") from error


def _csv(text: str, source: str) -> Iterator[tuple[int, str]]:
  # Cells may hold line breaks: the reader, not the lines, must cut the rows.
  reader = csv.reader(io.StringIO(text, newline=""), strict=True)
  column, start = None, 1
  try:
    for row in reader:
      if column is None:
        names = [name.strip() for name in row]
        if names.count("prompt") != 1:
          raise ValueError(
            f"{source} has the columns {', '.join(names)}; one must be called prompt."
          )
        column = names.index("prompt")
      elif row:
        yield start, row[column] if column < len(row) else ""
      start = reader.line_num + 1
  except csv.Error as error:
    raise ValueError(f"{source} line {reader.line_num} is not CSV ({error}).") from error


def _json_prompt(line: str, place: str) -> str:
  try:
    record = json.loads(line)
  except json.JSONDecodeError as error:
    raise ValueError(f"{place} is not JSON ({error.msg}); write one object a line.") from error
  prompt = record.get("prompt") if isinstance(record, dict) else None
  if not isinstance(prompt, str) or not prompt.strip():
    raise ValueError(f'{place} has no text under the key "prompt".')
  return prompt.strip()
