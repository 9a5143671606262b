"""What decoders and judges take in memory, from shapes alone.

docs/memory.md says how the numbers come about; tests hold parameters and caches to the models, and
the decoder's work to what XLA reports on the CPU.
"""

import dataclasses
import math

from models.clip.presets import CLIPConfig
from models.qwen_vl.presets import QwenVLConfig
from models.wan.vae_config import VAEConfig

_FLOAT = 4
_HISTORY_FRAMES = 2
# Of the widest level's activation: the input, which the block adds in the end, its normalised form,
# that with two frames before it, what the convolution gives, and with the bias. Where convolutions
# over time run as 2-D ones the three taps lie side by side as well.
_CONV3D_COPIES, _TAPS_COPIES = 5.2, 7.8


@dataclasses.dataclass(frozen=True)
class DecodeSizes:
  """One call of a video decoder.

  Attributes:
    vae: sizes of the autoencoder.
    height: rows of a latent frame.
    width: columns of a latent frame.
    frames: latent frames of a call.
    starts: whether they are a video's first.
    value_bytes: of a weight and of an activation, 4 or 2.
    taps: whether convolutions over time run as 2-D ones, as on CPUs.
    streamed: whether the frames before a call come from a cache.
  """

  vae: VAEConfig
  height: int
  width: int
  frames: int
  starts: bool
  value_bytes: int
  taps: bool
  streamed: bool


def vae_parameters(vae: VAEConfig) -> int:
  """Parameters of encoder and decoder; 126,892,531 of Wan2.1's."""
  return _half(vae, decoder=False) + decoder_parameters(vae)


def decoder_parameters(vae: VAEConfig) -> int:
  """Parameters of the decoder alone."""
  return _half(vae, decoder=True)


def _conv(width_in: int, width_out: int, *size: int) -> int:
  return width_in * width_out * math.prod(size) + width_out


def _residual_block(width_in: int, width: int) -> int:
  convs = _conv(width_in, width, 3, 3, 3) + _conv(width, width, 3, 3, 3)
  return convs + width_in + width + (0 if width_in == width else _conv(width_in, width))


def _half(vae: VAEConfig, *, decoder: bool) -> int:
  levels = vae.decoder_levels if decoder else vae.encoder_levels
  outer = levels[0][0] if decoder else levels[-1][1]
  attention = outer + _conv(outer, 3 * outer) + _conv(outer, outer)
  total = 2 * _residual_block(outer, outer) + attention
  blocks = vae.num_res_blocks + (vae.decoder_extra_res_blocks if decoder else 0)
  resamplings = vae.temporal_downsample[::-1] if decoder else vae.temporal_downsample
  for level, (width_in, width) in enumerate(levels):
    total += _residual_block(width_in, width) + (blocks - 1) * _residual_block(width, width)
    if level < len(resamplings):
      out = width // 2 if decoder and not vae.residual else width
      total += _conv(width, out, 3, 3)
      total += resamplings[level] * _conv(width, 2 * width if decoder else width, 3)
  z, pixels, last = vae.z_dim, vae.pixel_channels, levels[-1][1]
  if decoder:
    return total + _conv(z, z) + _conv(z, outer, 3, 3, 3) + last + _conv(last, pixels, 3, 3, 3)
  ends = _conv(pixels, levels[0][0], 3, 3, 3) + last + _conv(last, 2 * z, 3, 3, 3)
  return total + ends + _conv(2 * z, 2 * z)


def decoder_cache_bytes(sizes: DecodeSizes) -> int:
  """The last two input frames of every convolution over time, between two calls of a stream."""
  vae, cells = sizes.vae, sizes.height * sizes.width
  blocks = vae.num_res_blocks + vae.decoder_extra_res_blocks
  levels = vae.decoder_levels
  values = cells * (vae.z_dim + 4 * levels[0][0])  # the first convolution, the middle's four
  for level, (width_in, width) in enumerate(levels):
    values += cells * (width_in + (2 * blocks - 1) * width)
    if level < len(vae.temporal_downsample):
      values += cells * width * vae.temporal_downsample[::-1][level]
      cells *= 4
  values += cells * levels[-1][1]  # the last convolution
  return _HISTORY_FRAMES * values * sizes.value_bytes


def decode_working(sizes: DecodeSizes) -> int:
  """What a call of the decoder works with beside arguments and results."""
  vae = sizes.vae
  factor = vae.temporal_factor
  frames = factor * sizes.frames - (factor - 1) * sizes.starts
  cells = frames * sizes.height * sizes.width * 4 ** len(vae.temporal_downsample)
  copies = (_TAPS_COPIES if sizes.taps else _CONV3D_COPIES) + vae.residual
  return int(copies * cells * vae.decoder_levels[-1][1] * sizes.value_bytes)


def video_bytes(vae: VAEConfig, latent_frames: int, height: int, width: int) -> int:
  """A decoded video in bytes of RGB."""
  return 3 * vae.pixel_frames(latent_frames) * height * width * vae.spatial_factor**2


