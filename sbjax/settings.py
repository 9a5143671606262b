"""The settings of a run: what a config file's fields mean, their types, ranges and choices.

`sbjax.config` builds these records from a config file and checks them. They hold plain values
only, so any process can read them without JAX. docs/configs.md explains every field.
"""

import dataclasses
from typing import Annotated, Literal


@dataclasses.dataclass(frozen=True)
class Range:
  """Bounds of a number.

  Attributes:
    low: smallest value, None for no bound.
    high: largest value, None for no bound.
    low_open: True where the value must be above `low` and not equal to it.
    high_open: the same for `high`.
  """

  low: float | None = None
  high: float | None = None
  low_open: bool = False
  high_open: bool = False

  def holds(self, value: float) -> bool:
    """Tells whether `value` lies within the bounds."""
    above = self.low is None or value > self.low or (value == self.low and not self.low_open)
    below = self.high is None or value < self.high or (value == self.high and not self.high_open)
    return above and below

  def __str__(self) -> str:
    parts = []
    if self.low is not None:
      parts.append(f"{'above' if self.low_open else 'at least'} {_plain(self.low)}")
    if self.high is not None:
      parts.append(f"{'below' if self.high_open else 'at most'} {_plain(self.high)}")
    return " and ".join(parts)


def _plain(number: float) -> str:
  return str(int(number)) if number == int(number) else str(number)


# NumPy's generators and JAX's keys take any of these as they are.
Seed = Annotated[int, Range(0, 2**31 - 1)]
Count = Annotated[int, Range(1)]
Whole = Annotated[int, Range(0)]
Positive = Annotated[float, Range(0.0, low_open=True)]
NotNegative = Annotated[float, Range(0.0)]
Share = Annotated[float, Range(0.0, 1.0)]
Decay = Annotated[float, Range(0.0, 1.0, high_open=True)]
Seconds = Annotated[float, Range(0.0, low_open=True)]


@dataclasses.dataclass(frozen=True)
class SettingsModel:
  """Which network is trained, the files of its weights, and how large its videos are.

  Fields with a default may be left out of a config: their defaults are those of a world that comes
  with its own weights.
  """

  name: str
  checkpoint: str
  frames: Count
  part: str = ""
  adapter: str = ""
  adapter_alpha: NotNegative = 0.0
  vae: str = ""
  text_encoder: str = ""
  tokenizer: str = ""
  embeddings: str = ""
  sampler: str = ""
  height_px: Whole = 0
  width_px: Whole = 0
  weights_dtype: Literal["float32", "bfloat16"] = "float32"
  precision: str = "fp32"
  remat: str = "none"


@dataclasses.dataclass(frozen=True)
class SettingsLoRA:
  """The adapter: rank, alpha (the update is scaled by alpha / rank) and target patterns."""

  rank: Count
  alpha: Positive
  targets: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class SettingsPrompts:
  """Where prompts come from, and what to do with one that the text encoder cannot hold."""

  train: str
  eval: str
  overflow: Literal["refuse", "truncate"]


@dataclasses.dataclass(frozen=True)
class SettingsRollout:
  """How many candidates a step generates, and how they explore."""

  prompts_per_step: Count
  group_size: Count
  best_of: Whole
  same_noise: Literal["none", "group", "step"]
  transition: Literal["renoise", "dance_sde", "sde", "cps", "ddim"]
  noise_level: Positive


@dataclasses.dataclass(frozen=True)
class SettingsAlgorithm:
  """The objective and how a step's candidates are split into updates."""

  name: Literal[
    "dance_grpo",
    "flow_grpo",
    "flow_dppo",
    "grpo_guard",
    "gspo",
    "fpo",
    "diffusion_nft",
    "kvpo",
  ]
  minibatches: Count
  minibatch_order: Literal["group_major", "reference"]
  epochs: Count
  train_steps: str
  chunk_reduce: Literal["sum", "mean"]
  dim_reduce: Literal["mean", "sum"]
  clip_low: Annotated[float, Range(0.0, 1.0, low_open=True, high_open=True)]
  clip_high: Positive
  dual_clip: NotNegative
  kl_coef: NotNegative


@dataclasses.dataclass(frozen=True)
class SettingsAdvantage:
  """How rewards become advantages."""

  baseline: Literal["group_mean", "anchor"]
  std: Literal["group_unbiased", "group_population", "global_unbiased", "global_population", "none"]
  eps: Positive
  clip: Positive
  combine: Literal["adv_sum", "raw_sum", "separate_loss", "gdpo"]


