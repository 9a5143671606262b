"""Judges that look at single frames: HPS v2.1 and a CLIP score.

Both are the cosine between a frame and the prompt in the space of a CLIP model. Neither knows of
motion or time.
"""

import io
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from PIL import Image

from models.clip.checkpoint import load_folder
from models.clip.model import encode_images, encode_texts, score
from models.clip.preprocess import cropped, preprocess
from models.clip.tokens import TextTokens
from models.layers.dense import tree_of
from sbjax.rewards.frames import evenly_spaced
from sbjax.rewards.protocol import Job, Verdict, Video

COMPONENT = "overall"
REFERENCE_JPEG_QUALITY = 75


class ClipJudge:
  """Implements `protocol.Judge`; a verdict is the mean cosine of a video's best frames.

  Args:
    folder: the model, as `models.clip.checkpoint.load_folder` takes it, with `tokenizer.json`.
    hps: whether frames are prepared as HPS v2 does it and not as CLIP does.
    frames: evenly spaced frames of a video that are looked at.
    best_share: the share of them, the best, whose mean counts; at least one.
    jpeg: whether a frame is first stored as a JPEG file of quality 75 and read again, as
      DanceGRPO's pipeline does; it changes a cosine by about a thousandth.

  Raises:
    ValueError: the checkpoint or its tokenizer is missing, damaged or does not fit.
  """

  def __init__(
    self, folder: str, *, hps: bool, frames: int, best_share: float = 1.0, jpeg: bool = False
  ):
    model = load_folder(folder)
    self._p, self._config = tree_of(model), model.config
    self._tokens = TextTokens(folder, model.config)
    self._prepare: Callable[..., Array] = preprocess if hps else cropped
    self._frames, self._best_share, self._jpeg = frames, best_share, jpeg
    self._images = jax.jit(encode_images, static_argnames=("config",))
    self._texts = jax.jit(encode_texts, static_argnames=("config",))

  def judge(self, jobs: Sequence[Job], videos: Mapping[int, Video]) -> list[Verdict]:
    """One video a job; a video that several jobs name is looked at once a job."""
    verdicts = []
    for job in jobs:
      # One at a time: a video's verdict must not depend on who else is in the batch.
      found = self.cosines(videos[job.candidates[0]], job.prompt)
      best = np.sort(found)[::-1][: max(1, int(self._best_share * len(found)))]
      value = float(best.mean())
      told = ", ".join(f"{x:.3f}" for x in found)
      verdicts.append(Verdict({COMPONENT: value}, rationale=f"cosine of frames: {told}"))
    return verdicts

  def cosines(self, video: Video, prompt: str) -> Float[np.ndarray, " frames"]:
    """The cosine of each frame that is looked at and the prompt, in their order."""
    chosen = np.asarray(video)[evenly_spaced(len(video), self._frames)]
    if self._jpeg:
      chosen = np.stack([_through_jpeg(frame) for frame in chosen])
    pixels = self._prepare(chosen, side=self._config.image_px)
    images = self._images(self._p, self._config, pixels)
    text = self._texts(self._p, self._config, jnp.asarray(self._tokens([prompt])))
    return np.asarray(score(images, jnp.broadcast_to(text, images.shape)), np.float64)


def _through_jpeg(frame: np.ndarray) -> np.ndarray:
  file = io.BytesIO()
  Image.fromarray(frame).save(file, "JPEG", quality=REFERENCE_JPEG_QUALITY)
  return np.asarray(Image.open(file))
