"""The quickstart with a judge that looks, reasons in words, and compares.

    python -m sbjax.launch --config=configs/digits_judge.py --workdir=runs/digits_judge

The judge is a tiny Qwen3-VL that was made for this world (sbjax/worlds/digits/README.md): it sees
two candidates of a prompt, says what each shows, scores them, and names the better one overall and
in digit, colour and motion. Every pair of a group is asked in both orders; a candidate's reward is
its share of wins.

Whether the videos improve is measured with the quickstart's reward, which this run never sees, and
with the held-out classifier:

    python -m sbjax.sample --config=configs/quickstart.py --num_prompts=64 --seeds=1,2 \\
        --adapter=runs/digits_judge/adapter.safetensors --out=runs/digits_judge/truth

Schemes are compared, one worker of each kind on a core of its own, by

    python -m sbjax.compare --config=configs/digits_judge.py --workdir=runs/digits_compared \\
        --schemes=colocated,async_reward,stagebreaker
"""

from typing import Any

from configs import quickstart


def get_config():
  """Gives the settings: the quickstart's, with the reasoner as the reward."""
  c: Any = quickstart.get_config()  # its fields are sections, which pyright cannot tell
  c.reward.name = "digits_reasoner"
  c.reward.components = ("overall",)
  c.reward.weights = (1.0,)
  c.reward.judge.mode = "pairwise_all"
  c.reward.judge.swap_orders = True
  c.reward.judge.checkpoint = "world"  # the judge that is shipped with the world
  c.reward.judge.max_tokens = 112
  c.reward.judge.slots = 32
  c.reward.judge.context_tokens = 256
  return c
