"""Sizes by formula against the models themselves, and what is made of them."""

import dataclasses
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from models.clip import presets as clip_presets
from models.clip.model import CLIP, encode_images
from models.layers.dense import tree_of
from models.qwen_vl import presets as judges
from models.qwen_vl.model import QwenVL
from models.wan import presets, vae_config
from models.wan.cache import init_cache
from models.wan.dit import CausalWanDiT
from models.wan.vae import WanVAE
from sbjax.dataflow import memory_formula as formula
from sbjax.dataflow import memory_models as models
from sbjax.dataflow import memory_table as table
from sbjax.dataflow.schemes import scheme

TARGETS = ("self_attn.q", "self_attn.k", "cross_attn.v", "ffn.0", "ffn.2")
CHUNK = formula.ChunkSizes(
  dit=presets.PRESETS["self-forcing"][0],
  tokens=4680,
  slots=32760,
  rank=64,
  targets=TARGETS,
  weight_bytes=2,
  steps=3,
  channels=1,
  latent_bytes=4 * 3 * 16 * 60 * 104,
  states=5,
  widens=False,
)
DECODE = models.DecodeSizes(vae_config.PRESETS["wan2.1"], 60, 104, 1, False, 2, False, True)
RUN = table.RunSizes(
  chunk=CHUNK,
  chunks=7,
  decode=DECODE,
  latent_frames=21,
  judge=models.JudgeSizes(judges.PRESETS["qwen2.5-vl-7b"], 16, 16384, 480, 832, 4),
  units=3,
  buffers=2,
  blocks=2,
  known_weights=True,
  updates=2,
  minibatch=6,
  reference=False,
  fsdp=1,
  seq=1,
  host_is_device=False,
)


def parameters(make) -> int:
  return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(nnx.eval_shape(make))))


def nbytes(tree) -> int:
  return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def test_the_formula_counts_every_parameter():
  # The full-size transformer is a matter of shapes alone, and so are the smaller models.
  dit = presets.PRESETS["wan2.1-1.3b"][0]
  assert formula.parameters(dit) == 1_418_996_800
  small = dataclasses.replace(dit, dim=24, ffn_dim=40, num_heads=2, num_layers=2, in_dim=20)
  made = parameters(lambda: CausalWanDiT(small, rngs=nnx.Rngs(0)))
  assert formula.parameters(small) == made
  assert models.vae_parameters(vae_config.PRESETS["wan2.1"]) == 126_892_531
  for name in ("wan2.2", "digits"):
    vae = dataclasses.replace(vae_config.PRESETS[name], num_res_blocks=1)
    assert models.vae_parameters(vae) == parameters(lambda v=vae: WanVAE(v, rngs=nnx.Rngs(0)))


@pytest.mark.parametrize("name", ["qwen2.5-vl-3b", "qwen3-vl-8b"])
def test_the_formula_counts_every_parameter_of_a_judge(name):
  judge = judges.PRESETS[name]
  vision = dataclasses.replace(judge.vision, depth=3, full_blocks=(), deepstack=())
  if judge.vision.deepstack:
    vision = dataclasses.replace(vision, deepstack=(1, 2))
  small = dataclasses.replace(
    judge, vision=vision, text=dataclasses.replace(judge.text, num_layers=2)
  )
  assert models.judge_parameters(small) == parameters(lambda: QwenVL(small, rngs=nnx.Rngs(0)))


@pytest.mark.parametrize("precision", ["fp32", "mixed"])
def test_caches_are_as_large_as_the_formula_says(precision):
  dit, sampler = presets.PRESETS["longlive-1.3b"]
  dit = dataclasses.replace(dit, precision=precision)
  made = jax.eval_shape(lambda: init_cache(dit, sampler, 1))
  slots = sampler.cache_frames * sampler.tokens_per_frame(dit)
  sizes = dataclasses.replace(CHUNK, dit=dit, slots=slots)
  assert formula.cache_bytes(sizes) == nbytes((made.k, made.v))
  for name in ("digits", "wan2.2"):
    vae = dataclasses.replace(vae_config.PRESETS[name], num_res_blocks=1)
    graphdef, state = nnx.split(nnx.eval_shape(lambda v=vae: WanVAE(v, rngs=nnx.Rngs(0))))
    stream = jax.eval_shape(
      lambda s, g=graphdef: nnx.merge(g, s).init_decoder_cache(1, 4, 6), state
    )
    sizes = dataclasses.replace(DECODE, vae=vae, height=4, width=6, value_bytes=4)
    assert models.decoder_cache_bytes(sizes) == nbytes(stream)


