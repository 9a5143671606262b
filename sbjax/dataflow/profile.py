"""Measured task times: a small readable file, and the costs of a step at any length. No JAX."""

import bisect
import dataclasses
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from sbjax.dataflow.costs import StepCosts, WorkerCosts
from sbjax.dataflow.judge_costs import JudgeCosts, JudgeRow, fit

FORMAT = 1

PER_VIDEO = ("generate", "fused", "decode", "judge", "reference", "forward", "backward", "replay")
"""Kinds that take as long as the video is large; one measurement is scaled in proportion."""

FIXED = ("prefix", "fold", "reduce", "update", "push", "dispatch")
"""Kinds that do not grow with the video's length: one chunk, an adapter, a message."""

_REQUIRED = ("generate", "decode", "judge", "forward", "backward", "replay", "prefix")
_DRIVER = "driver"


@dataclasses.dataclass(frozen=True)
class Row:
  """One measured task.

  Attributes:
    kind: one of `PER_VIDEO` or `FIXED`; `fused` is a whole generation that takes its gradient,
      `prefix` the context of one chunk, `backward` a gradient with known weights.
    worker: kind of worker, `actor`, `reward` or `both`; `driver` for `dispatch`.
    frames: pixel frames of the video.
    height_px: its height.
    width_px: its width.
    seconds: median.
    spread_s: between the quartiles.
    batch: jobs of a judge task, 1 for every other kind.
  """

  kind: str
  worker: str
  frames: int
  height_px: int
  width_px: int
  seconds: float
  spread_s: float = 0.0
  batch: int = 1

  @property
  def key(self) -> tuple[str, str, int, int, int, int]:
    """What was measured."""
    return self.kind, self.worker, self.frames, self.height_px, self.width_px, self.batch


Record = TypeVar("Record", Row, JudgeRow)


