"""Loads what sampling needs of a world: video model, prompts to conditioning, streaming decoder."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from models.layers.lora import lora_shapes
from models.wan.cache import KVCache
from models.wan.dit import CausalWanDiT
from models.wan.vae import WanVAE
from sbjax.policy import TextConditioning, WanPolicy
from sbjax.rollout import make_rollout
from sbjax.runtime.recipe import Recipe
from sbjax.runtime.roles import load_models, place, recipe_of, worker_mesh
from sbjax.sampling.chunks import Generator
from sbjax.sampling.decoding import DecodeChunk, stream_decoder
from sbjax.separation.buffers import unflatten
from sbjax.separation.channels import Point, Transition
from sbjax.separation.policy import Params
from sbjax.settings import Settings


@dataclasses.dataclass(frozen=True, eq=False)
class VideoModels:
  """Everything that makes videos.

  Attributes:
    recipe: geometry and sampler.
    generator: the video model.
    decode: the streaming decoder.
  """

  recipe: Recipe
  generator: Generator
  decode: DecodeChunk


def build(
  recipe: Recipe,
  dit: CausalWanDiT,
  vae: WanVAE,
  embed: Callable[[Sequence[str]], Float[np.ndarray, "prompts text_len text_dim"]],
  conditioning_channels: Float[np.ndarray, "extra height width"],
  adapter: Float[np.ndarray, " parameters"] | None,
) -> VideoModels:
  """Binds networks and adapter to the functions that sampling calls; compiles nothing yet.

  The noise is that of evaluation and training: one seed gives the same video everywhere.

  Args:
    recipe: geometry, sampler, LoRA and transition.
    dit: the video model.
    vae: its autoencoder.
    embed: prompts -> prompt embeddings.
    conditioning_channels: concatenated to every latent frame.
    adapter: flat LoRA weights; None for the model without one.

  Raises:
    ValueError: an adapter of another size.
  """
  mesh = worker_mesh(recipe.settings)
  if mesh is not None:
    dit.mesh = mesh
  graphdef, frozen = nnx.split(dit)
  frozen = place(frozen, mesh)
  policy = WanPolicy(graphdef, recipe.dit, recipe.sampler, recipe.lora.scale)
  tree: Params = {}
  if adapter is not None:
    shapes = lora_shapes(recipe.lora, recipe.dit)
    like = jax.tree.map(
      lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
      shapes,
      is_leaf=lambda node: isinstance(node, tuple),
    )
    tree = place(unflatten(adapter, like), mesh)
  rollout = make_rollout(
    policy, recipe.transition, recipe.schedule, _no_score, recipe.geometry.chunk_shape
  )
  channels = jnp.asarray(conditioning_channels, jnp.float32)
  condition = jax.jit(policy.condition)
  write = jax.jit(policy.write_cache)

  def generate(
    cache: KVCache, conditioning: TextConditioning, chunk: int, start_frame: int, seed: int
  ) -> tuple[Array, KVCache]:
    states, _, _, after = rollout.generate_chunk(
      tree,
      frozen,
      cache,
      conditioning,
      jnp.asarray(chunk, jnp.int32),
      jnp.asarray(start_frame, jnp.int32),
      jnp.asarray(seed, jnp.uint32),
      jnp.asarray(seed, jnp.uint32),
    )
    return states[-1], after

  return VideoModels(
    recipe,
    Generator(
      sampler=recipe.sampler,
      init_cache=rollout.init_cache,
      condition=lambda prompt: condition(frozen, jnp.asarray(embed([prompt])[0]), channels),
      generate=generate,
      write=lambda latents, cache, start_frame, conditioning: write(
        tree, frozen, latents, conditioning, cache, start_frame
      ),
    ),
    stream_decoder(vae),
  )


def _no_score(point: Point, velocity: Array, transition: Transition) -> Array:
  """Nobody reads a log-probability here."""
  del point, velocity, transition
  return jnp.zeros((), jnp.float32)


def load(
  settings: Settings,
  prompts: Sequence[str],
  adapter: Float[np.ndarray, " parameters"] | None,
) -> VideoModels:
  """Loads the configured world's models.

  Args:
    settings: the model and, of the runtime, this process' devices.
    prompts: embedded first, where the text encoder does not stay on the device; it comes back for
      any other.
    adapter: as in `build`.

  Raises:
    ValueError: weights that cannot be used, or an adapter of another size.
  """
  world = load_models(settings, prompts)
  return build(
    recipe_of(settings),
    world.dit,
    world.vae,
    world.embed,
    world.conditioning_channels,
    adapter,
  )
