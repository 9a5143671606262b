"""Replays recorded values through our models and transitions.

    python -m sbjax.verify PATH...

A path is a recorded rollout of a causal Wan transformer, forward pass of a judge or pre-processing
(`.npz`), a file of transition cases or of groups of pairwise replies (`.json`), or a folder that is
searched for all of them. A judge's weights and settings stand beside its recording. For each
quantity the largest difference is printed beside its tolerance: 2e-4 (rollouts) or 1e-5
(transitions), times the largest reference value where that exceeds one; 1e-4 (judges and
pre-processing), 1e-3 (a judge's logits); 0 (pairwise replies, positions, sizes).

Exit status: 0 all within tolerance; 1 something beyond it; 2 a file, case or key that is not known,
named in one sentence.
"""

import argparse
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence

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
  return any(is_one(path) for is_one, _ in _layouts(path.suffix))


def _replay(path: pathlib.Path) -> list[Check]:
  if path.suffix not in (".npz", ".json"):
    raise ValueError(f"{path} is neither .npz nor .json; those are the layouts that are known.")
  layouts = _layouts(path.suffix)
  for is_one, replay in layouts:
    if is_one(path):
      return replay(path)
  return layouts[-1][1](path)  # which says what it misses


Layout = tuple[Callable[[pathlib.Path], bool], Callable[[pathlib.Path], list[Check]]]


def _layouts(suffix: str) -> list[Layout]:
  """Who recognises a file, and who replays it."""
  # JAX takes a second to import; a wrong path should be told at once.
  from sbjax.verification import cases, causal, clip, qwen_vl, recording, winrate

  if suffix == ".npz":
    return [
      (qwen_vl.is_qwen_recording, qwen_vl.replay_qwen),
      (qwen_vl.is_qwen_preprocessing, qwen_vl.replay_qwen_preprocessing),
      (clip.is_clip_recording, clip.replay_clip),
      (clip.is_hps_preprocessing, clip.replay_hps_preprocessing),
      (recording.is_recording, lambda p: causal.replay_rollout(recording.read_recording(p))),
    ]
  return [
    (winrate.is_winrate_file, winrate.replay_winrates),
    (cases.is_case_file, lambda p: cases.replay_cases(cases.read_cases(p))),
  ]


if __name__ == "__main__":
  sys.exit(main())
