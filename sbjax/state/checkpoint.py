"""Checkpoints: everything the next step depends on, written in the background, whole or not at all.

Orbax writes a step into a temporary folder and renames it when all is on disk, so a killed run
leaves the last good step. On top of that, this module
* stores a checksum of every array, since a damaged chunk of a file may read as zeros;
* reports a failed background write in one sentence at the next call.
No pickle is read or written: arrays are OCDBT chunks, everything else is JSON.
"""

import os
import pathlib
import platform
import sys
from collections.abc import Mapping
from typing import Any

import flax
import jax
import numpy as np
import optax
import orbax.checkpoint as ocp

from sbjax import files
from sbjax.runtime.records import TrainState
from sbjax.state.checkpoint_read import (
  FORMAT,
  CheckpointError,
  as_json,
  complete_steps,
  describe,
  read_checkpoint,
  reason,
)
from sbjax.state.quiet import OrbaxQuiet


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
    self._fingerprint = as_json(fingerprint)
    self._details = as_json(details or {})
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
        f"cannot open checkpoints in {self._directory}: {reason(error)}; name a workdir that can "
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
      "format": FORMAT,
      "step": state.step,
      "version": state.version,
      "prompt_cursor": state.prompt_cursor,
      "skipped_in_row": state.skipped_in_row,
      "fused": state.fused,
      "optimizer_leaves": len(state.optimizer),
      "arrays": {name: describe(array) for name, array in arrays.items()},
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
    return complete_steps(self._directory)

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
    state = read_checkpoint(self._directory, step, self._fingerprint)
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
      f"cannot write {name} to {self._directory}: {reason(error)} ({intact}); free some space or "
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


def _arrays(state: TrainState) -> dict[str, np.ndarray]:
  arrays = {"adapter": np.asarray(state.adapter), "ema": np.asarray(state.ema)}
  for number, leaf in enumerate(state.optimizer):
    arrays[f"optimizer_{number:04d}"] = np.asarray(leaf)
  return arrays
