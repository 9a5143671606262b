"""DanceGRPO on LongLive-1.3B: 480p, 129 frames, 12 candidates in two mini-batches, 4 + 2 GPUs.

    python -m sbjax.launch --config=configs/longlive.py --workdir=runs/longlive \\
        --config.model.checkpoint=/weights/longlive_base.pt \\
        --config.model.adapter=/weights/lora.pt \\
        --config.model.vae=/weights/Wan2.1_VAE.pth \\
        --config.model.text_encoder=/weights/models_t5_umt5-xxl-enc-bf16.pth \\
        --config.model.tokenizer=/weights/google/umt5-xxl \\
        --config.prompts.train=prompts.csv --config.prompts.eval=held_out.csv \\
        --config.reward.function=my_reward.py:score

LongLive's own LoRA is merged into the base, which stays frozen; what is trained is a new adapter on
top. The window is LongLive's: 12 latent frames, of which the first 3 are the sink. Length and
resolution are those that the paper trains LongLive at (33 latent frames), there under KVPO.

All else is as in configs/self_forcing.py, and so is this: it has not been run at full size.
"""

from configs import self_forcing


def get_config():
  """Gives the recipe; every field can be overridden as `--config.a.b=value`."""
  c = self_forcing.get_config()
  c.model.name = "longlive-1.3b"
  c.model.checkpoint = ""  # longlive_base.pt
  c.model.part = "generator"
  c.model.adapter = ""  # lora.pt
  c.model.adapter_alpha = 256.0  # the file does not say; LongLive trained with alpha = rank
  c.model.frames = 129  # 33 latent frames
  return c
