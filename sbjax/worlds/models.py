"""What a worker needs of a world, whichever it is."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from jaxtyping import Float, UInt8

from models.wan.dit import CausalWanDiT
from models.wan.vae import WanVAE


@dataclasses.dataclass(frozen=True, eq=False)
class WorldModels:
  """The models of a world, loaded.

  Attributes:
    dit: the video model.
    conditioning_channels: [extra, height, width], concatenated to every latent frame; no rows for
      models that take the latent alone.
    vae: the video autoencoder.
    embed: prompts -> prompt embeddings [prompts, text_len, text_dim], rows past a prompt zero.
    decode: latents [frames, channels, height, width] -> uint8 video.
    heldout: (videos, prompts) -> the held-out measure by name; None where there is none.
    judging: (videos, prompts, views) -> component -> a value per video, with which the judge
      `world` reads videos; None where there is none.
    parameters: parameter counts of the models beside the video model, for the banner.
    pixel_stride: pixels of a latent cell's side.
  """

  dit: CausalWanDiT
  conditioning_channels: Float[np.ndarray, "extra height width"]
  vae: WanVAE
  embed: Callable[[Sequence[str]], Float[np.ndarray, "prompts text_len text_dim"]]
  decode: Callable[[np.ndarray], UInt8[np.ndarray, "frames height width 3"]]
  heldout: Callable[[np.ndarray, Sequence[str]], Mapping[str, np.ndarray]] | None
  judging: Callable[[np.ndarray, Sequence[str], int], Mapping[str, np.ndarray]] | None
  parameters: Mapping[str, int]
  pixel_stride: int
