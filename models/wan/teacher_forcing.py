"""Attention of a cache-free forward over clean and noisy chunks, without masks."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from models.layers.attention import KeySet, attention, merge_heads


class TeacherForcingMixer(NamedTuple):
  """Attention over `[clean chunks; copies of noisy chunks]`, one call per chunk."""

  copies: int
  frames: int
  frames_per_chunk: int
  per_frame: int

  def __call__(self, q: Array, k: Array, v: Array) -> Array:
    """From `[batch, heads, tokens, head_dim]` queries, keys, values to `[batch, tokens, dim]`."""
    batch, heads, _, dim = q.shape
    chunk = self.frames_per_chunk * self.per_frame
    clean = (self.frames - self.frames_per_chunk) * self.per_frame
    grouped = (batch, heads, self.copies, self.frames * self.per_frame, dim)
    noisy_q, noisy_k, noisy_v = (a[:, :, clean:].reshape(grouped) for a in (q, k, v))
    clean_out, noisy_out = [], []
    for begin in range(0, self.frames * self.per_frame, chunk):
      end = begin + chunk
      if end <= clean:
        seen = KeySet(k[:, :, :end], v[:, :, :end])
        clean_out.append(attention(q[:, :, None, begin:end], (seen,))[:, :, 0])
      own = KeySet(noisy_k[:, :, :, begin:end], noisy_v[:, :, :, begin:end])
      past = (KeySet(k[:, :, :begin], v[:, :, :begin]),) if begin else ()
      noisy_out.append(attention(noisy_q[:, :, :, begin:end], (*past, own)))
    noisy = jnp.concatenate(noisy_out, axis=3).reshape(batch, heads, -1, dim)
    return merge_heads(jnp.concatenate([*clean_out, noisy], axis=2))