@dataclasses.dataclass(frozen=True)
class SettingsJudge:
  """How a vision-language judge is asked, and the servers that run it."""

  mode: Literal["pairwise_all", "pairwise_anchor", "pointwise"]
  unparsable: Literal["fail", "tie"]
  swap_orders: bool
  frames: Count
  pool_frames: Count
  initial_frames: Count
  calls: Whole
  frames_per_call: Count
  max_tokens: Count
  temperature: NotNegative
  checkpoint: str
  weights_dtype: Literal["float32", "bfloat16"]
  slots: Count
  context_tokens: Count
  endpoints: tuple[str, ...]
  model: str
  connect_timeout_s: Seconds
  total_timeout_s: Seconds
  attempts: Count
  backoff_s: NotNegative
  evict_after: Count
  cooldown_s: Seconds
  concurrency: Count


@dataclasses.dataclass(frozen=True)
class SettingsImage:
  """Judges of single frames: HPS v2.1 and a CLIP score."""

  hps_checkpoint: str
  clip_checkpoint: str
  frames: Count
  best_share: Annotated[float, Range(0.0, 1.0, low_open=True)]
  jpeg: bool


JudgeName = Literal[
  "world",
  "function",
  "unified_reward",
  "unified_reward_flex",
  "digits_reasoner",
  "vr_thinker",
  "hps_v21",
  "clip_score",
]


@dataclasses.dataclass(frozen=True)
class SettingsReward:
  """Who judges, how components are weighed, and what happens when judging fails."""

  name: JudgeName
  also: tuple[str, ...]
  function: str
  judge: SettingsJudge
  image: SettingsImage
  components: tuple[str, ...]
  weights: tuple[float, ...]
  views: Annotated[int, Range(1, 16)]
  optional: tuple[str, ...]
  retries: Whole
  timeout_s: Seconds
  max_failed_frac: Share
  max_skipped_in_row: Count

  @property
  def judges(self) -> tuple[str, ...]:
    """Names of all judges, `name` first."""
    return (self.name, *self.also)


@dataclasses.dataclass(frozen=True)
class SettingsOptim:
  """AdamW, gradient-norm clipping, warm-up and the moving average of the adapter."""

  learning_rate: Positive
  b1: Decay
  b2: Decay
  eps: Positive
  weight_decay: NotNegative
  max_grad_norm: Positive
  warmup_steps: Whole
  ema_decay: Decay


@dataclasses.dataclass(frozen=True)
class SettingsRuntime:
  """Processes, devices, deadlines and planning."""

  executor: Literal["ray", "inline"]
  actor_workers: Count
  reward_workers: Whole
  devices_per_worker: Count
  mesh: tuple[Count, Count]
  cores_per_worker: Whole
  gpus_per_worker: Whole
  ray_address: str
  actor_resource: str
  reward_resource: str
  task_timeout_s: Seconds
  startup_timeout_s: Seconds
  chunk_blocks: Count
  plan: Literal["search", "fixed"]
  profile: str
  fused: int
  replan_drift: NotNegative
  replays_on_reward: Share
  decodes_on_reward: Share
  device_memory_gb: NotNegative = 0.0


@dataclasses.dataclass(frozen=True)
class SettingsEval:
  """When fixed prompts and seeds are evaluated; `every` 0 means never."""

  every: Whole
  prompts: Count
  seeds: tuple[Seed, ...]


@dataclasses.dataclass(frozen=True)
class SettingsCheckpoint:
  """How often a checkpoint is written, in steps, and how many are kept."""

  every: Count
  keep: Count


@dataclasses.dataclass(frozen=True)
class SettingsReport:
  """Sample videos; `samples_every` 0 means never."""

  samples_every: Whole
  samples: Whole
  fps: Count
  writers: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Settings:
  """Everything that a run is told, checked; field for field what the config file holds."""

  seed: Seed
  total_steps: Count
  resume: Literal["never", "auto"]
  scheme: Literal[
    "colocated",
    "colocated_single_replay",
    "async_reward",
    "async_train",
    "merged_replay",
    "stagebreaker",
    "sbjax",
  ]
  model: SettingsModel
  lora: SettingsLoRA
  prompts: SettingsPrompts
  rollout: SettingsRollout
  algorithm: SettingsAlgorithm
  advantage: SettingsAdvantage
  reward: SettingsReward
  optim: SettingsOptim
  runtime: SettingsRuntime
  eval: SettingsEval
  checkpoint: SettingsCheckpoint
  report: SettingsReport

  @property
  def candidates(self) -> int:
    """Candidates that one step generates."""
    return self.rollout.prompts_per_step * self.rollout.group_size
