"""Rollout: a video's latents chunk by chunk, with everything that a replay needs recorded.

Also turns a recorded trajectory back into replay points, so that rollout and replay evaluate the
same network on the same inputs with one transition.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from sbjax.randomness import Purpose, draw_key
from sbjax.separation.channels import ChannelFn, Point, Transition
from sbjax.separation.policy import Cache, Conditioning, Params, Policy
from sbjax.separation.replay import ReplayInputs, add_trees
from sbjax.trajectory import Schedule, Trajectory


@dataclasses.dataclass(frozen=True)
class RolloutFunctions:
  """The jitted pieces of a rollout.

  Attributes:
    generate_chunk: (adapter, frozen, cache, conditioning, chunk, start_frame, seed, seed_initial)
      -> (states [K+1, ...], scores [K−1], anchor, cache with the finished chunk).
    fused_chunk: the same arguments, weights [K−1] and the trained steps (static) -> (states,
      scores, gradient Σ weight · ∇score over the trained steps, cache). None where the objective's
      points are not the trajectory's own, so that a rollout cannot take its gradient.
    forward_noise: (clean, seed, chunk, step) -> forward-process input of one chunk and step.
    init_cache: () -> cache.
    schedule: the sampler's steps.
    points: where the objective evaluates the network.
    transition: how a step explores.
  """

  generate_chunk: Callable[..., tuple[Array, Array, Array, Cache]]
  fused_chunk: Callable[..., tuple[Array, Array, Params, Cache]] | None
  forward_noise: Callable[..., Array]
  init_cache: Callable[[], Cache]
  schedule: Schedule
  points: Literal["trajectory", "forward"]
  transition: Transition


def make_rollout(
  policy: Policy,
  transition: Transition,
  schedule: Schedule,
  score: ChannelFn,
  chunk_shape: tuple[int, int, int, int],
  points: Literal["trajectory", "forward"] = "trajectory",
) -> RolloutFunctions:
  """Builds the jitted pieces.

  Args:
    policy: the video model.
    transition: gives mean and standard deviation of a step; the same object replays use.
    schedule: the sampler's steps.
    score: the objective's score, recorded at each stochastic step.
    chunk_shape: (frames, channels, height, width) of a chunk.
    points: `forward` evaluates score and anchor at the clean latents noised anew, not at the
      trajectory's own states.
  """
  sigmas = np.asarray(schedule.sigmas, np.float32)
  timesteps = np.asarray(schedule.timesteps, np.float32)
  last = schedule.stochastic

  def forward_noise(clean, seed, chunk, step):
    """(1−σ)·clean + σ·noise with the candidate's own noise for this chunk and step."""
    noise = jax.random.normal(
      draw_key(seed, chunk, step, Purpose.FORWARD), chunk_shape, jnp.float32
    )
    sigma = jnp.asarray(sigmas)[step]
    return (1.0 - sigma) * clean + sigma * noise

  def explore(velocity_of, seed, chunk, x, k):
    """One stochastic step: the next state and its score."""
    velocity = velocity_of(x, k)
    sigma, sigma_next = jnp.asarray(sigmas)[k], jnp.asarray(sigmas)[k + 1]
    mean, std = transition.step(x, velocity, sigma, sigma_next)
    noise = jax.random.normal(draw_key(seed, chunk, k, Purpose.STEP), chunk_shape, jnp.float32)
    # The action is a sample: a score's gradient goes through the mean alone.
    following = jax.lax.stop_gradient(mean + std * noise)
    point = Point(
      x=x,
      timestep=jnp.asarray(timesteps)[k],
      sigma=sigma,
      sigma_next=sigma_next,
      target=following,
      anchor=jax.lax.stop_gradient(mean),
      reference=jnp.zeros_like(x),
    )
    return following, score(point, velocity, transition)

  def velocities(adapter, frozen, conditioning, cache, start_frame):
    """The network at one chunk, as a function of state and step."""

    def velocity_of(x, k):
      return policy.velocity(
        adapter, frozen, x, jnp.asarray(timesteps)[k], conditioning, cache, start_frame
      )

    return velocity_of

  @jax.jit
  def generate_chunk(adapter, frozen, cache, conditioning, chunk, start_frame, seed, seed_initial):
    predict = velocities(adapter, frozen, conditioning, cache, start_frame)

    def stochastic_step(x, k):
      following, value = explore(predict, seed, chunk, x, k)
      return following, (x, value)

    initial = jax.random.normal(
      draw_key(seed_initial, chunk, 0, Purpose.INITIAL), chunk_shape, jnp.float32
    )
    x, (inputs, scores) = jax.lax.scan(stochastic_step, initial, jnp.arange(last))
    clean = x - sigmas[last] * predict(x, last)
    if points == "forward":

      def forward_step(k):
        noisy = forward_noise(clean, seed, chunk, k)
        velocity = predict(noisy, k)
        point = Point(
          x=noisy,
          timestep=jnp.asarray(timesteps)[k],
          sigma=jnp.asarray(sigmas)[k],
          sigma_next=jnp.asarray(sigmas)[k + 1],
          target=clean,
          anchor=velocity,
          reference=jnp.zeros_like(noisy),
        )
        return velocity, score(point, velocity, transition)

      anchor, scores = jax.lax.map(forward_step, jnp.arange(last))
    else:
      anchor = jnp.zeros((0,), jnp.float32)
    states = jnp.concatenate([inputs, x[None], clean[None]])
    after = policy.write_cache(adapter, frozen, clean, conditioning, cache, start_frame)
    return states, scores, anchor, after

  @functools.partial(jax.jit, static_argnames="trained")
  def fused_chunk(
    adapter,
    frozen,
    cache,
    conditioning,
    chunk,
    start_frame,
    seed,
    seed_initial,
    weights,
    *,
    trained,
  ):
    cache = jax.lax.stop_gradient(cache)

    def step(a, x, k):
      predict = velocities(a, frozen, conditioning, cache, start_frame)
      following, value = explore(predict, seed, chunk, x, k)
      return value * weights[k], (following, value)

    x = jax.random.normal(
      draw_key(seed_initial, chunk, 0, Purpose.INITIAL), chunk_shape, jnp.float32
    )
    states, scores, total = [x], [], jax.tree.map(jnp.zeros_like, adapter)
    for k in range(last):
      if k in trained:
        (_, (x, value)), gradient = jax.value_and_grad(step, has_aux=True)(adapter, x, k)
        total = jax.tree.map(jnp.add, total, gradient)
      else:
        _, (x, value) = step(adapter, x, k)
      states.append(x)
      scores.append(value)
    predict = velocities(adapter, frozen, conditioning, cache, start_frame)
    clean = x - sigmas[last] * predict(x, last)
    after = policy.write_cache(adapter, frozen, clean, conditioning, cache, start_frame)
    return jnp.stack([*states, clean]), jnp.stack(scores), total, after

  return RolloutFunctions(
    generate_chunk,
    fused_chunk if points == "trajectory" else None,
    jax.jit(forward_noise),
    jax.jit(policy.init_cache),
    schedule,
    points,
    transition,
  )


