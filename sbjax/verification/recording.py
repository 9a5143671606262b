"""The layout of a recorded causal rollout (`.npz`): its settings, and which arrays it must hold."""

import dataclasses
import json
import pathlib
import zipfile
from typing import Any

import numpy as np

from models.wan.presets import DiTConfig, SamplerConfig

RULES = {"sf": "self_forcing", "ll": "longlive"}
_META = {
  "source": str,
  "config": dict,
  "chunks": int,
  "frames_per_chunk": int,
  "latent_height": int,
  "latent_width": int,
  "cache_frames": int,
  "shift": (int, float),
  "denoising_steps": list,
  "context_noise": (int, float),
  "dtype": str,
}
_CONFIG = {
  "patch_size": list,
  "text_len": int,
  "in_dim": int,
  "dim": int,
  "ffn_dim": int,
  "freq_dim": int,
  "text_dim": int,
  "out_dim": int,
  "num_heads": int,
  "num_layers": int,
  "local_attn_size": int,
  "sink_size": int,
  "eps": float,
}
# Settings that our port has built in; another value is another model.
_FIXED = {"model_type": "t2v", "qk_norm": True, "cross_attn_norm": True}


@dataclasses.dataclass(frozen=True)
class Recording:
  """A recorded rollout.

  Attributes:
    path: the file.
    dit: sizes of the model.
    sampler: how it was rolled out.
    chunks: chunks of the video.
    arrays: everything but `meta`, by key; float32 where it was float32.
  """

  path: pathlib.Path
  dit: DiTConfig
  sampler: SamplerConfig
  chunks: int
  arrays: dict[str, np.ndarray]

  @property
  def steps(self) -> int:
    """Denoising steps per chunk."""
    return len(self.sampler.denoising_steps)

  @property
  def has_gradient(self) -> bool:
    """Whether a gradient was recorded."""
    return any(key.startswith("grad/") for key in self.arrays)

  @property
  def parameters(self) -> dict[str, np.ndarray]:
    """The model's tensors under their official names."""
    return _under(self.arrays, "param/")

  @property
  def parameter_gradients(self) -> dict[str, np.ndarray]:
    """The recorded gradients under the official names of their tensors."""
    return _under(self.arrays, "grad/param/")


def is_recording(path: pathlib.Path) -> bool:
  """Whether an `.npz` file has the layout of a recorded rollout, right or wrong in detail.

  Raises:
    ValueError: when it is no whole `.npz` file.
  """
  with _open(path) as archive:
    return "meta" in archive.files or any(key.startswith("chunk") for key in archive.files)


def read_recording(path: pathlib.Path) -> Recording:
  """Reads and checks a recorded rollout.

  Raises:
    ValueError: when the file is damaged, holds a key, setting or shape that is not known, lacks one
      that is needed, or holds a value that is not finite.
  """
  with _open(path) as archive:
    if "meta" not in archive.files:
      raise ValueError(f"{path} has no key 'meta'; record the settings there as a JSON string.")
    try:
      arrays = {key: archive[key] for key in archive.files}
    except (ValueError, OSError, zipfile.BadZipFile, EOFError) as error:
      raise ValueError(f"{path} cannot be read as a whole .npz file ({error}).") from error
  meta = _meta(path, arrays.pop("meta"))
  try:
    dit, sampler = _configs(path, meta)
  except ValueError as error:
    raise ValueError(f"{path} has settings that cannot be replayed: {error}") from error
  recording = Recording(path, dit, sampler, meta["chunks"], arrays)
  _check_arrays(recording)
  return recording


def _open(path: pathlib.Path) -> Any:
  try:
    archive = np.load(path, allow_pickle=False)
  except (ValueError, OSError, zipfile.BadZipFile, EOFError) as error:
    raise ValueError(f"{path} cannot be read as an .npz file ({error}).") from error
  if not isinstance(archive, np.lib.npyio.NpzFile):
    raise ValueError(f"{path} holds a single array; use an .npz file of named arrays.")
  return archive


