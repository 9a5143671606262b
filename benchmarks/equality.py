"""What may not change a bit, and what may change the last ones: checked on the embedded world.

    python -m benchmarks.equality [--steps=3] [--config=configs/quickstart.py] [--config.a.b=value]

Two comparisons from the same seed, after the same number of steps:

- one against two workers a group, each run by `sbjax.launch` under Ray as a user would: online and
  EMA adapters must be equal to the last bit;
- `colocated` (two-pass) against `stagebreaker` (merged), inline: for every update the combined
  gradients, taken at the same adapter on the same trajectories, must agree to 1e-5 of their norm.
  Adam turns a sign flip of a near-zero element into a full step, so the two-pass run gets the
  merged run's adapter after each update; its gradients are its own.

Exit codes: 0 both hold; 1 one does not, or a run failed; 2 the command cannot work.
"""

import argparse
import hashlib
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from safetensors.numpy import load_file

from sbjax import command
from sbjax import config as config_lib
from sbjax import prompts as prompt_lib
from sbjax.compilation import cache_dir, use_cache
from sbjax.report.console import Progress
from sbjax.runtime.driver import Driver
from sbjax.runtime.executor import Call, Result
from sbjax.runtime.inline import InlineExecutor
from sbjax.runtime.roles import recipe_of, reward_of

TOLERANCE = 1e-5
"""Largest norm of a difference of combined gradients, over the gradient's norm."""

ADAPTERS = ("adapter.safetensors", "adapter_ema.safetensors")


class WatchedExecutor(InlineExecutor):
  """Runs a step inline, and keeps what its updates and rollouts gave.

  Args:
    lead: another one that has run the same updates: their adapters, moving averages and optimizer
      states take the place of this one's own. The gradients stay.
  """

  def __init__(self, lead: "WatchedExecutor | None" = None):
    super().__init__()
    self._lead = lead
    self._calls: dict[int, Call] = {}
    self.updates: dict[int, tuple[Any, ...]] = {}
    self.trajectories: set[str] = set()

  def submit(self, worker: str, call: Call, inputs: Sequence[Any] = ()) -> int:
    """Queues a call."""
    ticket = super().submit(worker, call, inputs)
    self._calls[ticket] = call
    return ticket

  def result(self, ticket: int) -> Result:
    """Gives an ended call's result, an update's state as the lead's."""
    call, result = self._calls.pop(ticket), super().result(ticket)
    if call.op == "generate":
      latents = np.asarray(result.heavy[1])
      self.trajectories.add(hashlib.sha256(latents.tobytes()).hexdigest())
    if call.op != "update":
      return result
    count = call.args["count"]
    *state, gradient = result.heavy
    self.updates[count] = tuple(state)
    if self._lead is not None:
      state = self._lead.updates[count]
    return Result(result.scalars, (*state, gradient), result.seconds)


def main(argv: Sequence[str]) -> int:
  """Runs both comparisons and gives the exit code."""
  parser = argparse.ArgumentParser(description="Checks what must be equal on a world.")
  parser.add_argument("--steps", type=int, default=3)
  parser.add_argument("--config", default="configs/quickstart.py")
  parser.add_argument("--timeout_s", type=float, default=1800.0, help="of one launched run")
  asked, overrides = parser.parse_known_args(argv[1:])
  words = [f"--config={asked.config}", *overrides, f"--config.total_steps={asked.steps}"]
  try:
    settings = config_lib.validate(config_lib.parse(["equality", *words], {}).config)
  except ValueError as error:
    return command.refuse(error)
  command.prepare_environment(settings)

  def work() -> int:
    same = [compare_gradients(words, asked.steps), compare_workers(words, asked.timeout_s)]
    return command.EXIT_DONE if all(same) else command.EXIT_FAILED

  return command.guarded(work)


