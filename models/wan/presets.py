"""Named sizes of the Wan family and of the samplers they were distilled for."""

import dataclasses
import itertools


@dataclasses.dataclass(frozen=True)
class DiTConfig:
  """Sizes of a causal Wan transformer.

  Attributes:
    name: what error messages call it.
    dim: model width; `num_heads` must divide it.
    ffn_dim: width of the feed-forward layer.
    num_heads: attention heads.
    num_layers: transformer blocks.
    in_dim: input channels. Those above `out_dim` are conditioning which the caller concatenates on
      the channel axis, as Wan's image-to-video models do.
    out_dim: output channels (those of a latent).
    text_dim: width of the prompt embedding.
    text_len: rows of the prompt embedding; all of them are attended, also the zero rows past the
      prompt.
    freq_dim: width of the timestep sinusoid.
    eps: of every norm.
    patch_size: latent frames, rows and columns of a token; the first must be 1.
    rope_theta: base of the rotary frequencies.
    remat: what the backward pass recomputes: "none" nothing, "block" every block, "dots" every
      block but the results of its linear maps.
    scan_unroll: blocks per iteration of the loop over layers; `num_layers` or more unrolls it
      fully.
    precision: "fp32", "sf_bf16" (what Self-Forcing and LongLive run) or "mixed" (Wan's own
      autocast); `models.wan.precision` says what each computes in which type.
  """

  name: str
  dim: int
  ffn_dim: int
  num_heads: int
  num_layers: int
  in_dim: int = 16
  out_dim: int = 16
  text_dim: int = 4096
  text_len: int = 512
  freq_dim: int = 256
  eps: float = 1e-6
  patch_size: tuple[int, int, int] = (1, 2, 2)
  rope_theta: float = 10_000.0
  remat: str = "none"
  scan_unroll: int = 1
  precision: str = "fp32"

  def __post_init__(self):
    """Refuses sizes that no model can have."""
    for field in ("dim", "ffn_dim", "num_heads", "num_layers", "in_dim", "out_dim", "text_dim"):
      if getattr(self, field) < 1:
        raise ValueError(f"{field} is {getattr(self, field)}; it must be at least 1.")
    if self.dim % self.num_heads:
      raise ValueError(f"num_heads is {self.num_heads}; it must divide dim, which is {self.dim}.")
    if self.in_dim < self.out_dim:
      raise ValueError(f"in_dim is {self.in_dim}; it must be at least out_dim ({self.out_dim}).")
    if self.patch_size[0] != 1:
      raise ValueError(f"patch_size is {self.patch_size}; its first entry must be 1.")
    if self.remat not in ("none", "block", "dots"):
      raise ValueError(f"remat is {self.remat!r}; use 'none', 'block' or 'dots'.")
    if self.precision not in ("fp32", "sf_bf16", "mixed"):
      raise ValueError(f"precision is {self.precision!r}; use 'fp32', 'sf_bf16' or 'mixed'.")
    if self.scan_unroll < 1:
      raise ValueError(f"scan_unroll is {self.scan_unroll}; it must be at least 1.")

  @property
  def head_dim(self) -> int:
    """Width of one head."""
    return self.dim // self.num_heads

  def tokens_per_frame(self, height: int, width: int) -> int:
    """Tokens of one latent frame of `height` × `width`.

    Raises:
      ValueError: when the patch does not divide the frame.
    """
    rows, columns = self.patch_size[1:]
    if height % rows or width % columns:
      raise ValueError(
        f"latent size is {height}x{width}; it must be a multiple of the patch {rows}x{columns}."
      )
    return (height // rows) * (width // columns)


@dataclasses.dataclass(frozen=True)
class SamplerConfig:
  """How a causal model is rolled out.

  Attributes:
    frames_per_chunk: latent frames that are denoised together.
    window_frames: frames attended at most, counting sink and current chunk; None attends to all.
    sink_frames: first frames that never leave the window.
    cache_frames: frames the key-value cache holds (at least the window, or all frames where that is
      None).
    cache_rule: "self_forcing", "longlive" or "multi_shot" (LongLive 2.0); `models.wan.cache` says
      how they differ.
    shot_offset_frames: by how many frames the multi-shot rule moves positions at a scene cut.
    timestep_shift: shift of the flow-matching schedule.
    denoising_steps: steps on the unshifted 1000-step grid, falling.
    warp_steps: whether those are looked up in the shifted schedule (fractional timesteps) or used
      as they are.
    unipc_steps: None for the few-step sampler of `denoising_steps`; else the number of UniPC's
      steps (`models.wan.unipc`), which choose their own noise levels.
    latent_channels: channels of a latent.
    latent_height: rows of a latent.
    latent_width: columns of a latent.
    max_frames: latent frames of a video by default.
  """

  frames_per_chunk: int = 3
  window_frames: int | None = None
  sink_frames: int = 0
  cache_frames: int = 21
  cache_rule: str = "self_forcing"
  shot_offset_frames: int = 0
  timestep_shift: float = 5.0
  denoising_steps: tuple[int, ...] = (1000, 750, 500, 250)
  warp_steps: bool = True
  unipc_steps: int | None = None
  latent_channels: int = 16
  latent_height: int = 60
  latent_width: int = 104
  max_frames: int = 21

  def __post_init__(self):
    """Refuses settings that cannot work together."""
    if self.cache_rule not in ("self_forcing", "longlive", "multi_shot"):
      raise ValueError(
        f"cache_rule is {self.cache_rule!r}; use 'self_forcing', 'longlive' or 'multi_shot'."
      )
    if self.frames_per_chunk < 1:
      raise ValueError(f"frames_per_chunk is {self.frames_per_chunk}; it must be at least 1.")
    if self.cache_frames < self.frames_per_chunk:
      raise ValueError(
        f"cache_frames is {self.cache_frames}; it must hold a chunk ({self.frames_per_chunk})."
      )
    if self.window_frames is not None:
      if self.window_frames < self.frames_per_chunk:
        raise ValueError(
          f"window_frames is {self.window_frames}; it must hold a chunk ({self.frames_per_chunk})."
        )
      if self.cache_frames < self.window_frames:
        raise ValueError(
          f"cache_frames is {self.cache_frames}; it must hold the window ({self.window_frames})."
        )
      if self.sink_frames + self.frames_per_chunk > self.window_frames:
        raise ValueError(
          f"sink_frames is {self.sink_frames}; with a chunk ({self.frames_per_chunk}) it must fit "
          f"in window_frames ({self.window_frames})."
        )
    if not 0 <= self.sink_frames <= self.cache_frames:
      raise ValueError(f"sink_frames is {self.sink_frames}; it must be 0 to {self.cache_frames}.")
    steps = self.denoising_steps
    if not steps or any(a <= b for a, b in itertools.pairwise(steps)):
      raise ValueError(f"denoising_steps is {steps}; it must name falling steps.")
    if not (steps[-1] >= 1 and steps[0] <= 1000):
      raise ValueError(f"denoising_steps is {steps}; every step must be 1 to 1000.")
    if self.unipc_steps is not None and self.unipc_steps < 1:
      raise ValueError(f"unipc_steps is {self.unipc_steps}; it must be at least 1, or None.")
    if self.cache_rule == "multi_shot":
      self._check_multi_shot()
    elif self.shot_offset_frames:
      raise ValueError(
        f"shot_offset_frames is {self.shot_offset_frames}; under cache_rule {self.cache_rule!r} it "
        "must be 0."
      )

  def _check_multi_shot(self):
    chunk, sink = self.frames_per_chunk, self.sink_frames
    if self.window_frames != self.cache_frames:
      raise ValueError(
        f"window_frames is {self.window_frames}; under the multi-shot rule it must equal "
        f"cache_frames ({self.cache_frames})."
      )
    for field in ("cache_frames", "sink_frames"):
      if getattr(self, field) % chunk:
        raise ValueError(
          f"{field} is {getattr(self, field)}; under the multi-shot rule it must be a multiple of "
          f"frames_per_chunk ({chunk})."
        )
    needed = sink + min(sink, chunk) + chunk
    if self.cache_frames < needed:
      raise ValueError(
        f"cache_frames is {self.cache_frames}; sink, pinned chunk and current chunk need {needed}."
      )
    if self.shot_offset_frames < 0:
      raise ValueError(f"shot_offset_frames is {self.shot_offset_frames}; it must be at least 0.")

  def tokens_per_frame(self, dit: DiTConfig) -> int:
    """Tokens of one latent frame under `dit`'s patch."""
    return dit.tokens_per_frame(self.latent_height, self.latent_width)


_WAN_1_3B = DiTConfig("wan2.1-1.3b", 1536, 8960, 12, 30, remat="block")
_WAN_5B = DiTConfig("wan2.2-ti2v-5b", 3072, 14_336, 24, 30, in_dim=48, out_dim=48, remat="block")
# 704 × 1280 pixels in chunks of eight latent frames.
_SAMPLER_5B = SamplerConfig(
  frames_per_chunk=8,
  cache_frames=32,
  unipc_steps=50,
  latent_channels=48,
  latent_height=44,
  latent_width=80,
  max_frames=32,
)
_LONGLIVE_2 = dataclasses.replace(
  _SAMPLER_5B,
  window_frames=32,
  sink_frames=8,
  cache_rule="multi_shot",
  shot_offset_frames=8,
  unipc_steps=4,
  max_frames=128,
)

PRESETS: dict[str, tuple[DiTConfig, SamplerConfig]] = {
  "wan2.1-1.3b": (_WAN_1_3B, SamplerConfig()),
  "self-forcing": (dataclasses.replace(_WAN_1_3B, name="self-forcing"), SamplerConfig()),
  "longlive-1.3b": (
    dataclasses.replace(_WAN_1_3B, name="longlive-1.3b"),
    SamplerConfig(
      window_frames=12, sink_frames=3, cache_frames=12, cache_rule="longlive", max_frames=120
    ),
  ),
  "wan2.1-14b": (DiTConfig("wan2.1-14b", 5120, 13824, 40, 40, remat="block"), SamplerConfig()),
  "wan2.2-ti2v-5b": (_WAN_5B, _SAMPLER_5B),
  "longlive-2.0-5b": (dataclasses.replace(_WAN_5B, name="longlive-2.0-5b"), _LONGLIVE_2),
  # For training: nearly the same noise levels, and noise between them, so that steps have
  # log-probabilities.
  "longlive-2.0-5b-renoise": (
    dataclasses.replace(_WAN_5B, name="longlive-2.0-5b-renoise"),
    dataclasses.replace(_LONGLIVE_2, unipc_steps=None),
  ),
  "digits": (
    DiTConfig(
      "digits",
      192,
      768,
      6,
      6,
      in_dim=10,
      out_dim=8,
      text_dim=64,
      text_len=12,
      rope_theta=100.0,
      scan_unroll=6,
    ),
    SamplerConfig(
      window_frames=9,
      cache_frames=9,
      latent_channels=8,
      latent_height=8,
      latent_width=8,
      max_frames=9,
    ),
  ),
}


def preset(name: str) -> tuple[DiTConfig, SamplerConfig]:
  """The model and sampler sizes of a named preset.

  Raises:
    ValueError: for an unknown name; the message lists the known ones.
  """
  if name not in PRESETS:
    raise ValueError(f"preset is {name!r}; use one of {', '.join(sorted(PRESETS))}.")
  return PRESETS[name]