@dataclasses.dataclass(frozen=True)
class JudgeSizes:
  """A vision-language judge in its engine.

  Attributes:
    model: sizes of the model.
    slots: dialogues that decode at once.
    context_tokens: of a dialogue, reply included.
    prefill_tokens: of a prompt that are computed at once.
    prefill_rows: prompts that are.
    burst: decoding steps between two looks at the queue.
    slices: pictures that are encoded together.
    height_px: of a video.
    width_px: of a video.
    value_bytes: of a weight, a key or an activation, 4 or 2.
  """

  model: QwenVLConfig
  slots: int
  context_tokens: int
  height_px: int
  width_px: int
  value_bytes: int
  prefill_tokens: int = 256
  prefill_rows: int = 4
  burst: int = 16
  slices: int = 16


def judge_parameters(model: QwenVLConfig) -> int:
  """Parameters of decoder and vision tower."""
  t, v = model.text, model.vision
  queries, keys = t.num_heads * t.head_dim, t.num_kv_heads * t.head_dim
  layer = 2 * t.dim * (queries + keys) + 3 * t.dim * t.ffn_dim + 2 * t.dim
  layer += t.qkv_bias * (queries + 2 * keys) + t.qk_norm * 2 * t.head_dim
  text = (1 if t.tied else 2) * t.vocab_size * t.dim + t.num_layers * layer + t.dim
  wide = v.family == "qwen3"  # layer norms, biases, a table of positions; else a gate
  norm = v.dim * (1 + wide)
  block = 4 * (v.dim * v.dim + v.dim) + 2 * norm
  block += (2 if wide else 3) * v.dim * v.ffn_dim + (1 if wide else 2) * v.ffn_dim + v.dim
  joined = v.dim * v.merge**2
  merger = joined * joined + joined + joined * v.out_dim + v.out_dim
  deep = len(v.deepstack) * (merger + joined * (1 + wide))
  table = wide * (v.dim + v.table_side**2 * v.dim)
  return text + v.patch_width * v.dim + table + v.depth * block + merger + norm + deep


def judge_cache_bytes(judge: JudgeSizes) -> int:
  """Keys and values of all dialogues at their longest."""
  text = judge.model.text
  length = judge.context_tokens + judge.prefill_tokens + judge.burst
  per_token = 2 * text.num_layers * text.num_kv_heads * text.head_dim * judge.value_bytes
  return judge.slots * length * per_token


def judge_working(judge: JudgeSizes) -> int:
  """The larger of the work of a prefill call and that of encoding pictures."""
  text, vision = judge.model.text, judge.model.vision
  rows = judge.prefill_rows * judge.prefill_tokens
  keys = judge.context_tokens + judge.prefill_tokens + judge.burst
  scores = 2 * _FLOAT * text.num_heads * rows * keys
  past = 2 * judge.prefill_rows * text.num_kv_heads * text.head_dim * keys * judge.value_bytes
  prefill = scores + past + rows * (4 * text.dim + 3 * text.ffn_dim) * judge.value_bytes
  patches = round(judge.height_px / vision.factor_px) * round(judge.width_px / vision.factor_px)
  patches *= vision.merge**2
  picture = 2 * _FLOAT * vision.num_heads * patches**2
  picture += patches * (6 * vision.dim + 3 * vision.ffn_dim) * judge.value_bytes
  return max(prefill, judge.slices * picture)


@dataclasses.dataclass(frozen=True)
class ImageJudgeSizes:
  """A judge of single frames, a CLIP model in float32; each device of a mesh would hold all of it.

  Attributes:
    model: sizes of the model.
    frames: of a video, which are encoded together.
  """

  model: CLIPConfig
  frames: int


def image_judge_bytes(judge: ImageJudgeSizes) -> int:
  """Weights of both towers; ViT-H/14 has 986,109,441."""
  m = judge.model

  def blocks(dim: int, ffn_dim: int, layers: int) -> int:
    attention = 3 * (dim * dim + dim) + dim * dim + dim
    return layers * (attention + 2 * dim * ffn_dim + ffn_dim + dim + 4 * dim)

  image = 3 * m.patch_px**2 * m.vision_dim + (m.patches + 2) * m.vision_dim + 4 * m.vision_dim
  image += blocks(m.vision_dim, m.vision_ffn_dim, m.vision_layers) + m.vision_dim * m.out_dim
  text = (m.vocab_size + m.context + 2) * m.text_dim + m.text_dim * m.out_dim
  text += blocks(m.text_dim, m.text_ffn_dim, m.text_layers)
  return _FLOAT * (image + text + 1)


def image_judge_working(judge: ImageJudgeSizes) -> int:
  """The larger of attention's work and the feed-forward layer's on a video's frames."""
  m, tokens = judge.model, judge.model.patches + 1
  attention = 2 * m.vision_heads * tokens**2 + 5 * tokens * m.vision_dim
  forward = 2 * tokens * (m.vision_dim + m.vision_ffn_dim)
  return _FLOAT * judge.frames * max(attention, forward)
