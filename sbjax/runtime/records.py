"""Records that a step starts from and that the driver hands to reports and checkpoints.

Plain values and opaque handles: no JAX, no Ray.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np
from jaxtyping import Float, UInt8

from sbjax.runtime.executor import Handle


@dataclasses.dataclass(frozen=True)
class Span:
  """One executed task on one worker, for the timeline.

  Attributes:
    worker: the worker's name, e.g. `actor-0`.
    group: `actor` or `reward` (or `both`), the group whose devices the worker owns.
    kind: task kind, e.g. `replay`.
    task: task identity, e.g. `replay/m0/c3`.
    step: RL step.
    start_s: start on the driver's clock, seconds since the run began.
    end_s: end on the same clock.
    candidate: candidate index, or None for a task of more than one.
    minibatch: mini-batch index, or None.
    failed: True where the attempt was lost or raised.
  """

  worker: str
  group: str
  kind: str
  task: str
  step: int
  start_s: float
  end_s: float
  candidate: int | None = None
  minibatch: int | None = None
  failed: bool = False


@dataclasses.dataclass(frozen=True)
class TrainHandles:
  """Where the current training state is.

  Attributes:
    adapter: flat LoRA weights.
    ema: their moving average.
    optimizer: leaves of the optimizer's state.
    count: updates taken.
    skipped_in_row: updates skipped in a row.
  """

  adapter: Handle
  ema: Handle
  optimizer: Handle
  count: int
  skipped_in_row: int


@dataclasses.dataclass(frozen=True)
class Candidate:
  """One candidate before its rollout.

  Attributes:
    group: its group.
    prompt: what is asked for.
    seed: stream of the step noise.
    seed_initial: stream of the initial noise.
    trained: denoising steps that it trains on.
  """

  group: int
  prompt: str
  seed: int
  seed_initial: int
  trained: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class CandidateRecord:
  """What is worth keeping of one candidate video.

  Attributes:
    index: candidate index within the step.
    prompt: its prompt.
    seed: integer that names its random stream; the same number makes the same video again.
    reward: weighted reward, None where judging failed.
    components: each reward component by name; empty where judging failed.
    rationale: what the judge wrote, or why it failed.
    video: uint8 frames, or None where they were not kept.
  """

  index: int
  prompt: str
  seed: int
  reward: float | None
  components: Mapping[str, float]
  rationale: str
  video: UInt8[np.ndarray, "frames height width 3"] | None = None


@dataclasses.dataclass(frozen=True)
class TrainState:
  """Everything that the next step depends on, as numpy arrays and plain numbers.

  Attributes:
    step: RL steps completed.
    version: adapter version, the number of updates applied.
    adapter: LoRA weights as one flat buffer.
    ema: their exponential moving average.
    optimizer: leaves of the optimizer's state in optax order.
    prompt_cursor: prompts consumed so far.
    skipped_in_row: updates skipped in a row because too many rewards failed or the gradient was
      not finite.
    fused: candidates whose gradient is taken during rollout; a run keeps the number for good.
  """

  step: int
  version: int
  adapter: Float[np.ndarray, " parameters"]
  ema: Float[np.ndarray, " parameters"]
  optimizer: tuple[np.ndarray, ...]
  prompt_cursor: int
  skipped_in_row: int
  fused: int = 0


@dataclasses.dataclass(frozen=True)
class StepResult:
  """What one RL step gives.

  Attributes:
    step: the step that ended, from 1.
    metrics: scalars by key; every key is defined in docs/metrics.md.
    candidates: one record per candidate, in order.
    spans: the executed tasks.
  """

  step: int
  metrics: Mapping[str, float]
  candidates: tuple[CandidateRecord, ...]
  spans: tuple[Span, ...]


@dataclasses.dataclass(frozen=True)
class EvalResult:
  """Fixed prompts and seeds under several adapters.

  Attributes:
    step: RL steps completed when it was taken.
    scores: adapter name (`base`, `online`, `ema`) -> component name (with `reward` for the
      weighted sum and `heldout` where a held-out measure exists) -> one value per video, in the
      same order of (prompt, seed) for every adapter, NaN where judging failed.
    records: adapter name -> candidate records in the same order.
  """

  step: int
  scores: Mapping[str, Mapping[str, Float[np.ndarray, " videos"]]]
  records: Mapping[str, tuple[CandidateRecord, ...]]
