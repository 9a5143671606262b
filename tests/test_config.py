"""From a config to settings: types, ranges, unknown and missing fields, and what cannot work."""

import dataclasses
import importlib.util
import json
import pathlib

import pytest

from sbjax import checks, config, settings

QUICKSTART = pathlib.Path(__file__).parents[1] / "configs" / "quickstart.py"


def quickstart():
  spec = importlib.util.spec_from_file_location("quickstart", QUICKSTART)
  assert spec is not None and spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module.get_config()


def changed(**fields):
  """The quickstart with fields replaced; `rollout__group_size=4` is rollout.group_size."""
  c = quickstart()
  for name, value in fields.items():
    section, _, field = name.rpartition("__")
    target = c[section] if section else c
    # As a config file of the user's own, which ConfigDict has not seen with another type.
    if field in target:
      del target[field]
    target[field] = value
  return c


def refusal(check=config.validate, **fields):
  with pytest.raises(ValueError) as error:
    check(changed(**fields))
  text = str(error.value)
  assert "\n" not in text
  return text


def test_the_quickstart_is_valid_and_carried_over_field_for_field():
  c = quickstart()
  made = config.validate(c)

  def compare(record, section):
    for field in dataclasses.fields(record):
      value = getattr(record, field.name)
      if dataclasses.is_dataclass(value):
        compare(value, section[field.name])
      else:
        assert value == section[field.name]

  compare(made, c)
  assert made.candidates == c.rollout.prompts_per_step * c.rollout.group_size


def test_settings_and_quickstart_have_the_same_fields():
  def names(section, prefix=""):
    for name, value in section.items():
      if hasattr(value, "items"):
        yield from names(value, f"{prefix}{name}.")
      else:
        yield prefix + name

  assert set(config.field_names()) == set(names(quickstart()))


def test_an_integer_is_a_number_but_nothing_else_is_converted():
  assert config.convert(changed(optim__learning_rate=1)).optim.learning_rate == 1.0
  assert isinstance(config.convert(changed(lora__alpha=8)).lora.alpha, float)


@pytest.mark.parametrize(
  ("fields", "says"),
  [
    ({"total_steps": "two"}, "total_steps is 'two'; it must be an integer"),
    ({"total_steps": 2.0}, "total_steps is 2.0; it must be an integer"),
    ({"total_steps": True}, "total_steps is True; it must be an integer"),
    ({"total_steps": 0}, "total_steps is 0; it must be at least 1"),
    ({"seed": -1}, "seed is -1; it must be at least 0"),
    ({"seed": 2**31}, "at most 2147483647"),
    ({"scheme": "fast"}, "scheme is 'fast'; use one of 'colocated', 'colocated_single_replay', "),
    ({"resume": "always"}, "use one of 'never', 'auto'"),
    ({"optim__learning_rate": 0.0}, "optim.learning_rate is 0.0; it must be above 0"),
    ({"optim__learning_rate": float("nan")}, "must be a finite number"),
    ({"optim__b2": 1.0}, "optim.b2 is 1.0; it must be at least 0 and below 1"),
    ({"runtime__task_timeout_s": 0}, "runtime.task_timeout_s is 0; it must be above 0"),
    ({"reward__max_failed_frac": 1.5}, "at least 0 and at most 1"),
    ({"reward__weights": [1.0, 0.5, 0.5]}, "the list [1.0, 0.5, 0.5]; write the tuple (1.0, 0.5"),
    ({"reward__weights": 1.0}, "must be a tuple"),
    ({"reward__weights": (1.0, "a", 1.0)}, "reward.weights[1] is 'a'; it must be a number"),
    ({"runtime__mesh": (1, 1, 1)}, "it must have 2 entries"),
    ({"runtime__mesh": (1, 0)}, "runtime.mesh[1] is 0"),
    ({"model__name": None}, "model.name is None; it must be a string"),
    ({"model": 3}, "model is 3; it must be a section"),
    ({"sead": 1}, "no field sead; did you mean seed?"),
    ({"rollout__learning_rate": 1}, "did you mean optim.learning_rate?"),
  ],
)
def test_a_field_by_itself(fields, says):
  assert says in refusal(config.convert, **fields)


