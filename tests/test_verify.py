"""`python -m sbjax.verify`: what it accepts, what it fails, what it refuses."""

import json
import pathlib

import numpy as np
import pytest

from sbjax import verify
from sbjax.verification.causal import replay_rollout
from sbjax.verification.recording import read_recording

GOLDEN = pathlib.Path(__file__).parent / "golden"
ROLLOUT = GOLDEN / "causal_wan_window_sink.npz"
CASES = GOLDEN / "transitions.json"


@pytest.fixture(scope="module")
def arrays():
  with np.load(ROLLOUT, allow_pickle=False) as archive:
    return {key: archive[key] for key in archive.files}


def _saved(tmp_path, arrays, **meta):
  settings = json.loads(str(arrays["meta"]))
  config = {**settings["config"], **meta.pop("config", {})}
  path = tmp_path / "case.npz"
  np.savez(path, **{**arrays, "meta": np.array(json.dumps({**settings, "config": config, **meta}))})
  return path


def _cases(tmp_path, change):
  cases = json.loads(CASES.read_text())
  change(cases)
  path = tmp_path / "cases.json"
  path.write_text(json.dumps(cases))
  return path


def test_a_folder_is_searched_and_what_is_no_recording_is_passed_over(tmp_path, capsys):
  (tmp_path / "deep").mkdir()
  (tmp_path / "deep" / "cases.json").write_bytes(CASES.read_bytes())
  (tmp_path / "model.config.json").write_text('{"architectures": ["x"]}')
  np.savez(tmp_path / "features.npz", features=np.ones(3))
  assert verify.main([str(tmp_path)]) == 0
  out = capsys.readouterr().out
  assert "quantities, 0 beyond tolerance" in out
  assert out.count("passed over: neither") == 2
  assert "guard_k4/ratio" in out


def test_a_wrong_number_in_a_rollout_is_beyond_tolerance(tmp_path, arrays, capsys):
  changed = {**arrays, "chunk3/step1/flow": arrays["chunk3/step1/flow"].copy()}
  changed["chunk3/step1/flow"][0, 0, 0, 0, 0] += 0.01
  changed["grad/x"] = arrays["grad/x"] * 1.01
  changed["cache/1/v"] = np.roll(arrays["cache/1/v"], 16, axis=1)
  assert verify.main([str(_saved(tmp_path, changed))]) == 1
  lines = [line for line in capsys.readouterr().out.splitlines() if "BEYOND" in line]
  assert [line.split()[0] for line in lines] == ["flow", "grad/x", "cache/v"]


@pytest.mark.parametrize(
  ("where", "field", "factor"),
  [
    ("cps_T10_s3_n.8_k2", "logp_new", 1.001),
    ("flowgrpo_sde_T10_s3_n.7_k4", "kl_exact", 1.01),
    ("guard_k4", "bias", 1.01),
    ("kvpo_objective_safe=False", "loss", 1.001),
    ("ddim_t501", "std", 1.001),
  ],
)
def test_a_wrong_number_in_a_case_is_beyond_tolerance(tmp_path, capsys, where, field, factor):
  def change(cases):
    cases[where][field] *= factor

  assert verify.main([str(_cases(tmp_path, change))]) == 1
  lines = [line for line in capsys.readouterr().out.splitlines() if "BEYOND" in line]
  assert [line.split()[0] for line in lines] == [f"{where}/{field}"]


def test_an_unseen_step_is_replayed(tmp_path, capsys):
  cases = {"inputs": json.loads(CASES.read_text())["inputs"]}
  x, v = (np.array(cases["inputs"][key]) for key in "xv")
  cases["mine"] = {
    "kind": "renoise",
    "sigma": 0.9,
    "sigma_next": 0.5,
    "mean": (0.5 * (x - 0.9 * v)).tolist(),
    "std": 0.5,
  }
  path = tmp_path / "mine.json"
  path.write_text(json.dumps(cases))
  assert verify.main([str(path)]) == 0
  assert "mine/mean" in capsys.readouterr().out


def _refused(capsys, path) -> str:
  assert verify.main([str(path)]) == 2
  message = capsys.readouterr().err
  assert message.startswith("verify: ")
  assert message.count("\n") == 1
  return message


