"""What a user sees on the terminal: the banner, progress inside a step, progress of other work."""

import dataclasses
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TextIO

from sbjax.runtime.records import StepResult

# What a finished task of a kind has done to a candidate, in the user's words.
_DONE = {
  "generate": "generated",
  "decode": "decoded",
  "judge": "judged",
  "reference": "referenced",
  "replay": "replayed",
  "forward": "scored",
  "backward": "propagated",
}


@dataclasses.dataclass(frozen=True)
class DeviceRow:
  """One worker in the banner.

  Attributes:
    worker: its name, e.g. `actor-0`.
    role: `actor`, `reward` or `both`.
    devices: its devices in words, e.g. `1 x cpu` or `GPU 0`.
    models: what it holds, e.g. `policy, decoder`.
  """

  worker: str
  role: str
  devices: str
  models: str


@dataclasses.dataclass(frozen=True)
class ModelRow:
  """One network in the banner.

  Attributes:
    role: e.g. `policy`, `decoder`, `judge`.
    name: e.g. `Wan causal DiT, digits world`.
    parameters: how many numbers it has.
  """

  role: str
  name: str
  parameters: int


@dataclasses.dataclass(frozen=True)
class RunDescription:
  """What the banner tells before anything compiles.

  Attributes:
    workdir: absolute path.
    algorithm: e.g. `dance_grpo`.
    scheme: e.g. `stagebreaker`.
    executor: `ray` or `inline`.
    seed: the run's seed.
    first_step: the step that comes next, 1 in a new run.
    total_steps: the last step.
    devices: the workers.
    models: the networks.
    video: a candidate in words, e.g. `33 frames of 64 x 64 px`.
    chunks: chunks of a video.
    chunk_tokens: tokens of a chunk.
    denoising_steps: K.
    trained_steps: how many of them a candidate trains on.
    prompts_per_step: groups of a step.
    group_size: candidates of a group.
    minibatches: mini-batches of an epoch, one update each.
    epochs: passes over a step's candidates.
    lora_layers: how many linear maps are adapted.
    lora_targets: their names within a block.
    lora_parameters: how many numbers are trained.
    lora_rank: rank.
    lora_alpha: alpha; the update is scaled by alpha / rank.
    outputs: output name -> path.
    overrides: what the command line changed, `field=value`.
    notes: sentences the user should read: shared cores, a resumed run's changes.
  """

  workdir: str
  algorithm: str
  scheme: str
  executor: str
  seed: int
  first_step: int
  total_steps: int
  devices: Sequence[DeviceRow]
  models: Sequence[ModelRow]
  video: str
  chunks: int
  chunk_tokens: int
  denoising_steps: int
  trained_steps: int
  prompts_per_step: int
  group_size: int
  minibatches: int
  epochs: int
  lora_layers: int
  lora_targets: Sequence[str]
  lora_parameters: int
  lora_rank: int
  lora_alpha: float
  outputs: Mapping[str, str]
  overrides: Sequence[str] = ()
  notes: Sequence[str] = ()


def banner(run: RunDescription) -> str:
  """Lays the description out as plain text of several lines, without a newline at the end."""
  candidates = run.prompts_per_step * run.group_size
  updates = run.minibatches * run.epochs
  resumed = f", resumed after step {run.first_step - 1}" if run.first_step > 1 else ""
  rows = [
    (
      "run",
      f"{run.algorithm}, seed {run.seed}, steps {run.first_step} to {run.total_steps}{resumed}",
    ),
    ("scheme", f"{run.scheme} ({run.executor} executor)"),
  ]
  rows += [("worker", f"{d.worker} ({d.role}): {d.devices}; {d.models}") for d in run.devices]
  rows += [("model", f"{m.role}: {m.name}, {count(m.parameters)} parameters") for m in run.models]
  rows += [
    (
      "video",
      f"{run.video}; {run.chunks} chunks of {run.chunk_tokens} tokens, "
      f"{run.denoising_steps} denoising steps ({run.trained_steps} trained)",
    ),
    (
      "step",
      f"{run.prompts_per_step} prompts x {run.group_size} candidates = {candidates}; "
      f"{run.minibatches} mini-batches of {candidates // run.minibatches} x {run.epochs} epochs = "
      f"{updates} updates",
    ),
    (
      "adapter",
      f"LoRA rank {run.lora_rank}, alpha {run.lora_alpha:g} on {run.lora_layers} linears "
      f"({', '.join(run.lora_targets)}), {count(run.lora_parameters)} parameters trained",
    ),
  ]
  rows += [("set", override) for override in run.overrides]
  rows += [("output", f"{name}: {path}") for name, path in run.outputs.items()]
  rows += [("note", note) for note in run.notes]
  lines, last = [], ""
  for head, text in rows:
    lines.append(f"{'' if head == last else head:<8} {text}")
    last = head
  rule = "-" * 72
  return "\n".join([rule, f"sbjax: {run.workdir}", *lines, rule])


