"""Runs several schemes on one config, from the same seed and prompts; writes what differs."""

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from sbjax import files
from sbjax.dataflow.bound import lower_bound
from sbjax.dataflow.graph import DRIVER_KINDS, StepGraph
from sbjax.dataflow.plan import Plan, StepShape
from sbjax.dataflow.schemes import SCHEMES
from sbjax.dataflow.schemes import scheme as scheme_of
from sbjax.dataflow.simulate import simulate
from sbjax.prompts import PromptSet
from sbjax.report import compare_html, compare_plot, compare_report, plans, timeline, waiting
from sbjax.report.compare_report import Measured, MeasuredStep
from sbjax.report.console import Progress, duration
from sbjax.rewards.protocol import Reward
from sbjax.runtime.driver import Driver
from sbjax.runtime.judging import step_groups
from sbjax.runtime.planning import OWN_STEPS, refined
from sbjax.runtime.records import TrainHandles
from sbjax.settings import Settings


@dataclasses.dataclass(frozen=True)
class Opened:
  """A scheme's workers, ready to run.

  Attributes:
    driver: has loaded workers.
    reward: the driver's part of the reward.
    profiled: True where the driver was given costs and does not measure itself.
  """

  driver: Driver
  reward: Reward
  profiled: bool = False


Open = Callable[[Settings, str, Callable[[str], None]], contextlib.AbstractContextManager[Opened]]
"""Makes the workers of a scheme from settings, a folder for logs and a function that prints a line;
they end with the context."""


def scheme_settings(settings: Settings, names: str) -> dict[str, Settings]:
  """Gives each scheme the user's settings.

  Args:
    settings: checked settings; their own scheme does not matter.
    names: `all`, or names with commas between.

  Raises:
    ValueError: an unknown or doubled name, or a scheme that these workers cannot run.
  """
  wanted = list(SCHEMES) if names == "all" else [name.strip() for name in names.split(",")]
  out: dict[str, Settings] = {}
  for name in wanted:
    if name not in SCHEMES:
      raise ValueError(f"--schemes has {name!r}; use all, or some of {', '.join(SCHEMES)}.")
    if name in out:
      raise ValueError(f"--schemes has {name!r} twice; name each scheme once.")
    if SCHEMES[name].separate_groups and settings.runtime.reward_workers == 0:
      raise ValueError(
        f"runtime.reward_workers is 0, but scheme {name!r} needs reward workers of its own; use 1 "
        "or more, or --schemes=colocated,colocated_single_replay."
      )
    out[name] = dataclasses.replace(settings, scheme=name)  # pyright: ignore[reportArgumentType]
  return out


def compare(
  settings: Mapping[str, Settings],
  prompts: PromptSet,
  workdir: pathlib.Path,
  open_workers: Open,
  *,
  config: str,
  steps: int,
  paired: bool,
  emulated: bool,
  say: Callable[[str], None],
) -> dict[str, Any]:
  """Runs the schemes and writes report.html, report.json, pictures and traces.

  Every scheme starts from the same adapter and trains on the same prompts with the same seeds.
  Steps before the measured ones warm caches and, without a profile, let the run measure itself.

  Args:
    settings: scheme -> settings, in order of display.
    prompts: what candidates are made of.
    workdir: folder for everything.
    open_workers: makes a scheme's workers.
    config: the config file's path, for the report.
    steps: measured steps of each scheme.
    paired: True to keep all schemes' workers and let the schemes take turns step by step.
    emulated: True where the workers compute nothing.
    say: prints one line.

  Returns:
    The content of report.json.

  Raises:
    RunFailed: a step cannot be completed.
    OutputError: a file cannot be written.
  """
  tail = "  (emulated)" if emulated else ""

  def tell(text: str) -> None:
    say(text if text.endswith(tail) else f"{text}{tail}")

  runs: dict[str, _Run] = {}
  with contextlib.ExitStack() as everyone:
    for name, mine in settings.items():
      with contextlib.ExitStack() as one:
        logs = str(workdir / "logs" / name)
        told = _prefixed(tell, name)
        opened = (everyone if paired else one).enter_context(open_workers(mine, logs, told))
        runs[name] = _Run(opened, mine, prompts, told, steps, tail)
        runs[name].start()
        if not paired:
          _steps_of([runs[name]], steps)
    if paired:
      # In turns from the first step on: what a run measures of itself to plan by holds beside all
      # the others' workers.
      _steps_of(list(runs.values()), steps)
  measured = [run.result() for run in runs.values()]
  any_run = next(iter(runs.values()))
  facts = _facts(next(iter(settings.values())), any_run, config, steps)
  report = compare_report.summarise(measured, emulated=emulated, paired=paired, facts=facts)
  _write(workdir, report, measured)
  mark = "emulated" if emulated else ""
  table = compare_report.rows(report)
  say(compare_report.text_table(compare_report.COLUMNS, table, mark))
  for sentence in compare_report.sentences(report):
    tell(sentence)
  return report


