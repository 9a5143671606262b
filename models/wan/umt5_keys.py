"""Key names of the UMT5 encoder: Wan's own (its `models_t5_umt5-xxl-enc-bf16` has 242 tensors), and
those of transformers' `UMT5EncoderModel`.
"""

import dataclasses

from models.weights import SAME, TRANSPOSE, TensorKey

UMT5_KEYS: tuple[TensorKey, ...] = (
  TensorKey("token_embedding.weight", "token_embedding"),
  *(
    TensorKey(f"blocks.{{layer}}.{official}.weight", f"blocks.{path}", transform)
    for official, path, transform in (
      ("norm1", "norm1", SAME),
      ("attn.q", "q", TRANSPOSE),
      ("attn.k", "k", TRANSPOSE),
      ("attn.v", "v", TRANSPOSE),
      ("attn.o", "o", TRANSPOSE),
      ("pos_embedding.embedding", "position", SAME),
      ("norm2", "norm2", SAME),
      ("ffn.gate.0", "gate", TRANSPOSE),
      ("ffn.fc1", "fc1", TRANSPOSE),
      ("ffn.fc2", "fc2", TRANSPOSE),
    )
  ),
  TensorKey("norm.weight", "norm"),
)

_HUGGING_FACE = (
  ("norm1", "layer.0.layer_norm"),
  *((f"attn.{p}", f"layer.0.SelfAttention.{p}") for p in "qkvo"),
  ("pos_embedding.embedding", "layer.0.SelfAttention.relative_attention_bias"),
  ("norm2", "layer.1.layer_norm"),
  ("ffn.gate.0", "layer.1.DenseReluDense.wi_0"),
  ("ffn.fc1", "layer.1.DenseReluDense.wi_1"),
  ("ffn.fc2", "layer.1.DenseReluDense.wo"),
)


def umt5_hf_name(official: str) -> str:
  """The name in transformers' `UMT5EncoderModel` of a tensor of Wan's own file."""
  outer = {
    "token_embedding.weight": "shared.weight",
    "norm.weight": "encoder.final_layer_norm.weight",
  }
  if official in outer:
    return outer[official]
  _, layer, rest = official.split(".", 2)
  part = rest.removesuffix(".weight")
  return f"encoder.block.{layer}.{dict(_HUGGING_FACE)[part]}.weight"


UMT5_HF_KEYS: tuple[TensorKey, ...] = tuple(
  dataclasses.replace(key, official=umt5_hf_name(key.official)) for key in UMT5_KEYS
)
# transformers ties the encoder's table to the shared one; a file may hold either or both.
UMT5_HF_ALIASES = {"encoder.embed_tokens.weight": "shared.weight"}
