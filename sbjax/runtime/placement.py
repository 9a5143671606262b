"""Where a run's workers go on a Ray cluster: what each reserves, and whether the nodes have it."""

import collections
from collections.abc import Mapping, Sequence

from sbjax.runtime.executor import WorkerSpec
from sbjax.settings import SettingsRuntime

Bundle = Mapping[str, float]
"""Resource name -> amount that one worker reserves on one node."""


def bundle(spec: WorkerSpec) -> dict[str, float]:
  """Gives what a worker reserves: its cores or accelerators, and one of its group's resource.

  Args:
    spec: the worker. One with both roles is bound like an actor worker.
  """
  runtime = spec.settings.runtime
  if runtime.gpus_per_worker:
    # The core feeds the accelerators; Ray counts it so that nodes are not overfilled.
    out = {"GPU": float(runtime.gpus_per_worker), "CPU": 1.0}
  else:
    out = {"CPU": float(max(1, runtime.cores_per_worker))}
  name = group_resource(runtime, spec.group)
  return out | ({name: 1.0} if name else {})


def group_resource(runtime: SettingsRuntime, group: str) -> str:
  """The custom resource that binds a group's workers to nodes; empty for none."""
  return runtime.reward_resource if group == "reward" else runtime.actor_resource


def check_room(specs: Sequence[WorkerSpec], nodes: Sequence[Mapping[str, float]]) -> None:
  """Refuses workers that the nodes cannot hold, whoever else uses them; Ray would wait for ever.

  Args:
    specs: the workers.
    nodes: total resources of each living node.

  Raises:
    ValueError: the nodes have room for fewer workers of some kind, or of all kinds together.
  """
  kinds = collections.Counter(tuple(sorted(bundle(s).items())) for s in specs)
  groups = {tuple(sorted(bundle(s).items())): s for s in specs}
  for kind, wanted in kinds.items():
    room = sum(_fits(dict(kind), node) for node in nodes)
    if room < wanted:
      raise ValueError(_sentence(groups[kind], wanted, room, len(nodes)))
  for name in ("GPU", "CPU"):
    asked = sum(bundle(s).get(name, 0.0) for s in specs)
    there = sum(node.get(name, 0.0) for node in nodes)
    if asked > there:
      raise ValueError(
        f"runtime.actor_workers and reward_workers ask for {asked:g} {name}s in all and Ray's "
        f"nodes have {there:g}; use fewer workers or add nodes."
      )


def _fits(need: Bundle, node: Mapping[str, float]) -> int:
  return min(int(node.get(name, 0.0) / amount) for name, amount in need.items())


def _sentence(spec: WorkerSpec, wanted: int, room: int, nodes: int) -> str:
  runtime = spec.settings.runtime
  need = " and ".join(f"{amount:g} {name}" for name, amount in sorted(bundle(spec).items()))
  role = "reward" if spec.group == "reward" else "actor"
  field = f"runtime.{role}_workers"
  count = runtime.reward_workers if role == "reward" else runtime.actor_workers
  name = group_resource(runtime, spec.group)
  hint = f", or start nodes with --resources='{{\"{name}\": n}}'" if name else ""
  return (
    f"{field} is {count}; each needs {need} on one node and Ray's {nodes} node(s) have room for "
    f"{room} of the {wanted} such workers, so use fewer workers{hint}."
  )


def core_slots(hosts: Mapping[str, str]) -> dict[str, int]:
  """Numbers the workers of each machine from 0, so that they can be pinned to different cores.

  Args:
    hosts: worker -> machine, in the order of the workers. Several Ray nodes may share a machine.
  """
  seen: collections.Counter[str] = collections.Counter()
  out = {}
  for worker, host in hosts.items():
    out[worker] = seen[host]
    seen[host] += 1
  return out


def pinned(slot: int, per_worker: int, usable: Sequence[int]) -> tuple[int, ...]:
  """The cores of a worker: neighbours, round the machine again where workers outnumber cores.

  Args:
    slot: the worker's number on its machine.
    per_worker: cores that it gets; 0 pins none.
    usable: the machine's cores that this process may use.
  """
  cores = sorted(usable)
  return tuple(cores[(slot * per_worker + i) % len(cores)] for i in range(per_worker))