def count(number: float) -> str:
  """Writes a large number short: 1234567 as `1.23 M`."""
  for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
    if number >= size:
      return f"{number / size:.3g} {letter}"
  return f"{number:g}"


def duration(seconds: float) -> str:
  """Writes a time for people: `8.4 s`, `3:05`, `2:03:05`."""
  if seconds < 60:
    return f"{seconds:.1f} s"
  minutes, rest = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class _Line:
  """One line that a terminal rewrites; elsewhere a line now and then, so that logs stay short."""

  def __init__(self, stream: TextIO | None, clock: Callable[[], float], every_s: float):
    self._stream = stream or sys.stdout
    self._clock = clock
    self._tty = self._stream.isatty()
    self._every_s = 0.1 if self._tty else every_s
    self._last_s = clock()
    self._width = 0

  def show(self, text: Callable[[], str]) -> None:
    """Shows the text unless the last one is too recent."""
    if self._clock() - self._last_s >= self._every_s:
      self._last_s = self._clock()
      self._put(text(), end="" if self._tty else "\n")

  def finish(self, text: str) -> None:
    """Shows the text for good, whenever the last one was."""
    self._last_s = self._clock()
    self._put(text, end="\n")
    self._width = 0

  def _put(self, text: str, end: str) -> None:
    if self._tty:
      if not end:  # a line that wraps could not be rewritten
        text = text[: shutil.get_terminal_size().columns - 1]
      padding = " " * max(self._width - len(text), 0)
      self._stream.write(f"\r{text}{padding}{end}")
      self._width = len(text)
    else:
      self._stream.write(text + end)
    self._stream.flush()


