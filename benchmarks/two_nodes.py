"""The quickstart on two Ray nodes: the actor group on one, the reward group on the other.

    python -m benchmarks.two_nodes [--steps=2] [--config=configs/quickstart.py] [--config.FIELD=…]

Runs the config on one node, then on Ray's own test cluster of two nodes on 127.0.0.1. Prints which
node ran which worker. Exit code 1 unless the groups ran on different nodes, both runs ended with
the same adapter to the bit, and no process is left.
"""

import argparse
import os
import pathlib
import re
import subprocess
import sys
import tempfile

# Ray reads them when it is imported: everything listens on 127.0.0.1 only.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import numpy as np
from ray.cluster_utils import Cluster
from safetensors.numpy import load_file

from benchmarks import processes

GROUPS = ("actor", "reward")
_PLACED = re.compile(
  r"^\s*(?P<worker>\S+) \((?P<group>\w+), node [^/]+/(?P<node>\w+), (?P<rest>.*)"
)


def launch(workdir: pathlib.Path, words: list[str], timeout_s: float) -> str:
  """Trains in a process of its own and gives what it printed.

  Raises:
    RuntimeError: it did not end with exit code 0.
  """
  command = [sys.executable, "-m", "sbjax.launch", *words, f"--workdir={workdir}"]
  print("$", " ".join(command[1:]), flush=True)
  done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
  if done.returncode:
    raise RuntimeError(f"exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
  return done.stdout


def main() -> int:
  """Runs both and compares."""
  parser = argparse.ArgumentParser(description="The quickstart on two Ray nodes.")
  parser.add_argument("--config", default="configs/quickstart.py")
  parser.add_argument("--steps", type=int, default=2)
  parser.add_argument("--timeout_s", type=float, default=1800.0, help="of each of the two runs")
  asked, overrides = parser.parse_known_args()
  mark = processes.mark()
  words = [
    f"--config={asked.config}",
    f"--config.total_steps={asked.steps}",
    "--config.eval.every=0",
    *overrides,
  ]
  with tempfile.TemporaryDirectory() as folder:
    one, two = pathlib.Path(folder, "one"), pathlib.Path(folder, "two")
    launch(one, words, asked.timeout_s)
    cluster = Cluster()
    try:
      for group in GROUPS:
        cluster.add_node(num_cpus=8, resources={f"{group}s": 8}, include_dashboard=False)
      nodes = cluster.global_state.node_table()
      names = {g: n["NodeID"] for g in GROUPS for n in nodes if f"{g}s" in n["Resources"]}
      bound = [f"--config.runtime.{group}_resource={group}s" for group in GROUPS]
      address = f"--config.runtime.ray_address={cluster.address}"
      said = launch(two, [*words, address, *bound], asked.timeout_s)
    finally:
      cluster.shutdown()
    apart = placed(said, names)
    equal = same(one / "adapter.safetensors", two / "adapter.safetensors")
  left = processes.wait_until_gone(mark)
  print(f"groups on their own nodes: {apart}")
  print(f"adapters of one node and two equal to the bit: {equal}")
  print(f"processes left: {left or 'none'}")
  return 0 if apart and equal and not left else 1


def placed(said: str, nodes: dict[str, str]) -> bool:
  """Prints which node ran which worker; True where every worker ran on its group's node."""
  rows = [match for line in said.splitlines() if (match := _PLACED.match(line))]
  for row in rows:
    print(
      f"{row['worker']:12s} {row['group']:8s} node {row['node']}  {row['rest'].split(', log')[0]}"
    )
  right = [nodes[row["group"]].startswith(row["node"]) for row in rows]
  return all(right) and {row["group"] for row in rows} == set(GROUPS)


def same(first: pathlib.Path, second: pathlib.Path) -> bool:
  """Tells whether two adapter files hold the same tensors, bit for bit."""
  a, b = load_file(first), load_file(second)
  return a.keys() == b.keys() and all(
    np.array_equal(a[k].view(np.uint8), b[k].view(np.uint8)) for k in a
  )


if __name__ == "__main__":
  sys.exit(main())
