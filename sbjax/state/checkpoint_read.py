"""Reading checkpoints back: bit for bit as they were saved, or refused in one sentence.

Nothing here writes. A checkpoint of another model is refused before an array is loaded, a damaged
one by the checksums in its metadata.
"""

import errno
import os
import pathlib
import sys
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import tensorstore

from sbjax.runtime.records import TrainState

FORMAT = 1
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EFBIG, errno.EIO)


class CheckpointError(ValueError):
  """A checkpoint that cannot be read or used here; one sentence says why."""


class _DamagedError(CheckpointError):
  """A checkpoint whose files are incomplete or changed; an older one may still be good."""


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
  plain = None if fingerprint is None else as_json(fingerprint)
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
  step = complete_steps(root)[-1] if step is None and complete_steps(root) else step
  if step is None:
    raise CheckpointError(_nothing_in(root))
  return _read_meta(root, step)


def _restore(
  root: pathlib.Path, step: int | None, fingerprint: Mapping[str, Any] | None
) -> TrainState:
  steps = complete_steps(root)
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
    if describe(array) != description:
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
    raise _DamagedError(f"checkpoint {path} is damaged ({reason(error)})") from error
  if meta.get("format", 0) > FORMAT:
    raise CheckpointError(
      f"checkpoint {path} has format {meta['format']}, newer than this sbjax reads ({FORMAT}); "
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
    raise _DamagedError(f"checkpoint {root / str(step)} is damaged ({reason(error)})") from error


def complete_steps(root: pathlib.Path) -> tuple[int, ...]:
  """Gives the steps whose checkpoints are complete on disk, in rising order."""
  # Orbax's temporary folders and ours set aside have other names.
  if not root.is_dir():
    return ()
  return tuple(sorted(int(p.name) for p in root.iterdir() if p.name.isdigit() and p.is_dir()))


def _nothing_in(root: pathlib.Path) -> str:
  return f"{root} holds no complete checkpoint; name the folder `checkpoints` of a run's workdir"


def describe(array: np.ndarray) -> dict[str, Any]:
  """Gives what an array's metadata say of it: shape, type and the CRC-32 of its bytes."""
  checksum = zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
  return {"shape": list(array.shape), "dtype": array.dtype.name, "crc32": checksum}


def as_json(values: Mapping[str, Any]) -> dict[str, Any]:
  """Gives values as JSON gives them back, so that a tuple equals the list that was stored."""
  return {k: list(v) if isinstance(v, (tuple, list)) else v for k, v in values.items()}


def reason(error: BaseException) -> str:
  """Finds the disk's own words in an error that may come out of three layers of C++."""
  text = str(error)
  for number in _DISK_ERRORS:
    if (isinstance(error, OSError) and error.errno == number) or os.strerror(number) in text:
      return os.strerror(number)
  lines = text.strip().splitlines() or [""]
  return f"{type(error).__name__}: {lines[0][:160]}"
