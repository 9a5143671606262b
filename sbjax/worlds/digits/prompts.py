"""What a prompt of the digits world asks for, in words and numbers, and which prompts are held out.

A prompt names a colour (6), a digit (10), a direction (4) and a speed (2): 480 sentences in all,
such as "a red seven moves left slowly".
"""

from __future__ import annotations

import dataclasses
import itertools
import re

import numpy as np

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
COLOURS = ("red", "green", "blue", "yellow", "purple", "white")
DIRECTIONS = ("left", "right", "up", "down")
SPEEDS = ("slowly", "quickly")
FILLERS = ("a", "moves")

# RGB in [0, 1], one row per entry of COLOURS.
PALETTE = np.array(
  [
    [0.95, 0.15, 0.15],
    [0.15, 0.85, 0.20],
    [0.25, 0.40, 1.00],
    [0.95, 0.85, 0.10],
    [0.75, 0.20, 0.90],
    [0.95, 0.95, 0.95],
  ],
  np.float32,
)
# (row, column) unit steps, one per entry of DIRECTIONS.
DIRECTION_STEPS = np.array([[0, -1], [0, 1], [-1, 0], [1, 0]], np.float32)
# Pixels per frame, one per entry of SPEEDS.
SPEED_PX = np.array([0.5, 1.0], np.float32)

SPLIT_SEED = 20240


@dataclasses.dataclass(frozen=True)
class Asked:
  """What one prompt asks for: indices into COLOURS, DIGITS, DIRECTIONS and SPEEDS."""

  digit: int
  colour: int
  direction: int
  speed: int


def sentence(asked: Asked) -> str:
  """The prompt in words."""
  return (
    f"a {COLOURS[asked.colour]} {DIGITS[asked.digit]} moves "
    f"{DIRECTIONS[asked.direction]} {SPEEDS[asked.speed]}"
  )


def words(prompt: str) -> list[str]:
  """Lower-case words of a prompt; punctuation separates words and is dropped."""
  return re.findall(r"[a-z0-9'_-]+", prompt.lower())


def parse(prompt: str) -> Asked:
  """Reads a prompt back. Word order is free; every attribute must be named exactly once.

  Raises:
    ValueError: if an attribute is missing or named twice.
  """
  found = words(prompt)
  values = {}
  for name, options in (
    ("digit", DIGITS),
    ("colour", COLOURS),
    ("direction", DIRECTIONS),
    ("speed", SPEEDS),
  ):
    hits = [options.index(word) for word in found if word in options]
    if len(hits) != 1:
      raise ValueError(
        f"prompt {prompt!r} names {len(hits)} words for the {name}; it must name one of "
        f"{', '.join(options)}"
      )
    values[name] = hits[0]
  return Asked(**values)


def parse_all(prompts: list[str] | tuple[str, ...]) -> dict[str, np.ndarray]:
  """The asked indices of many prompts: keys digit, colour, direction, speed, each int32 [batch]."""
  asked = [parse(prompt) for prompt in prompts]
  return {
    field.name: np.array([getattr(a, field.name) for a in asked], np.int32)
    for field in dataclasses.fields(Asked)
  }


def all_prompts() -> tuple[str, ...]:
  """All 480 prompts in a fixed order."""
  return tuple(
    sentence(Asked(digit, colour, direction, speed))
    for digit, colour, direction, speed in itertools.product(
      range(len(DIGITS)), range(len(COLOURS)), range(len(DIRECTIONS)), range(len(SPEEDS))
    )
  )


def split_prompts() -> tuple[tuple[str, ...], tuple[str, ...]]:
  """240 prompts for reinforcement learning and 240 that it never sees, from a fixed seed.

  Every digit has 24 prompts on each side, so that a measure over either side weighs all digits
  alike. Both tuples are shuffled: any prefix is a fair sample.
  """
  rng = np.random.default_rng(SPLIT_SEED)
  per_digit = len(COLOURS) * len(DIRECTIONS) * len(SPEEDS)
  everything = np.array(all_prompts()).reshape(len(DIGITS), per_digit)
  seen, unseen = [], []
  for row in everything:
    row = rng.permutation(row)
    seen.append(row[: per_digit // 2])
    unseen.append(row[per_digit // 2 :])
  return (
    tuple(str(p) for p in rng.permutation(np.concatenate(seen))),
    tuple(str(p) for p in rng.permutation(np.concatenate(unseen))),
  )
