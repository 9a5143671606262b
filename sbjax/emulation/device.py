"""An emulated worker: takes the time that a profile says, gives seeded scalars and small buffers.

It imports no JAX, so that sixty-four of them fit on a small machine.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from sbjax.dataflow.costs import StepCosts
from sbjax.dataflow.graph import Task
from sbjax.dataflow.plan import StepShape, WorkerSlot
from sbjax.rewards.protocol import Job, Verdict
from sbjax.runtime import memory
from sbjax.runtime.executor import WorkerSpec

STEP_KINDS = frozenset(
  {"generate", "decode", "judge", "reference", "forward", "backward", "replay", "fold"}
  | {"reduce", "update"}
)
"""Operations that are tasks of a step's graph."""

_MASK = 2**63 - 1


@dataclasses.dataclass(frozen=True)
class Emulation:
  """What every emulated worker of a run knows.

  Attributes:
    costs: what tasks take; its `scale` is the time scale.
    blocks: chunks of each folding block.
    steps: stochastic denoising steps of a rollout.
    channels: channels of the objective.
    statistics: its statistics.
    unit_weight: sum of the weights that add (chunk, step) scalars up to units.
    pixel_stride: pixels of a latent cell's side.
    seed: of every number that stands for a result.
    parameters: length of the stand-in adapter.
  """

  costs: StepCosts
  blocks: tuple[tuple[int, ...], ...]
  steps: int
  channels: int
  statistics: int
  unit_weight: float
  pixel_stride: int
  seed: int
  parameters: int = 256

  @property
  def shape(self) -> StepShape:
    """The part of a step's shape that costs depend on."""
    chunks = tuple(len(block) for block in self.blocks)
    return StepShape((), ((),), 1, chunks, (), "group")

  def random(self, *names: int) -> np.random.Generator:
    """The random stream of a result, the same on every worker."""
    return np.random.default_rng([self.seed, *(name & _MASK for name in names)])

  def seconds(self, op: str, args: Mapping[str, Any], slot: WorkerSlot) -> float:
    """How long an operation occupies a worker on the emulation's clock, without dispatch."""
    if op == "set_adapter":
      return self.costs.push_seconds(slot)
    if op == "prefix":
      return self.costs.scale * self.costs.of(slot).prefix_s
    if op == "reduce":
      return self.costs.reduce_seconds(len(args["parts"]), slot, self.shape)
    if op not in STEP_KINDS:
      return 0.0
    task = Task(
      op,
      op,
      update=args["key"][1] if "key" in args else 0,
      blocks=tuple(args.get("blocks", range(len(self.blocks)))),
      jobs=tuple(range(len(args["jobs"]))) if op == "judge" else (),
      fused=args.get("fused") is not None,
    )
    return self.costs.seconds(task, slot, self.shape)


