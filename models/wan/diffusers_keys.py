"""Key tables of the diffusers layout (`WanTransformer3DModel`, `AutoencoderKLWan`).

Tensors keep shape and orientation; only names differ from Wan's own files, so the tables are
derived from those by renaming.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence

from models.wan.vae_config import VAEConfig
from models.wan.vae_keys import vae_keys
from models.wan.weights import DIT_KEYS
from models.weights import TensorKey

# Official and diffusers name of a part, anchored at the start of a name or of a block's part. Wan
# counts the affine norm before the cross-attention as its third, diffusers as its second.
_DIT_OUTER = (
  ("text_embedding.0.", "condition_embedder.text_embedder.linear_1."),
  ("text_embedding.2.", "condition_embedder.text_embedder.linear_2."),
  ("time_embedding.0.", "condition_embedder.time_embedder.linear_1."),
  ("time_embedding.2.", "condition_embedder.time_embedder.linear_2."),
  ("time_projection.1.", "condition_embedder.time_proj."),
  ("head.modulation", "scale_shift_table"),
  ("head.head.", "proj_out."),
)
_DIT_BLOCK = (
  ("modulation", "scale_shift_table"),
  ("norm3.", "norm2."),
  ("ffn.0.", "ffn.net.0.proj."),
  ("ffn.2.", "ffn.net.2."),
)
_DIT_ATTENTIONS = (("self_attn.", "attn1."), ("cross_attn.", "attn2."))
_DIT_PROJECTIONS = (("q.", "to_q."), ("k.", "to_k."), ("v.", "to_v."), ("o.", "to_out.0."))
_BLOCK = re.compile(r"(blocks\.(?:\d+|\{layer\})\.)(.*)")

_VAE_OUTER = (
  ("conv1.", "quant_conv."),
  ("conv2.", "post_quant_conv."),
)
_VAE_CODER = (
  ("conv1.", "conv_in."),
  ("head.0.", "norm_out."),
  ("head.2.", "conv_out."),
  ("middle.0.", "mid_block.resnets.0."),
  ("middle.1.", "mid_block.attentions.0."),
  ("middle.2.", "mid_block.resnets.1."),
)
_VAE_RESIDUAL = (
  ("residual.0.", "norm1."),
  ("residual.2.", "conv1."),
  ("residual.3.", "norm2."),
  ("residual.6.", "conv2."),
  ("shortcut.", "conv_shortcut."),
)


def dit_diffusers_name(official: str) -> str:
  """The name in diffusers' transformer of a tensor (or prefix of tensors) of Wan's own file."""
  block = _BLOCK.fullmatch(official)
  if block is None:
    return _replaced(official, _DIT_OUTER)
  rest = _replaced(block[2], _DIT_BLOCK)
  for theirs, ours in _DIT_ATTENTIONS:
    if rest.startswith(theirs):
      rest = ours + _replaced(rest.removeprefix(theirs), _DIT_PROJECTIONS)
  return block[1] + rest


def vae_diffusers_name(official: str, config: VAEConfig) -> str:
  """The name in diffusers' autoencoder of a tensor of Wan's own file."""
  coder, _, rest = official.partition(".")
  if coder not in ("encoder", "decoder"):
    return _replaced(official, _VAE_OUTER)
  layer = re.fullmatch(r"(down|up)samples\.(\d+)\.(.*)", rest)
  if layer is None:
    for theirs, ours in _VAE_CODER:
      if rest.startswith(theirs):
        return f"{coder}.{ours}{_replaced(rest.removeprefix(theirs), _VAE_RESIDUAL)}"
    raise ValueError(f"name is {official!r}, which no Wan autoencoder has.")
  direction, place, inner = layer[1], f"{layer[1]}_blocks.{layer[2]}", layer[3]
  extra = config.decoder_extra_res_blocks if direction == "up" else 0
  blocks = config.num_res_blocks + extra
  if config.residual:
    _, within, inner = inner.split(".", 2)
    last = f"{direction}sampler"
    place += f".resnets.{within}" if int(within) < blocks else f".{last}"
  elif direction == "up":
    level, within = divmod(int(layer[2]), blocks + 1)
    place = f"up_blocks.{level}." + (f"resnets.{within}" if within < blocks else "upsamplers.0")
  return f"{coder}.{place}.{_replaced(inner, _VAE_RESIDUAL)}"


def _replaced(name: str, pairs: Sequence[tuple[str, str]]) -> str:
  for official, theirs in pairs:
    if name.startswith(official):
      return theirs + name.removeprefix(official)
  return name


def renamed(table: Sequence[TensorKey], rename: Callable[[str], str]) -> tuple[TensorKey, ...]:
  """A key table with other names in the file."""
  return tuple(dataclasses.replace(key, official=rename(key.official)) for key in table)


DIT_DIFFUSERS_KEYS: tuple[TensorKey, ...] = renamed(DIT_KEYS, dit_diffusers_name)


def vae_diffusers_keys(config: VAEConfig) -> tuple[TensorKey, ...]:
  """The key table of `AutoencoderKLWan` of that size."""
  return renamed(vae_keys(config), lambda name: vae_diffusers_name(name, config))
