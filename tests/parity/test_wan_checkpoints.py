"""Transformers and adapters through published layouts, against diffusers, PEFT and torch itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.checkpoints.convert import convert
from models.checkpoints.families import DIT
from models.checkpoints.lora import read_lora, write_lora
from models.checkpoints.opening import open_checkpoint
from models.checkpoints.wan import load_dit
from models.layers.lora import LoRAConfig, init_lora
from models.wan.cache import init_cache
from models.wan.presets import DiTConfig, SamplerConfig

torch = pytest.importorskip("torch", reason="needs the extra `parity`")
diffusers = pytest.importorskip("diffusers", reason="needs the extra `parity`")
peft = pytest.importorskip("peft", reason="needs the extra `parity`")

pytestmark = pytest.mark.parity

TOLERANCE = 1e-4
CFG = DiTConfig("tiny", 48, 96, 2, 3, in_dim=4, out_dim=4, text_dim=16, text_len=6, freq_dim=32)
FRAMES, HEIGHT, WIDTH, CHUNK = 6, 8, 12, 2
SAMPLER = SamplerConfig(
  frames_per_chunk=CHUNK,
  cache_frames=FRAMES,
  latent_channels=4,
  latent_height=HEIGHT,
  latent_width=WIDTH,
  max_frames=FRAMES,
)
LORA = LoRAConfig(3, 6.0)


def reference(kind: type, **options):
  """diffusers' transformer of our tiny size with random weights."""
  torch.manual_seed(0)
  model = kind(
    num_attention_heads=CFG.num_heads,
    attention_head_dim=CFG.head_dim,
    in_channels=CFG.in_dim,
    out_channels=CFG.out_dim,
    text_dim=CFG.text_dim,
    freq_dim=CFG.freq_dim,
    ffn_dim=CFG.ffn_dim,
    num_layers=CFG.num_layers,
    cross_attn_norm=True,
    qk_norm="rms_norm_across_heads",
    **options,
  ).eval()
  with torch.no_grad():  # norm scales of one and biases of zero would hide mistakes
    for parameter in model.parameters():
      parameter.add_(0.05 * torch.randn_like(parameter))
  return model


@pytest.fixture(scope="module")
def wan(tmp_path_factory):
  """diffusers' transformer, its folder as `save_pretrained` writes it, and ours from there."""
  folder = tmp_path_factory.mktemp("wan")
  theirs = reference(diffusers.WanTransformer3DModel)
  theirs.save_pretrained(folder)
  return theirs, folder, load_dit(folder, CFG)


def inputs(seed: int):
  random = np.random.default_rng(seed)
  x = random.standard_normal((1, FRAMES, CFG.in_dim, HEIGHT, WIDTH)).astype(np.float32)
  text = random.standard_normal((1, CFG.text_len, CFG.text_dim)).astype(np.float32)
  return x, text


def their_flow(model, x, timestep, text, **options):
  with torch.no_grad():
    flow = model(
      torch.tensor(x).transpose(1, 2),
      torch.tensor(timestep),
      torch.tensor(text),
      return_dict=False,
      **options,
    )[0]
  return flow.transpose(1, 2).numpy()


def our_flow(model, x, timesteps, text, chunk, lora=None, lora_scale=1.0):
  """Chunk after chunk with a cache that keeps each chunk as it was given, noise and all."""
  context = model.embed_text(jnp.asarray(text))
  cache = init_cache(CFG, SAMPLER, 1)
  run = jax.jit(
    lambda x, t, cache, start: model(x, t, context, cache, start, lora=lora, lora_scale=lora_scale)
  )
  flows = []
  for start in range(0, FRAMES, chunk):
    part = slice(start, start + chunk)
    flow, cache = run(x[:, part], timesteps[:, part], cache, jnp.int32(start))
    flows.append(np.asarray(flow))
  return np.concatenate(flows, axis=1)


def test_one_chunk_is_wan_s_forward(wan):
  theirs, _, ours = wan
  x, text = inputs(1)
  wanted = their_flow(theirs, x, np.array([937.5], np.float32), text)
  times = np.full((1, FRAMES), 937.5, np.float32)
  assert wanted.std() > 0.1
  np.testing.assert_allclose(our_flow(ours, x, times, text, FRAMES), wanted, atol=TOLERANCE)


def test_block_causal_is_skyreels_forward(tmp_path):
  theirs = reference(diffusers.SkyReelsV2Transformer3DModel, num_frame_per_block=CHUNK)
  theirs.save_pretrained(tmp_path)
  ours = load_dit(tmp_path, CFG)
  x, text = inputs(2)
  times = np.repeat(np.array([[900.0, 500.0, 125.0]], np.float32), CHUNK, axis=1)
  wanted = their_flow(theirs, x, times, text, enable_diffusion_forcing=True)
  np.testing.assert_allclose(our_flow(ours, x, times, text, CHUNK), wanted, atol=TOLERANCE)


