"""A generator on the reward worker's own devices: the Qwen-VL engine."""

import pathlib
import time
from collections.abc import Callable, Sequence

import numpy as np
from jax.sharding import Mesh

from models.generate import request as engine_request
from models.generate.engine import Engine
from models.layers.dense import tree_of
from models.qwen_vl import checkpoint
from models.qwen_vl.chat import Encode, Prompt, chat_prompt
from models.qwen_vl.preprocess import Encoded, encode_image, encode_video
from models.qwen_vl.presets import QwenVLConfig, VisionConfig
from sbjax.rewards.generator import Dialogue, Frames, Message, Reply, Request

# The engine's own words for an end that leaves no usable answer.
_FAILED = {"deadline": "timeout", "cancelled": "cancelled"}


class EngineGenerator:
  """Implements `generator.Generator`: rounds of all dialogues share the engine's batch.

  A dialogue whose reply calls for another round goes back into the queue at once, with what the
  engine kept of it, while others go on.

  Args:
    engine: the engine; nobody else may use it meanwhile.
    model: its model.
    encode: text to token ids.
    stop_ids: tokens that end a reply.
    total_timeout_s: for a call of `generate`, per dialogue.
    clock: the engine's, in seconds.
  """

  def __init__(
    self,
    engine: Engine,
    model: QwenVLConfig,
    encode: Encode,
    *,
    stop_ids: tuple[int, ...],
    total_timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
  ):
    self._engine, self._model, self._encode = engine, model, encode
    self._stop_ids, self._total_timeout_s, self._clock = stop_ids, total_timeout_s, clock

  @property
  def engine(self) -> Engine:
    """The engine."""
    return self._engine

  @property
  def model(self) -> QwenVLConfig:
    """Its model."""
    return self._model

  def prompt(self, parts: Sequence[str | Encoded]) -> Prompt:
    """A user's turn of texts and pictures, as a dialogue would begin."""
    return chat_prompt(self._model, self._encode, [("user", list(parts))])

  def generate(self, dialogues: Sequence[Dialogue]) -> list[tuple[Reply, ...]]:
    """Runs dialogues together; what is not done after `total_timeout_s` each has failed."""
    end_s = self._clock() + self._total_timeout_s * len(dialogues)
    replies: list[list[Reply]] = [[] for _ in dialogues]
    running: dict[int, int] = {}
    seen: dict[int, tuple[Frames, list[Encoded]]] = {}

    def proceed(place: int, kept: engine_request.Kept | None) -> None:
      asked = dialogues[place].request(replies[place])
      if asked is None:
        return
      try:
        number = self._engine.submit(self._request(asked, kept, end_s - self._clock(), seen))
      except ValueError as error:  # more than the engine can hold
        replies[place].append(Reply("", "too_long", str(error)))
      else:
        running[number] = place

    for place in range(len(dialogues)):
      proceed(place, None)
    while running:
      for result in self._engine.step():
        place = running.pop(result.id)
        replies[place].append(_reply(result))
        if not replies[place][-1].cause:
          proceed(place, result.kept)
    return [tuple(one) for one in replies]

  def _request(
    self,
    asked: Request,
    kept: engine_request.Kept | None,
    left_s: float,
    seen: dict[int, tuple[Frames, list[Encoded]]],
  ) -> engine_request.Request:
    turns = [(message.role, self._parts(message, seen)) for message in asked.messages]
    return engine_request.Request(
      prompt=chat_prompt(self._model, self._encode, turns),
      max_new_tokens=asked.max_tokens,
      temperature=asked.temperature,
      seed=asked.seed,
      stop_ids=self._stop_ids,
      stop_strings=asked.stop,
      after=kept,
      keep=asked.more_rounds,
      deadline_s=left_s,
    )

  def _parts(
    self, message: Message, seen: dict[int, tuple[Frames, list[Encoded]]]
  ) -> list[str | Encoded]:
    parts: list[str | Encoded] = []
    for part in message.parts:
      if isinstance(part, str):
        parts.append(part)
        continue
      # Kept with their patches, so that no other object gets their identity.
      if id(part) not in seen:
        seen[id(part)] = (part, _encoded(part, self._model.vision))
      parts += seen[id(part)][1]
    return parts


def _encoded(frames: Frames, vision: VisionConfig) -> list[Encoded]:
  if frames.times_s:
    return [encode_video(frames.pixels, vision, np.asarray(frames.times_s))]
  return [encode_image(frame, vision) for frame in frames.pixels]


def _reply(result: engine_request.Result) -> Reply:
  cause = _FAILED.get(result.finish, "")
  if cause:
    count = len(result.tokens)
    return Reply("", cause, f"ended after {count} tokens ({result.finish}): {result.text}")
  return Reply(result.text, truncated=result.finish in ("length", "budget"))


def from_checkpoint(
  path: str,
  *,
  slots: int,
  context_tokens: int,
  total_timeout_s: float,
  mesh: Mesh | None,
  weights_dtype: str = "float32",
) -> EngineGenerator:
  """Loads a Qwen-VL judge.

  Args:
    path: folder in the Hugging Face layout: weights, `config.json`, the tokenizer's files.
    slots: dialogues that decode at once.
    context_tokens: tokens of a request, reply included.
    total_timeout_s: as `EngineGenerator` takes it.
    mesh: devices that the model is cut over; None: one.
    weights_dtype: `float32` or `bfloat16`, of weights, keys and values.

  Raises:
    ValueError: the files are damaged, missing, or do not fit.
  """
  from transformers import AutoTokenizer  # takes seconds

  tokenizer = AutoTokenizer.from_pretrained(pathlib.Path(path), local_files_only=True)
  model = checkpoint.load(path, dtype=weights_dtype, mesh=mesh)
  config = engine_request.EngineConfig(
    slots=slots, max_length=context_tokens, vocab_limit=len(tokenizer)
  )
  marks = ("<|im_end|>", "<|endoftext|>")
  stop_ids = tuple(tokenizer.convert_tokens_to_ids(mark) for mark in marks)
  engine = Engine(
    tree_of(model),
    model.config,
    config,
    decode_text=lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
    mesh=mesh,
  )
  return EngineGenerator(
    engine,
    model.config,
    lambda text: tokenizer(text, add_special_tokens=False)["input_ids"],
    stop_ids=stop_ids,
    total_timeout_s=total_timeout_s,
  )