def generate(
  functions: RolloutFunctions,
  adapter: Params,
  frozen: Params,
  conditioning: Conditioning,
  prompt_embeds: Float[np.ndarray, "text_len text_dim"],
  *,
  chunks: int,
  frames_per_chunk: int,
  seed: int,
  seed_initial: int,
  version: str,
) -> Trajectory:
  """Generates one candidate.

  Args:
    functions: the jitted pieces.
    adapter: the rollout's adapter.
    frozen: the network's other weights.
    conditioning: the prompt after the network's text layers.
    prompt_embeds: the prompt before them, recorded so that any worker can replay.
    chunks: C, chunks of the video.
    frames_per_chunk: latent frames of a chunk.
    seed: stream of the step noise, below 2**32.
    seed_initial: stream of the initial noise.
    version: the adapter's version, recorded.
  """
  cache = functions.init_cache()
  states, scores, anchors = [], [], []
  for chunk in range(chunks):
    x, s, anchor, cache = functions.generate_chunk(
      adapter,
      frozen,
      cache,
      conditioning,
      jnp.asarray(chunk, jnp.int32),
      jnp.asarray(chunk * frames_per_chunk, jnp.int32),
      jnp.asarray(seed, jnp.uint32),
      jnp.asarray(seed_initial, jnp.uint32),
    )
    states.append(x)
    scores.append(s)
    anchors.append(anchor)
  return Trajectory(
    x=np.stack([np.asarray(x) for x in states]),
    old_scores=np.stack([np.asarray(s) for s in scores]),
    prompt_embeds=np.asarray(prompt_embeds),
    seed=seed,
    seed_initial=seed_initial,
    version=version,
    anchor=np.stack([np.asarray(a) for a in anchors]),
  )


