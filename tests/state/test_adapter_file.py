"""Adapters as files: the flat buffer comes back bit for bit, foreign files are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from sbjax.state.adapter import (
  AdapterLayout,
  adapter_facts,
  layout_of,
  load_adapter,
  save_adapter,
)

LAYOUT = AdapterLayout(("q.a", "q.b", "ffn.a"), ((2, 3, 4), (2, 4, 3), (5,)))
FACTS = {"model": "digits", "rank": 4, "alpha": 16.0, "targets": ("q", "ffn"), "step": 10}


def flat(seed=0):
  return np.random.default_rng(seed).normal(size=LAYOUT.size).astype(np.float32)


def test_round_trip(tmp_path):
  path = tmp_path / "adapter.safetensors"
  save_adapter(path, flat(), LAYOUT, FACTS)
  expected = {"rank": 4, "alpha": 16.0, "targets": ("q", "ffn")}
  loaded, facts = load_adapter(path, LAYOUT, expected)
  assert loaded.tobytes() == flat().tobytes()
  assert facts == FACTS | {"targets": ["q", "ffn"]}
  assert adapter_facts(path) == facts
  tensors = safetensors.numpy.load_file(path)  # any safetensors reader can open it
  np.testing.assert_array_equal(tensors["q.b"].ravel(), flat()[24:48])


def test_layout_follows_jax(tmp_path):
  tree = {"b": {"b": jnp.zeros((2, 3)), "a": jnp.arange(4.0)}, "a": {"x": jnp.ones((1,))}}
  buffer = np.asarray(jax.flatten_util.ravel_pytree(tree)[0])
  layout = layout_of(tree)
  assert layout.names == ("a.x", "b.a", "b.b")
  parts = layout.split(buffer)
  np.testing.assert_array_equal(parts["b.a"], [0, 1, 2, 3])
  shapes = jax.eval_shape(lambda: tree)
  assert layout_of(shapes) == layout


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(1, 3), max_size=3).map(tuple), min_size=1, max_size=5))
def test_split_and_join_are_inverse(shapes):
  layout = AdapterLayout(tuple(f"t{i}" for i in range(len(shapes))), tuple(shapes))
  buffer = np.arange(layout.size, dtype=np.float32)
  parts = layout.split(buffer)
  assert [parts[n].shape for n in layout.names] == list(shapes)
  # The order of a file's tensors does not matter.
  np.testing.assert_array_equal(layout.join(dict(reversed(parts.items()))), buffer)


def test_not_an_adapter(tmp_path):
  path = tmp_path / "a.safetensors"
  with pytest.raises(ValueError, match="does not exist"):
    load_adapter(path, LAYOUT)
  path.write_text("hello")
  with pytest.raises(ValueError, match="truncated or no safetensors file"):
    load_adapter(path, LAYOUT)
  safetensors.numpy.save_file(LAYOUT.split(flat()), path)
  with pytest.raises(ValueError, match="not written by sbjax"):
    load_adapter(path, LAYOUT)


@pytest.mark.parametrize("share", [0.05, 0.5, 0.99])
def test_truncated(tmp_path, share):
  path = tmp_path / "a.safetensors"
  save_adapter(path, flat(), LAYOUT, FACTS)
  data = path.read_bytes()
  path.write_bytes(data[: int(share * len(data))])
  with pytest.raises(ValueError, match="truncated or no safetensors file") as caught:
    load_adapter(path, LAYOUT)
  assert "\n" not in str(caught.value)


def test_of_another_model(tmp_path):
  path = tmp_path / "a.safetensors"
  save_adapter(path, flat(), LAYOUT, FACTS)
  with pytest.raises(ValueError, match="of another model: rank is 4 there and 8 here"):
    load_adapter(path, LAYOUT, {"rank": 8})
  wider = AdapterLayout(LAYOUT.names, ((2, 3, 4), (2, 4, 3), (6,)))
  with pytest.raises(ValueError, match=r"tensor ffn.a has shape \(5,\) .* has \(6,\)"):
    load_adapter(path, wider)
  more = AdapterLayout((*LAYOUT.names, "k.a"), (*LAYOUT.shapes, (1,)))
  with pytest.raises(ValueError, match=r"lacks the tensor k\.a"):
    load_adapter(path, more)
  fewer = AdapterLayout(LAYOUT.names[:2], LAYOUT.shapes[:2])
  with pytest.raises(ValueError, match=r"has the tensor ffn\.a"):
    load_adapter(path, fewer)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_not_finite(tmp_path, bad):
  path = tmp_path / "a.safetensors"
  values = flat()
  values[7] = bad
  with pytest.raises(ValueError, match="is not written: 1 of its 53 numbers are not finite"):
    save_adapter(path, values, LAYOUT, FACTS)
  assert not path.exists()
  tensors = LAYOUT.split(values)
  metadata = {"format": "sbjax-adapter-1", "facts": "{}"}
  safetensors.numpy.save_file(tensors, path, metadata=metadata)
  with pytest.raises(ValueError, match="cannot be used: 1 of its 53 numbers are not finite"):
    load_adapter(path, LAYOUT)


def test_wrong_size(tmp_path):
  with pytest.raises(ValueError, match=r"shape \(52,\); this model's has \(53,\)"):
    save_adapter(tmp_path / "a.safetensors", flat()[1:], LAYOUT, FACTS)