def test_a_missing_field_is_named():
  c = quickstart()
  del c.optim.b1
  with pytest.raises(ValueError, match=r"lacks the field optim\.b1"):
    config.convert(c)


@pytest.mark.parametrize(
  ("fields", "says"),
  [
    ({"model__name": "sora"}, "model.name is 'sora'; use one of 'digits', 'wan2.1-1.3b'"),
    ({"model__checkpoint": "/nowhere"}, "model.checkpoint is '/nowhere'"),
    ({"model__frames": 34}, "33 or 45 would do"),
    ({"model__frames": 2}, "so 9 would do"),
    ({"model__frames": 10**6 * 12 - 3}, "at most 4089"),
    ({"runtime__chunk_blocks": 4}, "33 frames are 3 chunks"),
    ({"algorithm__minibatches": 3}, "use 1, 2 or 4"),
    (
      {"algorithm__minibatches": 5, "algorithm__minibatch_order": "reference"},
      "must divide the 24 candidates",
    ),
    ({"rollout__group_size": 1}, "use at least 2"),
    ({"rollout__best_of": 3}, "must be even"),
    ({"rollout__best_of": 8}, "at most rollout.group_size (6)"),
    ({"rollout__transition": "ddim"}, "predicts a velocity"),
    ({"rollout__noise_level": 0.5}, "'renoise' has no noise level"),
    ({"rollout__transition": "cps", "rollout__noise_level": 1.5}, "above 0 and at most 1"),
    ({"algorithm__train_steps": "some"}, "use 'all', 'fraction:0.5' or 'window:2'"),
    ({"algorithm__train_steps": "window:4"}, "3 stochastic steps"),
    ({"algorithm__train_steps": "window:0"}, "a window of 1 to 3"),
    ({"algorithm__train_steps": "fraction:0.3"}, "from 0.334 to 1"),
    ({"algorithm__train_steps": "fraction:1.5"}, "to 1"),
    ({"algorithm__train_steps": "fraction:."}, "to 1"),
    ({"algorithm__dual_clip": 1.0}, "above 1 + algorithm.clip_high"),
    ({"algorithm__name": "grpo_guard"}, "derived for 'sde'"),
    (
      {"algorithm__name": "kvpo", "algorithm__minibatch_order": "reference"},
      "so use 'group_major'",
    ),
    ({"advantage__baseline": "anchor"}, "use 'group_mean'"),
    (
      {"algorithm__name": "diffusion_nft", "advantage__combine": "separate_loss"},
      "one advantage a candidate",
    ),
    (
      {"advantage__combine": "separate_loss", "reward__weights": (1.0, -0.5, 0.1)},
      "weights of at least 0",
    ),
    ({"reward__weights": (1.0,)}, "one weight for each of the 3 components"),
    ({"reward__weights": (0.0, 0.0, 0.0)}, "at least one weight"),
    ({"reward__components": ("digit", "digit", "colour")}, "each component once"),
    ({"reward__components": ("digit", "beauty", "colour")}, "reward.components has 'beauty'"),
    ({"reward__function": "a:b"}, "set reward.name to 'function'"),
    ({"reward__name": "function"}, "reward.function is ''"),
    ({"reward__name": "function", "reward__function": "nosuch:f"}, "cannot be imported"),
    ({"eval__seeds": ()}, "eval.seeds is ()"),
    ({"eval__seeds": (1, 1)}, "each once"),
    ({"eval__prompts": 1000}, "holds 240 prompts"),
    ({"report__samples": 25}, "a step makes 24 videos"),
    ({"runtime__mesh": (2, 1)}, "its product must be runtime.devices_per_worker (1)"),
    ({"runtime__actor_workers": 10_000}, "10001 devices"),
    ({"runtime__gpus_per_worker": 2}, "must be runtime.devices_per_worker (1)"),
    (
      {"runtime__gpus_per_worker": 1, "runtime__actor_workers": 1000},
      "1001 workers ask for 1001 GPUs",
    ),
    ({"lora__targets": ("*", "mlp*")}, "lora.targets has 'mlp*', which matches nothing"),
    ({"lora__targets": ()}, "lora.targets is empty"),
    ({"lora__rank": 193}, "the model is 192 wide"),
    ({"prompts__train": "nowhere.txt"}, "prompts.train: 'nowhere.txt' is not there"),
    ({"prompts__eval": "world:test"}, "prompts.eval: 'world:test'"),
  ],
)
def test_settings_that_cannot_work_together(fields, says):
  assert says in refusal(**fields)


