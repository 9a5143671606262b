"""A worker: one process that holds models, adapters by version, and gradient buffers.

Each operation is a pure function of its arguments, its heavy inputs and the adapter version that it
names. A worker that does not hold the version refuses.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sbjax.rewards.protocol import Job, Judge, judge_with_retries
from sbjax.rollout import generate, generate_fused, replay_inputs
from sbjax.runtime import judge_measuring, memory
from sbjax.runtime.early import early_weights, known_weights
from sbjax.runtime.optimizer import initial_state
from sbjax.runtime.roles import Roles, place
from sbjax.separation import buffers as buffer_lib
from sbjax.separation import replay as replay_lib
from sbjax.trajectory import Trajectory

Output = tuple[dict[str, Any], tuple[Any, ...]]


@dataclasses.dataclass(frozen=True)
class BufferKey:
  """Which gradients: of which update, candidate and folding block."""

  step: int
  update: int
  candidate: int
  block: int


class Worker:
  """Runs operations; see the methods for what each takes and gives.

  Args:
    name: its name.
    build: gives the models; called once, on first use.
  """

  def __init__(self, name: str, build: Callable[[], Roles]):
    self._name = name
    self._build = build
    self._roles: Roles | None = None
    self._adapters: dict[str, Any] = {}
    self._folded: dict[BufferKey, np.ndarray] = {}
    self._units: dict[BufferKey, Any] = {}

  def call(self, op: str, args: Mapping[str, Any], *inputs: Any) -> tuple[dict[str, Any], ...]:
    """Runs one operation.

    Returns:
      (scalars with `seconds`, heavy results...).
    """
    start = time.perf_counter()
    scalars, heavy = getattr(self, f"op_{op}")(*inputs, **args)
    return {"seconds": time.perf_counter() - start, **scalars}, *heavy

  @property
  def roles(self) -> Roles:
    """The models, loaded on first use."""
    if self._roles is None:
      self._roles = self._build()
    return self._roles

  # What a worker is.

  def op_load(self) -> Output:
    """Loads the models; gives the banner's facts."""
    roles = self.roles
    devices = jax.local_devices()
    facts = {
      "platform": devices[0].platform,
      "device": devices[0].device_kind,
      "devices": len(devices),
      "memory_bytes": int((devices[0].memory_stats() or {}).get("bytes_limit", 0)),
      "parameters": dict(roles.parameters),
      "pixel_stride": roles.pixel_stride,
    }
    return facts, ()

  def op_initial_adapter(self) -> Output:
    """Gives the adapter as a run starts with it, flat, and the optimizer's first state."""
    flat = buffer_lib.flatten(self.roles.initial)
    return {}, (flat, initial_state(self.roles.recipe.settings.optim, flat.size))

  def op_set_adapter(self, flat: np.ndarray, version: str) -> Output:
    """Receives one adapter version."""
    tree = buffer_lib.unflatten(flat, self.roles.initial)
    self._adapters[version] = place(tree, self.roles.mesh)
    return {"version": version}, ()

  def op_keep(self, versions: tuple[str, ...], step: int) -> Output:
    """Forgets other adapter versions and other steps' buffers; says what the process occupies."""
    self._adapters = {v: a for v, a in self._adapters.items() if v in versions}
    self._folded = {k: b for k, b in self._folded.items() if k.step == step}
    self._units = {k: b for k, b in self._units.items() if k.step == step}
    return {"usage": memory.usage()}, ()

  # The step's tasks.

  def op_generate(
    self,
    prompt: str,
    seed: int,
    seed_initial: int,
    version: str,
    fused: tuple[int, int, int] | None = None,
    trained: tuple[int, ...] = (),
  ) -> Output:
    """Generates one candidate; gives old scores, and trajectory and latents as heavy results.

    With `fused`, the key of its buffers, it takes the first mini-batch's gradient on the way.
    """
    roles, recipe = self.roles, self.roles.recipe
    geometry = recipe.geometry
    embeds = self._embeds(prompt)
    common: dict[str, Any] = {
      "frames_per_chunk": geometry.frames_per_chunk,
      "seed": seed,
      "seed_initial": seed_initial,
      "version": version,
    }
    models = (
      self._adapter(version),
      roles.frozen,
      roles.condition(roles.frozen, jnp.asarray(embeds)),
      embeds,
    )
    scalars: dict[str, Any] = {}
    if fused is None:
      trajectory = generate(roles.rollout, *models, chunks=geometry.chunks, **common)
    else:
      known = known_weights(recipe, recipe.objective_of(0))
      if known is None or known.shape[-1] != 1:
        raise ValueError("this objective's first gradient depends on its scores; it cannot fuse")
      trajectory, folded = generate_fused(
        roles.rollout,
        *models,
        blocks=recipe.blocks,
        trained=trained,
        weights=known[..., 0],
        **common,
      )
      for block, gradient in enumerate(folded):
        self._folded[BufferKey(*fused, block)] = buffer_lib.flatten(gradient)[None]
      scalars = {
        "chunks": tuple(range(geometry.chunks)),
        "channels": trajectory.old_scores[:, list(trained), None],
        "statistics": np.zeros((geometry.chunks, len(trained), 0), np.float32),
      }
    scalars["old_scores"] = trajectory.old_scores
    scalars["finite"] = bool(np.isfinite(trajectory.x).all())
    return scalars, (trajectory, trajectory.latents)

  def op_decode(self, latents: np.ndarray) -> Output:
    """Decodes one candidate's latents to uint8 frames."""
    return {}, (self.roles.decode(latents),)

  def op_judge(
    self,
    *videos: np.ndarray,
    jobs: tuple[Job, ...],
    candidates: tuple[int, ...],
    retries: int,
    salt: tuple[int, ...] = (),
  ) -> Output:
    """Answers judge jobs; the videos come in the order of `candidates`.

    Args:
      videos: one a candidate.
      jobs: the questions.
      candidates: whose videos they are.
      retries: further attempts for a job that failed.
      salt: for measuring with one video in every place: makes them differ, from each other and
        from those of other salts, so that a judge finds nothing that it has seen before.
    """
    if salt:
      videos = judge_measuring.salted(videos, salt)
    by_candidate = dict(zip(candidates, videos, strict=True))
    verdicts = judge_with_retries(self._judge, jobs, by_candidate, retries)
    return {"verdicts": verdicts}, ()

  def op_measure_judge(self, video: np.ndarray, jobs: int, rounds: int) -> Output:
    """What a generating judge takes by frames, tokens and batch; none where there is no such."""
    frames = self.roles.recipe.settings.reward.judge.frames
    points = judge_measuring.measure_judge(
      self._judge, video, jobs=jobs, frames=frames, rounds=rounds
    )
    return {"points": points}, ()

  def op_heldout(self, video: np.ndarray, prompt: str) -> Output:
    """The held-out measure of one video, by name; empty where the world has none."""
    measure = self.roles.heldout
    if measure is None:
      return {"values": {}}, ()
    values = measure(np.asarray(video)[None], [prompt])
    return {"values": {name: float(v[0]) for name, v in values.items()}}, ()

  def op_reference(self, trajectory: Trajectory, trained: tuple[int, ...], version: str) -> Output:
    """What an adapter predicts at the trained points: means, or velocities at forward points."""
    roles = self.roles
    inputs = self._inputs(trajectory, trained, None)
    adapter, recipe = self._adapter(version), roles.recipe
    cache = roles.replay.init_cache()
    out = []
    for chunk, point in enumerate(inputs.points):
      start = jnp.asarray(chunk * inputs.frames_per_chunk, jnp.int32)
      out.append(roles.predict(adapter, roles.frozen, cache, point, inputs.conditioning, start))
      if chunk + 1 < recipe.geometry.chunks:
        cache = roles.replay.write_cache(
          adapter, roles.frozen, cache, inputs.clean[chunk], inputs.conditioning, start
        )
    return {}, (np.stack([np.asarray(o) for o in out]),)

  def op_prefix(self, trajectory: Trajectory, trained: tuple[int, ...], version: str) -> Output:
    """Rebuilds the context of one chunk, as a split replay's later part does; for profiles."""
    roles = self.roles
    inputs = self._inputs(trajectory, trained, None)
    start = jnp.asarray(0, jnp.int32)
    cache = roles.replay.init_cache()
    began = time.perf_counter()
    after = roles.replay.write_cache(
      self._adapter(version), roles.frozen, cache, inputs.clean[0], inputs.conditioning, start
    )
    jax.block_until_ready(after)
    return {"seconds": time.perf_counter() - began}, ()

  def op_forward(
    self,
    trajectory: Trajectory,
    reference: np.ndarray | None = None,
    *,
    trained: tuple[int, ...],
    version: str,
  ) -> Output:
    """The two-pass baseline's first half: channels and statistics."""
    roles = self.roles
    inputs = self._inputs(trajectory, trained, reference)
    scores = replay_lib.score(
      roles.replay,
      self._adapter(version),
      roles.frozen,
      inputs,
      range(roles.recipe.geometry.chunks),
    )
    return _scalars(scores), ()

  def op_replay(
    self,
    trajectory: Trajectory,
    reference: np.ndarray | None = None,
    *,
    key: tuple[int, int, int],
    blocks: tuple[int, ...],
    trained: tuple[int, ...],
    version: str,
  ) -> Output:
    """Merged replay of some folding blocks; keeps the gradients, gives channels and statistics.

    A whole replay folds at once with the objective's early weights. A part keeps one gradient per
    unit until `fold` brings the weights, which need every part's scores.
    """
    roles, recipe = self.roles, self.roles.recipe
    step, update, candidate = key
    inputs = self._inputs(trajectory, trained, reference)
    chunks = [recipe.blocks[b] for b in blocks]
    objective = recipe.objective_of(update)
    adapter = self._adapter(version)
    known = known_weights(recipe, objective)
    if known is not None:
      scores, folded = replay_lib.replay_folded(
        roles.replay, adapter, roles.frozen, inputs, chunks, known
      )
      for block, gradient in zip(blocks, folded, strict=True):
        key_ = BufferKey(step, update, candidate, block)
        self._folded[key_] = buffer_lib.flatten(gradient)[None]
      return _scalars(scores), ()
    scores, units = replay_lib.replay(
      roles.replay, adapter, roles.frozen, inputs, chunks, recipe.reduce_weights
    )
    scalars = _scalars(scores)
    for block, gradient in zip(blocks, units, strict=True):
      self._units[BufferKey(step, update, candidate, block)] = gradient
    if len(blocks) == len(recipe.blocks):
      old = np.asarray(trajectory.old_scores)[:, list(trained)]
      early = early_weights(recipe, update, scalars, old)
      self.op_fold(key=key, blocks=blocks, early=early)
    return scalars, ()

  def op_fold(
    self, key: tuple[int, int, int], blocks: tuple[int, ...], early: np.ndarray
  ) -> Output:
    """Folds kept unit gradients with the early weights."""
    for block in blocks:
      name = BufferKey(*key, block)
      if name in self._folded:
        continue  # its weights were known beforehand, so the replay folded as it went
      self._folded[name] = buffer_lib.fold(self._units.pop(name), early)
    return {}, ()

  def op_backward(
    self,
    trajectory: Trajectory,
    reference: np.ndarray | None = None,
    *,
    key: tuple[int, int, int],
    trained: tuple[int, ...],
    version: str,
    weights: np.ndarray,
  ) -> Output:
    """The two-pass baseline's second half: one gradient per block, rewards already in `weights`."""
    roles, recipe = self.roles, self.roles.recipe
    inputs = self._inputs(trajectory, trained, reference)
    scores, folded = replay_lib.replay_folded(
      roles.replay, self._adapter(version), roles.frozen, inputs, recipe.blocks, weights
    )
    for block, gradient in enumerate(folded):
      self._folded[BufferKey(*key, block)] = buffer_lib.flatten(gradient)[None]
    return _scalars(scores), ()

  def op_reduce(
    self,
    step: int,
    update: int,
    parts: tuple[tuple[int, int], ...],
    late: Mapping[int, np.ndarray],
  ) -> Output:
    """Sums some (candidate, block) buffers, each times its candidate's late coefficients."""
    total = np.zeros(self.roles.recipe.adapter_parameters, np.float64)
    held = [(self._folded[BufferKey(step, update, c, b)], late[c]) for c, b in parts]
    dropped = buffer_lib.accumulate(total, held)
    size = sum(b.nbytes for b in self._folded.values())
    return {"dropped": dropped, "parts": parts, "buffer_bytes": size}, (total,)

  def op_update(
    self,
    adapter: np.ndarray,
    ema: np.ndarray,
    optimizer: tuple[np.ndarray, ...],
    *sums: np.ndarray,
    skip: bool,
    count: int,
  ) -> Output:
    """Merges the workers' sums and takes one optimizer step."""
    merged = buffer_lib.merge(sums)
    outcome = self.roles.update(merged, adapter, ema, optimizer, skip=skip, count=count)
    return outcome.scalars, (outcome.adapter, outcome.ema, outcome.optimizer, outcome.gradient)

  # Helpers.

  @property
  def _judge(self) -> Judge:
    judge = self.roles.judge
    if judge is None:
      raise LookupError(f"{self._name} holds no judge; its group is not one that judges")
    return judge

  def _adapter(self, version: str) -> Any:
    if version not in self._adapters:
      held = ", ".join(sorted(self._adapters)) or "none"
      raise LookupError(f"{self._name} lacks adapter {version!r}; it holds {held}")
    return self._adapters[version]

  def _embeds(self, prompt: str) -> np.ndarray:
    # Not kept: one of Wan's takes 8 MB, and reading it again takes milliseconds.
    return np.asarray(self.roles.embed([prompt])[0], np.float32)

  def _inputs(
    self, trajectory: Trajectory, trained: tuple[int, ...], reference: np.ndarray | None
  ) -> replay_lib.ReplayInputs:
    roles = self.roles
    conditioning = roles.condition(roles.frozen, jnp.asarray(trajectory.prompt_embeds))
    frames = roles.recipe.geometry.frames_per_chunk
    return replay_inputs(roles.rollout, trajectory, conditioning, trained, frames, reference)


def _scalars(scores: Mapping[int, replay_lib.ChunkScores]) -> dict[str, Any]:
  order = sorted(scores)
  return {
    "chunks": tuple(order),
    "channels": np.stack([np.asarray(scores[c].channels) for c in order]),
    "statistics": np.stack([np.asarray(scores[c].statistics) for c in order]),
  }