def _steps_of(runs: "Sequence[_Run]", steps: int) -> None:
  """Warm-up and measured steps of runs that take turns."""
  for number in range(max(run.warm_up_steps for run in runs)):
    for run in runs:
      if number < run.warm_up_steps:
        run.warm_up()
  for _ in range(steps):
    for run in runs:
      run.measure()


class _Run:
  """One scheme's run: its steps, and what was measured of them."""

  def __init__(
    self,
    opened: Opened,
    settings: Settings,
    prompts: PromptSet,
    say: Callable[[str], None],
    steps: int,
    tail: str,
  ):
    self.driver, self._reward, self._settings = opened.driver, opened.reward, settings
    self._prompts, self._say, self._wanted, self._tail = prompts, say, steps, tail
    # A run that measures itself plans once more when it has; only then does its plan stay, and its
    # first step may compile: judge tasks have other sizes.
    itself = settings.runtime.plan == "search" and not opened.profiled
    self.warm_up_steps = OWN_STEPS + 1 if itself else 1
    self._state: TrainHandles | None = None
    self._step = 0
    self._measured: list[MeasuredStep] = []
    self._gradient: np.ndarray | None = None
    self._rewards: tuple[float | None, ...] = ()
    self._plan: Plan | None = None
    self._graph: StepGraph | None = None
    self._foreseen: tuple[float | None, float | None] = (None, None)

  def start(self) -> None:
    """Compiles, and starts from the run's first adapter."""
    self._state = self.driver.start(self._prompts.prompts[0], None)

  def warm_up(self) -> None:
    """Takes a step that is not measured."""
    self._take(f"warm-up step {self._step + 1} of {self.warm_up_steps}")

  def measure(self) -> None:
    """Takes one measured step."""
    number = len(self._measured) + 1
    costs = self.driver.costs
    step = self._take(f"step {number} of {self._wanted}")
    if number == 1:
      self._foreseen = self._foresee(costs)
    self._measured.append(step)

  def _take(self, what: str) -> MeasuredStep:
    self._step += 1
    assert self._state is not None
    with contextlib.ExitStack() as stack:
      line: list[Progress] = []
      counted = [0]

      def on_progress(graph: StepGraph) -> None:
        if not line:
          self._plan, self._graph = self.driver.plan, graph
          total = sum(task.kind not in DRIVER_KINDS for task in graph.tasks.values())
          title = f"{self._settings.scheme} {what}{self._tail}"
          line.append(stack.enter_context(Progress(title, total)))
        counts = graph.counts()
        done = sum(n for kind, (n, _) in counts.items() if kind not in DRIVER_KINDS)
        for _ in range(done - counted[0]):
          line[0].advance()
        counted[0] = max(done, counted[0])

      self._state, result = self.driver.run_step(
        self._state, self._step, self._prompts_of(self._step), on_progress=on_progress
      )
    step_s = result.metrics["timing_s/step"]
    if self._step == 1:
      first = self.driver.executor.fetch(self.driver.gradients[0])
      self._gradient = np.array(first)
      self._rewards = tuple(record.reward for record in result.candidates)
    assert self._plan is not None and self._graph is not None
    allowed = waiting.runners(self.driver.scheme, self._plan, self.driver.slots, result.spans)
    waits = waiting.reward_waits(result.spans, self._graph.tasks.values(), allowed, step_s)
    self._say(f"{what}: {duration(step_s)}")
    replays = result.metrics["training/replays_per_candidate"]
    return MeasuredStep(step_s, result.spans, waits, replays)

  def _prompts_of(self, step: int) -> tuple[str, ...]:
    count = self._settings.rollout.prompts_per_step
    return self._prompts.take(self._settings.seed, (step - 1) * count, count)

  def _foresee(self, costs: Any) -> tuple[float | None, float | None]:
    """The simulated length and the bound of the measured steps, from what was known before them."""
    plan = self._plan
    if plan is None or costs is None:
      return None, None
    if plan.simulated_s is not None:
      return plan.simulated_s, plan.bound_s
    shape, scheme, slots = self._shape(), self.driver.scheme, self.driver.slots
    simulated_s = simulate(shape, scheme, plan, slots, costs).step_s
    return simulated_s, lower_bound(shape, scheme, slots, costs, fused=len(plan.fused))

  def _in_hindsight(self) -> tuple[float | None, float | None]:
    """The plan's simulated length and the bound at the measured steps' own task times."""
    plan, costs = self._plan, self.driver.costs
    if plan is None or costs is None:
      return None, None
    spans = [span for step in self._measured for span in step.spans]
    shape, scheme, slots = self._shape(), self.driver.scheme, self.driver.slots
    own = refined(costs, spans, plan, slots)
    simulated_s = simulate(shape, scheme, plan, slots, own).step_s
    return simulated_s, lower_bound(shape, scheme, slots, own, fused=len(plan.fused))

  def _shape(self) -> StepShape:
    """The indices of the step that was taken last."""
    recipe, step = self.driver.recipe, self._step
    candidates = self.driver.candidates(step, self._prompts_of(step))
    groups = step_groups(recipe.shape(step, ()).groups, candidates, self._reward)
    jobs = [job.candidates for group in groups for job in self._reward.jobs(group)]
    return recipe.shape(step, tuple(jobs))

  def result(self) -> Measured:
    """Everything that the report needs; the workers may have ended."""
    assert self._plan is not None and self._graph is not None and self._gradient is not None
    simulated_s, bound_s = self._foreseen
    own_simulated_s, own_bound_s = self._in_hindsight()
    return Measured(
      scheme=self._settings.scheme,
      steps=tuple(self._measured),
      gradient=self._gradient,
      rewards=self._rewards,
      plan=plans.words(self._plan, scheme_of(self._settings.scheme), self._graph.tasks.values()),
      searched=self._plan.searched,
      simulated_s=simulated_s,
      bound_s=bound_s,
      own_simulated_s=own_simulated_s,
      own_bound_s=own_bound_s,
    )


