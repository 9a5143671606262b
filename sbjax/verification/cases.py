"""Replays recorded transition cases (`.json`) through our transitions, advantages and objectives.

What a case is, its own fields say: a step has a `kind`; the others are known by name.
"""

import json
import math
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models.wan.presets import SamplerConfig
from models.wan.schedule import denoising_schedule, flow_match_table, shift_sigma
from sbjax.algorithms.advantages import AdvantageConfig, advantages
from sbjax.algorithms.objectives.base import gradient, value
from sbjax.algorithms.objectives.clipped import Clipped
from sbjax.algorithms.objectives.kvpo import KVPO
from sbjax.algorithms.transitions import TRANSITIONS, clean_prediction, transition
from sbjax.separation.channels import Point, guard_score
from sbjax.separation.objective import Batch
from sbjax.verification.result import Check, Comparison

TOLERANCE = 1e-5
Case = Mapping[str, Any]

# Recorded observations whose own inputs the file does not hold: there is nothing to replay.
_OBSERVATIONS = r"ddim_bf16_storage_ratio_minus_1|separability_\w+"
_STEP_INPUTS = ("kind", "noise_level", "sigma", "sigma_next", "abar", "abar_prev")
_GRADIENTS = ("dlogpnew_dv", "dlogpnew_de")


def is_case_file(path: pathlib.Path) -> bool:
  """Whether a `.json` file has transition cases, right or wrong in detail.

  Raises:
    ValueError: when it is no JSON.
  """
  data = _load(path)
  return isinstance(data, dict) and ("inputs" in data or any(_handler(k, data[k]) for k in data))


def read_cases(path: pathlib.Path) -> dict[str, Any]:
  """Reads a file of cases.

  Raises:
    ValueError: when it is no JSON object, or has a case that is not known.
  """
  data = _load(path)
  if not isinstance(data, dict) or not data:
    raise ValueError(f"{path} holds no JSON object of cases.")
  for name, case in data.items():
    if name != "inputs" and _handler(name, case) is None:
      raise ValueError(f"{path} has a case {name!r} that is not known.")
    _check_numbers(f"{path} case {name!r}", case)
  return data


def replay_cases(cases: Mapping[str, Any]) -> list[Check]:
  """Largest differences per case and quantity, in float64.

  Raises:
    ValueError: when a case lacks a field or has one that is not known.
  """
  compared = Comparison(TOLERANCE)
  with jax.enable_x64(True):
    for name, case in cases.items():
      handler = None if name == "inputs" else _handler(name, case)
      if handler is not None:
        try:
          handler(compared, name, case, cases)
        except (KeyError, IndexError, TypeError) as error:
          raise ValueError(f"case {name!r} has a field missing or malformed ({error}).") from error
  return compared.checks()


def _load(path: pathlib.Path) -> Any:
  try:
    return json.loads(path.read_text())
  except (ValueError, OSError) as error:
    raise ValueError(f"{path} cannot be read as JSON ({error}).") from error


def _check_numbers(where: str, found: Any) -> None:
  if isinstance(found, float) and not math.isfinite(found):
    raise ValueError(f"{where} has a value that is not finite.")
  if isinstance(found, dict | list):
    for item in found.values() if isinstance(found, dict) else found:
      _check_numbers(where, item)


Handler = Callable[[Comparison, str, Any, Mapping[str, Any]], None]


def _handler(name: str, case: Any) -> Handler | None:
  if isinstance(case, dict) and "kind" in case:
    return _step if case["kind"] in TRANSITIONS else None
  for pattern, handler in _NAMED.items():
    if re.fullmatch(pattern, name):
      return handler
  return None


def _known(name: str, case: Case, fields: tuple[str, ...]) -> None:
  for field in case:
    if field not in fields:
      raise ValueError(f"case {name!r} has a field {field!r} that is not known.")


def _inputs(cases: Mapping[str, Any]) -> dict[str, jax.Array]:
  given = cases["inputs"]
  _known("inputs", given, ("shape", "x", "v", "z", "dv"))
  shape = tuple(given["shape"])
  if any(len(given[key]) != math.prod(shape) for key in ("x", "v", "z", "dv")):
    raise ValueError(f"inputs have a shape of {shape}; x, v, z and dv must have as many numbers.")
  return {key: jnp.asarray(given[key], jnp.float64).reshape(shape) for key in ("x", "v", "z", "dv")}


def _levels(case: Case) -> tuple[jax.Array, jax.Array]:
  names = ("abar", "abar_prev") if case["kind"] == "ddim" else ("sigma", "sigma_next")
  now, after = (jnp.asarray(case[name], jnp.float64) for name in names)
  return now, after


def _made(case: Case) -> Any:
  settings = {} if case["kind"] == "renoise" else {"noise_level": case["noise_level"]}
  return transition(case["kind"], **settings)


