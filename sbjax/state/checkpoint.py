"""Checkpoints: everything the next step depends on, written in the background, whole or not at all.

Orbax writes a step into a temporary folder and renames it when all is on disk, so a killed run
leaves the last good step. On top of that, this module
* keeps a checksum of every array, since a damaged chunk of a file may read as zeros;
* refuses a checkpoint of another model before it loads an array;
* reports a failed background write in one sentence at the next call.
No pickle is read or written: arrays are OCDBT chunks, everything else is JSON.
"""

import errno
import os
import pathlib
import platform
import sys
import zlib
from collections.abc import Mapping
from typing import Any

import flax
import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import tensorstore

from sbjax import files
from sbjax.runtime.records import TrainState
from sbjax.state.quiet import OrbaxQuiet

_FORMAT = 1
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EFBIG, errno.EIO)


class CheckpointError(ValueError):
  """A checkpoint that cannot be read or used here; one sentence says why."""


class CheckpointWriteError(files.OutputError):
  """A checkpoint that the disk refused; the last good step is intact."""


class Checkpointer:
  """Saves and restores the state of one run.

  A context manager: leaving it waits for the write in progress.
  """

  def __init__(
    self,
    directory: str | os.PathLike[str],
    keep: int,
    fingerprint: Mapping[str, Any],
    details: Mapping[str, Any] | None = None,
  ):
    """Opens the folder and removes what a killed run left half-written.

    Args:
      directory: folder of the checkpoints, one subfolder a step; made where it does not exist.
      keep: how many of the newest checkpoints stay.
      fingerprint: what a checkpoint must have in common with this run to be usable: model name,
        adapter size, LoRA rank and targets, as JSON values.
      details: further facts to store (a config's fingerprint); never compared.

    Raises:
      CheckpointWriteError: where the folder cannot be made or written.
    """
    if keep < 1:
      raise CheckpointError(f"checkpoint.keep is {keep}; keep at least 1")
    self._directory = pathlib.Path(directory).absolute()
    self._fingerprint = _plain(fingerprint)
    self._details = _plain(details or {})
    self._restored: int | None = None  # the step that this run continues from
    self._saved: set[int] = set()
    self._write_failed = False
    self._quiet = OrbaxQuiet()
    try:
      self._manager = ocp.CheckpointManager(
        self._directory,
        options=ocp.CheckpointManagerOptions(
          max_to_keep=keep, create=True, cleanup_tmp_directories=True
        ),
      )
    except Exception as error:
      self._quiet.stop()
      raise CheckpointWriteError(
        f"cannot open checkpoints in {self._directory}: {_reason(error)}; name a workdir that can "
        "be written"
      ) from error

  def __enter__(self) -> "Checkpointer":
    return self

  def __exit__(self, *exc_info: object) -> None:
    self.close()

  def save(self, state: TrainState) -> None:
    """Starts to write a checkpoint and returns; the arrays are copied first.

    A step that this run has saved, or continues from, is on disk already and is not written
    again. Later steps that another run left behind (this run went back before them, because they
    were damaged) are set aside under another name.

    Args:
      state: the state after a step.

    Raises:
      CheckpointWriteError: where this or the previous write failed; the last good step is intact.
    """
    self.wait()
    if state.step in self._saved or state.step == self._restored:
      return
    self._set_aside_later_than(self._restored or 0)
    arrays = _arrays(state)
    meta = {
      "format": _FORMAT,
      "step": state.step,
      "version": state.version,
      "prompt_cursor": state.prompt_cursor,
      "skipped_in_row": state.skipped_in_row,
      "fused": state.fused,
      "optimizer_leaves": len(state.optimizer),
      "arrays": {name: _describe(array) for name, array in arrays.items()},
      "fingerprint": self._fingerprint,
      "details": self._details,
      "versions": library_versions(),
    }
    # Orbax refuses empty arrays; their shape and type in the metadata say everything about them.
    stored = {name: array for name, array in arrays.items() if array.size}
    try:
      written = self._manager.save(
        state.step,
        args=ocp.args.Composite(state=ocp.args.StandardSave(stored), meta=ocp.args.JsonSave(meta)),
      )
    except Exception as error:
      raise self._write_error(state.step, error) from error
    if not written:
      raise CheckpointError(
        f"checkpoint {state.step} was not written to {self._directory}, which holds step "
        f"{self.latest_step()}; name another workdir"
      )
    self._saved.add(state.step)

  def wait(self) -> None:
    """Blocks until the write in progress is on disk.

    Raises:
      CheckpointWriteError: where it failed; the last good step is intact.
    """
    try:
      self._manager.wait_until_finished()
    except Exception as error:
      on_disk = set(self.steps())
      lost = max(self._saved - on_disk, default=-1)
      self._saved &= on_disk
      self._manager.reload()  # or it would forget the older steps, which then stay for ever
      raise self._write_error(lost, error) from error

  def steps(self) -> tuple[int, ...]:
    """Gives the steps whose checkpoints are complete on disk, in rising order."""
    # From the disk, not from the manager's list: that one keeps a step whose write failed.
    return _steps(self._directory)

  def latest_step(self) -> int | None:
    """Gives the newest complete step, None where there is none."""
    return max(self.steps(), default=None)

  def restore(self, step: int | None = None) -> TrainState:
    """Reads a checkpoint as numpy arrays, bit for bit as they were saved.

    Args:
      step: which one; a damaged one is refused. None, the case of `resume=auto`: the newest; where
        that is damaged, a warning names it and the one before it is taken, and so on.

    Returns:
      The state.

    Raises:
      CheckpointError: where there is no such checkpoint, it is damaged, or it belongs to another
        model.
    """
    state = _restore(self._directory, step, self._fingerprint)
    self._restored = state.step
    return state

  def close(self) -> None:
    """Waits for the write in progress and lets go of Orbax's threads.

    Raises:
      CheckpointWriteError: where that write failed.
    """
    failure: CheckpointWriteError | None = None
    try:
      self.wait()
    except CheckpointWriteError as error:
      failure = error
    try:
      self._manager.close()
    except Exception as error:  # Orbax may tell a failed write once more
      failure = failure or self._write_error(-1, error)
    finally:
      # After a failed write Orbax's own threads may still be about to log it.
      if not self._write_failed:
        self._quiet.stop()
    if failure is not None:
      raise failure

  def _write_error(self, step: int, error: Exception) -> CheckpointWriteError:
    self._write_failed = True
    latest = self.latest_step()
    intact = "no earlier one exists" if latest is None else f"step {latest} is intact"
    name = "a checkpoint" if step < 0 else f"checkpoint {step}"
    return CheckpointWriteError(
      f"cannot write {name} to {self._directory}: {_reason(error)} ({intact}); free some space or "
      "repair the folder, then resume"
    )

  def _set_aside_later_than(self, step: int) -> None:
    foreign = [s for s in self.steps() if s > step and s not in self._saved]
    for s in foreign:
      source = self._directory / str(s)
      number = 0
      while (target := self._directory / f"aside-{s}-{number}").exists():
        number += 1
      try:
        source.rename(target)
      except OSError as error:
        raise self._write_error(s, error) from error
      print(f"warning: set the unused checkpoint {source} aside as {target.name}", file=sys.stderr)
    if foreign:
      self._manager.reload()


