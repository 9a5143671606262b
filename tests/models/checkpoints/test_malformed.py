"""Broken and hostile checkpoints: each ends in one sentence that says what is wrong, at once, and
leaves nothing behind.
"""

import gc
import time

import jax
import jax.numpy as jnp
import pytest

from models.checkpoints.convert import convert
from models.checkpoints.families import DIT
from models.checkpoints.wan import load_dit, load_umt5, load_vae
from models.wan.umt5 import UMT5Config
from tests.models.checkpoints import broken_safetensors, broken_torch
from tests.models.checkpoints.broken import STATE, VAE, changed
from tests.models.checkpoints.files import (
  CFG,
  save,
  save_torch,
)

UMT5 = UMT5Config(10, 8, 8, 2, 4, 12, 2)
LIMIT_S = 5.0  # of processor time, so that a busy machine does not count

CASES = {**broken_safetensors.CASES, **broken_torch.CASES}


@pytest.mark.parametrize("name", CASES)
def test_a_broken_transformer_is_refused(tmp_path, name):
  build, match = CASES[name]
  path = build(tmp_path)
  before = sorted(p for p in tmp_path.rglob("*"))
  alive = len(jax.live_arrays())
  start_s = time.process_time()
  with pytest.raises(ValueError, match=match) as error:
    load_dit(path, CFG)
  assert time.process_time() - start_s < LIMIT_S
  assert "\n" not in str(error.value)
  # A command says the same, and writes nothing.
  with pytest.raises(ValueError, match=match):
    convert(path, tmp_path / "out", DIT, CFG, "diffusers", max_shard_bytes=20_000)
  assert not list((tmp_path / "out").rglob("*"))
  assert [p for p in sorted(tmp_path.rglob("*")) if p.name != "out"] == before
  assert not (tmp_path / "harm").exists()
  del error
  gc.collect()
  assert len(jax.live_arrays()) == alive


def test_there_are_fifty_of_them():
  assert len(CASES) >= 50


def test_a_value_that_overflows_the_type_is_refused(tmp_path):
  kernel = STATE["head.head.bias"] * 1e9
  path = save(tmp_path / "a.safetensors", changed(head__head__bias=kernel))
  load_dit(path, CFG)
  with pytest.raises(ValueError, match=r"head\.head\.bias of .* not finite in float16"):
    load_dit(path, CFG, param_dtype=jnp.float16)


def test_an_unknown_part_is_refused(tmp_path):
  path = save_torch(tmp_path / "a.pt", generator=STATE)
  with pytest.raises(ValueError, match="has no part 'ema'; it has 'generator'"):
    load_dit(path, CFG, part="ema")


def test_a_transformer_is_no_vae_and_no_text_encoder(tmp_path):
  path = save(tmp_path / "a.safetensors", STATE)
  with pytest.raises(ValueError, match="holds a Wan transformer, and a Wan VAE is needed"):
    load_vae(path, VAE)
  with pytest.raises(ValueError, match="holds a Wan transformer, and a UMT5 encoder is needed"):
    load_umt5(path, UMT5)
