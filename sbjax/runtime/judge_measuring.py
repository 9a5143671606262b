"""What a generating judge takes by frames, tokens and batch, measured on its own engine.

Answers are scripted: every step is computed, and each answer has the length that was asked for.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from models.generate.request import Request
from models.qwen_vl.preprocess import encode_image
from sbjax.rewards.combined import JudgeTable
from sbjax.rewards.conversation import ConversationJudge
from sbjax.rewards.engine_generator import EngineGenerator
from sbjax.rewards.frames import evenly_spaced
from sbjax.rewards.protocol import Judge

NEW_TOKENS = 32
SHORT, LONG = 8, 400  # letters of the text beside the frames; at most a token each


def salted(videos: Sequence[np.ndarray], salt: Sequence[int]) -> tuple[np.ndarray, ...]:
  """The videos with flipped bits, other ones for each place and each salt."""
  masks = np.random.default_rng(tuple(salt)).permutation(255)[: len(videos)] + 1
  return tuple(v ^ np.uint8(m) for v, m in zip(videos, masks, strict=True))


def measure_judge(
  judge: Judge,
  video: np.ndarray,
  *,
  jobs: int,
  frames: int,
  rounds: int,
  clock: Callable[[], float] = time.perf_counter,
) -> list[dict[str, Any]]:
  """Times batches of dialogues; the fields of `JudgeRow`, but for the worker.

  Args:
    judge: the worker's; one without an engine of its own gives nothing.
    video: uint8 frames, whose size the judge's pictures have.
    jobs: the largest batch, at least two, or the engine's slots where they are fewer.
    frames: that a dialogue shows at most.
    rounds: timed repetitions, after one that compiles.
    clock: seconds.
  """
  generators = [
    one.generator
    for one in (judge.judges.values() if isinstance(judge, JudgeTable) else [judge])
    if isinstance(one, ConversationJudge) and isinstance(one.generator, EngineGenerator)
  ]
  found = []
  for generator in generators:
    slots = generator.engine.config.slots
    rng = np.random.default_rng(0)
    for count in sorted({1, min(max(jobs, 2), slots)}):
      for shown, letters in ((0, SHORT), (0, LONG), (frames, SHORT)):
        tokens = len(_request(generator, video, shown, letters, rng).prompt.ids)
        if tokens + NEW_TOKENS > generator.engine.config.max_length:
          continue  # no dialogue of this judge has so much
        seconds = []
        for _ in range(rounds + 1):
          requests = [_request(generator, video, shown, letters, rng) for _ in range(count)]
          seconds.append(_times(generator, requests, clock))
        prefill_s, decode_s = (statistics.median(s) for s in zip(*seconds[1:], strict=True))
        found.append(
          {
            "jobs": count,
            "frames": shown,
            "prompt_tokens": tokens,
            "new_tokens": NEW_TOKENS,
            "prefill_s": prefill_s,
            "decode_s": decode_s,
            "slots": slots,
          }
        )
  return found


def _request(
  generator: EngineGenerator, video: np.ndarray, frames: int, letters: int, rng: np.random.Generator
) -> Request:
  """A dialogue that shares nothing with any other."""
  chosen = salted([video], [int(rng.integers(2**31))])[0][evenly_spaced(len(video), frames)]
  pictures = [encode_image(frame, generator.model.vision) for frame in chosen]
  text = "".join(chr(97 + int(i)) for i in rng.integers(0, 26, letters))
  script = tuple(rng.integers(0, 16, NEW_TOKENS).tolist())
  # The text first: no two prompts then have a beginning in common that is worth copying.
  return Request(generator.prompt([text, *pictures, "."]), NEW_TOKENS, script=script)


def _times(
  generator: EngineGenerator, requests: Sequence[Request], clock: Callable[[], float]
) -> tuple[float, float]:
  engine = generator.engine
  start_s = clock()
  for request in requests:
    engine.submit(request)
  while engine.filling:
    engine.step()
  engine.wait()
  middle_s = clock()
  while engine.pending:
    engine.step()
  engine.wait()
  return middle_s - start_s, clock() - middle_s
