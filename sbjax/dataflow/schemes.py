"""Execution schemes as data: a replay mode, barriers between stages, and which group runs what."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

ReplayMode = Literal["merged", "two_pass"]


@dataclasses.dataclass(frozen=True)
class Scheme:
  """How an RL step is executed.

  Attributes:
    name: how a config names it.
    replay_mode: `merged` replays a trajectory once and applies rewards to its gradients;
      `two_pass` scores it first and replays it again for the gradient.
    stages: barriers; no task of a stage starts before every task of the stages before has ended.
      Kinds that stand in no stage follow their dependencies alone.
    separate_groups: True where actor and reward workers are different devices; False where every
      worker holds every model.
    bindings: kind -> the groups that may run it, where a plan says nothing else.
    judge_batches: `device` forms one batch per reward device and mini-batch; `job` judges each job
      as soon as its videos exist.
  """

  name: str
  replay_mode: ReplayMode
  stages: tuple[tuple[str, ...], ...]
  separate_groups: bool
  bindings: Mapping[str, tuple[str, ...]]
  judge_batches: Literal["device", "job"]


_ACTOR_ONLY = MappingProxyType(
  {
    "generate": ("actor",),
    "decode": ("actor", "reward"),
    "judge": ("reward",),
    "reference": ("actor",),
    "replay": ("actor", "reward"),
    "forward": ("actor",),
    "backward": ("actor",),
  }
)
_ANYWHERE = MappingProxyType({kind: ("both",) for kind in _ACTOR_ONLY})

SCHEMES: Mapping[str, Scheme] = MappingProxyType(
  {
    "colocated": Scheme(
      name="colocated",
      replay_mode="two_pass",
      stages=(
        ("generate",),
        ("decode",),
        ("judge",),
        ("reference", "forward", "backward"),
      ),
      separate_groups=False,
      bindings=_ANYWHERE,
      judge_batches="device",
    ),
    "stagebreaker": Scheme(
      name="stagebreaker",
      replay_mode="merged",
      stages=(),
      separate_groups=True,
      bindings=_ACTOR_ONLY,
      judge_batches="device",
    ),
  }
)


def scheme(name: str) -> Scheme:
  """Gives a scheme by name.

  Raises:
    ValueError: for an unknown name; it lists the known ones.
  """
  if name not in SCHEMES:
    raise ValueError(f"scheme={name!r} is not known; use one of {', '.join(sorted(SCHEMES))}")
  return SCHEMES[name]
