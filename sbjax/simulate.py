"""The command that answers what-if questions about a step without running one.

    python -m sbjax.simulate --paper --actors=2,4,8 --rewards=1,2 --schemes=colocated,stagebreaker
    python -m sbjax.simulate --profile=runs/profile.json --candidates=24,48 --judge_scale=1,3

Options that take several values with commas between make a table of all combinations. Seconds come
from a profile file of `sbjax.profile`, or with `--paper` from the paper's ratios, in units of one
rollout of 21 latent frames at 480p. It imports no JAX. docs/scheduling.md tells how to read it.

Exit codes: 0 done; 1 the results cannot be written; 2 the command cannot work, with one sentence on
stderr.
"""

import argparse
import dataclasses
import itertools
import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from sbjax import files
from sbjax.dataflow.build import build_step
from sbjax.dataflow.costs import StepCosts, WorkerCosts
from sbjax.dataflow.paper import PaperCosts, paper_costs, paper_shape
from sbjax.dataflow.place import search
from sbjax.dataflow.plan import StepShape, WorkerSlot, worker_slots
from sbjax.dataflow.profile import Profile, read_profile
from sbjax.dataflow.schemes import SCHEMES, Scheme
from sbjax.dataflow.simulate import simulate
from sbjax.report import compare_report, plans
from sbjax.report.compare_report import MeasuredStep
from sbjax.report.console import Progress
from sbjax.report.simulated import as_step
from sbjax.report.waiting import wait_frac
from sbjax.simulate_options import DIALOGUE, dialogue_of, parser

LATENT_STRIDE = 4
"""Pixel frames of a latent frame, the first of which stands for one."""

Setting = Mapping[str, Any]
"""Option -> value: one combination, as a line of the table has it."""


@dataclasses.dataclass(frozen=True)
class Outcome:
  """One scheme in one setting.

  Attributes:
    scheme: its name.
    step: the simulated step under the best plan found.
    bound_s: no plan of the scheme can be faster.
    searched: how the plan was found.
    plan: in words.
  """

  scheme: str
  step: MeasuredStep
  bound_s: float
  searched: str
  plan: str