def _step(compared: Comparison, name: str, case: Case, cases: Mapping[str, Any]) -> None:
  given, made = _inputs(cases), _made(case)
  now, after = _levels(case)
  x, velocity, moved = given["x"], given["v"], given["v"] + given["dv"]
  # Flow-GRPO's CPS reports its log-probability without the constants.
  log_prob = made.log_prob if case["kind"] == "cps" else made.log_prob_full
  mean, std = made.step(x, velocity, now, after)
  x_next = mean + std * given["z"]

  def score(v: jax.Array) -> jax.Array:
    return log_prob(x_next, *made.step(x, v, now, after))

  new, slope = jax.value_and_grad(score)(moved)
  shift = jax.jvp(lambda v: made.step(x, v, now, after)[0], (velocity,), (jnp.ones_like(x),))[1]
  drift = jnp.mean((made.step(x, moved, now, after)[0] - mean) ** 2)
  ours = {
    "std": std,
    "injected_std": std,
    "std_dev_t": made.noise_scale(now, after),
    "mean": jnp.ravel(mean),
    "xnext": jnp.ravel(x_next),
    "x0": jnp.ravel(clean_prediction(x, velocity, now)),
    "logp_old": score(velocity),
    "logp_new": new,
    "ratio": jnp.exp(new - score(velocity)),
    "dmean_dv": jnp.ravel(shift)[0],
    **{field: jnp.ravel(slope) for field in _GRADIENTS},
    "mean_sq_drift": drift,
    "kl_exact": drift / (2.0 * std**2),
    "kl_flowgrpo": drift / (2.0 * made.noise_scale(now, after) ** 2),
  }
  if case["kind"] == "ddim":
    ours.pop("x0")  # a velocity's clean prediction; DDIM's network predicts the noise
  _known(name, case, (*_STEP_INPUTS, *ours))
  if not set(case) - set(_STEP_INPUTS):
    raise ValueError(f"case {name!r} has no recorded result; record one of {', '.join(ours)}.")
  for field in case:
    if field in ours:
      _add(compared, f"{name}/{field}", ours[field], case[field])


def _guard(compared: Comparison, name: str, case: Case, cases: Mapping[str, Any]) -> None:
  """GRPO-Guard on the `sde` step of the same index."""
  _known(name, case, ("scale", "bias", "ratio", "loss_div"))
  ending = name.removeprefix("guard")
  steps = [
    c
    for key, c in cases.items()
    if key.endswith(ending) and isinstance(c, dict) and c.get("kind") == "sde"
  ]
  if len(steps) != 1:
    raise ValueError(f"case {name!r} needs one step of kind 'sde' whose name ends in {ending!r}.")
  given, made = _inputs(cases), _made(steps[0])
  now, after = _levels(steps[0])
  mean, std = made.step(given["x"], given["v"], now, after)
  point = Point(
    x=given["x"],
    timestep=now * 1000.0,
    sigma=now,
    sigma_next=after,
    target=mean + std * given["z"],
    anchor=mean,
    reference=mean,
  )
  moved = given["v"] + given["dv"]
  drift = jnp.mean((made.step(given["x"], moved, now, after)[0] - mean) ** 2)
  ours = {
    "scale": std,
    "bias": drift / (2.0 * std**2),
    "ratio": jnp.exp(guard_score(point, moved, made) - guard_score(point, given["v"], made)),
    "loss_div": now - after,
  }
  for field in case:
    _add(compared, f"{name}/{field}", ours[field], case[field])


def _add(compared: Comparison, name: str, ours: Any, recorded: Any) -> None:
  """Compares; a divergence is far below the tolerance itself, so it must agree to 0.1 %."""
  tiny = name.rpartition("/")[2] in ("mean_sq_drift", "kl_exact", "kl_flowgrpo", "bias")
  absolute = min(TOLERANCE, 1e-3 * abs(recorded)) if tiny else None
  compared.add(name, np.asarray(ours), np.asarray(recorded), absolute=absolute)


def _sigmas(compared: Comparison, name: str, case: Any, cases: Mapping[str, Any]) -> None:
  steps, shift = re.findall(r"[\d.]+", name.replace("sd3", ""))
  steps, shift = int(steps), float(shift)
  if name.startswith("sd3"):
    # Stable Diffusion 3's scheduler shifts its smallest level once before it shifts them all.
    lowest = float(shift_sigma(np.array(0.001), shift))
    levels = np.append(shift_sigma(np.linspace(1.0, lowest, steps), shift), 0.0)
  else:
    levels = shift_sigma(np.linspace(1.0, 0.0, steps + 1), shift)
  compared.add(name, levels, np.asarray(case))


def _kvpo_table(compared: Comparison, name: str, case: Any, cases: Mapping[str, Any]) -> None:
  ours = denoising_schedule(SamplerConfig())[0]
  if name == "kvpo_min_sigma":
    ours = flow_match_table(SamplerConfig().timestep_shift)[1][-1]
  compared.add(name, np.asarray(ours), np.asarray(case))