def read_checkpoint(
  directory: str | os.PathLike[str],
  step: int | None = None,
  fingerprint: Mapping[str, Any] | None = None,
) -> TrainState:
  """Reads a checkpoint without writing to its folder, for commands beside the training.

  Args:
    directory: the folder of the checkpoints (`workdir/checkpoints`).
    step: which one; None: the newest that is whole.
    fingerprint: what it must have in common; None compares nothing.

  Returns:
    The state.

  Raises:
    CheckpointError: as `Checkpointer.restore`.
  """
  plain = None if fingerprint is None else _plain(fingerprint)
  return _restore(pathlib.Path(directory).absolute(), step, plain)


def read_meta(directory: str | os.PathLike[str], step: int | None = None) -> dict[str, Any]:
  """Reads a checkpoint's metadata alone: fingerprint, details, versions and counters.

  Args:
    directory: the folder of the checkpoints.
    step: which one; None: the newest.

  Returns:
    The metadata.

  Raises:
    CheckpointError: where there is none or it cannot be read.
  """
  root = pathlib.Path(directory).absolute()
  step = _steps(root)[-1] if step is None and _steps(root) else step
  if step is None:
    raise CheckpointError(_nothing_in(root))
  return _read_meta(root, step)


def library_versions() -> dict[str, str]:
  """Gives the versions of the libraries that results depend on."""
  return {
    "python": platform.python_version(),
    "jax": jax.__version__,
    "flax": flax.__version__,
    "optax": optax.__version__,
    "orbax": ocp.__version__,
    "numpy": np.__version__,
  }


def _restore(
  root: pathlib.Path, step: int | None, fingerprint: Mapping[str, Any] | None
) -> TrainState:
  steps = _steps(root)
  if not steps:
    raise CheckpointError(_nothing_in(root))
  if step is not None and step not in steps:
    raise CheckpointError(
      f"{root} has no checkpoint of step {step}; it has {', '.join(map(str, steps))}"
    )
  wanted = [step] if step is not None else list(reversed(steps))
  for number, candidate in enumerate(wanted):
    try:
      return _read(root, candidate, fingerprint)
    except _DamagedError as error:
      if number + 1 == len(wanted):
        raise
      print(f"warning: {error}; taking step {wanted[number + 1]}", file=sys.stderr)
  raise AssertionError("unreachable: the last candidate returns or raises")


