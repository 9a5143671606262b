"""Replays a recorded rollout of a causal Wan transformer through our port."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from models.wan.cache import KVCache, init_cache
from models.wan.dit import CausalWanDiT
from models.wan.schedule import denoising_schedule
from models.wan.weights import DIT_KEYS
from models.weights import fill, parameters, to_official, to_ours
from sbjax.algorithms.transitions import Renoise, clean_prediction
from sbjax.verification.recording import Recording
from sbjax.verification.result import Check, Comparison

TOLERANCE = 2e-4
TIMESTEP_TOLERANCE = 1e-3  # on the 0-1000 scale: ten float32 roundings


def replay_rollout(recording: Recording) -> list[Check]:
  """Largest differences of flow, x̂0, the re-noising chain, latents, caches and gradients.

  Every network call gets the recorded latents, so that one quantity's error is not blamed on
  another; the cache is our own from the first chunk on. As in the originals, every denoising step
  writes the cache, and the clean pass writes it last.

  Raises:
    ValueError: when the parameters are not those of the model that `meta` describes.
  """
  with jax.default_matmul_precision("highest"):
    return _replay(recording)


def _replay(recording: Recording) -> list[Check]:
  arrays, sampler = recording.arrays, recording.sampler
  model = _model(recording)
  graphdef, state = nnx.split(model)
  compared = Comparison(TOLERANCE)
  timesteps, sigmas = denoising_schedule(sampler)
  compared.add("timesteps", timesteps, arrays["timesteps"], absolute=TIMESTEP_TOLERANCE)
  compared.add("sigmas", sigmas, arrays["sigmas"])

  prompt = jnp.asarray(arrays["prompt_embeds"])
  context = model.embed_text(prompt)
  batch, frames = prompt.shape[0], sampler.frames_per_chunk
  forward = jax.jit(lambda *args: nnx.merge(graphdef, state)(*args))
  write = jax.jit(lambda *args: nnx.merge(graphdef, state).write_cache(*args))
  where = tuple(int(i) for i in arrays["grad/where"]) if recording.has_gradient else None
  cache = init_cache(recording.dit, sampler, batch)
  finished = []
  for c in range(recording.chunks):
    start = jnp.asarray(c * frames, jnp.int32)
    compared.add("x", arrays[f"chunk{c}/x_init"], arrays[f"chunk{c}/step0/x"])
    for k in range(recording.steps):
      at = f"chunk{c}/step{k}/"
      x = jnp.asarray(arrays[at + "x"])
      t = jnp.full((batch, frames), timesteps[k], jnp.float32)
      if (c, k) == where:
        _compare_gradients(compared, recording, graphdef, state, (x, t, prompt, cache, start))
      flow, cache = forward(x, t, context, cache, start)
      compared.add("flow", np.asarray(flow), arrays[at + "flow"])
      sigma = jnp.asarray(sigmas[k])
      x0 = clean_prediction(x, flow, sigma)
      compared.add("x0", np.asarray(x0), arrays[at + "x0"])
      if k + 1 < recording.steps:
        mean, std = Renoise().step(x, flow, sigma, jnp.asarray(sigmas[k + 1]))
        x_next = mean + std * jnp.asarray(arrays[at + "renoise"])
        compared.add("x", np.asarray(x_next), arrays[f"chunk{c}/step{k + 1}/x"])
      else:
        finished.append(x0)
        cache = write(x0, context, cache, start)
  compared.add("latents", np.asarray(jnp.concatenate(finished, axis=1)), arrays["latents"])
  _compare_cache(compared, recording, cache)
  return compared.checks()


def _model(recording: Recording) -> CausalWanDiT:
  # The shapes alone: drawing parameters that are replaced at once would only cost time.
  model = nnx.eval_shape(lambda: CausalWanDiT(recording.dit, rngs=nnx.Rngs(0)))
  ours = to_ours(str(recording.path), recording.parameters.items(), DIT_KEYS, parameters(model))
  fill(model, ours)
  return model


def _compare_gradients(
  compared: Comparison,
  recording: Recording,
  graphdef: Any,
  state: Any,
  inputs: tuple[Array, Array, Array, KVCache, Array],
) -> None:
  x, t, prompt, cache, start = inputs
  cotangent = jnp.asarray(recording.arrays["grad/cotangent"])

  def loss(state: Any, x: Array) -> Array:
    model = nnx.merge(graphdef, state)
    flow, _ = model(x, t, model.embed_text(prompt), cache, start)
    return jnp.sum(flow * cotangent)

  gradient: Callable[..., Any] = jax.jit(jax.grad(loss, argnums=(0, 1)))
  of_state, of_x = gradient(state, x)
  compared.add("grad/x", np.asarray(of_x), recording.arrays["grad/x"])
  flat = {
    ".".join(str(part) for part in path): variable[...]
    for path, variable in nnx.to_flat_state(of_state)
  }
  ours = dict(to_official(flat, DIT_KEYS))
  for name, reference in recording.parameter_gradients.items():
    compared.add(f"grad/param/{name}", ours[name], reference)


def _compare_cache(compared: Comparison, recording: Recording, cache: KVCache) -> None:
  """Compares filled slots only: what lies past `local_end` is read by nobody."""
  arrays = recording.arrays
  filled = int(arrays["cache/local_end"])
  for name in "kv":
    ours = np.asarray(getattr(cache, name)).transpose(0, 1, 3, 2, 4)
    for layer in range(recording.dit.num_layers):
      reference = arrays[f"cache/{layer}/{name}"]
      compared.add(f"cache/{name}", ours[layer][:, :filled], reference[:, :filled])
  for name in ("local_end", "global_end"):
    ours = np.asarray(getattr(cache, name))
    compared.add(f"cache/{name}", ours, arrays[f"cache/{name}"], absolute=0.0)
