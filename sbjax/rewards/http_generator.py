"""A generator behind HTTP: any server that speaks the OpenAI chat-completions protocol.

vLLM and SGLang do. Frames travel as base64 JPEG images. Every wait is bounded: connecting by a
timeout, a whole dialogue by a deadline which also cuts off a server that sends a byte now and then.
"""

import concurrent.futures
import dataclasses
import http.client
import json
import socket
import threading
import time
import urllib.parse
from collections.abc import Sequence
from typing import Any

from sbjax.rewards.endpoints import Endpoints
from sbjax.rewards.frames import jpeg_base64
from sbjax.rewards.generator import Dialogue, Frames, Message, Reply, Request, run_dialogue

# The server says that a later attempt may do; every other status is final.
RETRYABLE = frozenset({408, 425, 429, 500, 502, 503, 504})
# It lives, and has too much to do.
_BUSY = 429
_MAX_ANSWER_BYTES = 16 * 2**20
_EXCERPT = 200


@dataclasses.dataclass(frozen=True)
class HTTPConfig:
  """How servers are asked.

  Attributes:
    endpoints: base addresses, such as `http://127.0.0.1:8000/v1`.
    model: the model's name there.
    connect_timeout_s: for a connection.
    total_timeout_s: for a dialogue: all its rounds, attempts and waits.
    attempts: tries of one request.
    backoff_s: wait before the second try; it doubles from try to try.
    evict_after: failures in a row after which a server is left alone.
    cooldown_s: for how long.
    concurrency: requests at a time.
  """

  endpoints: tuple[str, ...]
  model: str
  connect_timeout_s: float
  total_timeout_s: float
  attempts: int
  backoff_s: float
  evict_after: int
  cooldown_s: float
  concurrency: int


class HTTPGenerator:
  """Implements `generator.Generator`.

  Args:
    config: servers and limits.
  """

  def __init__(self, config: HTTPConfig):
    for url in config.endpoints:
      check_endpoint(url)
    self._config = config
    self.endpoints = Endpoints(
      config.endpoints, evict_after=config.evict_after, cooldown_s=config.cooldown_s
    )

  def generate(self, dialogues: Sequence[Dialogue]) -> list[tuple[Reply, ...]]:
    """Runs dialogues side by side, each under its own deadline from its own start."""
    encoded = _Encoded()
    workers = max(1, min(self._config.concurrency, len(dialogues)))
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
      return list(pool.map(lambda dialogue: self._run(dialogue, encoded), dialogues))

  def _run(self, dialogue: Dialogue, encoded: "_Encoded") -> tuple[Reply, ...]:
    deadline_s = time.monotonic() + self._config.total_timeout_s
    return run_dialogue(
      dialogue, lambda request: self._ask(self._body(request, encoded), request.seed, deadline_s)
    )

  def _body(self, request: Request, encoded: "_Encoded") -> bytes:
    body = {
      "model": self._config.model,
      "messages": [chat_message(m, encoded) for m in request.messages],
      "max_tokens": request.max_tokens,
      "temperature": request.temperature,
      "seed": request.seed,
    }
    if request.stop:
      body["stop"] = list(request.stop)
    return json.dumps(body).encode()

  def _ask(self, body: bytes, seed: int, deadline_s: float) -> Reply:
    """One request: attempts until one succeeds, is refused for good, or none is left."""
    failure = Reply("", "timeout", f"no answer within {self._config.total_timeout_s:g} s")
    for attempt in range(self._config.attempts):
      if attempt:
        # Spread by the request's seed, so that what failed together does not return together.
        wait_s = self._config.backoff_s * 2.0 ** (attempt - 1) * (0.75 + 0.5 * (seed % 997) / 996)
        if time.monotonic() + wait_s >= deadline_s:
          return failure
        time.sleep(wait_s)
      url = self.endpoints.acquire(deadline_s)
      if url is None:
        count, last = len(self._config.endpoints), self.endpoints.last_failure
        text = f"all {count} servers were evicted; the last failure was: {last}"
        return Reply("", "no_endpoint", text)
      blame = f"{url}: the request was abandoned"
      try:
        outcome = _attempt(url, body, self._config.connect_timeout_s, deadline_s)
        blame = outcome.reply.detail if outcome.endpoint_failed else ""
      finally:
        self.endpoints.release(url, blame)
      if not outcome.again:
        return outcome.reply
      failure = outcome.reply
      if time.monotonic() >= deadline_s:
        break
    return failure


@dataclasses.dataclass(frozen=True)
class _Outcome:
  """One attempt: its reply, whether another may do, whether the server is to blame."""

  reply: Reply
  again: bool
  endpoint_failed: bool


