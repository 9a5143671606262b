"""Lower bounds of a part of a plan space, for branch and bound over counts of moved tasks.

They hold where reward workers do exactly the tasks that counts give them, generate nothing, replay
behind all judging, and actors take a replay only when no generation is left: the paper's scheme.
"""

import math
from collections.abc import Mapping

from sbjax.dataflow.bound import Bound
from sbjax.dataflow.costs import StepCosts
from sbjax.dataflow.space import Space


class Branches:
  """Bounds of the plans that share some choices.

  Args:
    space: of a scheme that replays on reward workers behind all judging.
    costs: what tasks take.
  """

  def __init__(self, space: Space, costs: StepCosts):
    shape, scheme, slots = space.shape, space.scheme, space.slots
    bound = Bound(shape, scheme, slots, costs)
    self._updates = [len(members) for members in shape.updates]
    groups = {"actor": 0, "reward": 0}
    for slot in slots:
      groups[slot.group] += 1
    self._actors, self._rewards = groups["actor"], groups["reward"]
    self._videos = shape.candidates + len(shape.anchors)
    self._judged = [bound.judged_s(bound.needs(m)) for m in range(len(self._updates))]
    self._all_judged = bound.judged_s(bound.everything())
    self._tails = [bound.tail_s(m) for m in range(len(self._updates))]
    self._passes = [bound.pass_s("replay", m, n) for m, n in enumerate(self._updates)]
    self._generate = bound.least_on("actor", "generate")
    self._decode = {g: bound.least_on(g, "decode") for g in groups}
    self._reference = bound.least_on("actor", "reference") if shape.reference else 0.0
    self._candidates = shape.candidates
    self._replay = {
      g: [bound.least_on(g, "replay", m) for m in range(len(self._updates))] for g in groups
    }
    self._judging = bound.judging_work_s()
    # Every moved decode comes before a judgement where every video is judged.
    self._all_jobs = {c for job in shape.jobs for c in job} >= set(range(shape.candidates))

  def least_s(self, chosen: Mapping[str, int]) -> float:
    """Seconds that no plan with these choices beats; what is not chosen is free.

    Args:
      chosen: `decodes`, `references` and `replays/u<m>`, as far as they are.
    """
    decodes = chosen.get("decodes", 0)
    moved = self._decode["reward"] * decodes if self._all_jobs else 0.0
    judged = max(self._all_judged, self._generate + (moved + self._judging) / self._rewards)
    theta, load = 0.0, self._videos * self._generate
    for m, members in enumerate(self._updates):
      away = chosen.get(f"replays/u{m}")
      ends = theta + self._passes[m]
      if away is not None:
        stay = members - away
        load += stay * self._replay["actor"][m]
        if stay:
          ends = max(ends, theta + math.ceil(stay / self._actors) * self._replay["actor"][m])
          # No actor takes a replay before the last generation has started.
          ends = max(ends, load / self._actors)
        if away:
          behind = math.ceil(away / self._rewards) * self._replay["reward"][m]
          ends = max(ends, max(theta, judged) + behind)
      theta = max(ends, self._judged[m]) + self._tails[m]
    if "decodes" in chosen:
      # An anchor's decode goes with the others'.
      load += (self._candidates - decodes) * self._decode["actor"]
    if "references" in chosen:
      load += (self._candidates - chosen["references"]) * self._reference
    return max(theta, judged, load / self._actors) * (1.0 - 1e-9)
