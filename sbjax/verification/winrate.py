"""Replays recorded groups of pairwise replies (`winrate_cases.json`) through our parser and rates.

The recording is of the reference's aggregator with `unparsable='tie'` and its weight-shadowing
fault; numbers must be equal to the decimals that it was written with.
"""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sbjax.rewards.unified_reward_flex import parse_answer
from sbjax.rewards.winrate import DIGITS, PairOutcome, combined, dimension_weights, win_rates
from sbjax.verification.result import Check, Comparison

_REWARD_DIGITS = 6
_FIELDS = {
  "num_items",
  "overall_weight",
  "dim_weight",
  "category_weights",
  "responses",
  "reward_shadow_bug",
  "dims",
}
_RESPONSE = {"first_index", "second_index", "model_output"}
_RATES = ("overall_reward", "dim_mean_reward", "dim_rate_flags")


def is_winrate_file(path: pathlib.Path) -> bool:
  """Whether a `.json` file has groups of pairwise replies, right or wrong in detail."""
  try:
    data = json.loads(path.read_text())
  except (ValueError, OSError):
    return False  # whoever reads it next says what is wrong with it
  return isinstance(data, list) and any(isinstance(c, dict) and "responses" in c for c in data)


def replay_winrates(path: pathlib.Path) -> list[Check]:
  """Largest differences by quantity, all with tolerance 0.

  Raises:
    ValueError: when a case lacks a field or has one that is not known.
  """
  compared = Comparison(0.0)
  for number, case in enumerate(json.loads(path.read_text())):
    where = f"{path} case {number}"
    if not isinstance(case, dict) or set(case) != _FIELDS:
      odd = sorted(set(case) ^ _FIELDS) if isinstance(case, dict) else ["no object"]
      raise ValueError(f"{where} has fields missing or not known ({', '.join(odd)}).")
    try:
      _replay(compared, case)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
      raise ValueError(f"{where} has a field missing or malformed ({error}).") from error
  return compared.checks()


def _replay(compared: Comparison, case: Mapping[str, Any]) -> None:
  count = case["num_items"]
  outcomes = [_outcome(response) for response in case["responses"]]
  if any(not 0 <= place < count for o in outcomes for place in (o.first, o.second)):
    raise IndexError("a reply names a candidate that does not exist")
  given = tuple(case["category_weights"] or ())
  rates = win_rates(count, outcomes, given)
  weights = dimension_weights(outcomes, given)
  dims = case["dims"]
  _equal(compared, "overall rate", [r.overall for r in rates], dims["overall_reward"])
  means = [0.0 if r.mean is None else r.mean for r in rates]
  _equal(compared, "mean of dimensions", means, dims["dim_mean_reward"])
  _equal(compared, "dimension seen", [r.mean is not None for r in rates], dims["dim_rate_flags"])
  names = [name for name in dims if name not in _RATES]
  # One number for what has no array: names that only one side knows.
  _equal(compared, "names of dimensions", [len(set(names) ^ set(weights))], [0])
  for name in names:
    ours = [round(r.dimensions.get(name, 0.0), DIGITS) for r in rates]
    _equal(compared, "rate by dimension", ours, dims[name])
  last = list(weights.values())[-1] if weights else None
  rewards = [
    combined(r, case["overall_weight"], case["dim_weight"], shadowed_by=last) for r in rates
  ]
  rounded = [None if r is None else round(r, _REWARD_DIGITS) for r in rewards]
  _equal(compared, "reward, weight shadowed", rounded, case["reward_shadow_bug"])


def _outcome(response: Mapping[str, Any]) -> PairOutcome:
  if set(response) != _RESPONSE:
    raise KeyError(", ".join(sorted(set(response) ^ _RESPONSE)))
  first, second = response["first_index"], response["second_index"]
  answer = parse_answer(response["model_output"], lenient=True)
  if answer is None:
    return PairOutcome(first, second, 0.5)
  return PairOutcome(first, second, answer.overall, dict(answer.categories))


def _equal(compared: Comparison, quantity: str, ours: Sequence[Any], reference: Any) -> None:
  numbers = [np.asarray(side, np.float64) for side in (ours, reference)]
  compared.add(quantity, numbers[0], numbers[1], absolute=0.0)