def test_self_forcing_files_of_torch_give_the_same_model(wan, tmp_path):
  """Official names under wrappers and nesting, saved by torch itself, load to the same bits."""
  _, folder, ours = wan
  convert(folder, tmp_path / "official", DIT, CFG, "official")
  state = {
    "model." + name.replace("blocks.1.", "blocks.1._fsdp_wrapped_module."): torch.tensor(
      tensor.view()
    )
    for name, tensor in open_checkpoint(tmp_path / "official").parts[""].items()
  }
  critic = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
  torch.save({"generator_ema": state, "critic": critic, "step": 600}, tmp_path / "sf.pt")
  loaded = load_dit(tmp_path / "sf.pt", CFG)
  for a, b in zip(_leaves(ours), _leaves(loaded), strict=True):
    np.testing.assert_array_equal(a, b)
  # bfloat16, non-contiguous tensors and parameters, as other trainers save them
  half = {
    n: torch.nn.Parameter(t.bfloat16().t().contiguous().t() if t.ndim == 2 else t.bfloat16())
    for n, t in state.items()
  }
  torch.save(half, tmp_path / "half.pt")
  loaded = load_dit(tmp_path / "half.pt", CFG, param_dtype=jnp.bfloat16)
  for a, b in zip(_leaves(ours), _leaves(loaded), strict=True):
    np.testing.assert_array_equal(np.asarray(a.astype(jnp.bfloat16)), np.asarray(b))


def test_our_adapter_changes_diffusers_model_as_ours(wan, tmp_path):
  theirs, _, ours = wan
  x, text = inputs(3)
  random = iter(jax.random.split(jax.random.key(0), 100))
  lora = jax.tree.map(
    lambda leaf: 0.1 * jax.random.normal(next(random), leaf.shape),
    init_lora(LORA, CFG, jax.random.key(1)),
  )
  write_lora(tmp_path / "peft", lora, LORA, "peft")
  times = np.full((1, FRAMES), 625.0, np.float32)
  base = our_flow(ours, x, times, text, FRAMES)
  changed = our_flow(ours, x, times, text, FRAMES, lora, LORA.scale)
  assert np.abs(changed - base).max() > 0.1
  copy = reference(diffusers.WanTransformer3DModel)
  adapted = peft.PeftModel.from_pretrained(copy, tmp_path / "peft")
  wanted = their_flow(adapted, x, np.array([625.0], np.float32), text)
  np.testing.assert_allclose(changed, wanted, atol=TOLERANCE)

  # diffusers' own loader, from one file
  write_lora(tmp_path / "lora.safetensors", lora, LORA, "diffusers")
  theirs.load_lora_adapter(tmp_path, weight_name="lora.safetensors", prefix="transformer")
  again = their_flow(theirs, x, np.array([625.0], np.float32), text)
  theirs.unload_lora()
  np.testing.assert_allclose(changed, again, atol=TOLERANCE)


def test_peft_s_adapter_changes_ours_as_diffusers_model(wan, tmp_path):
  _, _, ours = wan
  copy = reference(diffusers.WanTransformer3DModel)
  targets = ["attn1.to_q", "attn2.to_out.0", "ffn.net.0.proj", "ffn.net.2"]
  settings = peft.LoraConfig(r=4, lora_alpha=2, target_modules=targets, init_lora_weights=False)
  adapted = peft.get_peft_model(copy, settings).eval()
  adapted.save_pretrained(tmp_path / "theirs")
  lora, config = read_lora(tmp_path / "theirs", CFG)
  assert (config.rank, config.alpha) == (4, 2.0)
  assert config.resolved == ("self_attn.q", "cross_attn.o", "ffn.0", "ffn.2")
  x, text = inputs(4)
  wanted = their_flow(adapted, x, np.array([250.0], np.float32), text)
  times = np.full((1, FRAMES), 250.0, np.float32)
  changed = our_flow(ours, x, times, text, FRAMES, lora, config.scale)
  np.testing.assert_allclose(changed, wanted, atol=TOLERANCE)
  assert np.abs(changed - our_flow(ours, x, times, text, FRAMES)).max() > 0.01


def test_merged_weights_in_diffusers_layout_are_the_adapted_model(wan, tmp_path):
  _, folder, ours = wan
  lora = init_lora(LORA, CFG, jax.random.key(2))
  lora = jax.tree.map(lambda leaf: leaf + 0.02, lora)
  convert(folder, tmp_path, DIT, CFG, "diffusers", lora=lora, lora_scale=LORA.scale)
  copy = reference(diffusers.WanTransformer3DModel)
  from safetensors.torch import load_file

  copy.load_state_dict(load_file(tmp_path / "diffusion_pytorch_model.safetensors"))
  x, text = inputs(5)
  times = np.full((1, FRAMES), 500.0, np.float32)
  wanted = their_flow(copy, x, np.array([500.0], np.float32), text)
  changed = our_flow(ours, x, times, text, FRAMES, lora, LORA.scale)
  np.testing.assert_allclose(changed, wanted, atol=TOLERANCE)


def test_torch_reads_our_longlive_adapter(tmp_path):
  lora = init_lora(LORA, CFG, jax.random.key(3))
  write_lora(tmp_path / "lora.pt", lora, LORA, "longlive", "bfloat16")
  read = torch.load(tmp_path / "lora.pt", weights_only=True, mmap=True)["generator_lora"]
  assert len(read) == 2 * 10 * CFG.num_layers
  name = "base_model.model.blocks.2.cross_attn.o.lora_A.weight"
  wanted = np.asarray(lora["cross_attn.o"]["a"][2].T.astype(jnp.bfloat16), np.float32)
  assert read[name].dtype == torch.bfloat16
  np.testing.assert_array_equal(read[name].float().numpy(), wanted)
  # and the file that torch writes of it is read back to the same numbers
  torch.save({"generator_lora": read, "critic_lora": read}, tmp_path / "theirs.pt")
  back, _ = read_lora(tmp_path / "theirs.pt", CFG, alpha=6.0)
  np.testing.assert_array_equal(np.asarray(back["cross_attn.o"]["a"][2]).T, wanted)


def _leaves(model):
  from flax import nnx

  return jax.tree.leaves(nnx.state(model))
