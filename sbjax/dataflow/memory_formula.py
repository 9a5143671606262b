"""What a Wan transformer's passes take in memory, from shapes alone: no JAX, nothing compiled.

A pass takes its arguments, its results, and what it works with in between. The last is estimated
from the tensors that a block keeps for its backward pass, counted per policy, and from the two
phases in which most is alive: attention, with its scores and weights, and the feed-forward layer.
docs/memory.md derives the numbers; tests hold them to what XLA reports on the CPU.
"""

import dataclasses

from models.wan.presets import DiTConfig

_TARGET_SIDES = {"ffn.0": ("dim", "ffn_dim"), "ffn.2": ("ffn_dim", "dim")}
_FLOAT = 4


@dataclasses.dataclass(frozen=True)
class Kept:
  """Bytes that a block keeps for its backward pass, per element of each kind of tensor.

  Attributes:
    tokens: `[tokens, dim]`.
    ffn: `[tokens, ffn_dim]`.
    scores: `[heads, tokens, keys]`, past and own keys.
    own_scores: `[heads, tokens, own keys]` beyond that.
    text_scores: `[heads, tokens, text rows]`.
    text: `[text rows, dim]`.
    low: `[tokens, rank]`.
    text_low: `[text rows, rank]`.
    adapter: parameters of the block's adapter, as cast for the products.
  """

  tokens: int
  ffn: int = 0
  scores: int = 0
  own_scores: int = 0
  text_scores: int = 0
  text: int = 0
  low: int = 0
  text_low: int = 0
  adapter: int = 0


_WIDE = Kept(100, 24, 4, 0, 4, 16, 32, 8)
_NARROW = Kept(82, 22, 4, 2, 6, 12, 16, 4, 2)
KEPT = {
  ("fp32", "none"): _WIDE,
  ("fp32", "dots"): Kept(52, 8, text=16, low=32, text_low=8),
  ("fp32", "block"): Kept(4),
  ("mixed", "none"): _NARROW,
  ("mixed", "dots"): Kept(16, 2, text=4),
  ("mixed", "block"): Kept(4),
  ("sf_bf16", "none"): _NARROW,
  ("sf_bf16", "dots"): Kept(14, 2, text=4),
  ("sf_bf16", "block"): Kept(2),
}
"""Counted with an adapter on all ten linear maps of a block; fewer targets keep less."""


@dataclasses.dataclass(frozen=True)
class ChunkSizes:
  """One chunk of one candidate, as the network and its training see it.

  Attributes:
    dit: sizes of the transformer, its precision and remat policy.
    tokens: of a chunk.
    slots: tokens that the cache holds, the chunk's own included.
    rank: of the adapter.
    targets: the linear maps of a block that it adapts.
    weight_bytes: of an element of the frozen weights, 4 or 2.
    steps: denoising steps that are replayed.
    channels: differentiated scalars.
    latent_bytes: of a chunk of latents in float32.
    states: latent states that a rollout records of a chunk.
    widens: whether products in bfloat16 are computed in float32, as XLA does on CPUs.
  """

  dit: DiTConfig
  tokens: int
  slots: int
  rank: int
  targets: tuple[str, ...]
  weight_bytes: int
  steps: int
  channels: int
  latent_bytes: int
  states: int
  widens: bool

  @property
  def compute_bytes(self) -> int:
    """Of an element of what linear maps and attention compute."""
    return _FLOAT if self.dit.precision == "fp32" else 2


@dataclasses.dataclass(frozen=True)
class PassBytes:
  """A jitted pass, in bytes.

  Attributes:
    weights: frozen weights and one adapter version, its arguments.
    cache: the caches among its arguments and results.
    other: every other argument and result.
    working: what it allocates in between.
  """

  weights: int
  cache: int
  other: int
  working: int

  @property
  def total(self) -> int:
    """All of it."""
    return self.weights + self.cache + self.other + self.working


def layer_parameters(dit: DiTConfig) -> int:
  """Parameters of one block."""
  d = dit.dim
  attention = 2 * (4 * (d * d + d) + 2 * d)
  return attention + 2 * d * dit.ffn_dim + d + dit.ffn_dim + 2 * d + 6 * d


def parameters(dit: DiTConfig) -> int:
  """Parameters of the transformer; 1,418,996,800 of Wan2.1's 1.3B."""
  d, patch = dit.dim, dit.patch_size[1] * dit.patch_size[2]
  ends = dit.in_dim * patch * d + d + d * dit.out_dim * patch + dit.out_dim * patch + 2 * d
  text = dit.text_dim * d + d + d * d + d
  time = dit.freq_dim * d + d + d * d + d + 6 * (d * d + d)
  return ends + text + time + dit.num_layers * layer_parameters(dit)


def layer_adapter(dit: DiTConfig, rank: int, targets: tuple[str, ...]) -> int:
  """Parameters of one block's adapter."""
  sides = [_TARGET_SIDES.get(t, ("dim", "dim")) for t in targets]
  return sum(rank * (getattr(dit, a) + getattr(dit, b)) for a, b in sides)


def adapter_parameters(dit: DiTConfig, rank: int, targets: tuple[str, ...]) -> int:
  """Parameters of an adapter."""
  return dit.num_layers * layer_adapter(dit, rank, targets)


def cache_bytes(sizes: ChunkSizes) -> int:
  """Keys and values of one candidate's past."""
  return 2 * sizes.dit.num_layers * sizes.slots * sizes.dit.dim * sizes.compute_bytes


