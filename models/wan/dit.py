"""Wan2.1's diffusion transformer in its causal form: chunks of frames, a key-value cache.

One block function serves three callers: denoising with a cache (`__call__`), the clean pass that
fills the cache (`write_cache`) and the cache-free forward over a whole clip (`teacher_forcing`).
They differ only in the keys that a query group attends to.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from models.layers.attention import KeySet, attention, merge_heads
from models.layers.linear import Linear
from models.layers.norms import layer_norm
from models.layers.rope import check_frames, rope_tables
from models.layers.rounding import round_to
from models.wan.block import (
  Block,
  BlockParams,
  Lora,
  Rotary,
  Tree,
  gelu,
  modulated,
  modulation_init,
)
from models.wan.cache import KVCache, SlotPlan, past_slots, plan_slots, write_slots
from models.wan.precision import LINEAR_RESULT, Precision, activation, apply_linear, policy
from models.wan.presets import DiTConfig
from models.wan.sharding import check_mesh, constrain_tokens
from models.wan.teacher_forcing import TeacherForcingMixer
from models.wan.time_embedding import timestep_sinusoid


class CausalWanDiT(nnx.Module):
  """A Wan2.1 transformer that predicts flow (velocity) for a chunk of latent frames.

  Latents are `[batch, frames, channels, height, width]`; timesteps are on the 0-1000 scale, one per
  latent frame, and may be fractional. Parameters carry the official names (`blocks.self_attn.q` and
  so on), stacked over blocks.
  """

  def __init__(
    self,
    cfg: DiTConfig,
    *,
    rngs: nnx.Rngs,
    param_dtype: Any = jnp.float32,
    mesh: Mesh | None = None,
  ):
    """Draws the parameters as Wan2.1 initialises them (Xavier, small embeddings, a zero head).

    With a `mesh` (axes `fsdp` and `seq`) the tokens are kept cut over `seq`; placing the parameters
    is the caller's (`models.wan.sharding`).

    Raises:
      ValueError: when the mesh lacks an axis.
    """
    if mesh is not None:
      check_mesh(mesh)
    self.cfg = cfg
    self.mesh = mesh
    small = nnx.initializers.normal(0.02)

    def dense(fan_in: int, fan_out: int, **kwargs: Any) -> Linear:
      return Linear(fan_in, fan_out, rngs=rngs, param_dtype=param_dtype, **kwargs)

    patch = cfg.patch_size[1] * cfg.patch_size[2]
    self.patch_embedding = dense(cfg.in_dim * patch, cfg.dim)
    self.text_in = dense(cfg.text_dim, cfg.dim, kernel_init=small)
    self.text_out = dense(cfg.dim, cfg.dim, kernel_init=small)
    self.time_in = dense(cfg.freq_dim, cfg.dim, kernel_init=small)
    self.time_out = dense(cfg.dim, cfg.dim, kernel_init=small)
    self.time_projection = dense(cfg.dim, 6 * cfg.dim)
    self.blocks = BlockParams(cfg, rngs, param_dtype)
    self.head_modulation = nnx.Param(modulation_init(rngs, (2, cfg.dim), param_dtype))
    self.head = dense(cfg.dim, cfg.out_dim * patch, kernel_init=nnx.initializers.zeros_init())

  def embed_text(
    self, prompt_embeds: Float[Array, "batch text_len text_dim"]
  ) -> Float[Array, "batch text_len dim"]:
    """The text MLP, in the type that the policy computes in. All rows count: the zero rows past a
    prompt become non-zero through the biases, as in Wan2.1.

    Raises:
      ValueError: when the embedding has another shape than the configuration says.
    """
    expected = (self.cfg.text_len, self.cfg.text_dim)
    if prompt_embeds.shape[1:] != expected:
      raise ValueError(
        f"prompt_embeds is {prompt_embeds.shape[1:]} per video; {self.cfg.name} needs {expected}."
      )
    dtype = self._precision.compute
    hidden = activation(gelu, _dense(self.text_in, prompt_embeds, dtype))
    return _dense(self.text_out, hidden, dtype)

  def __call__(
    self,
    x: Float[Array, "batch frames in_dim height width"],
    timestep: Float[Array, "batch frames"],
    context: Float[Array, "batch text_len dim"],
    cache: KVCache,
    start_frame: int | Int[Array, ""],
    *,
    lora: Lora | None = None,
    lora_scale: float = 1.0,
  ) -> tuple[Float[Array, "batch frames out_dim height width"], KVCache]:
    """Flow of one chunk, and the cache with this chunk's keys and values in it (a value: keep it or
    drop it).

    Args:
      x: latents of the chunk, with conditioning channels after the latent ones where `in_dim >
        out_dim`.
      timestep: per frame, 0 to 1000.
      context: what `embed_text` gave.
      cache: the past.
      start_frame: absolute index of the chunk's first frame; may be traced.
      lora: adapter tree of `models.layers.lora`.
      lora_scale: alpha / rank.

    Raises:
      ValueError: when shapes do not fit, or a static `start_frame` runs past the rotary table or a
        global cache.
    """
    tokens, e, keys, values, plan = self._cached_pass(
      x, timestep, context, cache, start_frame, lora, lora_scale, last_block=True
    )
    flow = self._head(tokens, e, x.shape)
    return flow, write_slots(cache, plan, keys, values)

  def write_cache(
    self,
    x0: Float[Array, "batch frames in_dim height width"],
    context: Float[Array, "batch text_len dim"],
    cache: KVCache,
    start_frame: int | Int[Array, ""],
    *,
    lora: Lora | None = None,
    lora_scale: float = 1.0,
    rewrite_sink: bool = False,
  ) -> KVCache:
    """The clean pass: the cache after the finished chunk `x0`, encoded at timestep 0 without noise.

    Of the last block only keys and values are worked out, and no head. `rewrite_sink` is LongLive's
    prompt switch with a sink that is not kept.
    """
    timestep = jnp.zeros(x0.shape[:2], jnp.float32)
    _, _, keys, values, plan = self._cached_pass(
      x0,
      timestep,
      context,
      cache,
      start_frame,
      lora,
      lora_scale,
      last_block=False,
      rewrite_sink=rewrite_sink,
    )
    return write_slots(cache, plan, keys, values)

  def teacher_forcing(
    self,
    clean: Float[Array, "batch frames in_dim height width"],
    noisy: Float[Array, "batch copies frames in_dim height width"],
    timestep: Float[Array, "batch copies frames"],
    context: Float[Array, "batch text_len dim"],
    frames_per_chunk: int,
    *,
    lora: Lora | None = None,
    lora_scale: float = 1.0,
  ) -> Float[Array, "batch copies frames out_dim height width"]:
    """Flow of every chunk in one forward: each noisy chunk sees the clean chunks before it and
    itself.

    Several noisy copies share one clean stream (timestep 0). Equal to the cached rollout with a
    global window. Linear maps run on all tokens at once; attention runs per chunk, so nothing is
    masked away. The last clean chunk is attended by nobody and left out.

    Raises:
      ValueError: when the frames are no whole number of chunks.
    """
    batch, copies, frames = noisy.shape[:3]
    if frames % frames_per_chunk:
      raise ValueError(
        f"frames_per_chunk is {frames_per_chunk}; it must divide the clip's {frames} frames."
      )
    height, width = self._grid(noisy.shape)
    per_frame = height * width
    clean_frames = frames - frames_per_chunk
    sequence = jnp.concatenate(
      [clean[:, :clean_frames], noisy.reshape(batch, -1, *noisy.shape[3:])], axis=1
    )
    times = jnp.concatenate(
      [jnp.zeros((batch, clean_frames), jnp.float32), timestep.reshape(batch, -1)], axis=1
    )
    check_frames(frames)
    positions = jnp.concatenate(
      [jnp.arange(clean_frames), jnp.tile(jnp.arange(frames), copies)]
    ).astype(jnp.int32)
    rotary = Rotary(*rope_tables(positions, height, width, self.cfg.head_dim, self.cfg.rope_theta))
    mixer = TeacherForcingMixer(copies, frames, frames_per_chunk, per_frame)
    e, e0 = self._embed_time(times)
    tokens = self._patchify(sequence)

    def body(tokens: Array, layer: Tree) -> tuple[Array, None]:
      block = self._block(layer["params"], layer["lora"], lora_scale)
      tokens, _, _ = block(tokens, e0, context, rotary, mixer)
      return constrain_tokens(tokens, self.mesh), None

    layers = {"params": _pure(self.blocks), "lora": dict(lora or {})}
    tokens, _ = self._scan(body, tokens, layers)
    first_noisy = clean_frames * per_frame
    flow = self._head(
      tokens[:, first_noisy:],
      e[:, clean_frames:],
      (batch, copies * frames, *noisy.shape[3:]),
    )
    return flow.reshape(batch, copies, frames, *flow.shape[2:])

  def _cached_pass(
    self,
    x: Array,
    timestep: Array,
    context: Array,
    cache: KVCache,
    start_frame: int | Array,
    lora: Lora | None,
    lora_scale: float,
    *,
    last_block: bool,
    rewrite_sink: bool = False,
  ) -> tuple[Array, Array, Array, Array, SlotPlan]:
    frames = x.shape[1]
    height, width = self._grid(x.shape)
    self._check_chunk(x, context, cache, start_frame, height * width)
    start = jnp.asarray(start_frame, jnp.int32)
    plan = plan_slots(cache, start, frames * height * width, rewrite_sink=rewrite_sink)
    # A position past the table turns into NaN: so does a chunk that a global cache has no room for.
    positions = start + cache.position_offset + jnp.arange(frames, dtype=jnp.int32)
    positions = jnp.where(plan.overflow, 1 << 20, positions)
    rotary = Rotary(*rope_tables(positions, height, width, self.cfg.head_dim, self.cfg.rope_theta))
    past_bias = jnp.where(plan.attend_past, 0.0, -jnp.inf).astype(jnp.float32)
    own_bias = jnp.where(plan.attend_own, 0.0, -jnp.inf).astype(jnp.float32)
    e, e0 = self._embed_time(timestep)
    tokens = self._patchify(x)

    def body(tokens: Array, layer: Tree) -> tuple[Array, tuple[Array, Array]]:
      past_k, past_v = (past_slots(layer[name], plan) for name in "kv")

      def mixer(q: Array, k: Array, v: Array) -> Array:
        own = KeySet(k, v, own_bias)
        # A cache of exactly one chunk has no past.
        parts = (KeySet(past_k, past_v, past_bias), own) if past_bias.size else (own,)
        return merge_heads(attention(q[:, :, None], parts)[:, :, 0])

      block = self._block(layer["params"], layer["lora"], lora_scale)
      tokens, k, v = block(tokens, e0, context, rotary, mixer)
      return constrain_tokens(tokens, self.mesh), (k, v)

    layers = {
      "params": _pure(self.blocks),
      "lora": dict(lora or {}),
      "k": cache.k,
      "v": cache.v,
    }
    if last_block:
      tokens, (keys, values) = self._scan(body, tokens, layers)
      return tokens, e, keys, values, plan
    if self.cfg.num_layers > 1:
      tokens, (keys, values) = self._scan(body, tokens, layers, stop=self.cfg.num_layers - 1)
    else:
      keys, values = (old[:0, :, :, : plan.attend_own.size] for old in (cache.k, cache.v))
    last = jax.tree.map(lambda leaf: leaf[-1], layers)
    block = self._block(last["params"], last["lora"], lora_scale)
    _, k, v = block.queries_keys_values(tokens, e0, rotary)
    keys, values = (jnp.concatenate([a, b[None]], axis=0) for a, b in ((keys, k), (values, v)))
    return tokens, e, keys, values, plan

  def _scan(
    self, body: Callable, tokens: Array, layers: Tree, stop: int | None = None
  ) -> tuple[Array, Any]:
    """Runs `body` over the first `stop` layers (all of them by default)."""
    cfg = self.cfg
    if cfg.remat == "block":
      body = jax.checkpoint(body)
    elif cfg.remat == "dots":
      saved = jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        jax.checkpoint_policies.save_only_these_names(LINEAR_RESULT),
      )
      body = jax.checkpoint(body, policy=saved)
    if stop is None:
      return jax.lax.scan(body, tokens, layers, unroll=min(cfg.scan_unroll, cfg.num_layers))
    # Indexing inside the loop, because slicing off the last layer beforehand would copy all the
    # others.

    def step(tokens: Array, index: Array) -> tuple[Array, Any]:
      return body(tokens, jax.tree.map(lambda leaf: leaf[index], layers))

    indices = jnp.arange(stop, dtype=jnp.int32)
    return jax.lax.scan(step, tokens, indices, unroll=max(1, min(cfg.scan_unroll, stop)))

  @property
  def _precision(self) -> Precision:
    return policy(self.cfg.precision)

  def _block(self, params: Tree, lora: Lora, lora_scale: float) -> Block:
    return Block(self.cfg, params, lora, lora_scale)

  def _grid(self, shape: tuple[int, ...]) -> tuple[int, int]:
    height, width = shape[-2:]
    self.cfg.tokens_per_frame(height, width)
    return height // self.cfg.patch_size[1], width // self.cfg.patch_size[2]

  def _check_chunk(
    self, x: Array, context: Array, cache: KVCache, start_frame: int | Array, per_frame: int
  ) -> None:
    if x.shape[2] != self.cfg.in_dim:
      raise ValueError(
        f"x has {x.shape[2]} channels; {self.cfg.name} needs in_dim {self.cfg.in_dim}."
      )
    if cache.tokens_per_frame != per_frame:
      raise ValueError(
        f"cache has {cache.tokens_per_frame} tokens per frame; x needs {per_frame}, so make it "
        "with init_cache for the same latent size."
      )
    if cache.k.shape[1] != x.shape[0] or context.shape[0] != x.shape[0]:
      raise ValueError(
        f"x has batch {x.shape[0]}, cache {cache.k.shape[1]} and context {context.shape[0]}; they "
        "must be equal."
      )
    if isinstance(start_frame, int):
      check_frames(start_frame + x.shape[1])
      slots = cache.k.shape[3] // per_frame
      if cache.window_tokens is None and start_frame + x.shape[1] > slots:
        raise ValueError(
          f"start_frame is {start_frame}; a chunk of {x.shape[1]} frames there overflows the cache "
          f"of {slots} frames, so raise cache_frames or set window_frames."
        )

  def _patchify(self, x: Array) -> Array:
    """Tokens in (frame, row, column) order; inside a patch the channel is slowest, as in Wan's
    convolution.
    """
    batch, frames, channels, height, width = x.shape
    _, ph, pw = self.cfg.patch_size
    x = x.astype(jnp.float32).reshape(batch, frames, channels, height // ph, ph, width // pw, pw)
    x = x.transpose(0, 1, 3, 5, 2, 4, 6).reshape(batch, -1, channels * ph * pw)
    tokens = _dense(self.patch_embedding, x, self._precision.compute)
    return constrain_tokens(round_to(tokens, self._precision.stream), self.mesh)

  def _embed_time(self, timestep: Array) -> tuple[Array, Array]:
    """Per frame: e `[batch, frames, dim]` for the head and e0 `[batch, frames, 6, dim]` for the
    blocks.
    """
    dtype = self._precision.stream
    sinusoid = timestep_sinusoid(timestep, self.cfg.freq_dim)
    hidden = activation(jax.nn.silu, _dense(self.time_in, sinusoid, dtype))
    e = _dense(self.time_out, hidden, dtype)
    e0 = _dense(self.time_projection, activation(jax.nn.silu, e), dtype)
    return e, e0.reshape(*e.shape[:-1], 6, self.cfg.dim)

  def _head(self, tokens: Array, e: Array, shape: tuple[int, ...]) -> Array:
    """Flow from tokens; inside a patch the channel is fastest (the opposite of `_patchify`)."""
    cfg = self.cfg
    batch, frames, _, height, width = shape
    _, ph, pw = cfg.patch_size
    precision, table = self._precision, self.head_modulation[...]
    shift, scale = (precision.add(table[i][None, None, None], e[:, :, None]) for i in range(2))
    x = layer_norm(tokens, cfg.eps).reshape(batch, frames, -1, cfg.dim)
    y = _dense(self.head, modulated(x, shift, scale, precision), precision.stream)
    y = y.reshape(batch, frames, height // ph, width // pw, ph, pw, cfg.out_dim)
    return y.transpose(0, 1, 6, 2, 4, 3, 5).reshape(batch, frames, cfg.out_dim, height, width)


def _dense(layer: Linear, x: Array, dtype: Any) -> Array:
  return apply_linear(x, layer.kernel[...], layer.bias[...], dtype)


def _pure(module: nnx.Module) -> Tree:
  return nnx.to_pure_dict(nnx.state(module))
