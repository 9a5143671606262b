"""DanceGRPO on Self-Forcing at StageBreaker's settings: 480p, 81 frames, 12 candidates, 4 + 2 GPUs.

    python -m sbjax.launch --config=configs/self_forcing.py --workdir=runs/self_forcing \\
        --config.model.checkpoint=/weights/self_forcing_dmd.pt \\
        --config.model.vae=/weights/Wan2.1_VAE.pth \\
        --config.model.text_encoder=/weights/models_t5_umt5-xxl-enc-bf16.pth \\
        --config.model.tokenizer=/weights/google/umt5-xxl \\
        --config.prompts.train=prompts.csv --config.prompts.eval=held_out.csv \\
        --config.reward.function=my_reward.py:score

Expect: the first worker embeds the prompts (they are kept for later runs), every worker loads 1.4
billion weights in bfloat16, shapes compile, then steps run; videos and evaluations lie under the
workdir. The reward is a Python function of yours; configs/self_forcing_vr_thinker.py and
configs/self_forcing_unified_reward_flex.py have the paper's judges.

The paper gives model, length, resolution, candidates, mini-batches and devices, and leaves the rest
at DanceGRPO's defaults. Its code trains other models, so these are our choices: two groups of six,
`renoise`, rank 64, the learning rate, the moving average. Clip ranges depend on the number of
latent dimensions: look at `actor/pg_clipfrac/m1`.

This recipe has not been run at full size: no published weights were at hand. Tests run it end to
end on small random weights in the published layouts.
"""

from typing import Any

from configs import quickstart


def get_config():
  """Gives the recipe; every field can be overridden as `--config.a.b=value`."""
  c: Any = quickstart.get_config()  # its fields are sections, which pyright cannot tell
  c.total_steps = 200

  c.model.name = "self-forcing"
  c.model.checkpoint = ""  # self_forcing_dmd.pt
  c.model.part = "generator_ema"
  c.model.vae = ""  # Wan2.1_VAE.pth
  c.model.text_encoder = ""  # models_t5_umt5-xxl-enc-bf16.pth
  c.model.tokenizer = ""  # google/umt5-xxl
  c.model.frames = 81  # 21 latent frames
  c.model.height_px = 480
  c.model.width_px = 832
  c.model.weights_dtype = "bfloat16"
  c.model.precision = "mixed"
  c.model.remat = "block"

  c.lora.rank = 64
  c.lora.alpha = 128.0
  c.lora.targets = ("self_attn.*", "cross_attn.*", "ffn.*")

  c.prompts.train = ""
  c.prompts.eval = ""
  c.prompts.overflow = "truncate"  # as Wan does

  c.rollout.prompts_per_step = 2
  c.rollout.group_size = 6
  c.algorithm.minibatches = 2
  c.algorithm.clip_low = 1e-4
  c.algorithm.clip_high = 1e-4
  c.advantage.std = "group_unbiased"

  c.reward.name = "function"
  c.reward.function = ""
  c.reward.components = ("score",)
  c.reward.weights = (1.0,)
  c.reward.timeout_s = 600.0

  c.optim.learning_rate = 1e-4
  c.optim.b2 = 0.999
  c.optim.weight_decay = 1e-4
  c.optim.ema_decay = 0.995

  c.runtime.actor_workers = 4
  c.runtime.reward_workers = 2
  c.runtime.gpus_per_worker = 1
  c.runtime.cores_per_worker = 0
  c.runtime.task_timeout_s = 900.0
  c.runtime.startup_timeout_s = 3600.0

  c.eval.every = 50
  c.eval.prompts = 8
  c.report.samples_every = 10
  return c