def _advantages(compared: Comparison, name: str, case: Case, cases: Mapping[str, Any]) -> None:
  rewards = np.asarray(case["rewards"], np.float64)
  for field, recorded in case.items():
    if field == "rewards":
      continue
    if field == "kvpo_anchor":
      _known(f"{name}/{field}", recorded, ("anchor", "adv"))
      config = AdvantageConfig(baseline="anchor", clip=None)
      found = _group_advantages(rewards[:1], config, recorded["anchor"])[0]
      compared.add(f"{name}/{field}", found, np.asarray(recorded["adv"]))
      continue
    found = _group_advantages(rewards, _advantage_config(name, field))
    compared.add(f"{name}/{field}", found, np.asarray(recorded))


def _advantage_config(name: str, field: str) -> AdvantageConfig:
  flow = {"flowgrpo_globalstd": "global_population", "flowgrpo_groupstd": "group_population"}
  if field == "dance_group":
    return AdvantageConfig(clip=None)
  if field in flow:
    return AdvantageConfig(std=flow[field], eps=1e-4, clip=None)  # type: ignore[arg-type]
  verl = re.fullmatch(r"verl_(global|group)std_T(\d+)", field)
  if verl is None:
    raise ValueError(f"case {name!r} has a field {field!r} that is not known.")
  std = f"{verl[1]}_unbiased"
  return AdvantageConfig(std=std, eps=1e-4, clip=None, std_repeats=int(verl[2]))  # type: ignore[arg-type]


def _group_advantages(
  rewards: np.ndarray, config: AdvantageConfig, anchor: float | None = None
) -> np.ndarray:
  groups, members = rewards.shape
  flat = rewards.reshape(-1, 1)
  anchors = None if anchor is None else np.full_like(flat, anchor)
  group = np.repeat(np.arange(groups), members)
  found = advantages(flat, np.ones(flat.shape[0], bool), group, config, anchors)
  return found.values.reshape(groups, members)


def _batch(scores: Any, old: Any, advantage: np.ndarray, reference: Any, z: float) -> Batch:
  """One unit and one channel per candidate, all in one group."""
  count = len(scores)
  return Batch(
    channels=np.asarray(scores, np.float64).reshape(count, 1, 1),  # type: ignore[arg-type]
    old=np.asarray(old, np.float64).reshape(count, 1, 1),  # type: ignore[arg-type]
    statistics=np.asarray(reference, np.float64).reshape(count, 1, -1),  # type: ignore[arg-type]
    advantages=advantage,  # type: ignore[arg-type]
    valid=np.ones(count, bool),
    group=np.zeros(count, int),
    normaliser=z,
  )


def _clip(compared: Comparison, name: str, case: Any, cases: Mapping[str, Any]) -> None:
  """Rows of advantage, ratio, loss, its derivative by the log-ratio; clip 0.1 below, 0.2 above."""
  rows = np.asarray(case, np.float64)
  objective = Clipped(clip_low=0.1, clip_high=0.2, adv_clip=None)
  for row in rows:
    batch = _batch(np.log(row[1:2]), np.zeros(1), row[None, :1], np.zeros((1, 0)), 1.0)
    early = objective.early(batch.channels[0], batch.old[0], batch.statistics[0])
    weight = np.sum(early[:, 0, 0] * objective.late(batch)[0])
    compared.add(f"{name}/loss", np.asarray(value(objective.loss, batch)), row[2])
    compared.add(f"{name}/derivative", gradient(objective.loss, batch)[0, 0, 0], row[3])
    compared.add(f"{name}/early x late", weight, row[3])


def _kvpo(compared: Comparison, name: str, case: Case, cases: Mapping[str, Any]) -> None:
  _known(name, case, ("s", "s_old", "s_ref", "A", "rho", "pi", "kl", "m2", "loss", "dL_ds"))
  s, old, reference = (np.asarray(case[key], np.float64) for key in ("s", "s_old", "s_ref"))
  advantage = np.stack([np.asarray(case["A"]), np.full(len(s), case["m2"])], axis=1)
  objective = KVPO()
  batch = _batch(s, old, advantage, reference, float(len(s)))
  pi, pi_old, pi_ref = (np.exp(a) / np.sum(np.exp(a)) for a in (s, old, reference))
  ours = {
    "pi": pi,
    "rho": pi / pi_old,
    "kl": np.sum(pi * np.log(pi / pi_ref)),
    "loss": value(objective.loss, batch),
    "dL_ds": gradient(objective.loss, batch)[:, 0, 0],
  }
  for field, found in ours.items():
    compared.add(f"{name}/{field}", np.asarray(found), np.asarray(case[field]))
  compared.add(f"{name}/closed form", objective.late(batch)[:, 0], np.asarray(case["dL_ds"]))


def _nothing(compared: Comparison, name: str, case: Any, cases: Mapping[str, Any]) -> None:
  print(f"  {name}: passed over, an observation without its inputs")


_NAMED: Mapping[str, Handler] = {
  r"(sigmas_T\d+_shift|sd3_sigmas_T\d+_s)[\d.]+": _sigmas,
  r"kvpo_warp|kvpo_min_sigma": _kvpo_table,
  r"kvpo_objective_\S+": _kvpo,
  r"guard_k\d+": _guard,
  r"adv": _advantages,
  r"clip": _clip,
  _OBSERVATIONS: _nothing,
}