def adapter_bytes(sizes: ChunkSizes) -> int:
  """One version of the adapter, float32."""
  return _FLOAT * adapter_parameters(sizes.dit, sizes.rank, sizes.targets)


def generate_pass(sizes: ChunkSizes) -> PassBytes:
  """A chunk's denoising steps and its clean pass: `RolloutFunctions.generate_chunk`."""
  keys = 2 * sizes.dit.num_layers * sizes.tokens * sizes.dit.dim * sizes.compute_bytes
  states = 2 * sizes.states * sizes.latent_bytes
  return _pass(sizes, caches=2, other=states, working=keys + _forward_working(sizes))


def forward_pass(sizes: ChunkSizes) -> PassBytes:
  """Scores of a chunk's steps without gradient: `ReplayFunctions.score_chunk`."""
  return _pass(sizes, caches=1, other=_points(sizes), working=_forward_working(sizes))


def replay_pass(sizes: ChunkSizes) -> PassBytes:
  """Scores and one gradient per step and channel: `ReplayFunctions.replay_chunk`."""
  gradients = sizes.steps * sizes.channels * adapter_bytes(sizes)
  other = _points(sizes) + gradients
  return _pass(sizes, caches=1, other=other, working=_gradient_working(sizes, sizes.channels))


def folded_pass(sizes: ChunkSizes) -> PassBytes:
  """Scores and one weighted gradient: `ReplayFunctions.folded_chunk`."""
  other = _points(sizes) + adapter_bytes(sizes)
  return _pass(sizes, caches=1, other=other, working=_gradient_working(sizes, 1))


def _pass(sizes: ChunkSizes, *, caches: int, other: int, working: int) -> PassBytes:
  weights = parameters(sizes.dit) * sizes.weight_bytes + adapter_bytes(sizes)
  context = sizes.dit.text_len * sizes.dit.dim * sizes.compute_bytes
  return PassBytes(weights, caches * cache_bytes(sizes), other + context, working)


def _points(sizes: ChunkSizes) -> int:
  """State, next state, the rollout's mean and the reference's, of every step."""
  return 4 * sizes.steps * sizes.latent_bytes


def _elements(sizes: ChunkSizes) -> tuple[int, int, int]:
  """Elements of a block's tokens, of its feed-forward layer, of its attention scores."""
  dit = sizes.dit
  return (
    sizes.tokens * dit.dim,
    sizes.tokens * dit.ffn_dim,
    dit.num_heads * sizes.tokens * sizes.slots,
  )


def _layer_weights(sizes: ChunkSizes) -> int:
  """A block's weights and adapter, taken out of the stack and cast where types differ; of all
  blocks that one iteration of the loop over them holds.
  """
  cast = sizes.compute_bytes if sizes.compute_bytes != sizes.weight_bytes else 0
  low = _FLOAT + (sizes.compute_bytes if sizes.compute_bytes != _FLOAT else 0)
  adapter = layer_adapter(sizes.dit, sizes.rank, sizes.targets) * low
  layer = layer_parameters(sizes.dit)
  at_once = min(sizes.dit.scan_unroll, sizes.dit.num_layers)
  if sizes.widens and sizes.compute_bytes != _FLOAT:
    # XLA's CPU products want float32, and all blocks are widened before the loop over them.
    return layer * _FLOAT * (sizes.dit.num_layers + 1) + adapter
  return at_once * (layer * (sizes.weight_bytes + cast) + adapter)


def _forward_working(sizes: ChunkSizes) -> int:
  tokens, ffn, scores = _elements(sizes)
  past = (sizes.slots - sizes.tokens) * sizes.dit.dim * sizes.compute_bytes
  # Scores before and after the exponential, and its result once more in bfloat16.
  narrow = _narrow_scores(sizes, scores)
  attention = 2 * _FLOAT * scores + narrow + past + 2 * _FLOAT * tokens
  feed_forward = 2 * sizes.compute_bytes * ffn + 2 * _FLOAT * tokens
  return _layer_weights(sizes) + max(attention, feed_forward)


def _narrow_scores(sizes: ChunkSizes, scores: int) -> int:
  if sizes.compute_bytes == _FLOAT:
    return 0
  return (2 + (_FLOAT if sizes.widens else 0)) * scores


def kept_bytes(sizes: ChunkSizes, remat: str) -> int:
  """What one block keeps for its backward pass under a remat policy."""
  dit, kept = sizes.dit, KEPT[sizes.dit.precision, remat]
  tokens, ffn, scores = _elements(sizes)
  text = dit.text_len
  return (
    kept.tokens * tokens
    + kept.ffn * ffn
    + kept.scores * scores
    + kept.own_scores * dit.num_heads * sizes.tokens**2
    + kept.text_scores * dit.num_heads * sizes.tokens * text
    + kept.text * text * dit.dim
    + kept.low * sizes.tokens * sizes.rank
    + kept.text_low * text * sizes.rank
    + kept.adapter * layer_adapter(dit, sizes.rank, sizes.targets)
  )


def _gradient_working(sizes: ChunkSizes, channels: int) -> int:
  tokens, _, scores = _elements(sizes)
  layers = sizes.dit.num_layers
  # The block that is being differentiated has everything of itself at hand, whatever the policy.
  # In its attention that is the weights, their gradient and the gradient of the scores.
  narrow = _narrow_scores(sizes, scores)
  attention = 3 * _FLOAT * scores + narrow + 10 * _FLOAT * tokens
  block = max(kept_bytes(sizes, "none"), attention)
  saved = layers * kept_bytes(sizes, sizes.dit.remat)
  return saved + block + channels * adapter_bytes(sizes) + _layer_weights(sizes)