def generate_fused(
  functions: RolloutFunctions,
  adapter: Params,
  frozen: Params,
  conditioning: Conditioning,
  prompt_embeds: Float[np.ndarray, "text_len text_dim"],
  *,
  blocks: Sequence[Sequence[int]],
  trained: tuple[int, ...],
  weights: Float[np.ndarray, "chunks trained"],
  frames_per_chunk: int,
  seed: int,
  seed_initial: int,
  version: str,
) -> tuple[Trajectory, list[Params]]:
  """Generates one candidate and takes its gradient on the way, with weights known beforehand.

  It is the merged replay of the first mini-batch without its forward pass: the adapter has not
  moved since, so the ratio is one and nothing needs the rewards (as LeanGRPO does it for a whole
  rollout).

  Args:
    functions: the jitted pieces.
    adapter: the rollout's adapter, which is the trained one.
    frozen: the network's other weights.
    conditioning: the prompt after the network's text layers.
    prompt_embeds: the prompt before them.
    blocks: the folding blocks of chunks.
    trained: denoising steps that are trained on.
    weights: the weight of each chunk's and trained step's score.
    frames_per_chunk: latent frames of a chunk.
    seed: stream of the step noise, below 2**32.
    seed_initial: stream of the initial noise.
    version: the adapter's version, recorded.

  Returns:
    The record, and one folded gradient per block.

  Raises:
    ValueError: if the objective's points are not the trajectory's own.
  """
  if functions.fused_chunk is None:
    raise ValueError(
      "fused candidates need an objective that scores the trajectory's own states; "
      "use runtime.fused=0 with forward-process objectives"
    )
  cache = functions.init_cache()
  states, scores = [], []
  totals: list[Params] = [None] * len(blocks)
  for index, block in enumerate(blocks):
    for chunk in block:
      spread = np.zeros(functions.schedule.stochastic, np.float32)
      spread[list(trained)] = weights[chunk]
      x, s, gradient, cache = functions.fused_chunk(
        adapter,
        frozen,
        cache,
        conditioning,
        jnp.asarray(chunk, jnp.int32),
        jnp.asarray(chunk * frames_per_chunk, jnp.int32),
        jnp.asarray(seed, jnp.uint32),
        jnp.asarray(seed_initial, jnp.uint32),
        jnp.asarray(spread),
        trained=trained,
      )
      states.append(x)
      scores.append(s)
      before = totals[index]
      totals[index] = gradient if before is None else add_trees(before, gradient)
  trajectory = Trajectory(
    x=np.stack([np.asarray(x) for x in states]),
    old_scores=np.stack([np.asarray(s) for s in scores]),
    prompt_embeds=np.asarray(prompt_embeds),
    seed=seed,
    seed_initial=seed_initial,
    version=version,
    anchor=np.zeros((len(states), 0), np.float32),
  )
  return trajectory, totals


def replay_inputs(
  functions: RolloutFunctions,
  trajectory: Trajectory,
  conditioning: Conditioning,
  trained_steps: Sequence[int],
  frames_per_chunk: int,
  reference: Float[np.ndarray, "..."] | None = None,
) -> ReplayInputs:
  """Turns a recorded trajectory into replay points.

  Args:
    functions: the rollout's pieces; they give the schedule and the forward noise again.
    trajectory: the record.
    conditioning: the prompt after the network's text layers.
    trained_steps: the denoising steps that are replayed, drawn before the rollout.
    frames_per_chunk: latent frames of a chunk.
    reference: what the initial adapter predicts, [C, trained steps, ...], where a channel reads it.
  """
  steps = np.asarray(trained_steps, np.int32)
  sigmas = np.asarray(functions.schedule.sigmas, np.float32)
  index = jnp.asarray(steps)
  common: dict[str, Any] = {
    "timestep": jnp.asarray(np.asarray(functions.schedule.timesteps, np.float32)[steps]),
    "sigma": jnp.asarray(sigmas[steps]),
    "sigma_next": jnp.asarray(sigmas[steps + 1]),
  }
  points = []
  for chunk in range(trajectory.x.shape[0]):
    states = trajectory.x[chunk]
    seed = jnp.asarray(trajectory.seed, jnp.uint32)
    where: Int[Array, ""] = jnp.asarray(chunk, jnp.int32)
    if functions.points == "forward":
      x = jnp.stack(
        [functions.forward_noise(jnp.asarray(states[-1]), seed, where, k) for k in index]
      )
      target = jnp.broadcast_to(jnp.asarray(states[-1])[None], x.shape)
      anchor = jnp.asarray(trajectory.anchor[chunk][steps])
    else:
      x, target = jnp.asarray(states[steps]), jnp.asarray(states[steps + 1])
      anchor = _rollout_means(functions, target, seed, where, index, common)
    other = jnp.zeros_like(x) if reference is None else jnp.asarray(reference[chunk])
    points.append(Point(x=x, target=target, anchor=anchor, reference=other, **common))
  clean = [jnp.asarray(trajectory.x[c, -1]) for c in range(trajectory.x.shape[0])]
  return ReplayInputs(points, clean, conditioning, frames_per_chunk)


def _rollout_means(functions, target, seed, chunk, steps, common):
  """μ_old of each step: the next state less its noise, which its key gives again."""
  means = []
  for row, k in enumerate(steps):
    noise = jax.random.normal(draw_key(seed, chunk, k, Purpose.STEP), target.shape[1:], jnp.float32)
    # The injected std depends on the noise levels only, never on state or prediction.
    _, std = functions.transition.step(
      target[row], jnp.zeros_like(target[row]), common["sigma"][row], common["sigma_next"][row]
    )
    means.append(target[row] - std * noise)
  return jnp.stack(means)
