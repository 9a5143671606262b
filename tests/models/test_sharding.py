"""The same functions on a 2 × 2 mesh of fake devices and on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from models.layers.lora import LoRAConfig, init_lora
from models.wan.cache import init_cache
from models.wan.dit import CausalWanDiT
from models.wan.presets import DiTConfig, SamplerConfig
from models.wan.sharding import (
  cache_sharding,
  constrain_tokens,
  kernel_spec,
  parameter_shardings,
  replicated,
)

CFG = DiTConfig("tiny", 16, 32, 2, 2, in_dim=3, out_dim=3, text_dim=6, text_len=4, freq_dim=8)
SAMPLER = SamplerConfig(
  frames_per_chunk=2,
  window_frames=4,
  cache_frames=4,
  latent_channels=3,
  latent_height=4,
  latent_width=4,
)


@pytest.fixture
def mesh() -> Mesh:
  return Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("fsdp", "seq"))


def _run(mesh: Mesh | None):
  """Cache after a clean pass, and the gradient of an adapter for the next chunk."""
  model = nnx.jit(lambda: CausalWanDiT(CFG, rngs=nnx.Rngs(0), mesh=mesh))()
  model.head.kernel[...] = jnp.ones_like(model.head.kernel[...]) * 0.1
  graphdef, state = nnx.split(model)
  lora = init_lora(LoRAConfig(2), CFG, jax.random.key(1))
  lora = jax.tree.map(lambda leaf: leaf + 0.05, lora)
  x = jax.random.normal(jax.random.key(2), (1, 4, 3, 4, 4))
  prompt = jax.random.normal(jax.random.key(3), (1, 4, 6))
  cache = init_cache(CFG, SAMPLER, 1)
  if mesh is not None:
    state = jax.device_put(state, parameter_shardings(state, mesh))
    lora = jax.device_put(lora, parameter_shardings(lora, mesh))
    x, prompt = jax.device_put((x, prompt), replicated(mesh))
    of_cache = jax.tree.map(
      lambda leaf: cache_sharding(mesh) if leaf.ndim else replicated(mesh), cache
    )
    cache = jax.device_put(cache, of_cache)

  @jax.jit
  def step(state, lora, cache, x, prompt):
    model = nnx.merge(graphdef, state)
    context = model.embed_text(prompt)
    kwargs = {"lora": lora, "lora_scale": 0.5}
    cache = model.write_cache(x[:, :2], context, cache, jnp.int32(0), **kwargs)

    def score(lora):
      flow, _ = model(
        x[:, 2:], jnp.full((1, 2), 500.0), context, cache, jnp.int32(2), lora=lora, lora_scale=0.5
      )
      return jnp.mean(flow**2)

    return cache, jax.value_and_grad(score)(lora)

  return state, step(state, lora, cache, x, prompt)


def test_four_devices_compute_what_one_does(mesh):
  state, sharded = _run(mesh)
  _, single = _run(None)
  for a, b in zip(jax.tree.leaves(sharded), jax.tree.leaves(single), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5 * max(1.0, float(np.abs(b).max())))
  kernel = state["blocks"]["ffn"]["up"]["kernel"].get_value()
  assert kernel.addressable_shards[0].data.shape == (2, 16, 16)  # a half on each of two


def test_the_wider_side_of_a_kernel_is_cut():
  assert kernel_spec((4, 8, 16), 2) == P(None, None, "fsdp")
  assert kernel_spec((4, 16, 8), 2) == P(None, "fsdp", None)
  assert kernel_spec((4, 16, 7), 3) == P()
  assert kernel_spec((8,), 2) == P()


def test_tokens_are_cut_over_seq_and_left_alone_without_a_mesh(mesh):
  tokens = jnp.zeros((1, 8, 4))
  cut = jax.jit(lambda t: constrain_tokens(t, mesh))(tokens)
  assert cut.addressable_shards[0].data.shape == (1, 4, 4)
  assert constrain_tokens(tokens, None) is tokens


def test_a_mesh_without_the_axes_is_refused():
  wrong = Mesh(np.array(jax.devices()[:2]), ("data",))
  with pytest.raises(ValueError, match=r"mesh has the axes \('data',\)"):
    CausalWanDiT(CFG, rngs=nnx.Rngs(0), mesh=wrong)
  with pytest.raises(ValueError, match="it must have 'fsdp' and 'seq'"):
    parameter_shardings({}, wrong)
