"""The workdir of a run: what lies where, whose it is, and what a resumed run may change."""

import datetime
import errno
import fcntl
import fnmatch
import hashlib
import io
import json
import os
import pathlib
import shlex
import shutil
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from sbjax import files
from sbjax.report.writers import flatten

# Fields that a resumed run may change, by pattern. The rule: a field is free where it changes
# neither a task's result nor which tasks there are, so that a resumed run stays bit-equal.
FREE = (
  "total_steps",
  "resume",
  "scheme",  # within a replay mode, which is compared on its own
  "model.embeddings",  # named by content
  "runtime.executor",
  "runtime.actor_workers",
  "runtime.reward_workers",
  "runtime.task_timeout_s",
  "runtime.startup_timeout_s",
  "runtime.plan",
  "runtime.profile",
  "runtime.replan_drift",
  "runtime.fused",  # a run keeps the number that its first plan chose
  "runtime.replays_on_reward",
  "runtime.decodes_on_reward",
  "reward.retries",
  "reward.timeout_s",
  "reward.max_skipped_in_row",
  "reward.judge.endpoints",  # where the same model answers
  "reward.judge.connect_timeout_s",
  "reward.judge.total_timeout_s",
  "reward.judge.attempts",
  "reward.judge.backoff_s",
  "reward.judge.evict_after",
  "reward.judge.cooldown_s",
  "reward.judge.concurrency",
  "prompts.eval",
  "eval.*",
  "checkpoint.*",
  "report.*",
)
# May be changed too, but sums are then rounded in another order: equal up to rounding only.
ROUNDING = ("runtime.devices_per_worker", "runtime.mesh")

_MIN_FREE_BYTES = 64 * 2**20
# What tells that a folder holds a run. `run.json` is written last at a start, so a start that was
# killed before it leaves none of these.
_OUTPUTS = ("run.json", "metrics.jsonl", "checkpoints", "summary.json")
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


class Workdir:
  """The paths of a run's outputs; holds the folder's lock until `close`.

  Attributes:
    root: the folder.
    resumed: True where the folder held a run that this one continues.
    notes: sentences about the resumption that the user should read.
  """

  def __init__(self, root: pathlib.Path, resumed: bool, notes: tuple[str, ...], lock: io.IOBase):
    """Called by `open_workdir`."""
    self.root = root
    self.resumed = resumed
    self.notes = notes
    self._lock = lock

  @property
  def config(self) -> pathlib.Path:
    """The resolved config, JSON."""
    return self.root / "config.json"

  @property
  def command(self) -> pathlib.Path:
    """The command lines, one a start."""
    return self.root / "command.txt"

  @property
  def run(self) -> pathlib.Path:
    """Fingerprint, library versions and starts, JSON."""
    return self.root / "run.json"

  @property
  def metrics(self) -> pathlib.Path:
    """One JSON object a line."""
    return self.root / "metrics.jsonl"

  @property
  def tensorboard(self) -> pathlib.Path:
    """Folder of TensorBoard events."""
    return self.root / "tensorboard"

  @property
  def samples(self) -> pathlib.Path:
    """Folder of sample videos, a subfolder a step."""
    return self.root / "samples"

  @property
  def timeline(self) -> pathlib.Path:
    """Folder of step timelines, a trace and a picture a step."""
    return self.root / "timeline"

  @property
  def evaluation(self) -> pathlib.Path:
    """Folder of evaluations: `evaluation.jsonl`, tables, pictures, videos."""
    return self.root / "evaluation"

  @property
  def checkpoints(self) -> pathlib.Path:
    """Folder of checkpoints, a subfolder a step."""
    return self.root / "checkpoints"

  @property
  def adapter(self) -> pathlib.Path:
    """The final adapter for `sbjax.sample --adapter`."""
    return self.root / "adapter.safetensors"

  @property
  def ema(self) -> pathlib.Path:
    """Its moving average in the same format."""
    return self.root / "adapter_ema.safetensors"

  @property
  def summary(self) -> pathlib.Path:
    """What the run did, JSON."""
    return self.root / "summary.json"

  @property
  def reward_curve(self) -> pathlib.Path:
    """Reward and components against the step, a picture."""
    return self.root / "reward_curve.png"

  def outputs(self) -> dict[str, str]:
    """Names every output with its absolute path, for the banner and the summary."""
    names = (
      *("config", "metrics", "tensorboard", "samples", "timeline", "evaluation", "checkpoints"),
      *("adapter", "ema", "summary", "reward_curve"),
    )
    return {name: str(getattr(self, name)) for name in names}

  def close(self) -> None:
    """Lets another run have the folder."""
    self._lock.close()


