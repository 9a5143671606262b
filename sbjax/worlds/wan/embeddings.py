"""Prompt embeddings: worked out once, kept on disk by content, read by whoever needs them.

A file is named by what decides its content: the token ids, the encoder's weights and the type that
it computes in. So runs, workers and resumed runs share them, and nothing goes stale. It holds the
rows of the prompt; the zero rows past it are put back when it is read.
"""

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Float
from safetensors import SafetensorError, safe_open

from models.checkpoints.families import UMT5
from models.checkpoints.opening import open_checkpoint
from models.checkpoints.stored import DTYPES
from models.checkpoints.wan import find_weights, load_umt5
from models.checkpoints.write import NewTensor, write_safetensors
from models.wan.umt5 import UMT5Config, UMT5Encoder, encode_tokens
from sbjax.worlds.wan.text import WanTokenizer

_NAME = "embedding"
_CORNER = 8
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
_SAY_EVERY_S = 10.0
_POLL_S = 0.2


def default_folder() -> pathlib.Path:
  """Where embeddings are kept unless the user names a folder: under the user's cache directory."""
  root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
  return pathlib.Path(root, "sbjax", "prompts")


def weights_fingerprint(path: str) -> str:
  """Names an encoder's weights: names, types and shapes of all tensors and two corners of each.

  Another training changes every tensor, so that its corners tell it without reading gigabytes.

  Raises:
    ValueError: it holds no UMT5 encoder that can be opened.
  """
  tensors, _, _ = find_weights(open_checkpoint(path), None, UMT5)
  digest = hashlib.sha256()
  for name in sorted(tensors):
    tensor = tensors[name]
    digest.update(f"{name} {tensor.dtype} {tensor.shape}".encode())
    view = tensor.view()
    for corner in (slice(0, _CORNER), slice(-_CORNER, None)):
      digest.update(np.ascontiguousarray(view[(corner,) * view.ndim]).tobytes())
  return digest.hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class TextSource:
  """What makes embeddings.

  Attributes:
    encoder: file or folder of UMT5's weights.
    config: its sizes.
    tokenizer: prompts to ids.
    dtype: of weights and computation, "float32" or "bfloat16".
    folder: where embeddings are kept.
  """

  encoder: str
  config: UMT5Config
  tokenizer: WanTokenizer
  dtype: str
  folder: pathlib.Path