def test_a_worker_holds_what_its_group_may_be_asked_for():
  both = table.worker_bytes(RUN, scheme("colocated_single_replay"), "both")
  actor = table.worker_bytes(RUN, scheme("stagebreaker"), "actor")
  reward = table.worker_bytes(RUN, scheme("stagebreaker"), "reward")
  judging = table.worker_bytes(RUN, scheme("async_reward"), "reward")
  judge = {"judge", "judge's keys and values"}
  assert judge <= set(both.held) and judge <= set(reward.held) and not judge & set(actor.held)
  assert {"generate", "update"} <= set(actor.tasks) and "generate" not in reward.tasks
  assert set(judging.tasks) == {"judge"}
  assert "forward" in table.worker_bytes(RUN, scheme("async_train"), "actor").tasks
  assert both.total_bytes == both.held_bytes + max(sum(t.values()) for t in both.tasks.values())


def test_weights_of_two_bytes_and_judges_of_frames_count():
  wide = table.worker_bytes(RUN, scheme("stagebreaker"), "reward")
  assert RUN.judge is not None
  narrow = dataclasses.replace(RUN, judge=dataclasses.replace(RUN.judge, value_bytes=2))
  half = table.worker_bytes(narrow, scheme("stagebreaker"), "reward")
  for part in ("judge", "judge's keys and values"):
    assert 2 * half.held[part] == wide.held[part]
  images = (models.ImageJudgeSizes(clip_presets.preset("vit-h-14"), 8),)
  alone = dataclasses.replace(RUN, judge=None, images=images)
  frames = table.worker_bytes(alone, scheme("stagebreaker"), "reward")
  assert frames.held["judges of frames"] == 4 * 986_109_441
  assert frames.tasks["judge"]["activations"] == models.image_judge_working(images[0])
  actor = table.worker_bytes(alone, scheme("stagebreaker"), "actor")
  assert "judges of frames" not in actor.held
  assert table.memory_of(alone, scheme("sbjax")).judge_bytes == 4 * 986_109_441


def test_a_judge_of_frames_takes_what_the_formula_says():
  config = clip_presets.CLIPConfig("tiny", 112, 14, 128, 2, 2, 512, 32, 2, 2, 64, 77, 100, 48)
  model = nnx.eval_shape(lambda: CLIP(config, rngs=nnx.Rngs(0)))
  sizes = models.ImageJudgeSizes(config, 4)
  assert models.image_judge_bytes(sizes) == nbytes(nnx.state(model))
  pixels = jax.ShapeDtypeStruct((4, 3, 112, 112), jnp.float32)
  compiled = (
    jax.jit(encode_images, static_argnums=1).lower(tree_of(model), config, pixels).compile()
  )
  found = compiled.memory_analysis().temp_size_in_bytes
  assert models.image_judge_working(sizes) == pytest.approx(found, rel=0.1)


def test_what_the_compiler_reports_takes_the_place_of_the_estimate():
  plain = table.worker_bytes(RUN, scheme("stagebreaker"), "actor")
  told = table.worker_bytes(RUN, scheme("stagebreaker"), "actor", {"replay": 5})
  assert told.tasks["replay"]["activations"] == 5
  assert told.tasks["generate"] == plain.tasks["generate"]


def test_cutting_a_worker_over_devices_takes_less_of_each():
  whole = table.worker_bytes(RUN, scheme("colocated"), "both").total_bytes
  for cut in ({"fsdp": 2}, {"seq": 2}):
    part = table.worker_bytes(dataclasses.replace(RUN, **cut), scheme("colocated"), "both")
    assert whole / 2 < part.total_bytes < whole


@given(st.integers(0, 300), st.integers(0, 300))
def test_the_largest_rank_is_found(limit, most):
  assert table.largest_rank(lambda rank: rank <= limit, most) == min(limit, most)


def test_more_rank_and_longer_memory_never_take_less():
  totals = []
  for rank in (1, 8, 64, 256):
    run = dataclasses.replace(RUN, chunk=dataclasses.replace(CHUNK, rank=rank))
    totals.append(table.worker_bytes(run, scheme("stagebreaker"), "actor").total_bytes)
  assert totals == sorted(totals)
  for remat, less in (("none", "dots"), ("dots", "block")):
    sizes = [
      dataclasses.replace(CHUNK, dit=dataclasses.replace(CHUNK.dit, remat=name))
      for name in (remat, less)
    ]
    assert formula.replay_pass(sizes[0]).total > formula.replay_pass(sizes[1]).total


def test_candidates_are_limited_by_what_their_gradients_take():
  worker = table.worker_bytes(RUN, scheme("stagebreaker"), "actor")
  room = worker.total_bytes + 10 * worker.host
  assert table.largest_batch(worker, room, 3 * worker.host, shared=False) == 3
  assert table.largest_batch(worker, room, 100 * worker.host, shared=True) == 10
  assert table.largest_batch(worker, worker.total_bytes - 1, room, shared=False) == 0


def test_the_formula_imports_no_jax():
  code = (
    "import sys, sbjax.dataflow.memory_table; "
    "print([m for m in ('jax', 'flax', 'ray') if m in sys.modules])"
  )
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
  assert done.stdout.strip() == "[]"