@pytest.mark.parametrize(
  "name", ["dance_grpo", "flow_grpo", "flow_dppo", "gspo", "fpo", "diffusion_nft", "kvpo"]
)
@pytest.mark.parametrize("kl_coef", [0.0, 0.04])
def test_every_algorithm_is_accepted(name, kl_coef):
  assert config.validate(changed(algorithm__name=name, algorithm__kl_coef=kl_coef))


@pytest.mark.parametrize(
  ("transition", "noise_level"), [("dance_sde", 0.3), ("sde", 0.7), ("cps", 1.0), ("renoise", 1.0)]
)
def test_every_transition_is_accepted(transition, noise_level):
  fields = {"rollout__transition": transition, "rollout__noise_level": noise_level}
  assert config.validate(changed(**fields))
  if transition == "sde":
    assert config.validate(changed(algorithm__name="grpo_guard", **fields))


@pytest.mark.parametrize("frames", [9, 21, 33, 45, 81])
def test_lengths_that_fit(frames):
  assert config.validate(changed(model__frames=frames, runtime__chunk_blocks=1))


def test_every_length_that_is_suggested_does():
  for frames in range(1, 60):
    try:
      config.validate(changed(model__frames=frames, runtime__chunk_blocks=1))
    except ValueError as error:
      hints = str(error).split("so ")[-1].removesuffix(" would do.").split(" or ")
      assert hints
      for hint in hints:
        config.validate(changed(model__frames=int(hint), runtime__chunk_blocks=1))


def test_long_and_unknown_prompts(tmp_path):
  path = tmp_path / "p.txt"
  path.write_text("a red seven moves left slowly\na a a a a a a red seven moves left slowly\n")
  text = refusal(prompts__train=str(path))
  assert "line 2: the prompt has 13 tokens but the text encoder takes 12" in text
  assert config.validate(changed(prompts__train=str(path), prompts__overflow="truncate"))
  path.write_text("a red seven moves left slowly\na red cat moves left slowly\n")
  assert "line 2: prompt 'a red cat moves left slowly'" in refusal(prompts__train=str(path))


def test_devices_of_either_kind(monkeypatch):
  checks.enough_gpus(2, 4, 8)
  with pytest.raises(ValueError, match="3 workers ask for 12 GPUs and 8 are visible"):
    checks.enough_gpus(3, 4, 8)
  checks.enough_cores(4, 1, 2)
  with pytest.raises(ValueError, match="9 devices on 2 CPU cores"):
    checks.enough_cores(9, 1, 2)
  monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
  assert checks.visible_gpus() == 0


def test_a_run_s_config_json_is_a_config_too(tmp_path):
  made = config.validate(quickstart())
  path = tmp_path / "config.json"
  path.write_text(json.dumps(dataclasses.asdict(made)))
  command = config.parse(["x", f"--config={path}", "--workdir=w"], {"workdir": "a folder"})
  assert config.validate(command.config) == made
  arguments = ["x", "--config", str(path), "--config.seed=5", "--config.eval.seeds=(7,8)"]
  command = config.parse(arguments, {"workdir": "a folder"})
  other = config.validate(command.config)
  assert other.seed == 5 and other.eval.seeds == (7, 8)
  assert command.overrides == {"seed": 5, "eval.seeds": (7, 8)}


@pytest.mark.parametrize("text", ["[1]", "{", "\xff"])
def test_a_broken_config_json_is_refused(tmp_path, text):
  path = tmp_path / "config.json"
  path.write_bytes(text.encode("latin-1"))
  with pytest.raises(ValueError, match="--config is"):
    config.parse(["x", f"--config={path}"], {})


@pytest.mark.parametrize(
  ("bounds", "inside", "outside"),
  [
    (settings.Range(0, 1), (0, 0.5, 1), (-0.1, 1.1)),
    (settings.Range(0, 1, low_open=True, high_open=True), (0.5,), (0, 1)),
    (settings.Range(), (-1e9, 1e9), ()),
  ],
)
def test_ranges(bounds, inside, outside):
  assert all(bounds.holds(v) for v in inside)
  assert not any(bounds.holds(v) for v in outside)