class EmulatedWorker:
  """Answers the operations of `sbjax.runtime.worker.Worker` with stand-ins of the same form.

  Args:
    emulation: what every worker knows.
    spec: which worker this is.
    sleep: waits some seconds without using the processor.
  """

  def __init__(
    self, emulation: Emulation, spec: WorkerSpec, sleep: Callable[[float], None] = time.sleep
  ):
    self._emulation, self._sleep = emulation, sleep
    self._slot = WorkerSlot(spec.name, spec.group, spec.group)
    self._adapters: set[str] = set()
    self._folded: dict[tuple[int, int, int, int], np.ndarray] = {}

  def call(self, op: str, args: Mapping[str, Any], *inputs: Any) -> tuple[Any, ...]:
    """Runs one operation and takes its time.

    Returns:
      (scalars with `seconds`, heavy results...).
    """
    start = time.perf_counter()
    seconds, scalars, heavy = self.run(op, args, *inputs)
    self._sleep(max(seconds - (time.perf_counter() - start), 0.0))
    return {**scalars, "seconds": max(time.perf_counter() - start, seconds)}, *heavy

  def run(
    self, op: str, args: Mapping[str, Any], *inputs: Any
  ) -> tuple[float, dict[str, Any], tuple[Any, ...]]:
    """Gives an operation's seconds, scalars and heavy results at once."""
    version = args.get("version")
    if op == "set_adapter":
      self._adapters.add(args["version"])
    elif version is not None and version not in self._adapters:
      raise LookupError(f"{self._slot.name} lacks adapter {version!r}")
    scalars, heavy = getattr(self, f"_{op}")(*inputs, **args)
    return self._emulation.seconds(op, args, self._slot), scalars, heavy

  # What a worker is.

  def _load(self):
    facts = {
      "platform": "emulated",
      "device": f"emulated {self._slot.group}",
      "devices": 1,
      "parameters": {"adapter": self._emulation.parameters},
      "pixel_stride": self._emulation.pixel_stride,
    }
    return facts, ()

  def _initial_adapter(self):
    zeros = np.zeros(self._emulation.parameters, np.float32)
    return {}, (zeros, (zeros,))

  def _set_adapter(self, flat: np.ndarray, version: str):
    del flat
    return {"version": version}, ()

  def _keep(self, versions: tuple[str, ...], step: int):
    self._adapters &= set(versions)
    self._folded = {k: b for k, b in self._folded.items() if k[0] == step}
    return {"usage": memory.usage()}, ()

  # The step's tasks.

  def _generate(self, prompt, seed, seed_initial, version, fused=None, trained=()):
    del prompt, seed_initial, version
    emulation = self._emulation
    chunks = sum(len(block) for block in emulation.blocks)
    old = emulation.random(seed).normal(size=(chunks, emulation.steps)).astype(np.float32)
    scalars: dict[str, Any] = {"old_scores": old, "finite": True}
    if fused is not None:
      blocks = tuple(range(len(emulation.blocks)))
      scalars |= self._scores(old, fused, blocks, trained)
      self._fill(fused, blocks, emulation.unit_weight)
    return scalars, (old, np.zeros(1, np.float32))

  def _decode(self, latents):
    del latents
    return {}, (np.zeros((1, 8, 8, 3), np.uint8),)

  def _judge(self, *videos, jobs: tuple[Job, ...], candidates, retries, salt=()):
    del videos, candidates, retries, salt
    verdicts = []
    for job in jobs:
      random = self._emulation.random(job.seed, *(c + 2**20 for c in job.candidates))
      names = job.components
      values = random.uniform(size=len(names))
      verdicts.append(Verdict(dict(zip(names, map(float, values), strict=True)), "", "emulated"))
    return {"verdicts": verdicts}, ()

  def _measure_judge(self, video, jobs, rounds):
    del video, jobs, rounds
    return {"points": []}, ()  # nothing generates here

  def _heldout(self, video, prompt):
    del video, prompt
    return {"values": {}}, ()

  def _reference(self, old, trained, version):
    del old, trained, version
    return {}, (np.zeros(1, np.float32),)

  def _prefix(self, old, trained, version):
    del old, trained, version
    return {}, ()

  def _forward(self, old, reference=None, *, trained, version):
    del reference, version
    blocks = tuple(range(len(self._emulation.blocks)))
    return self._scores(old, (0, 0, 0), blocks, trained), ()

  def _replay(self, old, reference=None, *, key, blocks, trained, version):
    del reference, version
    self._fill(key, blocks, self._emulation.unit_weight)
    return self._scores(old, key, blocks, trained), ()

  def _backward(self, old, reference=None, *, key, trained, version, weights):
    del reference, version
    blocks = tuple(range(len(self._emulation.blocks)))
    self._fill(key, blocks, float(np.sum(weights)))
    return self._scores(old, key, blocks, trained), ()

  def _fold(self, key, blocks, early):
    del key, blocks, early
    return {}, ()

  def _reduce(self, step, update, parts, late):
    total = np.zeros(self._emulation.parameters, np.float64)
    for c, block in parts:
      total += float(np.sum(late[c])) * self._folded[step, update, c, block]
    size = sum(b.nbytes for b in self._folded.values())
    return {"dropped": 0, "parts": parts, "buffer_bytes": size}, (total,)

  def _update(self, adapter, ema, optimizer, *sums, skip, count):
    del count
    gradient = np.sum(sums, axis=0).astype(np.float32)
    scalars = {
      "grad_norm": float(np.linalg.norm(gradient)),
      "lr": 1e-3,
      "skipped": skip,
      "not_finite": False,
    }
    new = adapter if skip else (adapter - 1e-3 * gradient).astype(np.float32)
    return scalars, (new, (0.5 * (ema + new)).astype(np.float32), tuple(optimizer), gradient)

  # Stand-ins.

  def _scores(self, old, key, blocks, trained) -> dict[str, Any]:
    """Channels whose first is the rollout's score; later updates have moved a little."""
    emulation = self._emulation
    step, update, candidate = key
    chunks = tuple(c for b in blocks for c in emulation.blocks[b])
    kept = np.asarray(old)[np.ix_(chunks, trained)]
    out: dict[str, Any] = {"chunks": chunks}
    for name, count in (("channels", emulation.channels), ("statistics", emulation.statistics)):
      random = emulation.random(step + 1, update, candidate, len(name))
      out[name] = random.uniform(size=(*kept.shape, count)).astype(np.float32)
    moved = 1e-6 * out["channels"][..., 0] if update else 0.0
    out["channels"][..., 0] = kept + moved
    return out

  def _fill(self, key, blocks, weight: float) -> None:
    """Leaves one stand-in gradient a block."""
    for block in blocks:
      random = self._emulation.random(key[0] + 1, key[1], key[2], block, 7)
      values = weight * random.normal(size=self._emulation.parameters)
      self._folded[(*key, block)] = values.astype(np.float32)