@pytest.mark.parametrize(
  ("change", "words"),
  [
    (lambda c: c.update(novel={"kind": "heun"}), "case 'novel' that is not known"),
    (lambda c: c.update(novel=3), "case 'novel' that is not known"),
    (lambda c: c["guard_k4"].update(extra=1.0), "field 'extra' that is not known"),
    (lambda c: c["ddim_t21"].pop("abar"), "'abar'"),
    (lambda c: c["adv"].update(novel_std=[[1.0]]), "field 'novel_std' that is not known"),
    (lambda c: c["inputs"].update(shape=[3]), "shape of"),
    (lambda c: c["ddim_t21"].update(std=float("nan")), "not finite"),
    (lambda c: c.pop("inputs"), "'inputs'"),
  ],
)
def test_cases_that_are_not_known_are_refused(tmp_path, capsys, change, words):
  assert words in _refused(capsys, _cases(tmp_path, change))


@pytest.mark.parametrize(
  ("meta", "words"),
  [
    ({"source": "dd"}, "source='dd'"),
    ({"context_noise": 5}, "context_noise=5"),
    ({"seed": 1}, "unknown meta field 'seed'"),
    ({"chunks": "6"}, "chunks='6'"),
    ({"chunks": 5}, "unknown keys chunk5/"),
    ({"chunks": 7}, "missing keys chunk6/"),
    ({"cache_frames": 5}, "cache_frames is 5"),
    ({"config": {"qk_norm": False}}, "qk_norm=False"),
    ({"config": {"dim": 63}}, "num_heads is 2"),
    ({"config": {"rope": 1}}, "unknown config field 'rope'"),
    ({"config": {"patch_size": [1, 4, 4]}}, "patch_size is"),
    ({"config": {"ffn_dim": 161}}, "does not fit the model; misshapen: blocks.0.ffn.0.weight"),
  ],
)
def test_settings_that_are_not_known_are_refused(tmp_path, arrays, capsys, meta, words):
  assert words in _refused(capsys, _saved(tmp_path, arrays, **meta))


@pytest.mark.parametrize(
  ("key", "value", "words"),
  [
    ("novel", np.ones(2), "unknown keys novel"),
    ("latents", None, "missing keys latents"),
    ("param/head.head.bias", None, "does not fit the model; missing: head.head.bias"),
    ("param/novel.weight", np.ones((2, 2)), "does not fit the model; unknown: novel.weight"),
    ("chunk0/step0/flow", np.ones((1, 2, 16, 8, 7)), "chunk0/step0/flow of shape"),
    ("chunk0/step0/flow", np.full((1, 2, 16, 8, 8), np.nan), "not finite"),
    ("sigmas", np.ones(4, int), "of the wrong kind"),
    ("grad/where", np.array([9, 0]), "grad/where (9, 0)"),
    ("grad/param/novel", np.ones(2), "grad/param/novel of shape"),
    ("grad/x", None, "missing keys grad/x"),
    ("meta", None, "no key 'meta'"),
    ("meta", np.array("{"), "no JSON"),
  ],
)
def test_arrays_that_are_not_known_are_refused(tmp_path, arrays, capsys, key, value, words):
  changed = dict(arrays)
  changed.pop(key, None)
  if value is not None:
    changed[key] = value
  path = tmp_path / "case.npz"
  np.savez(path, **changed)
  assert words in _refused(capsys, path)


@pytest.mark.parametrize(
  ("name", "content", "words"),
  [
    ("x.npz", b"no zip", "cannot be read as an .npz file"),
    ("x.npz", ROLLOUT.read_bytes()[:5000], "cannot be read as an .npz file"),
    ("x.json", b"{", "cannot be read as JSON"),
    ("x.json", b"[]", "no JSON object of cases"),
    ("x.txt", b"", "neither .npz nor .json"),
  ],
)
def test_damaged_and_foreign_files_are_refused(tmp_path, capsys, name, content, words):
  (tmp_path / name).write_bytes(content)
  assert words in _refused(capsys, tmp_path / name)
  if name != "x.txt" and content != b"[]":
    assert words in _refused(capsys, tmp_path)  # damage is no reason to pass a file over


def test_pickled_arrays_are_never_loaded(tmp_path, arrays, capsys):
  path = tmp_path / "case.npz"
  np.savez(path, **{**arrays, "latents": np.array([{"a": 1}], object)}, allow_pickle=True)
  assert "cannot be read as a whole .npz file" in _refused(capsys, path)


def test_absent_paths_and_empty_folders_are_refused(tmp_path, capsys):
  assert "does not exist" in _refused(capsys, tmp_path / "absent")
  assert "holds no recorded rollout" in _refused(capsys, tmp_path)


def test_a_rollout_without_a_gradient_is_replayed(tmp_path, arrays):
  plain = {key: a for key, a in arrays.items() if not key.startswith("grad/")}
  checks = replay_rollout(read_recording(_saved(tmp_path, plain)))
  assert all(check.passed for check in checks)
  assert not any(check.quantity.startswith("grad") for check in checks)
