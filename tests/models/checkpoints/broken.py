"""What broken checkpoints are made of: a good transformer, and a list of ways to break it."""

import numpy as np
from flax import nnx

from models.layers.lora import LoRAConfig, init_lora
from models.wan.vae import VAEConfig
from tests.models.checkpoints.files import CFG, dit_state

STATE = dit_state()
VAE = VAEConfig("tiny", base_dim=4, z_dim=4, dim_mult=(1, 2, 2, 2), num_res_blocks=1)
LORA_CONFIG = LoRAConfig(2, 4.0, ("self_attn.*", "ffn.2"))
LORA = init_lora(LORA_CONFIG, CFG, nnx.Rngs(0).params())


def changed(**changes) -> dict[str, np.ndarray]:
  """The good tensors with some replaced (double underscores stand for dots), None dropping one."""
  renamed = {name.replace("__", "."): value for name, value in changes.items()}
  return {n: v for n, v in {**STATE, **renamed}.items() if v is not None}


def lister(cases: dict):
  """A decorator factory that lists functions which write a broken checkpoint and give its path."""

  def case(match: str):
    def register(build):
      cases[build.__name__] = (build, match)
      return build

    return register

  return case