class StepProgress:
  """Progress inside the RL steps of a run, with the time left for the step and for the run.

  Times left come from the median of the last five steps; within the first step, from the share of
  tasks that have ended.
  """

  def __init__(
    self,
    total_steps: int,
    *,
    stream: TextIO | None = None,
    clock: Callable[[], float] = time.monotonic,
    every_s: float = 5.0,
  ):
    """Prints nothing yet.

    Args:
      total_steps: the run's last step.
      stream: where to print; None: standard output as it is now.
      clock: gives seconds.
      every_s: least time between two lines where the stream is no terminal.
    """
    self._total_steps = total_steps
    self._clock = clock
    self._line = _Line(stream, clock, every_s)
    self._history_s: list[float] = []
    self._step = 0
    self._start_s = 0.0
    self._totals: dict[str, float] = {}
    self._done: dict[str, float] = {}

  def begin(self, step: int, totals: Mapping[str, float]) -> None:
    """Starts a step.

    Args:
      step: its number, from 1.
      totals: task kind -> how many candidates (or tasks) of it the step has, in order of display.
    """
    self._step = step
    self._start_s = self._clock()
    self._totals = dict(totals)
    self._done = dict.fromkeys(totals, 0.0)

  def advance(self, kind: str, amount: float = 1.0) -> None:
    """Counts finished work; kinds that `begin` did not name are left out.

    Args:
      kind: task kind.
      amount: candidates: more than 1 for a batch of judge jobs, a fraction for a part of a replay.
    """
    if kind in self._done:
      self._done[kind] += amount
      self._line.show(self._text)

  def end(self, result: StepResult) -> None:
    """Ends the step with a line of its reward, time and clip fraction.

    Args:
      result: the step; `timing_s/step`, `critic/rewards/mean`, `actor/pg_clipfrac` and
        `reward/failed` are read where present.
    """
    metrics = result.metrics
    step_s = metrics.get("timing_s/step", self._clock() - self._start_s)
    self._history_s.append(step_s)
    parts = [f"step {result.step}/{self._total_steps}"]
    for key, text in (
      ("critic/rewards/mean", "reward {:.4f}"),
      ("actor/pg_clipfrac", "clipfrac {:.3f}"),
      ("actor/grad_norm", "grad {:.3g}"),
    ):
      if key in metrics:
        parts.append(text.format(metrics[key]))
    parts.append(duration(step_s))
    if metrics.get("reward/failed", 0) > 0:
      parts.append(f"{metrics['reward/failed']:g} rewards failed")
    if metrics.get("training/skipped_updates", 0) > 0:
      parts.append(f"{metrics['training/skipped_updates']:g} updates skipped")
    left = self._total_steps - result.step
    if left > 0:
      parts.append(f"run ETA {duration(left * self._typical_s())}")
    self._line.finish("  ".join(parts))

  def _text(self) -> str:
    parts = [f"step {self._step}/{self._total_steps}"]
    for kind, total in self._totals.items():
      parts.append(f"{_DONE.get(kind, kind)} {int(self._done[kind] + 1e-6)}/{total:g}")
    step_left_s = self._step_left_s()
    if step_left_s is not None:
      parts.append(f"step ETA {duration(step_left_s)}")
      typical_s = self._typical_s() or self._clock() - self._start_s + step_left_s
      run_left_s = step_left_s + (self._total_steps - self._step) * typical_s
      parts.append(f"run ETA {duration(run_left_s)}")
    return "  ".join(parts)

  def _typical_s(self) -> float:
    return statistics.median(self._history_s[-5:]) if self._history_s else 0.0

  def _step_left_s(self) -> float | None:
    elapsed_s = self._clock() - self._start_s
    if self._history_s:
      return max(self._typical_s() - elapsed_s, 0.0)
    shares = [min(self._done[k] / n, 1.0) for k, n in self._totals.items() if n]
    share = sum(shares) / len(shares) if shares else 0.0
    return elapsed_s * (1 / share - 1) if share > 0 else None


class Progress:
  """Progress of any other work that takes longer than two seconds: warm-up, evaluation, profiles.

  Work that ends earlier prints nothing. A context manager; an exception ends it without a word.
  """

  def __init__(
    self,
    title: str,
    total: int = 0,
    *,
    stream: TextIO | None = None,
    clock: Callable[[], float] = time.monotonic,
    every_s: float = 5.0,
  ):
    """Prints nothing yet.

    Args:
      title: what the work is, e.g. `warm-up`.
      total: how many parts it has; `at` may say it later.
      stream: where to print; None: standard output as it is now.
      clock: gives seconds.
      every_s: least time between two lines where the stream is no terminal.
    """
    self._title = title
    self._total = total
    self._clock = clock
    self._line = _Line(stream, clock, every_s)
    self._start_s = clock()
    self._done = 0
    self._detail = ""

  def __enter__(self) -> "Progress":
    return self

  def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
    elapsed_s = self._clock() - self._start_s
    if kind is None and elapsed_s >= 2.0:
      self._line.finish(f"{self._title} {self._done}/{self._total}  {duration(elapsed_s)}")

  def advance(self, detail: str = "") -> None:
    """Counts one part.

    Args:
      detail: what ended, e.g. a shape's name.
    """
    self.at(self._done + 1, self._total, detail)

  def at(self, done: int, total: int, detail: str = "") -> None:
    """Says how many parts of how many have ended.

    Args:
      done: at least one.
      total: of all.
      detail: what ended, e.g. a shape's name.
    """
    self._done, self._total, self._detail = done, total, detail
    if self._clock() - self._start_s >= 2.0:
      self._line.show(self._text)

  def _text(self) -> str:
    elapsed_s = self._clock() - self._start_s
    left_s = elapsed_s * (self._total / self._done - 1)
    parts = [f"{self._title} {self._done}/{self._total}", self._detail, f"ETA {duration(left_s)}"]
    return "  ".join(part for part in parts if part)
