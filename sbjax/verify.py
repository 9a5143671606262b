"""Replays recorded values through our models and transitions.

    python -m sbjax.verify PATH...

A path is a recorded rollout of a causal Wan transformer (`.npz`), a file of transition cases or of
groups of pairwise replies (`.json`), or a folder that is searched for all of them. For each
quantity the largest difference is printed beside its tolerance: 2e-4 (rollouts) or 1e-5
(transitions), times the largest reference value where that exceeds one; 0 (pairwise replies).

Exit status: 0 all within tolerance; 1 something beyond it; 2 a file, case or key that is not known,
named in one sentence.
"""

import argparse
import pathlib
import sys
from collections.abc import Iterator, Sequence

from sbjax.verification.result import Check


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the command and gives its exit status."""
  parser = argparse.ArgumentParser(prog="python -m sbjax.verify", description=__doc__)
  parser.formatter_class = argparse.RawDescriptionHelpFormatter
  parser.add_argument("paths", nargs="+", type=pathlib.Path, metavar="PATH")
  try:
    return _verify(parser.parse_args(arguments).paths)
  except ValueError as error:
    print(f"verify: {error}", file=sys.stderr)
    return 2


def _verify(paths: Sequence[pathlib.Path]) -> int:
  failed, files = 0, 0
  for path in _files(paths):
    files += 1
    print(path)
    checks = _replay(path)
    for check in checks:
      verdict = "ok" if check.passed else "BEYOND TOLERANCE"
      line = f"  {check.quantity:<42} {check.difference:9.2e}  tolerance {check.tolerance:8.2e}"
      print(f"{line}  {verdict}")
    beyond = sum(not check.passed for check in checks)
    print(f"  {len(checks)} quantities, {beyond} beyond tolerance", flush=True)
    failed += beyond
  if not files:
    raise ValueError(f"{', '.join(map(str, paths))} holds no recorded rollout and no cases.")
  return 1 if failed else 0


def _files(paths: Sequence[pathlib.Path]) -> Iterator[pathlib.Path]:
  for path in paths:
    if not path.exists():
      raise ValueError(f"{path} does not exist; name a file or a folder.")
    if not path.is_dir():
      yield path
      continue
    # Folders of golden values also hold weights and images, so what has another layout is passed
    # over there, and said; a damaged file is an error anywhere.
    for file in sorted(p for p in path.rglob("*") if p.suffix in (".npz", ".json")):
      if _known(file):
        yield file
      else:
        print(f"{file}\n  passed over: neither a recorded rollout nor cases")


def _known(path: pathlib.Path) -> bool:
  # JAX takes a second to import; a wrong path should be told at once.
  from sbjax.verification.cases import is_case_file
  from sbjax.verification.recording import is_recording
  from sbjax.verification.winrate import is_winrate_file

  if path.suffix == ".npz":
    return is_recording(path)
  return is_winrate_file(path) or is_case_file(path)


def _replay(path: pathlib.Path) -> list[Check]:
  from sbjax.verification.cases import read_cases, replay_cases
  from sbjax.verification.causal import replay_rollout
  from sbjax.verification.recording import read_recording
  from sbjax.verification.winrate import is_winrate_file, replay_winrates

  if path.suffix == ".npz":
    return replay_rollout(read_recording(path))
  if path.suffix == ".json" and is_winrate_file(path):
    return replay_winrates(path)
  if path.suffix == ".json":
    return replay_cases(read_cases(path))
  raise ValueError(f"{path} is neither .npz nor .json; those are the layouts that are known.")


if __name__ == "__main__":
  sys.exit(main())