_PAPER_ONLY = {
  "judge": "vr_thinker",
  "algorithm": "dancegrpo",
  "resolution": "480p",
  "model": "1.3B",
}
_EVERY = (
  *("actors", "rewards", "candidates", "minibatches", "frames"),
  *("judge_scale", "actor_scale", "reward_scale"),
)


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the command and gives the exit code."""
  options = parser().parse_args(arguments)
  try:
    profile = read_profile(options.profile) if options.profile else None
    schemes = _schemes(options.schemes)
    settings = _settings(options, profile)
    out = _folder(options.out)
    results = _run(settings, schemes, profile, options)
    varied = [name for name in settings[0] if len({s[name] for s in settings}) > 1]
    mark = "emulated" if profile and profile.emulated else ""
    print(_title(settings[0], varied, profile, mark))
    print(compare_report.text_table(*_table(results, varied), mark))
    if out is not None:
      _write(out, results, varied, mark or "simulated")
  except ValueError as error:
    print(f"sbjax.simulate: {str(error).rstrip('.')}.", file=sys.stderr)
    return 2
  except files.OutputError as error:
    print(f"sbjax.simulate: {error}", file=sys.stderr)
    return 1
  return 0


def _schemes(names: Sequence[str]) -> list[Scheme]:
  wanted = list(SCHEMES) if tuple(names) == ("all",) else list(names)
  for name in wanted:
    if name not in SCHEMES or wanted.count(name) > 1:
      raise ValueError(f"--schemes has {name!r}; use all, or some of {', '.join(SCHEMES)}, once")
  return [SCHEMES[name] for name in wanted]


def _settings(options: argparse.Namespace, profile: Profile | None) -> list[Setting]:
  values = {name: getattr(options, name) for name in _EVERY}
  for name, default in _PAPER_ONLY.items():
    given = getattr(options, name)
    if given and profile is not None:
      raise ValueError(f"--{name} goes with --paper; a profile was measured with one")
    if profile is None:
      values[name] = given or (default,)
  if profile is None and options.dialogue != (DIALOGUE,):
    raise ValueError("--dialogue goes with --profile; the paper's ratios know no tokens")
  if (profile is not None and profile.judges) or options.dialogue != (DIALOGUE,):
    values["dialogue"] = options.dialogue
  if not options.frames:
    longest = (max(row.frames for row in profile.rows),) if profile else (21,)
    values["frames"] = longest
  names = list(values)
  return [dict(zip(names, made, strict=True)) for made in itertools.product(*values.values())]


def _folder(name: str | None) -> pathlib.Path | None:
  if name is None:
    return None
  out = pathlib.Path(name)
  if out.exists() and (not out.is_dir() or any(out.iterdir())):
    raise ValueError(f"--out is {name!r}, which is not empty; name a new folder")
  return out


def _run(
  settings: Sequence[Setting],
  schemes: Sequence[Scheme],
  profile: Profile | None,
  options: argparse.Namespace,
) -> list[tuple[Setting, list[Outcome]]]:
  results = []
  tail = " (emulated)" if profile and profile.emulated else ""
  total = len(settings) * len(schemes)
  # Not on standard output, where the table alone may be wanted.
  with Progress(f"simulated plans{tail}", total, stream=sys.stderr) as progress:
    for setting in settings:
      shape = step_shape(setting, options.chunk_frames, profile)
      costs = step_costs(setting, profile)
      outcomes = []
      for scheme in schemes:
        outcomes.append(_outcome(shape, scheme, setting, costs, options.budget_s))
        progress.advance(scheme.name)
      results.append((setting, outcomes))
  return results


def _outcome(
  shape: StepShape, scheme: Scheme, setting: Setting, costs: StepCosts, budget_s: float
) -> Outcome:
  slots = device_slots(scheme, setting["actors"], setting["rewards"])
  plan = search(shape, scheme, slots, costs, budget_s=budget_s)
  graph = build_step(shape, scheme, plan)
  ran = simulate(shape, scheme, plan, slots, costs, graph)
  assert plan.bound_s is not None
  words = plans.words(plan, scheme, graph.tasks.values())
  step = as_step(ran, graph, shape, scheme, plan, slots)
  return Outcome(scheme.name, step, plan.bound_s, plan.searched, words)


def step_shape(setting: Setting, chunk_frames: int, profile: Profile | None) -> StepShape:
  """Gives the indices of a setting's step.

  Args:
    setting: candidates, mini-batches and frames.
    chunk_frames: latent frames of a chunk.
    profile: where it is given, frames are pixel frames; else the paper's shape is taken.

  Raises:
    ValueError: if mini-batches or chunks do not come out even.
  """
  candidates, minibatches = setting["candidates"], setting["minibatches"]
  if profile is None:
    return paper_shape(candidates, minibatches, setting["frames"], setting["algorithm"])
  latent = (setting["frames"] - 1) // LATENT_STRIDE + 1
  if chunk_frames < 1 or latent % chunk_frames:
    raise ValueError(
      f"--frames={setting['frames']} are {latent} latent frames, which chunks of {chunk_frames} do "
      "not divide; use other frames, or --chunk_frames"
    )
  chunks = latent // chunk_frames
  shape = paper_shape(candidates, minibatches)
  blocks = (chunks - chunks // 2, chunks // 2) if chunks > 1 else (1,)
  has_reference = any(row.kind == "reference" for row in profile.rows)
  return dataclasses.replace(shape, block_chunks=blocks, reference=has_reference)


def step_costs(setting: Setting, profile: Profile | None) -> StepCosts:
  """Gives the costs of a setting's tasks, for workers of the kinds that `device_slots` names.

  Args:
    setting: frames, scales, and with the paper's numbers judge, algorithm, resolution and model.
    profile: measured times; None: the paper's.

  Raises:
    ValueError: for names that the paper's numbers do not know, or a profile that lacks a kind.
  """
  if profile is None:
    names = [setting[k] for k in ("frames", "judge", "algorithm", "resolution", "model")]
    costs = paper_costs(PaperCosts(), *names)
  else:
    largest = max(profile.rows, key=lambda row: row.height_px * row.width_px)
    told = setting.get("dialogue", DIALOGUE)
    dialogue = None if told == DIALOGUE else dialogue_of(told)
    size = (setting["frames"], largest.height_px, largest.width_px)
    costs = profile.costs(*size, dialogue=dialogue)
  judge = setting["judge_scale"]
  by_kind = {}
  for group in ("actor", "reward"):
    scale = setting[f"{group}_scale"]
    by_kind[group] = scaled(costs.by_kind[group], scale, judge)
    by_kind[f"both, {group}"] = scaled(costs.by_kind["both"], scale, judge)
  return dataclasses.replace(costs, by_kind=by_kind)


def scaled(costs: WorkerCosts, device: float, judge: float) -> WorkerCosts:
  """Multiplies all seconds by the device's factor, and those of judging by the judge's as well."""
  fields = [f.name for f in dataclasses.fields(costs) if f.name != "judge_s"]
  table = tuple((jobs, seconds * device * judge) for jobs, seconds in costs.judge_s)
  return WorkerCosts(judge_s=table, **{name: getattr(costs, name) * device for name in fields})


def device_slots(scheme: Scheme, actors: int, rewards: int) -> tuple[WorkerSlot, ...]:
  """Gives a scheme's workers; those with both roles keep the kind of their device.

  Args:
    scheme: says whether groups are separate.
    actors: devices of the actor group.
    rewards: devices of the reward group; 0 only for schemes without separate groups.

  Raises:
    ValueError: if a scheme with separate groups has no reward workers.
  """
  if scheme.separate_groups and rewards == 0:
    raise ValueError(
      f"--rewards is 0, but scheme {scheme.name!r} needs reward workers of its own; use 1 or more, "
      "or --schemes=colocated,colocated_single_replay"
    )
  slots = worker_slots(scheme, actors, rewards)
  return tuple(
    dataclasses.replace(slot, kind=f"both, {'actor' if i < actors else 'reward'}")
    if slot.group == "both"
    else slot
    for i, slot in enumerate(slots)
  )


# Output.

_HEADS = (
  *("scheme", "step, s", "speed-up", "actor busy", "reward busy", "wait for reward"),
  *("bound, s", "above bound", "search", "plan"),
)


def _speedup(outcome: Outcome, outcomes: Sequence[Outcome]) -> float | None:
  base = [o.step.step_s for o in outcomes if o.scheme == compare_report.BASELINE]
  return base[0] / outcome.step.step_s if base else None


def _title(setting: Setting, varied: Sequence[str], profile: Profile | None, mark: str) -> str:
  fixed = ", ".join(f"{name} {setting[name]}" for name in setting if name not in varied)
  devices = ", ".join(sorted(set(profile.devices.values()))) if profile else ""
  source = f"profile of {devices}" if profile else "the paper's ratios, one rollout = 1 s"
  return f"simulated from {f'{mark} ' if mark else ''}{source}: {fixed}"


def _table(
  results: Sequence[tuple[Setting, Sequence[Outcome]]], varied: Sequence[str]
) -> tuple[list[str], list[list[str]]]:
  columns, cells = [*varied, *_HEADS], []
  for setting, outcomes in results:
    for o in outcomes:
      factor, busy = _speedup(o, outcomes), compare_report.utilisation([o.step])
      cells.append(
        [
          *(str(setting[name]) for name in varied),
          o.scheme,
          f"{o.step.step_s:.4g}",
          "-" if factor is None else f"{factor:.2f}",
          f"{busy['actor']:.0%}",
          f"{busy['reward']:.0%}",
          f"{wait_frac(o.step.waits, o.step.spans, o.step.step_s):.1%}",
          f"{o.bound_s:.4g}",
          f"{o.step.step_s / o.bound_s - 1:.1%}",
          o.searched,
          o.plan,
        ]
      )
  return columns, cells


def _write(
  out: pathlib.Path,
  results: Sequence[tuple[Setting, Sequence[Outcome]]],
  varied: Sequence[str],
  mark: str,
) -> None:
  # Not at the top: a table alone never waits for matplotlib.
  from sbjax.report.compare_plot import Panel, write_timelines

  data = [
    {"setting": dict(setting), "schemes": {o.scheme: _figures(o, outcomes) for o in outcomes}}
    for setting, outcomes in results
  ]
  files.atomic_write(out / "simulated.json", json.dumps(data, indent=2) + "\n")
  with Progress(f"pictures ({mark})", len(results), stream=sys.stderr) as progress:
    for number, (setting, outcomes) in enumerate(results, 1):
      panels = []
      for o in outcomes:
        factor = _speedup(o, outcomes)
        note = f"{factor:.2f} x {compare_report.BASELINE}" if factor and factor != 1 else ""
        panels.append(Panel(o.scheme, o.step.spans, o.step.waits, o.step.step_s, note))
      name = f"timelines_{number:03d}.png" if len(results) > 1 else "timelines.png"
      title = ", ".join(f"{key} {setting[key]}" for key in varied or ("actors", "rewards"))
      write_timelines(out / name, panels, mark=mark, title=f"Simulated: {title}")
      progress.advance()
  pictures = "timelines.png" if len(results) == 1 else f"timelines of {len(results)} settings"
  print(f"{mark}: simulated.json and {pictures} are in {out}")


def _figures(o: Outcome, outcomes: Sequence[Outcome]) -> dict[str, Any]:
  return {
    "step_s": o.step.step_s,
    "speedup_vs_colocated": _speedup(o, outcomes),
    "utilisation": compare_report.utilisation([o.step]),
    "wait_for_reward_frac": wait_frac(o.step.waits, o.step.spans, o.step.step_s),
    "replays_per_candidate": o.step.replays_per_candidate,
    "lower_bound_s": o.bound_s,
    "gap": o.step.step_s / o.bound_s - 1,
    "searched": o.searched,
    "plan": o.plan,
  }


if __name__ == "__main__":
  sys.exit(main())
