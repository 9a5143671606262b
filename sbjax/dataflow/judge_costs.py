"""What a generating judge costs by frames, tokens and batch: a model that is fitted, and read off.

A dialogue first takes its prompt in (frames through the vision tower, then tokens), work that adds
up over dialogues. Then it writes token by token: a step reads all weights once for the whole batch,
and each dialogue adds little. So batches are cheap while they fit the judge's slots, and long
answers cost steps. No JAX.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class JudgePoint:
  """One measured batch of equal dialogues.

  Attributes:
    jobs: dialogues, at most as many as the judge has slots.
    frames: that each shows.
    prompt_tokens: of each, those that stand for frames included.
    new_tokens: that each writes.
    prefill_s: until all prompts are in.
    decode_s: from there to the end.

  Raises:
    ValueError: a count below its least, or seconds that are not finite and at least 0.
  """

  jobs: int
  frames: int
  prompt_tokens: int
  new_tokens: int
  prefill_s: float
  decode_s: float

  def __post_init__(self):
    for field, least in (("jobs", 1), ("frames", 0), ("prompt_tokens", 1), ("new_tokens", 0)):
      if getattr(self, field) < least:
        raise ValueError(f"{field} is {getattr(self, field)}; it must be at least {least}.")
    for field in ("prefill_s", "decode_s"):
      if not 0.0 <= getattr(self, field) < math.inf:
        raise ValueError(f"{field} is {getattr(self, field)}; use seconds of at least 0.")


@dataclasses.dataclass(frozen=True)
class JudgeRow(JudgePoint):
  """A measurement with where it was made.

  Attributes:
    worker: kind of worker.
    slots: dialogues that its judge decodes at once.
  """

  worker: str = "reward"
  slots: int = 1

  @property
  def key(self) -> tuple[str, int, int, int, int, int]:
    """What was measured."""
    return (self.worker, self.slots, self.jobs, self.frames, self.prompt_tokens, self.new_tokens)


@dataclasses.dataclass(frozen=True)
class JudgeCosts:
  """Seconds of a judge on one kind of worker.

  Attributes:
    slots: dialogues that it decodes at once.
    call_s: of a batch, whatever it holds.
    frame_s: a frame through the vision tower.
    token_s: a token of a prompt.
    step_s: a decoding step, whatever the batch.
    row_s: what each dialogue adds to a step.
  """

  slots: int
  call_s: float
  frame_s: float
  token_s: float
  step_s: float
  row_s: float

  def prefill_s(self, jobs: int, frames: int, prompt_tokens: int) -> float:
    """Seconds to take in the prompts of a batch; frames and tokens are of each dialogue."""
    return self.call_s + jobs * (frames * self.frame_s + prompt_tokens * self.token_s)

  def decode_s(self, jobs: int, new_tokens: int) -> float:
    """Seconds to write a batch's answers; what does not fit the slots waits for its turn."""
    full, rest = divmod(jobs, self.slots)
    step_s = full * (self.step_s + self.slots * self.row_s)
    if rest:
      step_s += self.step_s + rest * self.row_s
    return new_tokens * step_s

  def judging_s(self, jobs: int, frames: int, prompt_tokens: int, new_tokens: int) -> float:
    """Seconds of one judge task."""
    return self.prefill_s(jobs, frames, prompt_tokens) + self.decode_s(jobs, new_tokens)

  def table(
    self, most: int, frames: int, prompt_tokens: int, new_tokens: int
  ) -> tuple[tuple[int, float], ...]:
    """(jobs, seconds) of batches of 1 to `most`, as `WorkerCosts.judge_s` takes them."""
    return tuple(
      (jobs, self.judging_s(jobs, frames, prompt_tokens, new_tokens)) for jobs in range(1, most + 1)
    )


def fit(points: Sequence[JudgePoint], slots: int) -> JudgeCosts:
  """The model that is nearest to measurements, relatively; no cost comes out below zero.

  Args:
    points: measurements that differ in tokens and batch, else their costs cannot be told apart.
    slots: of the judge.

  Raises:
    ValueError: no points, one with more dialogues than slots, or none that says what a step and a
      further dialogue cost.
  """
  wide = [p.jobs for p in points if p.jobs > slots]
  if wide:
    raise ValueError(f"jobs is {wide[0]}; measure at most as many as the {slots} slots.")
  written = [p for p in points if p.new_tokens]
  if len({p.jobs for p in written}) < min(2, slots):
    raise ValueError(
      f"points has {len(points)} measurements; give at least two batch sizes whose dialogues write."
    )
  call_s, frame_s, token_s = _nearest(
    [(1, p.jobs * p.frames, p.jobs * p.prompt_tokens) for p in points],
    [p.prefill_s for p in points],
  )
  step_s, row_s = _nearest(
    [(p.new_tokens, p.new_tokens * p.jobs) for p in written], [p.decode_s for p in written]
  )
  return JudgeCosts(slots, call_s, frame_s, token_s, step_s, row_s)


def _nearest(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
  """Least squares of relative errors; the most negative cost is set to zero until none is."""
  y = np.asarray(seconds, float)
  weight = 1.0 / np.maximum(y, 1e-9)
  x, wanted = np.asarray(rows, float) * weight[:, None], y * weight
  kept = [i for i in range(x.shape[1]) if x[:, i].any()]
  while True:
    found = np.linalg.lstsq(x[:, kept], wanted, rcond=None)[0]
    if (found >= 0).all():
      break
    kept.pop(int(np.argmin(found * np.abs(x[:, kept]).mean(axis=0))))
  costs = np.zeros(x.shape[1])
  costs[kept] = found
  return costs.tolist()
