"""Ray that does not start, or loses a worker before it lives: one sentence, never a traceback."""

import pytest
import ray

from sbjax import launch, sample
from sbjax.runtime.executor import Call, WorkerLost, WorkerSpec
from sbjax.runtime.pool import RunFailed
from sbjax.runtime.ray_executor import RayExecutor
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
    code = sample.main(["sample", config, "--num_prompts=1", f"--out={tmp_path / 'out'}"])
  said = capsys.readouterr().err
  assert code == 1
  assert said.startswith("sbjax: Ray did not start: The current node timed out during startup;")
  assert said.count("\n") == 1
  assert "less busy" in said and "logs" in said


def executor(tmp_path, **settings):
  return RayExecutor(
    str(tmp_path), cores_per_worker=1, gpus_per_worker=0, cache_dir=str(tmp_path), **settings
  )


def test_a_cluster_that_is_not_reached_is_named(late, tmp_path):
  with pytest.raises(RunFailed, match=r"ray_address='10\.0\.0\.1:6379': The"):
    executor(tmp_path, address="10.0.0.1:6379")


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

  monkeypatch.setattr(ray, "init", lambda **arguments: None)
  monkeypatch.setattr(ray, "get", get)
  monkeypatch.setattr(ray, "cluster_resources", dict)
  monkeypatch.setattr(RayExecutor, "_create", lambda self, spec: Actor())
  made = executor(tmp_path)
  made.start([WorkerSpec("actor-0", "actor", 0, tiny.settings(), "a.log", "m:f")])
  ticket = made.submit("actor-0", Call("load", {}))
  with pytest.raises(
    WorkerLost, match=r"actor-0 \(.* is lost during 'load': .*the agent timed out"
  ):
    made.result(ticket)