def _attempt(url: str, body: bytes, connect_timeout_s: float, deadline_s: float) -> _Outcome:
  try:
    status, answer = _post(
      f"{url.rstrip('/')}/chat/completions", body, connect_timeout_s, deadline_s
    )
  except TimeoutError as error:
    return _Outcome(Reply("", "timeout", f"{url}: {error}"), True, True)
  except (OSError, http.client.HTTPException) as error:
    text = f"{url}: {type(error).__name__}: {error}"
    return _Outcome(Reply("", "connection", text), True, True)
  if status != 200:
    excerpt = answer[:_EXCERPT].decode("utf-8", "replace")
    reply = Reply("", f"http_{status}", f"{url} answered {status}: {excerpt}")
    again = status in RETRYABLE
    return _Outcome(reply, again, again and status != _BUSY)
  return _Outcome(parse_completion(answer), False, False)


def _post(url: str, body: bytes, connect_timeout_s: float, deadline_s: float) -> tuple[int, bytes]:
  """Posts JSON and reads the whole answer.

  Raises:
    TimeoutError: not connected in time, or not done at the deadline.
    OSError, http.client.HTTPException: the connection broke or is not HTTP.
  """
  parts = urllib.parse.urlsplit(url)
  kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
  left_s = deadline_s - time.monotonic()
  if left_s <= 0:
    raise TimeoutError("no time was left")
  connection = kind(parts.hostname or "", parts.port, timeout=min(connect_timeout_s, left_s))
  try:
    try:
      connection.connect()
    except TimeoutError as error:
      raise TimeoutError("no connection in time") from error
    # A socket's own timeout starts anew with every byte; the deadline is for the whole exchange.
    with _CutAt(connection.sock, deadline_s) as cut:
      connection.sock.settimeout(None)
      try:
        connection.request("POST", parts.path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = response.read(_MAX_ANSWER_BYTES + 1)
      except (OSError, http.client.HTTPException, ValueError) as error:
        if cut.fired:
          raise TimeoutError("no whole answer by the deadline") from error
        if isinstance(error, ValueError):  # http.client's, for a malformed length
          raise http.client.HTTPException(str(error)) from error
        raise
      if cut.fired:  # an answer without a length ends where its connection does
        raise TimeoutError("no whole answer by the deadline")
    return response.status, answer
  finally:
    connection.close()


class _CutAt:
  """Shuts a socket down at a deadline, whatever it is waiting for."""

  def __init__(self, sock: socket.socket, deadline_s: float):
    self._sock, self.fired = sock, False
    self._timer = threading.Timer(max(deadline_s - time.monotonic(), 0.0), self._cut)
    self._timer.daemon = True

  def _cut(self) -> None:
    self.fired = True
    try:
      self._sock.shutdown(socket.SHUT_RDWR)
    except OSError:  # the other side was faster
      return

  def __enter__(self) -> "_CutAt":
    self._timer.start()
    return self

  def __exit__(self, *error: object) -> None:
    self._timer.cancel()


def parse_completion(answer: bytes) -> Reply:
  """Reads a chat completion; a failed reply with cause `bad_response` where it is none."""

  def bad(why: str) -> Reply:
    excerpt = answer[:_EXCERPT].decode("utf-8", "replace")
    return Reply("", "bad_response", f"{why}: {excerpt}")

  if len(answer) > _MAX_ANSWER_BYTES:
    return bad(f"the answer is larger than {_MAX_ANSWER_BYTES} bytes")
  try:
    choice = json.loads(answer)["choices"][0]
    text = choice["message"]["content"]
    reason = choice.get("finish_reason")
  except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
    return bad(f"the answer is no chat completion ({type(error).__name__})")
  if not isinstance(text, str):
    return bad("the message has no text")
  return Reply(text, truncated=reason == "length")


class _Encoded:
  """Frames as data addresses, encoded once however many dialogues show them."""

  def __init__(self):
    self._made: dict[int, tuple[Frames, list[str]]] = {}

  def urls(self, frames: Frames) -> list[str]:
    # Two threads may encode the same frames at once; the results are equal. The frames are kept
    # with them, so that no other object gets their identity.
    if id(frames) not in self._made:
      urls = [f"data:image/jpeg;base64,{jpeg_base64(frame)}" for frame in frames.pixels]
      self._made[id(frames)] = (frames, urls)
    return self._made[id(frames)][1]


def chat_message(message: Message, encoded: "_Encoded | None" = None) -> dict[str, Any]:
  """Gives a message in the protocol's form; one without pictures is plain text."""
  if all(isinstance(part, str) for part in message.parts):
    return {"role": message.role, "content": "".join(map(str, message.parts))}
  encoded = encoded or _Encoded()
  content: list[dict[str, Any]] = []
  for part in message.parts:
    if isinstance(part, str):
      content.append({"type": "text", "text": part})
    else:
      for url in encoded.urls(part):
        content.append({"type": "image_url", "image_url": {"url": url}})
  return {"role": message.role, "content": content}


def check_endpoint(url: str) -> None:
  """Refuses an address that cannot be one.

  Raises:
    ValueError: it is no http or https address with a host.
  """
  try:
    parts = urllib.parse.urlsplit(url)
    usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
  except ValueError:  # the port is no number
    usable = False
  if not usable:
    raise ValueError(
      f"reward.judge.endpoints has {url!r}; write an address such as 'http://127.0.0.1:8000/v1'."
    )
