"""StageBreaker's main setting on emulated devices: DanceGRPO with VR-Thinker, 24 candidates, 4 + 2.

    python -m sbjax.compare --config=configs/paper_emulated.py --workdir=runs/paper_emulated \\
        --emulated=configs/paper_emulated.json --time_scale=0.25

Nothing is computed: every task waits as long as the profile says, times the time scale, under the
real driver and Ray processes; "emulated" stands on every line and picture. The profile was fitted
by `python -m benchmarks.paper --profile=configs/paper_emulated.json` to the speeds of three
schemes relative to `colocated` (0.78, 1.00, 1.13); its unit is one rollout with its decode, so a
step is 10 to 21 of them and at 0.25 takes 2.7 s or more.

Expected: `stagebreaker` about 1.35 x as fast as `colocated` (the paper: 1.41) and 1.72 x as fast as
`async_reward` (1.81), reward devices busy 85 % (84 %). docs/performance.md has the fit.

Groups of 6 are our choice; the paper does not state its own. Videos have 81 frames, 21 of them
latent. Model and judge are the embedded world's: they give the form of scalars and never run.
"""

from typing import Any

from configs import quickstart


def get_config():
  """Gives the setting; every field can be overridden as `--config.a.b=value`."""
  c: Any = quickstart.get_config()  # its fields are sections, which pyright cannot tell
  c.total_steps = 9  # the paper: one warm-up step and eight more
  c.model.frames = 81
  c.rollout.prompts_per_step = 4
  c.rollout.group_size = 6
  c.algorithm.minibatches = 2
  c.runtime.actor_workers = 4
  c.runtime.reward_workers = 2
  c.runtime.cores_per_worker = 0
  c.eval.every = 0
  return c
