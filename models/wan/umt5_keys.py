"""Official key names of Wan's UMT5 encoder (its `models_t5_umt5-xxl-enc-bf16` has 242 tensors)."""

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
