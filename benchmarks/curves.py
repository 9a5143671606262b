"""Compares reward curves of runs: `python -m benchmarks.curves A B [C ...] --out=curves.png`.

Each argument is the workdir of a run. For every pair it prints the largest gap between the moving
averages of the step's mean reward, in the manner of StageBreaker's figure 15: two schemes from one
seed beside two seeds of one scheme, which tell how large a gap means nothing. One picture shows
all. Reads `metrics.jsonl` and `config.json` only.
"""

import argparse
import itertools
import json
import pathlib
import sys

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from jaxtyping import Float

KEY = "critic/rewards/mean"


def rewards(workdir: pathlib.Path, steps: int) -> Float[np.ndarray, " steps"]:
  """Mean reward of a run's first steps.

  Raises:
    ValueError: the folder holds no run of so many steps.
  """
  path = workdir / "metrics.jsonl"
  if not path.is_file():
    raise ValueError(f"{workdir} holds no metrics.jsonl; name the workdir of a run")
  rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
  found = {int(row["step"]): row[KEY] for row in rows if KEY in row}
  missing = [step for step in range(1, steps + 1) if step not in found]
  if missing:
    raise ValueError(f"{workdir} lacks step {missing[0]}; use --steps={missing[0] - 1} or less")
  return np.array([found[step] for step in range(1, steps + 1)], np.float64)


def moving_average(values: Float[np.ndarray, " steps"], window: int) -> Float[np.ndarray, " rest"]:
  """Means over windows that lie wholly inside."""
  return np.convolve(values, np.full(window, 1.0 / window), mode="valid")


def label(workdir: pathlib.Path) -> str:
  """Scheme and seed of a run."""
  config = json.loads((workdir / "config.json").read_text(encoding="utf-8"))
  return f"{config['scheme']}, seed {config['seed']}"


def main() -> int:
  """The command; exit 2 where a folder cannot be used."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("workdirs", nargs="+", type=pathlib.Path)
  parser.add_argument("--steps", type=int, default=60)
  parser.add_argument("--window", type=int, default=10, help="steps of the moving average")
  parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("curves.png"))
  given = parser.parse_args()
  try:
    curves = {w: rewards(w, given.steps) for w in given.workdirs}
    names = {w: label(w) for w in given.workdirs}
  except (OSError, ValueError, KeyError) as error:
    print(f"curves: {error}", file=sys.stderr)
    return 2
  smooth = {w: moving_average(curve, given.window) for w, curve in curves.items()}
  for a, b in itertools.combinations(given.workdirs, 2):
    gap = np.abs(smooth[a] - smooth[b])
    mean = 0.5 * (smooth[a].mean() + smooth[b].mean())
    print(
      f"{names[a]} | {names[b]}: largest gap of the {given.window}-step averages "
      f"{gap.max():.4f} ({gap.max() / mean:.1%}) at step {gap.argmax() + given.window}, "
      f"mean gap {gap.mean():.4f}"
    )
  figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
  for number, w in enumerate(given.workdirs):
    colour = f"C{number}"
    axes.plot(np.arange(1, given.steps + 1), curves[w], color=colour, alpha=0.25, linewidth=1)
    rest = np.arange(given.window, given.steps + 1)
    axes.plot(rest, smooth[w], color=colour, linewidth=2, label=names[w])
  axes.set_xlabel("RL step")
  axes.set_ylabel("mean reward of the step's candidates")
  axes.legend()
  figure.savefig(given.out, dpi=120)
  print(f"picture: {given.out}")
  return 0


if __name__ == "__main__":
  sys.exit(main())
