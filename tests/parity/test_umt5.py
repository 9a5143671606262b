"""The text encoder against Hugging Face's `UMT5EncoderModel`, through the official key names."""

import jax
import numpy as np
import pytest
from flax import nnx

from models.wan.umt5 import UMT5Config, UMT5Encoder, relative_buckets
from models.wan.umt5_keys import UMT5_KEYS
from models.weights import fill, parameters, to_ours

torch = pytest.importorskip("torch", reason="needs the extra `parity`")
transformers = pytest.importorskip("transformers", reason="needs the extra `parity`")

pytestmark = pytest.mark.parity

TOLERANCE = 1e-4

# Wan's name and Hugging Face's of the same tensor; {i} is the layer.
NAMES = {
  "token_embedding.weight": "shared.weight",
  "norm.weight": "encoder.final_layer_norm.weight",
}
LAYER_NAMES = {
  "norm1": "layer.0.layer_norm",
  "attn.q": "layer.0.SelfAttention.q",
  "attn.k": "layer.0.SelfAttention.k",
  "attn.v": "layer.0.SelfAttention.v",
  "attn.o": "layer.0.SelfAttention.o",
  "pos_embedding.embedding": "layer.0.SelfAttention.relative_attention_bias",
  "norm2": "layer.1.layer_norm",
  "ffn.gate.0": "layer.1.DenseReluDense.wi_0",
  "ffn.fc1": "layer.1.DenseReluDense.wi_1",
  "ffn.fc2": "layer.1.DenseReluDense.wo",
}


@pytest.mark.parametrize(
  ("dim", "heads", "head_dim", "layers"), [(32, 4, 8, 2), (48, 2, 16, 3), (16, 3, 8, 1)]
)
def test_encoder_matches_hugging_face(dim, heads, head_dim, layers):
  torch.manual_seed(dim)
  theirs = transformers.UMT5EncoderModel(
    transformers.UMT5Config(
      vocab_size=100,
      d_model=dim,
      d_kv=head_dim,
      d_ff=2 * dim,
      num_layers=layers,
      num_heads=heads,
      feed_forward_proj="gated-gelu",
    )
  ).eval()
  with torch.no_grad():
    for parameter in theirs.parameters():
      parameter.add_(0.1 * torch.randn_like(parameter))
  config = UMT5Config(
    vocab_size=100,
    dim=dim,
    dim_attn=heads * head_dim,
    num_heads=heads,
    head_dim=head_dim,
    ffn_dim=2 * dim,
    num_layers=layers,
  )
  ours = UMT5Encoder(config, rngs=nnx.Rngs(0))
  state = theirs.state_dict()
  names = NAMES | {
    f"blocks.{i}.{wan}.weight": f"encoder.block.{i}.{hf}.weight"
    for i in range(layers)
    for wan, hf in LAYER_NAMES.items()
  }
  assert set(names.values()) | {"encoder.embed_tokens.weight"} == set(state)
  tensors = [(wan, state[hf].numpy()) for wan, hf in names.items()]
  fill(ours, to_ours("transformers", tensors, UMT5_KEYS, parameters(ours)))

  lengths = np.array([40, 3, 1])
  ids = np.random.default_rng(dim).integers(0, 100, (3, 40)).astype(np.int32)
  mask = (np.arange(40)[None] < lengths[:, None]).astype(np.int32)
  with torch.no_grad():
    wanted = theirs(torch.tensor(ids), attention_mask=torch.tensor(mask)).last_hidden_state.numpy()
  result = np.asarray(jax.jit(UMT5Encoder.__call__)(ours, ids, mask))
  for row, length in enumerate(lengths):
    np.testing.assert_allclose(result[row, :length], wanted[row, :length], atol=TOLERANCE)


def test_buckets_match_hugging_face_at_every_distance():
  module = transformers.models.umt5.modeling_umt5.UMT5Attention(
    transformers.UMT5Config(num_layers=1), has_relative_attention_bias=True
  )
  positions = torch.arange(600)
  wanted = module._relative_position_bucket(positions[None, :] - positions[:, None]).numpy()
  np.testing.assert_array_equal(relative_buckets(600, 32, 128), wanted)