@dataclasses.dataclass(frozen=True)
class Profile:
  """Task times of one configuration on one set of devices.

  Attributes:
    rows: the measurements.
    config: fingerprint of the settings that task times depend on.
    devices: kind of worker -> what it runs on.
    emulated: True where nobody measured the times.
    judges: what a generating judge takes, by frames, tokens and batch.

  Raises:
    ValueError: for an unknown kind, a doubled row, or a number that cannot be a measurement.
  """

  rows: tuple[Row, ...]
  config: str
  devices: Mapping[str, str]
  emulated: bool = False
  judges: tuple[JudgeRow, ...] = ()

  def __post_init__(self):
    seen = set()
    for row in self.rows:
      if row.kind not in PER_VIDEO + FIXED:
        raise ValueError(
          f"rows.kind is {row.kind!r}; a profile has {', '.join(PER_VIDEO + FIXED)}."
        )
      if row.key in seen:
        raise ValueError(f"rows has {row.key!r} twice; keep one.")
      seen.add(row.key)
      if not (math.isfinite(row.seconds) and row.seconds >= 0.0 <= row.spread_s):
        raise ValueError(
          f"rows.seconds of {row.key!r} is {row.seconds}; use seconds of at least 0."
        )
      if min(row.frames, row.height_px, row.width_px, row.batch) < 1:
        raise ValueError(f"rows has {row.key!r}; frames, pixels and batch are at least 1.")

  @property
  def workers(self) -> tuple[str, ...]:
    """The kinds of workers that were measured."""
    return tuple(sorted({row.worker for row in self.rows} - {_DRIVER}))

  def judging(self, worker: str) -> JudgeCosts | None:
    """The costs of a generating judge on a kind of worker; None where none was measured.

    Raises:
      ValueError: too little was measured to tell its costs apart.
    """
    mine = [row for row in self.judges if row.worker == worker]
    return fit(mine, mine[0].slots) if mine else None

  def costs(
    self,
    frames: int,
    height_px: int,
    width_px: int,
    *,
    scale: float = 1.0,
    dialogue: tuple[int, int, int] | None = None,
  ) -> StepCosts:
    """Costs of a step's tasks for videos of one size.

    Between measured lengths, areas and judge batches times are piecewise linear, beyond them the
    last slope holds; below the smallest, or with one measurement alone, they are in proportion. A
    worker that holds both roles and was not measured takes the mean of those that were, and the
    other way round: it is the same device with the same models.

    Args:
      frames: pixel frames.
      height_px: height of a video.
      width_px: width of a video.
      scale: what every time is multiplied by.
      dialogue: frames, tokens of the prompt and tokens of the answers of a judge's dialogue, where
        they differ from the measured run's; needs `judges`.

    Raises:
      ValueError: a kind that every step has was not measured, or a dialogue is given and no judge
        that generates was.
    """
    if dialogue is not None and not self.judges:
      raise ValueError("the profile has no judges, whose dialogues could differ; measure it again.")
    measured = {row.kind for row in self.rows}
    for kind in _REQUIRED:
      if kind not in measured:
        raise ValueError(f"the profile has no row of kind {kind!r}; run sbjax.profile again.")
    size = (frames, height_px * width_px)
    by_kind = {worker: self._worker(worker, *size) for worker in self.workers}
    for worker in self.workers if dialogue is not None else ():
      judging = self.judging(worker)
      if judging is not None and dialogue is not None:
        most = max([judging.slots, *(row.batch for row in self.rows if row.kind == "judge")])
        table = judging.table(most, *dialogue)
        by_kind[worker] = dataclasses.replace(by_kind[worker], judge_s=table)
    together = _mean(list(by_kind.values()))
    for worker in ("actor", "reward", "both"):
      by_kind.setdefault(worker, together)
    dispatch_s = self._at("dispatch", _DRIVER, *size)
    return StepCosts(by_kind, 0.0 if math.isinf(dispatch_s) else dispatch_s, scale)

  def _worker(self, worker: str, frames: int, area: int) -> WorkerCosts:
    def of(kind: str, missing: float = math.inf) -> float:
      seconds = self._at(kind, worker, frames, area)
      return missing if math.isinf(seconds) else seconds

    batches = sorted({row.batch for row in self.rows if row.kind == "judge"})
    judging = [(n, self._at("judge", worker, frames, area, n)) for n in batches]
    known = tuple((n, s) for n, s in judging if math.isfinite(s))
    generate_s = of("generate")
    return WorkerCosts(
      generate_s=generate_s,
      fused_s=max(of("fused") - generate_s, 0.0) if math.isfinite(generate_s) else math.inf,
      decode_s=of("decode"),
      judge_s=known or ((1, math.inf),),
      reference_s=of("reference"),
      forward_s=of("forward"),
      backward_s=of("backward"),
      replay_s=of("replay"),
      prefix_s=of("prefix", 0.0),
      fold_s=of("fold", 0.0),
      reduce_s=of("reduce", 0.0),
      update_s=of("update", 0.0),
      push_s=of("push", 0.0),
    )

  def _at(self, kind: str, worker: str, frames: int, area: int, batch: int = 1) -> float:
    """Seconds at a size, infinite where the worker was not measured at that batch."""
    by_area: dict[int, dict[int, float]] = {}
    for row in self.rows:
      if (row.kind, row.worker, row.batch) == (kind, worker, batch):
        by_area.setdefault(row.height_px * row.width_px, {})[row.frames] = row.seconds
    if not by_area:
      return math.inf
    grows = kind in PER_VIDEO
    table = {a: _curve(lengths, frames, grows) for a, lengths in by_area.items()}
    return _curve(table, area, grows)

  def with_rows(self, rows: Iterable[Row]) -> "Profile":
    """The profile with further or newer measurements; a newer one of the same key replaces."""
    kept = {row.key: row for row in self.rows} | {row.key: row for row in rows}
    return dataclasses.replace(self, rows=tuple(kept[key] for key in sorted(kept)))

  def with_judges(self, judges: Iterable[JudgeRow]) -> "Profile":
    """The same for measurements of a generating judge."""
    kept = {row.key: row for row in self.judges} | {row.key: row for row in judges}
    return dataclasses.replace(self, judges=tuple(kept[key] for key in sorted(kept)))

  def merged(self, other: "Profile") -> "Profile":
    """Two profiles of the same configuration and devices; the other's rows are newer.

    Raises:
      ValueError: they were measured with another configuration or on other devices.
    """
    other.check(self.config, {k: v for k, v in self.devices.items() if k in other.devices})
    devices = {**self.devices, **other.devices}
    return dataclasses.replace(
      self.with_rows(other.rows).with_judges(other.judges),
      devices=devices,
      emulated=self.emulated or other.emulated,
    )

  def check(self, config: str, devices: Mapping[str, str]) -> None:
    """Refuses a profile that does not belong to a run.

    Args:
      config: the run's fingerprint.
      devices: kind of worker -> what it runs on; kinds that were not measured are not compared.

    Raises:
      ValueError: it was measured with another configuration or on another device.
    """
    if config != self.config:
      raise ValueError(
        f"the profile's config is {self.config!r} but this run's is {config!r}; measure it again "
        "with sbjax.profile."
      )
    for worker, device in devices.items():
      measured = self.devices.get(worker, device)
      if measured != device:
        raise ValueError(
          f"the profile's devices.{worker} is {measured!r} but this run has {device!r}; measure it "
          "again with sbjax.profile."
        )

  def write(self, path: str | os.PathLike[str]) -> None:
    """Writes a readable JSON file, one row a line, in one go."""
    head = {"format": FORMAT, "emulated": self.emulated, "config": self.config}
    head["devices"] = dict(self.devices)
    text = json.dumps(head, indent=2)[:-2]
    lists = {"rows": self.rows} | ({"judges": self.judges} if self.judges else {})
    for name, rows in lists.items():
      lines = ",\n    ".join(json.dumps(dataclasses.asdict(row)) for row in rows)
      text += f',\n  "{name}": [\n    {lines}\n  ]'
    partial = Path(f"{path}.partial")
    partial.write_text(f"{text}\n}}\n")
    partial.replace(path)


