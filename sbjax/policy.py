"""The Wan policy: a causal Wan DiT with LoRA, as replay and rollout see it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from models.wan.cache import KVCache, init_cache
from models.wan.presets import DiTConfig, SamplerConfig
from sbjax.separation.policy import Params


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TextConditioning:
  """What a prompt became.

  Attributes:
    context: embedded text rows after the model's text layers, which no adapter touches.
    channels: conditioning channels that are concatenated to the latents; none for text-to-video
      models whose input is the latent alone.
  """

  context: Float[Array, "text_len dim"]
  channels: Float[Array, "extra height width"]


@dataclasses.dataclass(frozen=True, eq=False)
class WanPolicy:
  """Implements `sbjax.separation.policy.Policy` for one candidate at a time.

  Attributes:
    graphdef: the network's structure, from `nnx.split`.
    dit: its sizes.
    sampler: chunk, window and cache sizes.
    lora_scale: alpha / rank.
  """

  graphdef: Any
  dit: DiTConfig
  sampler: SamplerConfig
  lora_scale: float

  def init_cache(self) -> KVCache:
    """Gives the empty cache of one candidate."""
    return init_cache(self.dit, self.sampler, batch=1)

  def condition(
    self,
    frozen: Params,
    prompt_embeds: Float[Array, "text_len text_dim"],
    channels: Float[Array, "extra height width"],
  ) -> TextConditioning:
    """Embeds a prompt's text rows; zero rows past the prompt are attended as Wan does."""
    context = nnx.merge(self.graphdef, frozen).embed_text(prompt_embeds[None])[0]
    return TextConditioning(context, channels)

  def velocity(
    self,
    adapter: Params,
    frozen: Params,
    x: Float[Array, "frames channels height width"],
    timestep: Float[Array, ""],
    conditioning: TextConditioning,
    cache: KVCache,
    start_frame: Int[Array, ""],
  ) -> Float[Array, "frames channels height width"]:
    """Predicts the velocity of one chunk, float32 whatever the network computes in."""
    model = nnx.merge(self.graphdef, frozen)
    flow, _ = model(
      _with_channels(x, conditioning.channels)[None],
      jnp.full((1, x.shape[0]), timestep, jnp.float32),
      conditioning.context[None],
      cache,
      start_frame,
      lora=adapter,
      lora_scale=self.lora_scale,
    )
    return flow[0].astype(jnp.float32)

  def write_cache(
    self,
    adapter: Params,
    frozen: Params,
    clean: Float[Array, "frames channels height width"],
    conditioning: TextConditioning,
    cache: KVCache,
    start_frame: Int[Array, ""],
  ) -> KVCache:
    """Adds a finished chunk to the cache: timestep 0 on the unchanged latents."""
    model = nnx.merge(self.graphdef, frozen)
    return model.write_cache(
      _with_channels(clean, conditioning.channels)[None],
      conditioning.context[None],
      cache,
      start_frame,
      lora=adapter,
      lora_scale=self.lora_scale,
    )


def _with_channels(
  x: Float[Array, "frames channels height width"], extra: Float[Array, "extra height width"]
) -> Float[Array, "frames all height width"]:
  if extra.shape[0] == 0:
    return x
  shape = (x.shape[0], *extra.shape)
  return jnp.concatenate([x, jnp.broadcast_to(extra[None], shape).astype(x.dtype)], axis=1)