def open_workdir(
  path: str | os.PathLike[str],
  config: Mapping[str, Any],
  *,
  resume: Literal["never", "auto"],
  replay_mode: str = "",
  command: Sequence[str] = (),
  versions: Mapping[str, str] | None = None,
  min_free_bytes: int = _MIN_FREE_BYTES,
) -> Workdir:
  """Makes or takes over a workdir and writes `config.json`, `command.txt` and `run.json`.

  Args:
    path: the folder; made with its parents where it does not exist.
    config: the resolved config, nested dictionaries of JSON values (tuples count as lists).
    resume: `never` refuses a folder that holds a run, `auto` continues the run where the configs
      agree but for the fields of `FREE` and `ROUNDING`.
    replay_mode: how the scheme replays (two-pass, merged, …); a resumed run must keep it.
    command: the command line's words.
    versions: library versions to record.
    min_free_bytes: free space below which the disk counts as full.

  Returns:
    The workdir, locked against a second run.

  Raises:
    ValueError: where the folder holds another run, or one that may not be continued, or is in use.
    OutputError: where it cannot be written.
  """
  root = pathlib.Path(path).absolute()
  if root.exists() and not root.is_dir():
    raise ValueError(f"--workdir={path} is a file; name a folder")
  with files.writing(root):
    root.mkdir(parents=True, exist_ok=True)
    free_bytes = shutil.disk_usage(root).free
  if free_bytes < min_free_bytes:
    raise files.OutputError(
      f"--workdir={path} is on a disk with {free_bytes / 2**20:.0f} MB left; "
      f"free {min_free_bytes / 2**20:.0f} MB or name another folder"
    )
  plain = json.loads(json.dumps(config))  # tuples become lists, as they are when read back
  lock = _lock(root, path)
  try:
    earlier = _earlier_run(root, path, resume)
    changes = _changes(earlier["config"], plain) if earlier else {}
    if earlier:
      _check_changes(path, changes, earlier["run"]["replay_mode"], replay_mode)
    notes = _notes(changes) if earlier else ()
    workdir = Workdir(root, earlier is not None, notes, lock)
    _record(workdir, plain, replay_mode, command, versions or {}, changes, earlier)
  except BaseException:
    lock.close()
    raise
  return workdir


def fingerprint(config: Mapping[str, Any]) -> str:
  """Hashes the fields that a resumed run must share with the run that it continues.

  Args:
    config: the resolved config.

  Returns:
    Sixteen hexadecimal digits.
  """
  plain = flatten(json.loads(json.dumps(config)))
  bound = {k: v for k, v in plain.items() if not _matches(k, FREE + ROUNDING)}
  return hashlib.sha256(json.dumps(bound, sort_keys=True).encode()).hexdigest()[:16]


def _lock(root: pathlib.Path, path: str | os.PathLike[str]) -> io.IOBase:
  with files.writing(root):
    lock = (root / ".lock").open("a")
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
      lock.close()
      raise ValueError(
        f"--workdir={path} is in use by a run that has not ended; end it or name another folder"
      ) from error
    except OSError as error:
      if error.errno not in _NO_LOCKS:  # some network disks have none: then nobody is kept out
        lock.close()
        raise
  return lock


def _earlier_run(
  root: pathlib.Path, path: str | os.PathLike[str], resume: str
) -> dict[str, Any] | None:
  present = [name for name in _OUTPUTS if (root / name).exists()]
  if not present:
    return None
  if resume == "never" and present == ["run.json"]:
    return None  # it ended before its first step was recorded: there is nothing to continue
  if resume == "never":
    raise ValueError(
      f"--workdir={path} holds a run already ({present[0]}); "
      "name a new folder or continue it with --config.resume=auto"
    )
  earlier = {}
  for name in ("run", "config"):
    try:
      earlier[name] = json.loads((root / f"{name}.json").read_bytes())
    except (OSError, ValueError) as error:
      raise ValueError(
        f"--workdir={path} has outputs but no readable {name}.json, so the run cannot be "
        "continued; name a new folder"
      ) from error
  if "replay_mode" not in earlier["run"]:
    raise ValueError(f"--workdir={path} holds no run of sbjax (run.json); name a new folder")
  return earlier


def _changes(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
  a, b = flatten(theirs), flatten(ours)
  return {
    key: (a.get(key), b.get(key)) for key in sorted(a.keys() | b.keys()) if a.get(key) != b.get(key)
  }


def _check_changes(
  path: str | os.PathLike[str],
  changes: Mapping[str, tuple[Any, Any]],
  their_mode: str,
  our_mode: str,
) -> None:
  for key, (theirs, ours) in changes.items():
    if not _matches(key, FREE + ROUNDING):
      raise ValueError(
        f"--workdir={path} holds another run: {key} is {theirs!r} there and {ours!r} here; "
        "use its value or name a new folder"
      )
  if their_mode != our_mode:
    theirs, ours = changes.get("scheme", (their_mode, our_mode))
    raise ValueError(
      f"--workdir={path} holds a run of scheme {theirs!r} ({their_mode} replay), which {ours!r} "
      f"({our_mode} replay) cannot continue; use a scheme with {their_mode} replay"
    )


def _notes(changes: Mapping[str, tuple[Any, Any]]) -> tuple[str, ...]:
  return tuple(
    f"{key} changes from {theirs!r} to {ours!r}: the run continues equal up to rounding, "
    "not bit by bit"
    for key, (theirs, ours) in changes.items()
    if _matches(key, ROUNDING)
  )


def _record(
  workdir: Workdir,
  config: Mapping[str, Any],
  replay_mode: str,
  command: Sequence[str],
  versions: Mapping[str, str],
  changes: Mapping[str, tuple[Any, Any]],
  earlier: Mapping[str, Any] | None,
) -> None:
  starts = list(earlier["run"].get("starts", ())) if earlier else []
  starts.append(
    {
      "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
      "command": shlex.join(command),
      "versions": dict(versions),
      "changed": {key: {"from": a, "to": b} for key, (a, b) in changes.items()},
    }
  )
  run = {"fingerprint": fingerprint(config), "replay_mode": replay_mode, "starts": starts}
  files.atomic_write(workdir.config, json.dumps(config, indent=2) + "\n")
  files.atomic_write(workdir.command, "".join(f"{start['command']}\n" for start in starts))
  files.atomic_write(workdir.run, json.dumps(run, indent=2) + "\n")


def _matches(key: str, patterns: Sequence[str]) -> bool:
  return any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)
