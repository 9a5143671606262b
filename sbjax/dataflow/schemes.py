"""Execution schemes as data: a replay mode, barriers between stages, and which group runs what."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

ReplayMode = Literal["merged", "two_pass", "two_pass_early"]
"""What a gradient is made of; schemes of one mode give equal bits.

`merged` takes it in a trajectory's only replay, before rewards are known, and scales it later;
`two_pass` scores the trajectory in a replay of its own, waits for the coefficients and replays
again; `two_pass_early` replays twice as well, but takes the gradient before rewards are known.
"""


@dataclasses.dataclass(frozen=True)
class Scheme:
  """How an RL step is executed.

  Attributes:
    name: how a config names it.
    replay_mode: what a gradient is made of.
    stages: barriers; no task of a stage starts before every task of the stages before has ended.
      Kinds that stand in no stage follow their dependencies alone.
    separate_groups: True where actor and reward workers are different devices; False where every
      worker holds every model.
    bindings: kind -> the groups that may run it; where there are two a plan chooses.
    judge_batches: `stage` forms one batch per judging device over the whole step, `device` one per
      judging device and mini-batch, `job` judges each job as soon as its videos exist.
    judging_first: True where reward devices replay only after every judgement of the step.
    plan_space: what a plan may choose beside the bindings: `split_replays`, `fused`,
      `generate_on_reward`, `judge_batching`, `order`.
    summary: one line for tables.
  """

  name: str
  replay_mode: ReplayMode
  stages: tuple[tuple[str, ...], ...]
  separate_groups: bool
  bindings: Mapping[str, tuple[str, ...]]
  judge_batches: Literal["stage", "device", "job"]
  judging_first: bool
  plan_space: frozenset[str]
  summary: str

  @property
  def forward_first(self) -> bool:
    """True where a trajectory is scored in a replay of its own before its gradient is taken."""
    return self.replay_mode != "merged"


_KINDS = ("generate", "decode", "judge", "reference", "forward", "replay", "backward")
_COLOCATED = MappingProxyType({kind: ("both",) for kind in _KINDS})
_BY_STAGE = MappingProxyType({kind: ("actor",) for kind in _KINDS} | {"judge": ("reward",)})
_BY_TASK = MappingProxyType(
  dict(_BY_STAGE)
  | {kind: ("actor", "reward") for kind in ("decode", "reference", "forward", "replay", "backward")}
)
_ANYWHERE = MappingProxyType(dict(_BY_TASK) | {"generate": ("actor", "reward")})

_ROLLOUT, _TRAINING = ("generate",), ("reference", "forward", "replay", "backward")
_STAGE_BY_STAGE = (_ROLLOUT, ("decode",), ("judge",), _TRAINING)


def _scheme(name: str, mode: ReplayMode, summary: str, **kwargs) -> Scheme:
  defaults = {
    "stages": (),
    "separate_groups": True,
    "bindings": _BY_STAGE,
    "judge_batches": "job",
    "judging_first": False,
    "plan_space": frozenset(),
  }
  return Scheme(name=name, replay_mode=mode, summary=summary, **(defaults | kwargs))


_ALL = (
  _scheme(
    "colocated",
    "two_pass",
    "every worker holds every model, stage after stage, two replays (StageBreaker §5.1)",
    stages=_STAGE_BY_STAGE,
    separate_groups=False,
    bindings=_COLOCATED,
    judge_batches="stage",
  ),
  _scheme(
    "colocated_single_replay",
    "merged",
    "colocated, but each trajectory is replayed once, as some code bases do",
    stages=_STAGE_BY_STAGE,
    separate_groups=False,
    bindings=_COLOCATED,
    judge_batches="stage",
  ),
  _scheme(
    "async_reward",
    "two_pass",
    "reward devices judge during rollout, training waits for every reward (§3.2)",
    stages=(("generate", "decode", "judge"), _TRAINING),
  ),
  _scheme(
    "async_train",
    "two_pass_early",
    "training no longer waits for rewards, still two replays (§4.2)",
  ),
  _scheme(
    "merged_replay",
    "merged",
    "one replay, tasks stay with their stage's devices (§4.3)",
  ),
  _scheme(
    "stagebreaker",
    "merged",
    "decodes and whole replays move to reward devices (§4.4)",
    bindings=_BY_TASK,
    judge_batches="device",
    judging_first=True,
  ),
  _scheme(
    "sbjax",
    "merged",
    "fused candidates, split replays, generation on reward devices, planned together",
    bindings=_ANYWHERE,
    judge_batches="device",
    plan_space=frozenset(
      {"split_replays", "fused", "generate_on_reward", "judge_batching", "order"}
    ),
  ),
)
SCHEMES: Mapping[str, Scheme] = MappingProxyType({s.name: s for s in _ALL})


def scheme(name: str) -> Scheme:
  """Gives a scheme by name.

  Raises:
    ValueError: for an unknown name; it lists the known ones.
  """
  if name not in SCHEMES:
    raise ValueError(f"scheme={name!r} is not known; use one of {', '.join(sorted(SCHEMES))}")
  return SCHEMES[name]
