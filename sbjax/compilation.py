"""Where compiled programs are kept, so that workers and later runs need not compile again."""

import hashlib
import os
import pathlib
import platform

MIN_COMPILE_S = 0.5


def cache_dir() -> str:
  """Gives the folder: JAX_COMPILATION_CACHE_DIR, or one under the user's cache directory.

  Programs for a CPU use what that CPU has. A home directory may be shared by different machines,
  so the folder's name tells processors apart.
  """
  chosen = os.environ.get("JAX_COMPILATION_CACHE_DIR")
  if chosen:
    return chosen
  root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
  return os.path.join(root, "sbjax", "compiled", _processor())


def use_cache(directory: str) -> None:
  """Makes this process keep its compiled programs there."""
  import jax

  jax.config.update("jax_compilation_cache_dir", directory)
  jax.config.update("jax_persistent_cache_min_compile_time_secs", MIN_COMPILE_S)


def _processor() -> str:
  text = platform.machine() + platform.processor()
  info = pathlib.Path("/proc/cpuinfo")
  if info.exists():
    lines = info.read_text().splitlines()
    text += "".join(sorted({line for line in lines if line.startswith(("flags", "model name"))}))
  return hashlib.sha256(text.encode()).hexdigest()[:12]
