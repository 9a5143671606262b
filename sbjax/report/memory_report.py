"""The memory plan of a run as a record and as a table."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from sbjax.dataflow import memory_table as table
from sbjax.dataflow.schemes import scheme as scheme_of
from sbjax.report.console import Progress
from sbjax.runtime import memory_plan
from sbjax.runtime.programs import working_bytes
from sbjax.runtime.recipe import Recipe

GIB = memory_plan.GIB
# The compiler's names for a chunk's programs, by the task that runs them.
_PROGRAMS = {
  "generate": "generate",
  "forward": "forward",
  "reference": "forward",
  "replay": "replay",
  "backward": "folded",
}


def plan(recipe: Recipe, options: Mapping[str, Any]) -> dict[str, Any]:
  """What each kind of worker needs, and what fits each device.

  Args:
    recipe: the run's recipe.
    options: of `sbjax.plan_memory`.

  Raises:
    ValueError: an unknown judge, or files that cannot be read.
  """
  settings, scheme = recipe.settings, scheme_of(recipe.settings.scheme)
  device = jax.local_devices()[0]
  on_cpu = device.platform == "cpu" and not options["device_gb"]
  judge_bytes = {"": 0, "float32": 4, "bfloat16": 2}[options["judge_dtype"]]
  sizes = memory_plan.run_sizes(
    recipe, on_cpu=on_cpu, judge=options["judge"], judge_bytes=judge_bytes
  )
  ask = options["compile"] == "yes" or (options["compile"] == "auto" and device.platform != "cpu")
  working = compiled(recipe) if ask else None
  groups = memory_plan.groups_of(scheme, settings.runtime.reward_workers)
  workers = {g: table.worker_bytes(sizes, scheme, g, working) for g in groups}
  limits = [memory_plan.device_bytes(gb) for gb in options["device_gb"]]
  if not limits and (device.memory_stats() or {}).get("bytes_limit"):
    limits = [device.memory_stats()["bytes_limit"]]
  host = memory_plan.device_bytes(options["host_gb"])
  devices = [_device(sizes, scheme, workers, limit, host or limit, working) for limit in limits]
  geometry = recipe.geometry
  return {
    "model": recipe.dit.name,
    "basis": "compiled" if working is not None else "estimated",
    "compiled_on": f"{device.platform} {device.device_kind}" if working is not None else None,
    "scheme": scheme.name,
    "precision": recipe.dit.precision,
    "remat": recipe.dit.remat,
    "latent": [sizes.latent_frames, geometry.height, geometry.width],
    "rank": recipe.lora.rank,
    "adapter_parameters": recipe.adapter_parameters,
    "minibatch": sizes.minibatch,
    "workers": {
      group: {
        "held": dict(worker.held),
        "tasks": {task: dict(parts) for task, parts in worker.tasks.items()},
        "largest_task": worker.largest_task,
        "total": worker.total_bytes,
        "host_per_candidate": worker.host,
      }
      for group, worker in workers.items()
    },
    "devices": devices,
    "fits": all(d["fits"] for d in devices),
  }


def compiled(recipe: Recipe) -> dict[str, int]:
  """Task -> bytes that the compiler reports for its work, arguments and results left out."""
  wide = recipe.settings.model.weights_dtype
  programs = sorted(set(_PROGRAMS.values()))
  found: dict[str, int] = {}
  with Progress("compiled passes", len(programs), stream=sys.stderr) as progress:
    for name in programs:
      found[name] = working_bytes(recipe, wide, name)
      progress.advance(name)
  return {task: found[name] for task, name in _PROGRAMS.items()}


def _device(
  sizes: table.RunSizes,
  scheme: Any,
  workers: Mapping[str, table.WorkerBytes],
  limit: int,
  host: int,
  working: Mapping[str, int] | None,
) -> dict[str, Any]:
  fits = {group: worker.total_bytes <= limit for group, worker in workers.items()}
  # The compiler knows one rank; what another adds to the work is the formula's difference.
  beyond = {
    group: worker.total_bytes - table.worker_bytes(sizes, scheme, group).total_bytes
    for group, worker in workers.items()
  }

  def rank_fits(rank: int) -> bool:
    other = memory_plan.with_rank(sizes, rank)
    return all(
      table.worker_bytes(other, scheme, group).total_bytes + beyond[group] <= limit
      for group in workers
    )

  del working
  return {
    "device_bytes": limit,
    "host_bytes": host,
    "fits": all(fits.values()),
    "fits_by_group": fits,
    "largest_batch": {
      group: table.largest_batch(worker, limit, host, sizes.host_is_device)
      for group, worker in workers.items()
    },
    "largest_rank": table.largest_rank(rank_fits, sizes.chunk.dit.dim),
  }


def text(found: Mapping[str, Any]) -> str:
  """The plan as lines for a terminal."""
  workers: Mapping[str, Any] = found["workers"]
  small = max(w["total"] for w in workers.values()) < GIB
  unit, name_of_unit = (2**20, "MiB") if small else (GIB, "GiB")

  def row(name: str, cells: Sequence[Any]) -> str:
    shown = ["-" if c is None else c if isinstance(c, str) else f"{c / unit:.2f}" for c in cells]
    return f"{name:32s}" + "".join(f"{cell:>12s}" for cell in shown)

  frames, height, width = found["latent"]
  lines = [
    f"{found['model']}, {frames} latent frames of {height} x {width}, precision "
    f"{found['precision']}, remat {found['remat']}, adapter of rank {found['rank']}, scheme "
    f"{found['scheme']}",
    f"{name_of_unit} per device, {found['basis']}"
    + (f" on {found['compiled_on']}" if found["compiled_on"] else ""),
    "",
    row("", list(workers)),
  ]
  for part in _names(worker["held"] for worker in workers.values()):
    lines.append(row(part, [w["held"].get(part) for w in workers.values()]))
  lines.append(row("held all the time", [sum(w["held"].values()) for w in workers.values()]))
  for task in _names(worker["tasks"] for worker in workers.values()):
    given = [w["tasks"].get(task) for w in workers.values()]
    lines.append(row(f"{task} adds", [None if g is None else sum(g.values()) for g in given]))
    for part in _names(g for g in given if g is not None):
      lines.append(row(f"  {part}", [None if g is None else g.get(part) for g in given]))
  lines.append(row("held + largest task", [w["total"] for w in workers.values()]))
  lines.append(row("  which is", [w["largest_task"] for w in workers.values()]))
  folded = [w["host_per_candidate"] for w in workers.values()]
  lines.append(row("host: gradients of a candidate", folded))
  for device in found["devices"]:
    lines += ["", *_device_lines(device, found)]
  return "\n".join(lines)


def _device_lines(device: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
  by_group = ", ".join(
    f"{group} {'fits' if fits else 'does not fit'}"
    for group, fits in device["fits_by_group"].items()
  )
  batch = ", ".join(f"{group} {count}" for group, count in device["largest_batch"].items())
  rank = device["largest_rank"]
  return [
    f"device of {device['device_bytes'] / 1e9:.0f} GB ({device['device_bytes'] / GIB:.1f} GiB): "
    f"{by_group}",
    f"  candidates of a mini-batch that one worker can hold, of {found['minibatch']}: {batch} "
    f"({device['host_bytes'] / 1e9:.0f} GB of host memory a worker)",
    f"  largest rank: {rank if rank else 'none'}",
  ]


def _names(parts: Any) -> list[str]:
  """Every name once, in the order in which they are met."""
  return list(dict.fromkeys(name for part in parts for name in part))
