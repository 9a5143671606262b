"""configs/self_forcing.py judged by UnifiedReward-Flex.

    python -m sbjax.launch --config=configs/self_forcing_unified_reward_flex.py \\
        --workdir=runs/unified_reward_flex \\
        --config.reward.judge.checkpoint=/weights/UnifiedReward-Flex-qwen3vl-8b …

with the paths of weights and prompts as there, or `reward.judge.endpoints` and
`reward.judge.model` in place of the checkpoint. All pairs of a group are compared, 15 of six
candidates; weights are Pref-GRPO's. Not run at full size, as there.
"""

from configs import self_forcing_vr_thinker


def get_config():
  """Gives the recipe; every field can be overridden as `--config.a.b=value`."""
  c = self_forcing_vr_thinker.get_config()
  c.reward.name = "unified_reward_flex"
  c.reward.judge.mode = "pairwise_all"
  c.reward.judge.max_tokens = 4096
  return c