def compare_gradients(words: Sequence[str], steps: int) -> bool:
  """Prints the gradients' differences per update, and tells whether all are within bounds."""
  use_cache(cache_dir())
  lead = WatchedExecutor()
  merged, state, prompts, groups = _driver([*words, "--config.scheme=stagebreaker"], lead)
  follow = WatchedExecutor(lead)
  two_pass, _, _, _ = _driver([*words, "--config.scheme=colocated"], follow)
  seed, worst = merged.recipe.settings.seed, 0.0
  lines = []
  with Progress("steps of both schemes", 2 * steps) as progress:
    for step in range(1, steps + 1):
      asked = prompts.take(seed, (step - 1) * groups, groups)
      after, _ = merged.run_step(state, step, asked)
      progress.advance("stagebreaker")
      two_pass.run_step(state, step, asked)
      progress.advance("colocated")
      state = after
      for update, gradient in merged.gradients.items():
        own, other = np.asarray(gradient), np.asarray(two_pass.gradients[update])
        difference, norm = relative_difference(own, other)
        worst = max(worst, difference)
        lines.append(f"  step {step} update {update}: {difference:.2e} of norm {norm:.3e}")
  print("merged against two-pass, norm of the difference of combined gradients / norm:")
  print("\n".join(lines))
  if lead.trajectories != follow.trajectories:
    print("  the trajectories differ: these gradients cannot be compared")
    return False
  print(f"  largest: {worst:.2e} (allowed: {TOLERANCE:.0e}); the trajectories are the same bits")
  return worst <= TOLERANCE


def relative_difference(
  one: Float[np.ndarray, " parameters"], other: Float[np.ndarray, " parameters"]
) -> tuple[float, float]:
  """Gives |one - other| / |one|, and |one|, in float64.

  Two zeros differ by 0; anything that is not finite differs by infinity.
  """
  one, other = one.astype(np.float64), other.astype(np.float64)
  norm, gap = float(np.linalg.norm(one)), float(np.linalg.norm(one - other))
  if not np.isfinite(norm + gap):
    return float("inf"), norm
  return (gap / norm if norm else (0.0 if gap == 0 else float("inf"))), norm


def compare_workers(words: Sequence[str], timeout_s: float) -> bool:
  """Launches a run with one and one with two workers a group, and compares their adapters."""
  with tempfile.TemporaryDirectory(prefix="equality-") as folder:
    found = []
    for workers in (1, 2):
      workdir = pathlib.Path(folder) / f"{workers}"
      print(f"\n{workers} worker(s) a group:", flush=True)
      code = _launch(
        [
          *words,
          "--config.eval.every=0",
          "--config.report.samples_every=0",
          "--config.runtime.executor=ray",
          f"--config.runtime.actor_workers={workers}",
          f"--config.runtime.reward_workers={workers}",
          f"--workdir={workdir}",
        ],
        timeout_s,
      )
      if code:
        print(f"the run with {workers} worker(s) a group ended with exit code {code}")
        return False
      found.append([load_file(workdir / name) for name in ADAPTERS])
  print("\none against two workers a group, numbers that differ in any bit:")
  bits = [different_bits(*pair) for pair in zip(*found, strict=True)]
  for name, (differing, total) in zip(ADAPTERS, bits, strict=True):
    print(f"  {name}: {differing} of {total}")
  return all(differing == 0 for differing, _ in bits)


def different_bits(
  one: dict[str, Float[np.ndarray, "..."]], other: dict[str, Float[np.ndarray, "..."]]
) -> tuple[int, int]:
  """Counts the numbers of two adapters that differ in any bit, and all numbers.

  Raises:
    ValueError: the adapters have tensors of different names or shapes.
  """
  shapes = [{name: t.shape for name, t in adapter.items()} for adapter in (one, other)]
  if shapes[0] != shapes[1]:
    raise ValueError("the two adapters have different tensors; compare runs of one config.")
  differing = sum(int((one[n].view(np.uint32) != other[n].view(np.uint32)).sum()) for n in one)
  return differing, sum(t.size for t in one.values())


def _launch(words: Sequence[str], timeout_s: float) -> int:
  process = subprocess.Popen([sys.executable, "-m", "sbjax.launch", *words])
  try:
    return process.wait(timeout_s)
  except subprocess.TimeoutExpired:
    print(f"the run did not end within {timeout_s:.0f} s; raise --timeout_s", file=sys.stderr)
    return command.EXIT_FAILED
  finally:
    if process.poll() is None:
      process.terminate()  # it ends its workers itself
      process.wait(120)


def _driver(words: Sequence[str], executor: InlineExecutor):
  parsed = config_lib.parse(["equality", *words, "--config.runtime.executor=inline"], {})
  settings = config_lib.validate(parsed.config)
  recipe = recipe_of(settings)
  prompts, _ = prompt_lib.from_settings(settings)
  driver = Driver(recipe, executor, reward_of(settings), os.devnull, lambda line: None)
  with Progress(f"models and shapes of {settings.scheme}", 2) as progress:
    driver.wait_for_workers()
    progress.advance("models")
    state = driver.start(prompts.prompts[0], None)
    progress.advance("shapes")
  return driver, state, prompts, settings.rollout.prompts_per_step


if __name__ == "__main__":
  sys.exit(main(sys.argv))
