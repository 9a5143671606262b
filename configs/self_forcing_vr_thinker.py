"""configs/self_forcing.py judged by VR-Thinker, StageBreaker's main setting.

    python -m sbjax.launch --config=configs/self_forcing_vr_thinker.py --workdir=runs/vr_thinker \\
        --config.reward.judge.checkpoint=/weights/VR-Thinker-7B …

with the paths of weights and prompts as there. The judge runs on the two reward workers, beside the
decoder. Servers can run it instead: leave `reward.judge.checkpoint` empty and give
`reward.judge.endpoints` and `reward.judge.model`.

Every candidate meets one fixed opponent of its prompt, which the run's first adapter made. Not run
at full size, as there.
"""

from configs import self_forcing


def get_config():
  """Gives the recipe; every field can be overridden as `--config.a.b=value`."""
  c = self_forcing.get_config()
  c.reward.name = "vr_thinker"
  c.reward.components = ("overall", "dimensions")
  c.reward.weights = (0.3, 0.7)
  c.reward.retries = 0
  c.reward.timeout_s = 1800.0
  c.reward.judge.mode = "pairwise_anchor"
  c.reward.judge.checkpoint = ""  # folder of VR-Thinker
  c.reward.judge.weights_dtype = "bfloat16"
  c.reward.judge.max_tokens = 2048
  c.reward.judge.total_timeout_s = 1800.0
  return c