class _DamagedError(CheckpointError):
  """A checkpoint whose files are incomplete or changed; an older one may still be good."""


def _read(root: pathlib.Path, step: int, fingerprint: Mapping[str, Any] | None) -> TrainState:
  meta = _read_meta(root, step)
  path = root / str(step)
  if fingerprint is not None:  # before any array is read
    theirs = meta["fingerprint"]
    for name in sorted(theirs.keys() | fingerprint.keys()):
      if theirs.get(name) != fingerprint.get(name):
        raise CheckpointError(
          f"checkpoint {path} is of another model: {name} is {theirs.get(name)!r} there and "
          f"{fingerprint.get(name)!r} here; use its config or another workdir"
        )
  arrays = {}
  for name, description in meta["arrays"].items():
    array = _read_array(root, step, name, description)
    if _describe(array) != description:
      raise _DamagedError(f"checkpoint {path} is damaged (its array {name} is not what was saved)")
    arrays[name] = array
  return TrainState(
    step=meta["step"],
    version=meta["version"],
    adapter=arrays["adapter"],
    ema=arrays["ema"],
    optimizer=tuple(arrays[f"optimizer_{i:04d}"] for i in range(meta["optimizer_leaves"])),
    prompt_cursor=meta["prompt_cursor"],
    skipped_in_row=meta["skipped_in_row"],
    fused=meta.get("fused", 0),  # checkpoints from before there was fusing lack it
  )


def _read_meta(root: pathlib.Path, step: int) -> dict[str, Any]:
  path = root / str(step)
  try:
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
      item = ocp.args.Composite(meta=ocp.args.JsonRestore())
      meta = reader.restore(path, args=item)["meta"]
    fields = (*TrainState.__dataclass_fields__, "fingerprint", "arrays", "optimizer_leaves")
    missing = set(fields) - {"adapter", "ema", "optimizer"} - set(meta)
  except Exception as error:
    raise _DamagedError(f"checkpoint {path} is damaged ({_reason(error)})") from error
  if meta.get("format", 0) > _FORMAT:
    raise CheckpointError(
      f"checkpoint {path} has format {meta['format']}, newer than this sbjax reads ({_FORMAT}); "
      "use the sbjax that wrote it"
    )
  if missing or meta["step"] != step:
    raise _DamagedError(f"checkpoint {path} is damaged (its metadata is not what was saved)")
  return meta


def _read_array(
  root: pathlib.Path, step: int, name: str, description: Mapping[str, Any]
) -> np.ndarray:
  if 0 in description["shape"]:
    return np.empty(description["shape"], description["dtype"])
  # TensorStore itself, not Orbax: where a read fails, Orbax closes its event loop under the others,
  # and they print tracebacks around the one sentence that matters.
  try:
    folder = {"driver": "ocdbt", "base": f"file://{root / str(step) / 'state'}/"}
    keys = tensorstore.KvStore.open(folder).result().list().result()
    driver = "zarr3" if f"{name}/zarr.json".encode() in keys else "zarr"
    spec = {"driver": driver, "kvstore": folder | {"path": f"{name}/"}}
    return np.array(tensorstore.open(spec, read=True).result().read().result())
  except Exception as error:  # TensorStore maps its error codes to many types
    raise _DamagedError(f"checkpoint {root / str(step)} is damaged ({_reason(error)})") from error


def _steps(root: pathlib.Path) -> tuple[int, ...]:
  # Orbax's temporary folders and ours set aside have other names.
  if not root.is_dir():
    return ()
  return tuple(sorted(int(p.name) for p in root.iterdir() if p.name.isdigit() and p.is_dir()))


def _nothing_in(root: pathlib.Path) -> str:
  return f"{root} holds no complete checkpoint; name the folder `checkpoints` of a run's workdir"


def _arrays(state: TrainState) -> dict[str, np.ndarray]:
  arrays = {"adapter": np.asarray(state.adapter), "ema": np.asarray(state.ema)}
  for number, leaf in enumerate(state.optimizer):
    arrays[f"optimizer_{number:04d}"] = np.asarray(leaf)
  return arrays


def _describe(array: np.ndarray) -> dict[str, Any]:
  checksum = zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
  return {"shape": list(array.shape), "dtype": array.dtype.name, "crc32": checksum}


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
  # As JSON gives them back, so that a tuple equals the list that was stored.
  return {k: list(v) if isinstance(v, (tuple, list)) else v for k, v in values.items()}


def _reason(error: BaseException) -> str:
  """Finds the disk's own words in an error that may come out of three layers of C++."""
  text = str(error)
  for number in _DISK_ERRORS:
    if (isinstance(error, OSError) and error.errno == number) or os.strerror(number) in text:
      return os.strerror(number)
  lines = text.strip().splitlines() or [""]
  return f"{type(error).__name__}: {lines[0][:160]}"
