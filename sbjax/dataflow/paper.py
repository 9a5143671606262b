"""Costs in the paper's setting: a few numbers and how they scale; none of them is measured here.

StageBreaker reports ratios and shares, not task times. So seconds here are in units of one rollout
of 21 latent frames at 480p on the 1.3B model, and every other length, size or judge follows from a
reference number and a law: a pass over the network costs one part that grows with the tokens and
one that grows with tokens times context; a judge's batch costs a fixed part (writing its reasoning
is bound by memory, so a batch takes hardly longer than one) and a part per video.
`benchmarks.paper` fits the free numbers to the baselines' ratios.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from sbjax.dataflow.costs import StepCosts, WorkerCosts
from sbjax.dataflow.plan import StepShape

REFERENCE_FRAMES = 21
CHUNK_FRAMES = 3
"""Latent frames of a chunk of the Self-Forcing and LongLive models."""

_PIXELS = MappingProxyType({"480p": 832 * 480, "360p": 640 * 352})
_LOCAL_FRAMES = 12
"""LongLive attends to this many latent frames only, so its passes grow with the length alone."""

Algorithm = Literal["dancegrpo", "kvpo"]


@dataclasses.dataclass(frozen=True)
class JudgeCurve:
  """A judge's seconds for 21 latent frames.

  Attributes:
    fixed_s: of a batch, whatever its size.
    each_s: of every video in it.
    frames_share: the share of both that grows with the number of frames it looks at.
  """

  fixed_s: float
  each_s: float
  frames_share: float = 0.5

  def seconds(self, videos: int, frames: int) -> float:
    """Seconds of a batch."""
    growth = 1.0 - self.frames_share + self.frames_share * frames / REFERENCE_FRAMES
    return (self.fixed_s + self.each_s * videos) * growth


_JUDGES = MappingProxyType(
  {
    "vr_thinker": JudgeCurve(0.3962, 0.3962),
    "unified_reward_flex": JudgeCurve(0.28306, 0.28306),
  }
)


@dataclasses.dataclass(frozen=True)
class PaperCosts:
  """The numbers, for 21 latent frames at 480p with the 1.3B model; a rollout is 1 second.

  The defaults are what `benchmarks.paper` fits to the paper's baselines.

  Attributes:
    generate_s: rollout of one candidate without its decode.
    decode_s: its decode; about 30 % of rollout with decode (§5.5).
    forward_s: a scoring replay.
    backward_s: a gradient replay, its own forward pass included.
    units_share: what keeping units and folding them adds to a gradient replay.
    fused_s: what taking the gradient adds to a rollout.
    attention_share: share of a pass that grows with tokens times context.
    judges: name -> curve.
    swap_s: what a colocated worker spends in a step on exchanging policy and judge.
    colocated_judging: how many times as long a colocated judge takes, which shares its memory with
      the policy and ends with the slowest of all verdicts.
    model_scale: model -> seconds of a pass relative to the 1.3B model.
    window_frames: frames of KVPO's policy window, all that it replays.
    gradient_steps_share: share of KVPO's denoising steps that take a gradient.
    reduce_s: summing one candidate's buffers.
    update_s: the optimizer.
    push_s: receiving an adapter.
    dispatch_s: between two tasks of a worker.
  """

  generate_s: float = 0.7
  decode_s: float = 0.3
  forward_s: float = 0.3048
  backward_s: float = 1.3316
  units_share: float = 0.02
  fused_s: float = 1.0268
  attention_share: float = 0.3
  judges: Mapping[str, JudgeCurve] = dataclasses.field(default_factory=lambda: dict(_JUDGES))
  swap_s: float = 0.0
  colocated_judging: float = 2.6832
  model_scale: Mapping[str, float] = dataclasses.field(
    default_factory=lambda: {"1.3B": 1.0, "5B": 2.5}
  )
  window_frames: int = 12
  gradient_steps_share: float = 0.5
  reduce_s: float = 0.001
  update_s: float = 0.01
  push_s: float = 0.01
  dispatch_s: float = 0.002


def paper_costs(
  parameters: PaperCosts,
  frames: int = REFERENCE_FRAMES,
  judge: str = "vr_thinker",
  algorithm: Algorithm = "dancegrpo",
  resolution: str = "480p",
  model: str = "1.3B",
  *,
  most_jobs: int = 64,
) -> StepCosts:
  """Gives the costs of a step for actor, reward and colocated workers.

  Args:
    parameters: the numbers at the reference.
    frames: latent frames of a video, a multiple of 3.
    judge: a name among the parameters' judges.
    algorithm: DanceGRPO replays the whole trajectory; KVPO its policy window under local attention,
      with gradients in some of the steps and a reference pass.
    resolution: 480p or 360p.
    model: a name among the parameters' models.
    most_jobs: the largest batch of the judge's table.

  Raises:
    ValueError: for an unknown name, or frames that chunks do not divide.
  """
  _known("judge", judge, parameters.judges)
  _known("resolution", resolution, _PIXELS)
  _known("model", model, parameters.model_scale)
  _known("algorithm", algorithm, ("dancegrpo", "kvpo"))
  if frames <= 0 or frames % CHUNK_FRAMES:
    raise ValueError(f"frames={frames} are no whole chunks; use a multiple of {CHUNK_FRAMES}")
  size = _PIXELS[resolution] / _PIXELS["480p"]
  scale = parameters.model_scale[model]
  local = algorithm == "kvpo"
  whole = scale * _passes(parameters, frames, size, local=local)
  replayed, share = whole, 1.0
  if local:
    share = parameters.gradient_steps_share
    replayed = scale * _passes(parameters, min(parameters.window_frames, frames), size, local=True)
  gradient = parameters.forward_s + share * (parameters.backward_s - parameters.forward_s)
  curve = parameters.judges[judge]

  def worker(swap_s: float, times: float) -> WorkerCosts:
    sizes = sorted({1, 2, most_jobs})
    # Plain floats: numbers from a fit may be numpy scalars, and simulating those is slow.
    seconds = dict(
      generate_s=parameters.generate_s * whole,
      decode_s=parameters.decode_s * size * frames / REFERENCE_FRAMES,
      forward_s=parameters.forward_s * replayed,
      backward_s=gradient * replayed,
      replay_s=gradient * replayed * (1.0 + parameters.units_share),
      fused_s=share * parameters.fused_s * replayed,
      reference_s=parameters.forward_s * replayed,
      # A chunk's clean pass is one of the five passes that a chunk takes.
      prefix_s=parameters.forward_s * whole * CHUNK_FRAMES / frames / 5.0,
      fold_s=parameters.reduce_s,
      reduce_s=parameters.reduce_s,
      update_s=parameters.update_s,
      push_s=parameters.push_s,
    )
    table = tuple((n, float(swap_s + times * curve.seconds(n, frames))) for n in sizes)
    return WorkerCosts(judge_s=table, **{name: float(s) for name, s in seconds.items()})

  apart = worker(0.0, 1.0)
  together = worker(parameters.swap_s, parameters.colocated_judging)
  by_kind = {"actor": apart, "reward": apart, "both": together}
  return StepCosts(by_kind, dispatch_s=parameters.dispatch_s)


def _known(field: str, name: str, names) -> None:
  if name not in names:
    raise ValueError(f"{field}={name!r} is not known; use one of {', '.join(sorted(names))}")


def _passes(parameters: PaperCosts, frames: int, size: float, *, local: bool) -> float:
  """Passes over a video relative to the reference; `size` is its pixels relative to 480p."""
  tokens = size * frames / REFERENCE_FRAMES
  # Frame by frame the context grows, so that its mean is half the length.
  context = size * (_LOCAL_FRAMES if local else frames) / REFERENCE_FRAMES
  return tokens * (1.0 - parameters.attention_share + parameters.attention_share * context)


def paper_shape(
  candidates: int,
  minibatches: int,
  frames: int = REFERENCE_FRAMES,
  algorithm: Algorithm = "dancegrpo",
  *,
  window_frames: int = 12,
) -> StepShape:
  """Gives the step of the paper's experiments.

  Groups do not straddle mini-batches: a group is as many of a mini-batch's candidates as divide it
  evenly and are at most eight. The paper does not state its group sizes.

  Args:
    candidates: of a step; KVPO's anchors come on top, one a group.
    minibatches: updates of a step.
    frames: latent frames.
    algorithm: KVPO replays a window, compares with an anchor and has a reference.
    window_frames: latent frames of that window.

  Raises:
    ValueError: if mini-batches cannot be equal, or a group would have one member.
  """
  if candidates % minibatches:
    raise ValueError(
      f"minibatches={minibatches} do not divide {candidates} candidates; use a divisor"
    )
  per = candidates // minibatches
  size = max(s for s in range(1, 9) if per % s == 0)
  if size < 2:
    raise ValueError(
      f"minibatches={minibatches} leave groups of one of {candidates} candidates, and an "
      "advantage compares; use fewer mini-batches"
    )
  groups = tuple(tuple(range(i, i + size)) for i in range(0, candidates, size))
  updates = tuple(tuple(range(i, i + per)) for i in range(0, candidates, per))
  local = algorithm == "kvpo"
  chunks = (min(window_frames, frames) if local else frames) // CHUNK_FRAMES
  blocks = (chunks - chunks // 2, chunks // 2) if chunks > 1 else (1,)
  jobs = tuple((c, -1 - g) if local else (c,) for g, group in enumerate(groups) for c in group)
  return StepShape(groups, updates, minibatches, blocks, jobs, "group", reference=local)