def read_profile(path: str | os.PathLike[str]) -> Profile:
  """Reads a profile file.

  Raises:
    ValueError: the file is not there, is no JSON, or has unknown, missing or impossible fields.
  """
  try:
    return _profile(json.loads(Path(path).read_text()))
  except OSError as error:
    raise ValueError(f"profile {str(path)!r} cannot be read: {error.strerror}.") from error
  except ValueError as error:  # of JSON or of a field
    raise ValueError(f"profile {str(path)!r}: {' '.join(str(error).split())}") from error


def _profile(read: Any) -> Profile:
  types = {"format": int, "emulated": bool, "config": str, "devices": dict, "rows": list}
  judges = read.pop("judges", []) if isinstance(read, dict) else []  # most judges do not generate
  body = _fields(read, types)
  if body["format"] != FORMAT:
    raise ValueError(f"format is {body['format']}; this version reads {FORMAT}.")
  if not all(isinstance(name, str) for name in body["devices"].values()):
    raise ValueError("devices must map kinds of workers to names.")
  rows = _records(Row, body["rows"])
  return Profile(
    rows, body["config"], body["devices"], body["emulated"], _records(JudgeRow, judges)
  )


def _records(kind: type[Record], read: Any) -> tuple[Record, ...]:
  if not isinstance(read, list):
    raise ValueError(f"{read!r} stands where a list of {kind.__name__} must.")
  types = {f.name: f.type for f in dataclasses.fields(kind)}
  return tuple(kind(**_fields(row, types)) for row in read)


def _fields(read: Any, types: Mapping[str, Any]) -> dict[str, Any]:
  if not isinstance(read, dict):
    raise ValueError(f"{read!r} stands where fields {', '.join(types)} must.")
  unknown, missing = sorted(read.keys() - types.keys()), sorted(types.keys() - read.keys())
  if unknown:
    raise ValueError(f"{unknown[0]} is not a field; use {', '.join(types)}.")
  if missing:
    raise ValueError(f"{missing[0]} is missing.")
  for name, kind in types.items():
    allowed = (int, float) if kind is float else (kind,)
    if not isinstance(read[name], allowed) or (isinstance(read[name], bool) and kind is not bool):
      raise ValueError(f"{name} is {read[name]!r}; use a value of type {kind.__name__}.")
  return dict(read)


def profile_of_costs(
  costs: StepCosts,
  frames: int,
  height_px: int,
  width_px: int,
  *,
  config: str,
  devices: Mapping[str, str],
  emulated: bool = False,
) -> Profile:
  """Writes costs down as measurements at one size; `Profile.costs` gives them back.

  Args:
    costs: what a run has measured of itself, or what an emulation assumes.
    frames: pixel frames of its videos.
    height_px: their height.
    width_px: their width.
    config: fingerprint of the settings.
    devices: kind of worker -> what it runs on.
    emulated: True where nobody measured the times.
  """
  size = (frames, height_px, width_px)
  rows = [Row("dispatch", _DRIVER, *size, costs.dispatch_s)]
  for worker, c in sorted(costs.by_kind.items()):
    plain = {"fused": c.generate_s + c.fused_s} | {
      kind: getattr(c, f"{kind}_s")
      for kind in PER_VIDEO + FIXED
      if kind not in ("fused", "judge", "dispatch")
    }
    rows += [Row(kind, worker, *size, s) for kind, s in plain.items() if math.isfinite(s)]
    rows += [Row("judge", worker, *size, s, batch=n) for n, s in c.judge_s if math.isfinite(s)]
  return Profile(tuple(sorted(rows, key=lambda row: row.key)), config, dict(devices), emulated)


def _curve(table: Mapping[int, float], at: int, grows: bool) -> float:
  """Piecewise linear; below the first entry in proportion, or level where it does not grow."""
  sizes = sorted(table)
  place = bisect.bisect_left(sizes, at)
  if place < len(sizes) and sizes[place] == at:
    return table[sizes[place]]
  if place == 0 or len(sizes) == 1:
    return table[sizes[0]] * (at / sizes[0] if grows else 1.0)
  place = min(place, len(sizes) - 1)
  a, b = sizes[place - 1], sizes[place]
  # A table's noise must not make a long video free.
  return max(table[a] + (table[b] - table[a]) * (at - a) / (b - a), 0.0)


def _mean(workers: Sequence[WorkerCosts]) -> WorkerCosts:
  def mean(values: Sequence[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return sum(known) / len(known) if known else math.inf

  plain = {
    f.name: mean([getattr(worker, f.name) for worker in workers])
    for f in dataclasses.fields(WorkerCosts)
    if f.name != "judge_s"
  }
  sizes = sorted({n for worker in workers for n, _ in worker.judge_s})
  judge_s = tuple((n, mean([worker.judging_s(n) for worker in workers])) for n in sizes)
  return WorkerCosts(judge_s=judge_s, **plain)
