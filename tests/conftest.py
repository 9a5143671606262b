"""Strict numerics for every test: four fake CPU devices, no silent casts, no silent broadcasts."""

import os
import shutil
import tempfile

# Before JAX is imported anywhere: its backend reads these once. Child processes inherit them.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
  os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
).strip()
os.environ.setdefault("RAY_DEDUP_LOGS", "0")
# Ray reads this when it is imported: it then listens on 127.0.0.1 only.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
os.environ.setdefault("MPLBACKEND", "Agg")

# One compilation cache for all tests of a run and for the processes that they start, so that a
# program which two tests share is compiled once. Who made it removes it; pytest-xdist's
# workers inherit its name.
_OWNER = "SBJAX_TEST_CACHE" not in os.environ
_CACHE = os.environ.setdefault(
  "SBJAX_TEST_CACHE", tempfile.mkdtemp(prefix="sbjax-test-compilation-") if _OWNER else ""
)
os.environ["JAX_COMPILATION_CACHE_DIR"] = _CACHE
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

# No test asserts a time: a busy machine is not a failure.
hypothesis.settings.register_profile("sbjax", deadline=None)
hypothesis.settings.load_profile("sbjax")

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_unconfigure(config: pytest.Config) -> None:
  """Removes the compilation cache of this run."""
  del config
  if _OWNER:
    shutil.rmtree(_CACHE, ignore_errors=True)
