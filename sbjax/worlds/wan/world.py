"""Loads published Wan weights: transformer, decoder and prompt embeddings, on the worker's devices.

The text encoder is the largest of the three and is needed for minutes only, so that it comes first,
embeds the run's prompts, and is gone before the transformer comes. Tensors stream from the files
into the sharding of the worker's mesh.
"""

import dataclasses
import pathlib
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from models.checkpoints.load import Progress
from models.checkpoints.lora import read_lora
from models.checkpoints.wan import load_dit, load_vae
from models.layers.lora import merge_lora
from models.wan.dit import CausalWanDiT
from models.wan.presets import SamplerConfig
from models.wan.sharding import parameter_shardings
from models.wan.vae import WanVAE
from sbjax.settings import SettingsModel
from sbjax.worlds.wan.embeddings import Embeddings, TextSource, default_folder
from sbjax.worlds.wan.sizes import WanSizes, check, tokenizer_of, wan_sizes

Say = Callable[[str], None]
_SAY_EVERY_S = 10.0


@dataclasses.dataclass(frozen=True, eq=False)
class WanWorld:
  """A Wan model as the settings describe it, loaded.

  Attributes:
    sizes: of all its parts.
    dit: the transformer, with the adapter of `model.adapter` merged into it.
    vae: the video autoencoder, for whole or streamed decoding.
    embeddings: prompts -> embeddings; works out what it has not met.
  """

  sizes: WanSizes
  dit: CausalWanDiT
  vae: WanVAE
  embeddings: Embeddings

  @property
  def sampler(self) -> SamplerConfig:
    """How the transformer is rolled out."""
    return self.sizes.sampler


def load_world(
  model: SettingsModel,
  prompts: Sequence[str] = (),
  *,
  mesh: Mesh | None = None,
  say: Say = print,
  timeout_s: float = 600.0,
) -> WanWorld:
  """Loads everything that a run or a sampler needs.

  Args:
    model: the config's section.
    prompts: embedded first; others are embedded when they are met, for which the text encoder is
      loaded beside the rest.
    mesh: axes `fsdp` and `seq`, where a worker has several devices.
    say: told what takes long.
    timeout_s: how long another process may take that embeds prompts into the same folder.

  Raises:
    ValueError: a file is missing, does not fit or cannot be used.
  """
  check(model)
  sizes = wan_sizes(model)
  embeddings = embeddings_of(model, mesh=mesh, say=say, timeout_s=timeout_s)
  embeddings.prepare(prompts)
  dit = load_transformer(model, mesh=mesh, say=say)
  vae = load_vae(
    model.vae,
    sizes.vae,
    param_dtype=model.weights_dtype,
    mesh=mesh,
    progress=_progress(say, model.vae),
  )
  vae.dtype = jnp.dtype(model.weights_dtype)
  return WanWorld(sizes, dit, vae, embeddings)


def embeddings_of(
  model: SettingsModel, *, mesh: Mesh | None = None, say: Say = print, timeout_s: float = 600.0
) -> Embeddings:
  """The prompt embeddings that the settings describe; loads nothing. Arguments as `load_world`."""
  folder = pathlib.Path(model.embeddings) if model.embeddings else default_folder()
  source = TextSource(
    model.text_encoder, wan_sizes(model).text, tokenizer_of(model), model.weights_dtype, folder
  )
  return Embeddings(source, mesh=mesh, say=say, timeout_s=timeout_s)


def load_transformer(
  model: SettingsModel, *, mesh: Mesh | None = None, say: Say = print
) -> CausalWanDiT:
  """The transformer alone, the adapter merged into it; arguments and errors as `load_world`."""
  sizes = wan_sizes(model)
  # An adapter is added to the weights as the file has them; only the sum is rounded.
  dtype = "float32" if model.adapter else model.weights_dtype
  dit = load_dit(
    model.checkpoint,
    sizes.dit,
    part=model.part or None,
    param_dtype=dtype,
    mesh=mesh,
    progress=_progress(say, model.checkpoint),
  )
  if model.adapter:
    _merge(dit, model, sizes, mesh)
  return dit


def _merge(dit: CausalWanDiT, model: SettingsModel, sizes: WanSizes, mesh: Mesh | None) -> None:
  lora, config = read_lora(model.adapter, sizes.dit, alpha=model.adapter_alpha or None)
  if mesh is not None:
    lora = jax.device_put(lora, parameter_shardings(lora, mesh))
  merged = merge_lora(nnx.state(dit), lora, config.scale)
  dtype = jnp.dtype(model.weights_dtype)
  nnx.update(dit, jax.tree.map(lambda leaf: leaf.astype(dtype), merged))


def _progress(say: Say, path: str) -> Progress:
  """Says how far a file is read, every few seconds."""
  said = time.monotonic()

  def told(done_bytes: int, all_bytes: int) -> None:
    nonlocal said
    if time.monotonic() - said > _SAY_EVERY_S:
      said = time.monotonic()
      say(f"reading {path}: {done_bytes / 1e9:.1f} of {all_bytes / 1e9:.1f} GB")

  return told