class Embeddings:
  """The embeddings of a run's prompts.

  Args:
    source: what makes them.
    mesh: the worker's devices, where there is more than one.
    say: told what takes long.
    timeout_s: how long another process may take that works on the same folder.
  """

  def __init__(
    self,
    source: TextSource,
    *,
    mesh: Mesh | None = None,
    say: Callable[[str], None] = print,
    timeout_s: float = 600.0,
  ):
    self._source, self._mesh, self._say, self._timeout_s = source, mesh, say, timeout_s
    self._weights = weights_fingerprint(source.encoder)
    self._folder = source.folder / f"{self._weights}-{source.dtype}"

  def path(self, prompt: str) -> pathlib.Path:
    """The file of a prompt's embedding, whether it is there or not."""
    ids = np.asarray(self._source.tokenizer(prompt), np.int64)
    return self._folder / f"{hashlib.sha256(ids.tobytes()).hexdigest()[:32]}.safetensors"

  def missing(self, prompts: Sequence[str]) -> list[str]:
    """The prompts whose embedding is not on disk yet, each once."""
    return [prompt for prompt in dict.fromkeys(prompts) if not self.path(prompt).is_file()]

  def prepare(self, prompts: Sequence[str]) -> int:
    """Makes every embedding that is missing; the encoder is on the devices meanwhile only.

    Workers that share the folder take turns, so that the first one does it for all.

    Returns:
      How many were made.

    Raises:
      ValueError: the encoder's weights cannot be used.
      TimeoutError: another process holds the folder for too long.
      OSError: the folder cannot be written.
    """
    if not self.missing(prompts):
      return 0
    self._folder.mkdir(parents=True, exist_ok=True)
    with self._turn():
      wanted = self.missing(prompts)  # another worker may have made them meanwhile
      if wanted:
        self._encode(wanted)
      return len(wanted)

  def __call__(self, prompts: Sequence[str]) -> Float[np.ndarray, "prompts text_len text_dim"]:
    """Embeddings in float32, rows past a prompt zero; those that are missing are made first."""
    self.prepare(prompts)
    return np.stack([self._read(prompt) for prompt in prompts])

  def _encode(self, prompts: Sequence[str]) -> None:
    source = self._source
    self._say(f"text encoder {source.encoder}: {len(prompts)} prompts to embed")
    encoder = load_umt5(source.encoder, source.config, param_dtype=source.dtype, mesh=self._mesh)
    said = time.monotonic()
    try:
      for done, prompt in enumerate(prompts):
        ids = source.tokenizer(prompt)
        self._write(prompt, encode_one(encoder, ids, source.tokenizer.text_len))
        if time.monotonic() - said > _SAY_EVERY_S:
          said = time.monotonic()
          self._say(f"text encoder: {done + 1} of {len(prompts)} prompts embedded")
    finally:
      # Not left to the garbage collector: what comes next needs the memory.
      for array in jax.tree.leaves(nnx.state(encoder)):
        array.delete()

  def _write(self, prompt: str, rows: np.ndarray) -> None:
    path = self.path(prompt)
    if not np.isfinite(rows.astype(np.float32)).all():
      raise ValueError(
        f"{self._source.encoder} gives an embedding of {prompt!r} that is not finite in "
        f"{self._source.dtype}; use model.weights_dtype 'float32'."
      )
    dtype = {kind: name for name, kind in DTYPES.items()}[rows.dtype]
    tensor = NewTensor(_NAME, rows.shape, dtype, lambda: rows)
    write_safetensors(path, [tensor], {"prompt": prompt, "encoder": self._weights})

  def _read(self, prompt: str) -> Float[np.ndarray, "text_len text_dim"]:
    path, source = self.path(prompt), self._source
    shape = (len(source.tokenizer(prompt)), source.config.dim)
    try:
      with safe_open(path, framework="numpy") as file:
        rows = file.get_tensor(_NAME)
    except (SafetensorError, OSError) as error:
      raise ValueError(f"{path} cannot be read ({error}); remove it.") from error
    if rows.shape != shape:
      raise ValueError(f"{path} holds {rows.shape} where {shape} is needed; remove it.")
    full = np.zeros((source.tokenizer.text_len, source.config.dim), np.float32)
    full[: shape[0]] = rows
    return full

  @contextlib.contextmanager
  def _turn(self) -> Iterator[None]:
    with (self._folder / ".lock").open("a") as lock:
      end = time.monotonic() + self._timeout_s
      waits = False
      while True:
        try:
          fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
          break
        except BlockingIOError:
          if not waits:
            self._say(f"another process embeds prompts in {self._folder}; waiting for it")
            waits = True
          if time.monotonic() > end:
            raise TimeoutError(
              f"another process has embedded prompts in {self._folder} for {self._timeout_s:.0f} "
              "s; raise runtime.startup_timeout_s"
            ) from None
          time.sleep(_POLL_S)
        except OSError as error:
          if error.errno not in _NO_LOCKS:
            raise
          break  # some network disks have no locks: then the work may be done twice, equally
      yield


def encode_one(
  encoder: UMT5Encoder, ids: Sequence[int], text_len: int
) -> Float[np.ndarray, "tokens dim"]:
  """The rows of one prompt, encoded by itself so that they do not depend on its neighbours."""
  padded = np.zeros((1, text_len), np.int32)
  padded[0, : len(ids)] = ids
  mask = (np.arange(text_len) < len(ids)).astype(np.int32)[None]
  return np.asarray(_encode(encoder, jnp.asarray(padded), jnp.asarray(mask)))[0, : len(ids)]


_encode = jax.jit(encode_tokens)
