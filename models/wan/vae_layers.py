"""Building blocks of Wan's video autoencoders.

Arrays are channels last: [batch, time, height, width, channels]. Every convolution over time is
causal: frame t sees frames t-2, t-1 and t. What lies before the first frame of a call comes from a
`History`, so one code path serves a whole video (zeros lie before it) and a stream (the last frames
of the previous call lie before it).
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

HISTORY_FRAMES = 2  # a kernel of three frames looks two back

Video = Float[Array, "batch time height width channels"]


class History:
  """What came before this call, one slot per time convolution in order of execution.

  It lives during one forward pass only. `past` is the tuple that the previous call left in `kept`,
  or None at the start of a video, where zeros stand for the missing frames.
  """

  def __init__(self, past: Sequence[Video] | None):
    self._past = None if past is None else iter(past)
    self.kept: list[Video] = []

  def extend(self, x: Video) -> Video:
    """Puts the two frames before `x` in front of it, and keeps the last two frames of the result.

    `x` may hold no frame at all: then the slot passes on unchanged.
    """
    if self._past is None:
      before = jnp.zeros((x.shape[0], HISTORY_FRAMES, *x.shape[2:]), x.dtype)
    else:
      before = next(self._past)
    extended = jnp.concatenate([before, x], axis=1)
    self.kept.append(extended[:, -HISTORY_FRAMES:])
    return extended


def use_conv3d(impl: str) -> bool:
  """Whether `impl` ("auto", "conv3d", "taps2d") runs convolutions over time as 3-D ones.

  "auto" does so except on the CPU, where XLA runs a 3-D convolution several times slower than one
  2-D convolution over the three time taps laid side by side on the channels.
  """
  return impl == "conv3d" or (impl == "auto" and jax.default_backend() != "cpu")


def conv2d(
  x: Float[Array, "images height width in"],
  kernel: Float[Array, "kh kw in out"],
  stride: int = 1,
  padding: Sequence[tuple[int, int]] = ((0, 0), (0, 0)),
) -> Float[Array, "images height2 width2 out"]:
  """A 2-D convolution without bias; 1x1 kernels run as a matrix product."""
  if kernel.shape[:2] == (1, 1) and stride == 1:
    return jnp.einsum("nhwi,io->nhwo", x, kernel[0, 0])
  return lax.conv_general_dilated(
    x, kernel, (stride, stride), padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
  )


def causal_conv(
  x: Float[Array, "batch time height width in"],
  kernel: Float[Array, "kt kh kw in out"],
  impl: str,
  time_stride: int = 1,
) -> Float[Array, "batch time2 height width out"]:
  """A convolution that pads space by half its kernel and time not at all (see `History`).

  Both implementations give the same numbers up to the order of summation.
  """
  kt, kh, kw, width_in, width_out = kernel.shape
  padding = ((kh // 2, kh // 2), (kw // 2, kw // 2))
  if use_conv3d(impl):
    return lax.conv_general_dilated(
      x,
      kernel,
      (time_stride, 1, 1),
      ((0, 0), *padding),
      dimension_numbers=("NDHWC", "DHWIO", "NDHWC"),
    )
  batch, time, height, width, _ = x.shape
  time_out = (time - kt) // time_stride + 1
  last = (time_out - 1) * time_stride
  taps = [x[:, k : k + last + 1 : time_stride] for k in range(kt)]
  folded = jnp.concatenate(taps, axis=-1).reshape(batch * time_out, height, width, kt * width_in)
  kernel2d = kernel.transpose(1, 2, 0, 3, 4).reshape(kh, kw, kt * width_in, width_out)
  y = conv2d(folded, kernel2d, padding=padding)
  return y.reshape(batch, time_out, height, width, width_out)


class Conv(nnx.Module):
  """Kernel and bias of a convolution; how it is applied is its user's business.

  Args:
    size: kernel extent, (time, height, width) or (height, width).
    zero: start from zero weights (a branch that begins as the identity).
  """

  def __init__(
    self,
    size: tuple[int, ...],
    width_in: int,
    width_out: int,
    *,
    rngs: nnx.Rngs,
    param_dtype: jnp.dtype = jnp.float32,
    zero: bool = False,
  ):
    init = nnx.initializers.zeros if zero else nnx.initializers.lecun_normal()
    self.kernel = nnx.Param(init(rngs.params(), (*size, width_in, width_out), param_dtype))
    self.bias = nnx.Param(jnp.zeros((width_out,), param_dtype))

  def weights(self, dtype: jnp.dtype) -> tuple[Array, Array]:
    """Kernel and bias in the dtype of the computation."""
    return self.kernel[...].astype(dtype), self.bias[...].astype(dtype)


class CausalConv(Conv):
  """A causal convolution over time and space, zero padded in space."""

  def __init__(self, size: tuple[int, int, int], *widths: int, impl: str, **options):
    super().__init__(size, *widths, **options)
    self.impl = impl

  def __call__(self, x: Video, history: History) -> Video:
    """[batch, time, height, width, in] to the same with `out` channels."""
    kernel, bias = self.weights(x.dtype)
    if kernel.shape[0] > 1:
      x = history.extend(x)
    return causal_conv(x, kernel, self.impl) + bias[None, None, None, None]


class FrameConv(Conv):
  """A 2-D convolution applied to every frame, zero padded to keep the size at stride 1."""

  def __call__(self, x: Video) -> Video:
    """[batch, time, height, width, in] to the same with `out` channels."""
    kernel, bias = self.weights(x.dtype)
    pad = (kernel.shape[0] // 2, kernel.shape[0] // 2)
    y = conv2d(x.reshape(-1, *x.shape[2:]), kernel, padding=(pad, pad))
    return y.reshape(*x.shape[:2], *y.shape[1:]) + bias[None, None, None, None]


class ChannelNorm(nnx.Module):
  """RMS norm over channels at each position: x / max(|x|, 1e-12) * sqrt(C) * gamma (Wan2.1 VAE)."""

  def __init__(self, width: int, *, param_dtype: jnp.dtype = jnp.float32):
    self.gamma = nnx.Param(jnp.ones((width,), param_dtype))

  def __call__(self, x: Video) -> Video:
    """Normalises the last axis; statistics in float32, result in the dtype of `x`."""
    wide = x.astype(jnp.float32)
    # The bound acts on the square: the same number, and a finite gradient where all channels are 0.
    square = jnp.maximum(jnp.sum(wide * wide, axis=-1, keepdims=True), 1e-24)
    scale = self.gamma[...].astype(jnp.float32) * jnp.float32(x.shape[-1] ** 0.5)
    return (wide * lax.rsqrt(square) * scale.reshape((1,) * (x.ndim - 1) + (-1,))).astype(x.dtype)


class ResidualBlock(nnx.Module):
  """norm, SiLU, conv, norm, SiLU, conv, added to the input.

  Where the widths differ the input passes through a 1x1x1 convolution first.
  """

  def __init__(
    self,
    width_in: int,
    width_out: int,
    *,
    impl: str,
    rngs: nnx.Rngs,
    param_dtype: jnp.dtype = jnp.float32,
  ):
    options: dict[str, Any] = dict(impl=impl, rngs=rngs, param_dtype=param_dtype)
    self.norm1 = ChannelNorm(width_in, param_dtype=param_dtype)
    self.conv1 = CausalConv((3, 3, 3), width_in, width_out, **options)
    self.norm2 = ChannelNorm(width_out, param_dtype=param_dtype)
    self.conv2 = CausalConv((3, 3, 3), width_out, width_out, **options)
    self.shortcut = (
      None if width_in == width_out else CausalConv((1, 1, 1), width_in, width_out, **options)
    )

  def __call__(self, x: Video, history: History) -> Video:
    """[batch, time, height, width, in] to the same with `out` channels."""
    h = self.conv1(jax.nn.silu(self.norm1(x)), history)
    h = self.conv2(jax.nn.silu(self.norm2(h)), history)
    return h + (x if self.shortcut is None else self.shortcut(x, history))


class FrameAttention(nnx.Module):
  """Single-head self-attention over the positions of each frame, added to the input."""

  def __init__(self, width: int, *, rngs: nnx.Rngs, param_dtype: jnp.dtype = jnp.float32):
    self.norm = ChannelNorm(width, param_dtype=param_dtype)
    self.to_qkv = FrameConv((1, 1), width, 3 * width, rngs=rngs, param_dtype=param_dtype)
    self.proj = FrameConv((1, 1), width, width, rngs=rngs, param_dtype=param_dtype, zero=True)

  def __call__(self, x: Video, history: History) -> Video:
    """Keeps the shape; frames do not see each other, so `history` is not used."""
    batch, time, height, width, channels = x.shape
    qkv = self.to_qkv(self.norm(x)).reshape(batch * time, height * width, 3 * channels)
    q, k, v = jnp.split(qkv, 3, axis=-1)
    logits = jnp.einsum("nqc,nkc->nqk", q, k, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(logits * jnp.float32(channels**-0.5), axis=-1).astype(x.dtype)
    attended = jnp.einsum("nqk,nkc->nqc", weights, v)
    return x + self.proj(attended.reshape(x.shape))


class Downsample(nnx.Module):
  """Halves height and width; with `temporal`, then halves time except for the first frame."""

  def __init__(
    self,
    width: int,
    *,
    temporal: bool,
    impl: str,
    rngs: nnx.Rngs,
    param_dtype: jnp.dtype = jnp.float32,
  ):
    self.impl = impl
    self.conv = FrameConv((3, 3), width, width, rngs=rngs, param_dtype=param_dtype)
    self.time_conv = (
      Conv((3, 1, 1), width, width, rngs=rngs, param_dtype=param_dtype) if temporal else None
    )

  def __call__(self, x: Video, history: History) -> Video:
    """[batch, 2n+1, height, width, channels] to n+1 frames (or all of them) of half the size.

    Whole videos only: `history` is not used, the stride makes the first frame stand alone.
    """
    kernel, bias = self.conv.weights(x.dtype)
    # The padding lies right and below only, whatever the parity of the size (Wan pads so by hand).
    y = conv2d(x.reshape(-1, *x.shape[2:]), kernel, stride=2, padding=((0, 1), (0, 1)))
    x = y.reshape(*x.shape[:2], *y.shape[1:]) + bias[None, None, None, None]
    if self.time_conv is None:
      return x
    if x.shape[1] == 1:
      return x
    kernel, bias = self.time_conv.weights(x.dtype)
    rest = causal_conv(x, kernel, self.impl, time_stride=2) + bias[None, None, None, None]
    return jnp.concatenate([x[:, :1], rest], axis=1)


class Upsample(nnx.Module):
  """With `temporal`, doubles time except for a video's first frame; then doubles height and width.

  The last convolution takes the channels from `width` to `width_out`.
  """

  def __init__(
    self,
    width: int,
    width_out: int,
    *,
    temporal: bool,
    impl: str,
    rngs: nnx.Rngs,
    param_dtype: jnp.dtype = jnp.float32,
  ):
    self.conv = FrameConv((3, 3), width, width_out, rngs=rngs, param_dtype=param_dtype)
    self.time_conv = (
      CausalConv((3, 1, 1), width, 2 * width, impl=impl, rngs=rngs, param_dtype=param_dtype)
      if temporal
      else None
    )

  def __call__(self, x: Video, history: History, *, starts: bool) -> Video:
    """`starts`: the first frame of `x` is the video's first, which is not doubled in time.

    That frame is left out of the time convolution's history too: the second latent frame sees zeros
    before it (the rule of the reference implementation's cache).
    """
    if self.time_conv is not None:
      alone = int(starts)
      batch, time, height, width, channels = x.shape
      doubled = self.time_conv(x[:, alone:], history)
      doubled = doubled.reshape(batch, time - alone, height, width, 2, channels)
      doubled = doubled.transpose(0, 1, 4, 2, 3, 5).reshape(
        batch, 2 * (time - alone), height, width, channels
      )
      x = jnp.concatenate([x[:, :alone], doubled], axis=1)
    return self.conv(repeat_pixels(x))


def repeat_pixels(x: Video) -> Video:
  """Nearest-neighbour upsampling of height and width by two."""
  batch, time, height, width, channels = x.shape
  tiled = jnp.broadcast_to(x[:, :, :, None, :, None], (batch, time, height, 2, width, 2, channels))
  return tiled.reshape(batch, time, 2 * height, 2 * width, channels)
