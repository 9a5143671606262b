"""docs/metrics.md defines every key that the code can write."""

import ast
import pathlib
import re

import numpy as np

from sbjax.report import evaluation, timeline
from sbjax.runtime.records import EvalResult, Span

ROOT = pathlib.Path(__file__).parents[2]
FAMILIES = ("actor", "check", "critic", "perf", "reward", "timing_s", "timing_task_ms", "training")


def documented():
  page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
  keys = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
  assert len(keys) == len(set(keys))
  return {key: re.compile(re.sub(r"<\w+>", r"[^/]+", key)) for key in keys}


def defined(key):
  return any(pattern.fullmatch(key) for pattern in documented().values())


def keys_in_the_code():
  """Finds keys among string literals; a formatted part stands for any word."""
  found = set()
  for path in (ROOT / "sbjax").rglob("*.py"):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
      if isinstance(node, ast.JoinedStr):
        parts = [p.value if isinstance(p, ast.Constant) else "x" for p in node.values]
        text = "".join(str(p) for p in parts)
      elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        text = node.value
      else:
        continue
      if re.fullmatch(rf"({'|'.join(FAMILIES)})(/\w+)+", text):
        found.add(text)
  return found


def test_every_key_in_the_code_is_defined():
  keys = keys_in_the_code()
  assert len(keys) > 20  # else the search itself is broken
  assert sorted(k for k in keys if not defined(k)) == []


def test_keys_of_reports_are_defined():
  spans = [Span("actor-0", "actor", "generate", "generate/c0", 1, 0.0, 1.0)]
  columns = {"reward": np.ones(3), "heldout": np.zeros(3)}
  result = EvalResult(1, {"base": columns, "ema": columns}, {})
  for key in [*timeline.span_metrics(spans, devices=1), *evaluation.scalars(result)]:
    assert defined(key), key


def test_the_page_defines_nothing_that_no_code_writes():
  sources = "\n".join(p.read_text(encoding="utf-8") for p in (ROOT / "sbjax").rglob("*.py"))
  for key in documented():
    if "/m<" not in key:  # written as a suffix to any key
      assert key.split("<")[0] in sources, key
