"""Imports point one way, and the scheduler stays free of JAX."""

import ast
import collections
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]

# A part may import parts of a lower rank only. What is not listed is a command.
RANKS = {
  "sbjax.settings": 0,
  "sbjax.files": 0,
  "sbjax.compilation": 0,
  "sbjax.randomness": 0,
  "sbjax.simulate_options": 0,
  "sbjax.separation": 1,
  "sbjax.algorithms": 2,
  "sbjax.policy": 2,
  "sbjax.trajectory": 2,
  "sbjax.rollout": 3,
  "sbjax.rewards": 4,
  "sbjax.dataflow": 4,
  "sbjax.worlds": 5,
  "sbjax.world_table": 6,
  "sbjax.sizes": 7,
  "sbjax.prompts": 7,
  "sbjax.verification": 8,
  "sbjax.checks": 8,
  "sbjax.config": 9,
  "sbjax.runtime": 9,
  "sbjax.report": 10,
  "sbjax.state": 10,
  "sbjax.command": 10,
  "sbjax.train": 11,
  "sbjax.evaluate": 12,
  "sbjax.sampling": 12,
  "sbjax.emulation": 12,
}
COMMAND = 13
# Both write a run's files, and may know of each other.
TOGETHER = {"sbjax.report", "sbjax.state"}


def _imports(folder):
  """Gives part -> parts that it imports, both as `package.part`, and the importing files."""
  found = collections.defaultdict(dict)
  for path in (ROOT / folder).rglob("*.py"):
    part = ".".join(path.relative_to(ROOT).with_suffix("").parts[:2])
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
      names = []
      if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
      elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"{path}: write the whole name of what is imported"
        names = [f"{node.module}.{alias.name}" for alias in node.names]
      for name in names:
        found[part][".".join(name.split(".")[:2])] = str(path)
  return found


def test_imports_point_one_way():
  wrong = []
  for part, others in _imports("sbjax").items():
    for other, path in others.items():
      rank, other_rank = (RANKS.get(p, COMMAND) for p in (part, other))
      if not other.startswith("sbjax.") or other == part or {part, other} == TOGETHER:
        continue
      if other_rank >= rank:
        wrong.append(f"{path} imports {other}")
  assert not wrong


def test_models_know_nothing_of_sbjax():
  for part, others in _imports("models").items():
    assert not [o for o in others if o.split(".")[0] == "sbjax"], part


def test_worlds_import_models_and_rewards_only():
  others = {o for o in _imports("sbjax")["sbjax.worlds"] if o.startswith("sbjax.")}
  # Settings are plain records that anyone may read.
  assert others <= {"sbjax.worlds", "sbjax.rewards", "sbjax.settings"}


def test_every_ranked_part_exists():
  for part in RANKS:
    path = ROOT.joinpath(*part.split("."))
    assert path.is_dir() or path.with_suffix(".py").is_file(), part


def test_dataflow_imports_no_jax():
  code = (
    "import sys, sbjax.dataflow.build; "
    "print([m for m in ('jax', 'flax', 'ray') if m in sys.modules])"
  )
  done = subprocess.run(
    [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
  )
  assert done.stdout.strip() == "[]"
