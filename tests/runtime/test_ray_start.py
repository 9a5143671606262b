"""Ray that does not start, or loses a worker before it lives: one sentence, never a traceback."""

import pytest
import ray

from sbjax import launch, sample
from sbjax.runtime.executor import Call, WorkerLost, WorkerSpec
from sbjax.runtime.pool import RunFailed
from sbjax.runtime.ray_executor import RayExecutor
from sbjax.runtime.ray_worker import Process
from tests.runtime import tiny

# What Ray 2.60 raises, a plain Exception, when an overloaded machine keeps a node from starting.
LATE = (
  "The current node timed out during startup. This could happen because\n"
  "some of the raylet failed to startup or the GCS has become overloaded."
)


@pytest.fixture
def late(monkeypatch):
  def init(**arguments):
    raise Exception(LATE)

  monkeypatch.setattr(ray, "init", init)
  monkeypatch.delenv("SBJAX_TRACEBACK", raising=False)


@pytest.mark.parametrize("name", ["launch", "sample"])
def test_a_node_that_does_not_start_is_one_sentence(late, tmp_path, capsys, name):
  config = "--config=configs/quickstart.py"
  if name == "launch":
    code = launch.main(["launch", config, f"--workdir={tmp_path / 'run'}"])
  else:
    words = ["--mode=compare", "--num_prompts=1", f"--out={tmp_path / 'out'}"]
    code = sample.main(["sample", config, *words])
  said = capsys.readouterr().err
  assert code == 1
  assert said.startswith("sbjax: Ray did not start: The current node timed out during startup;")
  assert said.count("\n") == 1
  assert "less busy" in said and "logs" in said


def executor(tmp_path, **settings):
  return RayExecutor(cores_per_worker=1, gpus_per_worker=0, cache_dir=str(tmp_path), **settings)


def test_a_cluster_that_does_not_answer_is_named(tmp_path):
  spec = WorkerSpec("actor-0", "actor", 0, tiny.settings(), "a.log", "m:f")
  with pytest.raises(ValueError, match=r"runtime\.ray_address is '127\.0\.0\.1:1', where nothing"):
    executor(tmp_path, address="127.0.0.1:1").start([spec])


def test_a_cluster_that_answers_but_is_not_reached_is_named(late, tmp_path):
  spec = WorkerSpec("actor-0", "actor", 0, tiny.settings(), "a.log", "m:f")
  with pytest.raises(RunFailed, match=r"no cluster at auto: The"):
    executor(tmp_path, address="auto").start([spec])


def test_an_actor_that_could_not_be_made_counts_as_lost(tmp_path, monkeypatch):
  class Actor:
    """Stands for an actor whose process never came up: every call of it fails."""

    call = property(lambda self: self)

    def options(self, **settings):
      return self

    def remote(self, *arguments):
      return "ticket"

  def get(ticket, timeout):
    raise ray.exceptions.RuntimeEnvSetupError("the agent\ntimed out")

  monkeypatch.setattr(ray, "get", get)
  made = executor(tmp_path)
  made._specs = {"actor-0": WorkerSpec("actor-0", "actor", 0, tiny.settings(), "a.log", "m:f")}
  made._actors = {"actor-0": Actor()}
  made._processes = {"actor-0": Process("here", "node", 1, "core 0")}
  ticket = made.submit("actor-0", Call("load", {}))
  with pytest.raises(
    WorkerLost, match=r"actor-0 \(.* is lost during 'load': .*the agent timed out"
  ):
    made.result(ticket)
