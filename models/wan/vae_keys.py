"""Official key names of Wan's VAEs: at the published sizes 194 tensors (`Wan2.1_VAE.pth`) and 196
(`Wan2.2_VAE.pth`).
"""

import numpy as np

from models.wan.vae_config import VAEConfig
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
  """The key table of a VAE of that size.

  Wan2.1's file numbers the layers of a coder through; Wan2.2's numbers levels, and layers in each.
  """
  blocks = (config.num_res_blocks, config.num_res_blocks + config.decoder_extra_res_blocks)
  down = config.temporal_downsample
  return (
    *_conv("conv1"),
    *_conv("conv2"),
    *_coder("encoder", "downsamples", blocks[0], down, config.encoder_levels, config.residual),
    *_coder("decoder", "upsamples", blocks[1], down[::-1], config.decoder_levels, config.residual),
  )


def _coder(
  name: str,
  levels: str,
  blocks: int,
  temporal: tuple[bool, ...],
  widths: tuple[tuple[int, int], ...],
  nested: bool,
) -> list[TensorKey]:
  keys = [*_conv(f"{name}.conv1")]
  keys += [*_block(f"{name}.middle.0", False), *_block(f"{name}.middle.2", False)]
  attention = f"{name}.middle.1"
  keys.append(TensorKey(f"{attention}.norm.gamma", f"{attention}.norm.gamma", IMAGE_SCALE))
  keys += [key for part in ("to_qkv", "proj") for key in _conv(f"{attention}.{part}")]
  index = 0
  for level, (width_in, width) in enumerate(widths):
    for layer in range(blocks + (level < len(temporal))):
      at = path = f"{name}.{levels}.{index}"
      if nested:
        at, path = (f"{name}.{levels}.{level}.{inner}.{layer}" for inner in (levels, "layers"))
      index += 1
      if layer < blocks:
        keys += _block(at, layer == 0 and width_in != width, path)
        continue
      keys += _conv(f"{at}.resample.1", f"{path}.conv")
      keys += _conv(f"{at}.time_conv", f"{path}.time_conv") if temporal[level] else ()
  keys.append(TensorKey(f"{name}.head.0.gamma", f"{name}.head_norm.gamma", VIDEO_SCALE))
  keys += _conv(f"{name}.head.2", f"{name}.head_conv")
  return keys


def _conv(official: str, path: str | None = None) -> tuple[TensorKey, TensorKey]:
  path = official if path is None else path
  return (
    TensorKey(f"{official}.weight", f"{path}.kernel", CONV),
    TensorKey(f"{official}.bias", f"{path}.bias"),
  )


def _block(at: str, shortcut: bool, path: str | None = None) -> list[TensorKey]:
  path = at if path is None else path
  keys = [
    TensorKey(f"{at}.residual.0.gamma", f"{path}.norm1.gamma", VIDEO_SCALE),
    *_conv(f"{at}.residual.2", f"{path}.conv1"),
    TensorKey(f"{at}.residual.3.gamma", f"{path}.norm2.gamma", VIDEO_SCALE),
    *_conv(f"{at}.residual.6", f"{path}.conv2"),
  ]
  return [*keys, *_conv(f"{at}.shortcut", f"{path}.shortcut")] if shortcut else keys