def _under(arrays: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
  return {key.removeprefix(prefix): a for key, a in arrays.items() if key.startswith(prefix)}


def _meta(path: pathlib.Path, array: np.ndarray) -> dict[str, Any]:
  if array.shape != () or array.dtype.kind != "U":
    raise ValueError(f"{path} has a 'meta' of type {array.dtype}; use one JSON string.")
  try:
    meta = json.loads(str(array))
  except json.JSONDecodeError as error:
    raise ValueError(f"{path} has a 'meta' that is no JSON ({error}).") from error
  _check_fields(path, "meta", meta, _META)
  config = dict(meta["config"])
  for name, value in _FIXED.items():
    if config.pop(name, value) != value:
      raise ValueError(
        f"{path} has config {name}={meta['config'][name]!r}; only {value!r} is known."
      )
  _check_fields(path, "config", config, _CONFIG)
  for name, value in (("dtype", "float32"), ("context_noise", 0)):
    if meta[name] != value:
      raise ValueError(f"{path} has {name}={meta[name]!r}; only {value!r} can be replayed.")
  if meta["source"] not in RULES:
    raise ValueError(f"{path} has source={meta['source']!r}; use one of {', '.join(RULES)}.")
  if meta["chunks"] < 1:
    raise ValueError(f"{path} has chunks={meta['chunks']}; it must be at least 1.")
  return meta


def _check_fields(path: pathlib.Path, where: str, found: Any, known: dict[str, Any]) -> None:
  if not isinstance(found, dict):
    raise ValueError(f"{path} has a {where} that is no JSON object.")
  for name in found:
    if name not in known:
      raise ValueError(f"{path} has an unknown {where} field {name!r}; use {', '.join(known)}.")
  for name, kind in known.items():
    if name not in found:
      raise ValueError(f"{path} lacks the {where} field {name!r}.")
    if not isinstance(found[name], kind) or isinstance(found[name], bool):
      raise ValueError(f"{path} has {where} {name}={found[name]!r}, which is of the wrong type.")


def _configs(path: pathlib.Path, meta: dict[str, Any]) -> tuple[DiTConfig, SamplerConfig]:
  config = meta["config"]
  if config["patch_size"] != [1, 2, 2]:
    raise ValueError(f"patch_size is {config['patch_size']}; only [1, 2, 2] is known.")
  dit = DiTConfig(
    name=path.name,
    patch_size=(1, 2, 2),
    **{
      name: config[name]
      for name in _CONFIG
      if name not in ("patch_size", "local_attn_size", "sink_size")
    },
  )
  window = config["local_attn_size"]
  sampler = SamplerConfig(
    frames_per_chunk=meta["frames_per_chunk"],
    window_frames=None if window == -1 else window,
    sink_frames=config["sink_size"],
    cache_frames=meta["cache_frames"],
    cache_rule=RULES[meta["source"]],
    timestep_shift=meta["shift"],
    denoising_steps=tuple(meta["denoising_steps"]),
    latent_channels=config["out_dim"],
    latent_height=meta["latent_height"],
    latent_width=meta["latent_width"],
    max_frames=meta["chunks"] * meta["frames_per_chunk"],
  )
  if config["in_dim"] != config["out_dim"]:
    raise ValueError(f"in_dim is {config['in_dim']}; it must equal out_dim ({config['out_dim']}).")
  if window == -1 and sampler.cache_frames < sampler.max_frames:
    raise ValueError(
      f"cache_frames is {sampler.cache_frames}; a global window needs all {sampler.max_frames}."
    )
  sampler.tokens_per_frame(dit)
  return dit, sampler


def _expected(recording: Recording) -> dict[str, tuple[int, ...] | None]:
  """Shape of every key the file must hold; None leaves the shape to a later check."""
  dit, sampler, arrays = recording.dit, recording.sampler, recording.arrays
  prompt = arrays.get("prompt_embeds", np.zeros((1,)))
  batch = prompt.shape[0] if prompt.ndim else 1
  frame = (sampler.latent_channels, sampler.latent_height, sampler.latent_width)
  chunk = (batch, sampler.frames_per_chunk, *frame)
  slots = sampler.cache_frames * sampler.tokens_per_frame(dit)
  shapes: dict[str, tuple[int, ...] | None] = {
    "prompt_embeds": (batch, dit.text_len, dit.text_dim),
    "timesteps": (recording.steps,),
    "sigmas": (recording.steps,),
    "latents": (batch, recording.chunks * sampler.frames_per_chunk, *frame),
    "cache/local_end": (),
    "cache/global_end": (),
  }
  for layer in range(dit.num_layers):
    for name in "kv":
      shapes[f"cache/{layer}/{name}"] = (batch, slots, dit.num_heads, dit.head_dim)
  for c in range(recording.chunks):
    shapes[f"chunk{c}/x_init"] = chunk
    for step in range(recording.steps):
      last = step == recording.steps - 1
      for name in ("x", "flow", "x0") if last else ("x", "flow", "x0", "renoise"):
        shapes[f"chunk{c}/step{step}/{name}"] = chunk
  if recording.has_gradient:
    shapes |= {"grad/where": (2,), "grad/cotangent": chunk, "grad/x": chunk}
  for key in arrays:
    if key.startswith("param/"):
      shapes[key] = None  # the loader knows the shapes
    elif key.startswith("grad/param/"):
      shapes[key] = arrays.get(key.removeprefix("grad/"), np.zeros((0, 0, 0))).shape
  return shapes


def _check_arrays(recording: Recording) -> None:
  path, arrays = recording.path, recording.arrays
  expected = _expected(recording)
  unknown = sorted(set(arrays) - set(expected))
  missing = sorted(set(expected) - set(arrays))
  if unknown or missing:
    told = [("unknown keys", unknown), ("missing keys", missing)]
    raise ValueError(
      f"{path} has {' and '.join(f'{kind} {_some(keys)}' for kind, keys in told if keys)}."
    )
  for key, array in arrays.items():
    shape = expected[key]
    if shape is not None and array.shape != shape:
      raise ValueError(f"{path} has {key} of shape {array.shape}; it must be {shape}.")
    whole = key in ("grad/where", "cache/local_end", "cache/global_end")
    if array.dtype.kind not in ("iu" if whole else "f"):
      raise ValueError(f"{path} has {key} of type {array.dtype}, which is of the wrong kind.")
    if not np.isfinite(array).all():
      raise ValueError(f"{path} has a value in {key} that is not finite.")
  if recording.has_gradient:
    chunk, step = (int(i) for i in arrays["grad/where"])
    if not (0 <= chunk < recording.chunks and 0 <= step < recording.steps):
      raise ValueError(f"{path} has grad/where ({chunk}, {step}), a step that was not recorded.")


def _some(keys: list[str]) -> str:
  more = f" and {len(keys) - 5} more" if len(keys) > 5 else ""
  return ", ".join(keys[:5]) + more
