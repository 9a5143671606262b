"""One small setting for the tests of emulation: costs, settings, steps."""

from configs import quickstart
from sbjax import config as config_lib
from sbjax.dataflow.costs import StepCosts, WorkerCosts

PROMPTS = ("a", "b", "c", "d")

WORKER = WorkerCosts(
  generate_s=0.1,
  fused_s=0.13,
  decode_s=0.05,
  judge_s=((1, 0.1), (4, 0.25)),
  forward_s=0.05,
  backward_s=0.2,
  replay_s=0.22,
  prefix_s=0.005,
  fold_s=0.01,
  reduce_s=0.002,
  update_s=0.01,
  push_s=0.004,
)
COSTS = StepCosts({kind: WORKER for kind in ("actor", "reward", "both")}, dispatch_s=0.001)


def settings(scheme="sbjax", actors=4, rewards=2, **fields):
  """The quickstart's settings with an emulated step's workers."""
  c = quickstart.get_config()
  c.scheme = scheme
  c.runtime.actor_workers, c.runtime.reward_workers = actors, rewards
  c.rollout.group_size = 3
  for name, value in fields.items():
    node = c
    *path, leaf = name.split("__")
    for part in path:
      node = node[part]
    node[leaf] = value
  return config_lib.convert(c)


def quiet(text):
  del text
