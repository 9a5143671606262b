"""Official key names of the Wan2.1 transformer and of LoRA files for it."""

from models.layers.lora import LoRAConfig
from models.weights import SAME, TRANSPOSE, TensorKey, Transform

# The patch embedding is a convolution whose kernel equals its stride: a linear map over the patch.
# Wan's patch is 1 × 2 × 2; flattened, the channel is slowest.
PATCH = Transform(
  lambda w: w.reshape(w.shape[0], -1).T,
  lambda w: w.T.reshape(w.shape[1], -1, 1, 2, 2),
)
# Modulation tables have a leading axis of one.
LEADING = Transform(lambda w: w[0], lambda w: w[None])


def _linear(official: str, path: str, weight: Transform = TRANSPOSE) -> tuple[TensorKey, ...]:
  return (
    TensorKey(f"{official}.weight", f"{path}.kernel", weight),
    TensorKey(f"{official}.bias", f"{path}.bias"),
  )


def _attention(name: str) -> tuple[TensorKey, ...]:
  official, path = f"blocks.{{layer}}.{name}", f"blocks.{name}"
  projections = [key for p in "qkvo" for key in _linear(f"{official}.{p}", f"{path}.{p}")]
  norms = [TensorKey(f"{official}.norm_{p}.weight", f"{path}.norm_{p}.scale", SAME) for p in "qk"]
  return (*projections, *norms)


DIT_KEYS: tuple[TensorKey, ...] = (
  *_linear("patch_embedding", "patch_embedding", PATCH),
  *_linear("text_embedding.0", "text_in"),
  *_linear("text_embedding.2", "text_out"),
  *_linear("time_embedding.0", "time_in"),
  *_linear("time_embedding.2", "time_out"),
  *_linear("time_projection.1", "time_projection"),
  TensorKey("blocks.{layer}.modulation", "blocks.modulation", LEADING),
  *_attention("self_attn"),
  TensorKey("blocks.{layer}.norm3.weight", "blocks.norm3.scale"),
  TensorKey("blocks.{layer}.norm3.bias", "blocks.norm3.bias"),
  *_attention("cross_attn"),
  *_linear("blocks.{layer}.ffn.0", "blocks.ffn.up"),
  *_linear("blocks.{layer}.ffn.2", "blocks.ffn.down"),
  TensorKey("head.modulation", "head_modulation", LEADING),
  *_linear("head.head", "head"),
)


def lora_keys(cfg: LoRAConfig) -> tuple[TensorKey, ...]:
  """The key table of a LoRA file as PEFT saves it for the official model (600 tensors at 1.3B)."""
  stem = "base_model.model.blocks.{layer}."
  return tuple(
    TensorKey(f"{stem}{target}.lora_{letter}.weight", f"{target}.{letter.lower()}", TRANSPOSE)
    for target in cfg.resolved
    for letter in "AB"
  )
