"""Emulation stays out of the real path, and its workers out of JAX."""

import ast
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]
MAY = {"sbjax/emulation", "sbjax/compare.py"}
"""What may import it; every other file is a real path."""


def test_no_real_path_imports_emulation():
  wrong = []
  for path in (ROOT / "sbjax").rglob("*.py"):
    relative = str(path.relative_to(ROOT))
    if any(relative.startswith(allowed) for allowed in MAY):
      continue
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
      names = []
      if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
      elif isinstance(node, ast.ImportFrom):
        names = [f"{node.module}.{alias.name}" for alias in node.names]
      wrong += [relative for name in names if name.startswith("sbjax.emulation")]
  assert not wrong


def test_an_emulated_worker_imports_no_jax():
  code = (
    "import sys, sbjax.emulation.device, sbjax.runtime.ray_executor; "
    "print([m for m in ('jax', 'flax') if m in sys.modules])"
  )
  done = subprocess.run(
    [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
  )
  assert done.stdout.strip() == "[]"