def _facts(settings: Settings, run: _Run, config: str, steps: int) -> dict[str, Any]:
  algorithm = settings.algorithm
  return {
    "config": config,
    "seed": settings.seed,
    "executor": settings.runtime.executor,
    "actor_workers": settings.runtime.actor_workers,
    "reward_workers": settings.runtime.reward_workers,
    "candidates": settings.candidates,
    "updates": algorithm.minibatches * algorithm.epochs,
    "warm_up_steps": run.warm_up_steps,
    "measured_steps": steps,
  }


def _write(workdir: pathlib.Path, report: dict[str, Any], measured: Sequence[Measured]) -> None:
  mark = "emulated" if report["emulated"] else ""
  lines, bars = workdir / "timelines.png", workdir / "steps.png"
  compare_plot.write_timelines(
    lines,
    _panels(report, measured),
    mark=mark,
    title="One actor and one reward worker under each scheme",
  )
  compare_plot.write_steps(
    bars,
    {m.scheme: [step.step_s for step in m.steps] for m in measured},
    {m.scheme: m.bound_s for m in measured},
    mark=mark,
  )
  for m in measured:
    trace = workdir / "timeline" / f"{m.scheme}.json"
    timeline.write_trace(trace, m.typical.spans, scheme=m.scheme, emulated=report["emulated"])
  files.atomic_write(workdir / "report.json", json.dumps(report, indent=2) + "\n")
  pictures = {
    "Timelines of an actor and a reward worker": lines.read_bytes(),
    "Step times": bars.read_bytes(),
  }
  files.atomic_write(workdir / "report.html", compare_html.render(report, pictures))


def _panels(report: Mapping[str, Any], measured: Sequence[Measured]) -> list[compare_plot.Panel]:
  """What the timelines' picture shows: each scheme's typical step."""
  out = []
  for m in measured:
    factor = report["schemes"][m.scheme]["speedup_vs_colocated"]
    note = (
      f"{factor:.2f} x {compare_report.BASELINE}"
      if factor is not None and m.scheme != compare_report.BASELINE
      else ""
    )
    step = m.typical
    out.append(compare_plot.Panel(m.scheme, step.spans, step.waits, step.step_s, note))
  return out


def _prefixed(say: Callable[[str], None], name: str) -> Callable[[str], None]:
  return lambda text: say(f"{name}: {text}")
