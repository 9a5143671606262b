"""What a judge asks of a language model that sees, whoever runs it: chat messages in, text out.

A judgement is a dialogue of one or more rounds. A dialogue is a pure function from the replies so
far to the next request, so the one who runs it may interleave rounds of many dialogues, keep what
it has computed for a common beginning, or run one again elsewhere.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import numpy as np
from jaxtyping import UInt8


@dataclasses.dataclass(frozen=True, eq=False)
class Frames:
  """Pictures within a message, in order, each an image of its own, or the frames of one video.

  Attributes:
    pixels: RGB frames. One object stands for one content: whoever encodes frames may remember
      them by it.
    times_s: when each is shown, of the frames of a video; a server gets them as images all the
      same.
  """

  pixels: UInt8[np.ndarray, "frames height width 3"]
  times_s: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class Message:
  """One turn of a chat.

  Attributes:
    role: who speaks.
    parts: text and pictures in order.
  """

  role: Literal["system", "user", "assistant"]
  parts: tuple[str | Frames, ...]


@dataclasses.dataclass(frozen=True)
class Request:
  """What the next reply is to answer.

  Attributes:
    messages: the whole chat so far; it may differ from the last round's in the middle.
    seed: names the random stream, where the temperature is above 0.
    max_tokens: budget of the reply.
    temperature: 0 takes the likeliest token.
    stop: strings that end the reply; they may or may not be part of its text.
    more_rounds: whether the dialogue may go on after the reply, so that it pays to keep what was
      computed.
  """

  messages: tuple[Message, ...]
  seed: int
  max_tokens: int
  temperature: float = 0.0
  stop: tuple[str, ...] = ()
  more_rounds: bool = False


@dataclasses.dataclass(frozen=True)
class Reply:
  """What came back.

  Attributes:
    text: what the model wrote; empty where it failed.
    cause: why there is no text, in a word that metrics can count; empty where there is.
    detail: the failure in full.
    truncated: whether the budget of tokens ended it.
  """

  text: str
  cause: str = ""
  detail: str = ""
  truncated: bool = False


class Dialogue(Protocol):
  """One judgement as a dialogue."""

  def request(self, replies: Sequence[Reply]) -> Request | None:
    """Gives the next request after the replies so far, None where the dialogue is over."""
    ...


@dataclasses.dataclass(frozen=True)
class SingleRound:
  """Implements `Dialogue`: one request, whose reply ends it.

  Attributes:
    only: the request.
  """

  only: Request

  def request(self, replies: Sequence[Reply]) -> Request | None:
    """The request, where there is no reply yet."""
    return None if replies else self.only


class Generator(Protocol):
  """Whoever runs dialogues: the engine on the reward mesh, a server, or a script."""

  def generate(self, dialogues: Sequence[Dialogue]) -> list[tuple[Reply, ...]]:
    """Runs dialogues; each ends at its own end or at its first failed reply.

    Returns:
      The replies of each dialogue, in order. A failure is a reply with a cause, never an exception,
      and does not touch other dialogues.
    """
    ...


def run_dialogue(dialogue: Dialogue, ask: Callable[[Request], Reply]) -> tuple[Reply, ...]:
  """Runs one dialogue by itself.

  Args:
    dialogue: the dialogue.
    ask: answers one request.
  """
  replies: list[Reply] = []
  while (request := dialogue.request(replies)) is not None:
    replies.append(ask(request))
    if replies[-1].cause:
      break
  return tuple(replies)


class ScriptedGenerator:
  """Plays given answers: parsers, protocols and whole steps run without a model.

  Args:
    answer: gives the text of a reply to (place of the dialogue in the call, round from 0, request).
  """

  def __init__(self, answer: Callable[[int, int, Request], str]):
    self._answer = answer

  def generate(self, dialogues: Sequence[Dialogue]) -> list[tuple[Reply, ...]]:
    """Runs dialogues one after the other."""
    return [self._run(place, dialogue) for place, dialogue in enumerate(dialogues)]

  def _run(self, place: int, dialogue: Dialogue) -> tuple[Reply, ...]:
    played = 0

    def ask(request: Request) -> Reply:
      nonlocal played
      text = self._answer(place, played, request)
      played += 1
      return Reply(text)

    return run_dialogue(dialogue, ask)
