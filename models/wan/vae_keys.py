"""Official key names of the Wan2.1 VAE (`Wan2.1_VAE`): 194 tensors at the published sizes."""

import itertools

import numpy as np

from models.wan.vae import VAEConfig
from models.weights import TensorKey, Transform

# Convolutions: torch has [out, in, (time,) height, width], ours the last two in front.
CONV = Transform(
  lambda w: np.moveaxis(w, (0, 1), (-1, -2)),
  lambda w: np.moveaxis(w, (-1, -2), (0, 1)),
)
# Norm scales are stored with trailing axes of one: over video three, in the attention (images) two.
VIDEO_SCALE = Transform(lambda w: w[:, 0, 0, 0], lambda w: w[:, None, None, None])
IMAGE_SCALE = Transform(lambda w: w[:, 0, 0], lambda w: w[:, None, None])


def vae_keys(config: VAEConfig) -> tuple[TensorKey, ...]:
  """The key table of a VAE of that size; layers of a level are numbered through, as in the file."""
  encoder_blocks = config.num_res_blocks
  decoder_blocks = encoder_blocks + config.decoder_extra_res_blocks
  widths = [config.base_dim * m for m in (1, *config.dim_mult)]
  down = config.temporal_downsample
  return (
    *_conv("conv1", "conv1"),
    *_conv("conv2", "conv2"),
    *_coder("encoder", "downsamples", encoder_blocks, down, _encoder_shortcuts(widths)),
    *_coder("decoder", "upsamples", decoder_blocks, down[::-1], _decoder_shortcuts(widths[:0:-1])),
  )


def _encoder_shortcuts(widths: list[int]) -> list[bool]:
  """Per level, whether its first block changes the width."""
  return [a != b for a, b in itertools.pairwise(widths)]


def _decoder_shortcuts(widths: list[int]) -> list[bool]:
  """As `_encoder_shortcuts`; an upsampling halves the channels before each level but the first."""
  return [False, *(a // 2 != b for a, b in itertools.pairwise(widths))]


def _coder(
  name: str, levels: str, blocks: int, temporal: tuple[bool, ...], shortcuts: list[bool]
) -> list[TensorKey]:
  keys = [*_conv(f"{name}.conv1", f"{name}.conv1")]
  keys += [*_block(f"{name}.middle.0", False), *_block(f"{name}.middle.2", False)]
  attention = f"{name}.middle.1"
  keys.append(TensorKey(f"{attention}.norm.gamma", f"{attention}.norm.gamma", IMAGE_SCALE))
  keys += [key for part in ("to_qkv", "proj") for key in _conv(*[f"{attention}.{part}"] * 2)]
  index = 0
  for level, shortcut in enumerate(shortcuts):
    for block in range(blocks):
      keys += _block(f"{name}.{levels}.{index}", shortcut and block == 0)
      index += 1
    if level < len(temporal):
      at = f"{name}.{levels}.{index}"
      keys += _conv(f"{at}.resample.1", f"{at}.conv")
      keys += _conv(f"{at}.time_conv", f"{at}.time_conv") if temporal[level] else ()
      index += 1
  keys.append(TensorKey(f"{name}.head.0.gamma", f"{name}.head_norm.gamma", VIDEO_SCALE))
  keys += _conv(f"{name}.head.2", f"{name}.head_conv")
  return keys


def _conv(official: str, path: str) -> tuple[TensorKey, TensorKey]:
  return (
    TensorKey(f"{official}.weight", f"{path}.kernel", CONV),
    TensorKey(f"{official}.bias", f"{path}.bias"),
  )


def _block(at: str, shortcut: bool) -> list[TensorKey]:
  keys = [
    TensorKey(f"{at}.residual.0.gamma", f"{at}.norm1.gamma", VIDEO_SCALE),
    *_conv(f"{at}.residual.2", f"{at}.conv1"),
    TensorKey(f"{at}.residual.3.gamma", f"{at}.norm2.gamma", VIDEO_SCALE),
    *_conv(f"{at}.residual.6", f"{at}.conv2"),
  ]
  return [*keys, *_conv(f"{at}.shortcut", f"{at}.shortcut")] if shortcut else keys
