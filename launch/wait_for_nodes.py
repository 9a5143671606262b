"""Waits until a Ray cluster has a number of living nodes.

    python launch/wait_for_nodes.py HEAD:PORT NODES TIMEOUT_S

Exit code 1 where the time is over first.
"""

import sys
import time

import ray


def main(address: str, wanted: int, timeout_s: float) -> int:
  """Polls the cluster, and prints its size when that changes.

  Args:
    address: of the cluster's head.
    wanted: nodes, the head included.
    timeout_s: how long to wait.
  """
  ray.init(address=address, log_to_driver=False, configure_logging=False)
  end, seen = time.monotonic() + timeout_s, 0
  while True:
    living = sum(node["Alive"] for node in ray.nodes())
    if living != seen:
      print(f"{living} of {wanted} nodes", flush=True)
      seen = living
    if living >= wanted:
      return 0
    if time.monotonic() > end:
      print(f"the other nodes did not come within {timeout_s:.0f} s", file=sys.stderr)
      return 1
    time.sleep(1.0)


if __name__ == "__main__":
  if len(sys.argv) != 4:
    sys.exit(__doc__)
  sys.exit(main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
