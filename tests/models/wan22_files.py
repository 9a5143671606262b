"""A tiny autoencoder of Wan2.2's kind and a tiny flow, which tests and parity tests share.

`tests/golden/wan22.npz` holds what diffusers gives for them; the parity tests hold it to that.
"""

import pathlib
from collections.abc import Callable

import numpy as np
from flax import nnx

from models.wan.vae import WanVAE
from models.wan.vae_config import VAEConfig
from models.weights import Model, fill, parameters

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "wan22.npz"

RESIDUAL = VAEConfig(
  name="tiny 2.2",
  base_dim=4,
  decoder_base_dim=6,
  z_dim=5,
  dim_mult=(1, 2, 2),
  num_res_blocks=1,
  temporal_downsample=(False, True),
  residual=True,
  patch_px=2,
)
UNIPC_STEPS = (2, 4, 7)
SHIFT = 5.0


def random_vae(config: VAEConfig, seed: int = 0) -> WanVAE:
  """An autoencoder in which no weight is zero or one."""
  return randomised(lambda: WanVAE(config, rngs=nnx.Rngs(0)), seed)


def randomised(make: Callable[[], Model], seed: int = 0) -> Model:
  """A model with weights drawn by numpy: the same on every machine, and nothing is compiled."""
  model = nnx.eval_shape(make)
  random = np.random.default_rng(seed)

  def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
    noise = random.standard_normal(shape).astype(np.float32)
    if name.endswith("kernel"):
      return noise * np.float32(np.prod(shape[:-1]) ** -0.5)
    return np.float32(0.1) * noise + np.float32(name.endswith(("gamma", "scale")))

  shapes = parameters(model)
  fill(model, {name: draw(name, shapes[name].shape) for name in sorted(shapes)})
  return model


def pixels_and_latents() -> tuple[np.ndarray, np.ndarray]:
  random = np.random.default_rng(1)
  pixels = random.uniform(-1, 1, (1, 5, 3, 16, 24)).astype(np.float32)
  return pixels, random.standard_normal((1, 4, RESIDUAL.z_dim, 2, 3)).astype(np.float32)


def initial_noise() -> np.ndarray:
  return np.random.default_rng(2).standard_normal((1, 3, 4)).astype(np.float32)


def velocity(x: np.ndarray, sigma: float) -> np.ndarray:
  """A smooth network that is no solution of anything: not linear in latents or time."""
  return np.sin(1.3 * x + sigma) + 0.5 * x * sigma**2
