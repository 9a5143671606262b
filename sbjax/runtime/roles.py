"""What a worker's group holds: the video model, its decoder, a judge, as jitted functions."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from models.layers.lora import init_lora
from models.wan.dit import CausalWanDiT
from models.wan.sharding import parameter_shardings
from sbjax import prompts as prompt_lib
from sbjax.policy import TextConditioning, WanPolicy
from sbjax.rewards import catalogue
from sbjax.rewards.combined import JudgeTable
from sbjax.rewards.function import FunctionJudge
from sbjax.rewards.protocol import Judge, Reward
from sbjax.rewards.world import WorldJudge
from sbjax.rollout import RolloutFunctions, make_rollout
from sbjax.runtime.optimizer import UpdateFn, make_update
from sbjax.runtime.recipe import Recipe, make_recipe
from sbjax.separation.policy import Params
from sbjax.separation.replay import ReplayFunctions, make_replay
from sbjax.settings import Settings
from sbjax.sizes import model_sizes
from sbjax.world_table import world_of
from sbjax.worlds.models import WorldModels


@dataclasses.dataclass(frozen=True, eq=False)
class Roles:
  """A worker's models. Every worker that decodes or replays holds the same ones.

  Attributes:
    recipe: objective, schedule, geometry.
    frozen: the video model's weights.
    initial: the adapter as it starts.
    rollout: jitted pieces of a rollout.
    replay: jitted pieces of a replay.
    update: the optimizer step on the flat adapter.
    predict: (adapter, frozen, cache, point, conditioning, start_frame) -> what an anchor or a
      reference is made of at the point's steps: means, or velocities at forward-process points.
    condition: (frozen, prompt embedding) -> conditioning.
    embed: prompts -> prompt embeddings [prompts, text_len, text_dim].
    decode: latents [frames, channels, height, width] -> uint8 video.
    judge: answers judge jobs; None on a worker that is never asked to.
    heldout: (videos, prompts) -> the held-out measure by name, or None where there is none.
    parameters: parameter counts by model, for the banner.
    pixel_stride: pixels of a latent cell's side.
    mesh: the worker's devices where there is more than one.
  """

  recipe: Recipe
  frozen: Params
  initial: Params
  rollout: RolloutFunctions
  replay: ReplayFunctions
  update: UpdateFn
  predict: Callable[..., jax.Array]
  condition: Callable[[Params, Any], TextConditioning]
  embed: Callable[[Sequence[str]], np.ndarray]
  decode: Callable[[np.ndarray], np.ndarray]
  judge: Judge | None
  heldout: Callable[[np.ndarray, Sequence[str]], Mapping[str, np.ndarray]] | None
  parameters: Mapping[str, int]
  pixel_stride: int
  mesh: Mesh | None


def recipe_of(settings: Settings) -> Recipe:
  """The recipe alone, without loading weights."""
  return make_recipe(settings, *model_sizes(settings))


def reward_of(settings: Settings) -> Reward:
  """The driver's part of the configured reward."""
  return catalogue.reward_of(settings.reward)


def build_roles(settings: Settings, judges: bool = True) -> Roles:
  """Loads the models and builds the jitted functions; compiles nothing yet.

  Args:
    settings: checked settings.
    judges: whether to load the judge, which may be larger than the video model.

  Raises:
    ValueError: weights that cannot be used.
  """
  recipe = recipe_of(settings)
  models = load_models(settings)
  return assemble(
    recipe,
    models.dit,
    models.conditioning_channels,
    embed=models.embed,
    decode=models.decode,
    judge=_judge(settings, models) if judges else None,
    heldout=models.heldout,
    parameters=models.parameters,
    pixel_stride=models.pixel_stride,
  )


def load_models(settings: Settings, prompts: Sequence[str] | None = None) -> WorldModels:
  """Loads the configured world onto this process' devices.

  Args:
    settings: checked settings.
    prompts: what will be asked for; None for all that the settings name. A world whose text encoder
      does not stay embeds them first.

  Raises:
    ValueError: weights that cannot be used.
  """
  models = world_of(settings.model.name).load_models(
    settings.model,
    lambda: _prompts(settings) if prompts is None else prompts,
    settings.prompts.overflow,
    worker_mesh(settings),
    settings.runtime.startup_timeout_s,
  )
  # Weights do not depend on precision and rematerialisation; the pass over them does.
  models.dit.cfg, _ = model_sizes(settings)
  return models


def assemble(
  recipe: Recipe,
  dit: CausalWanDiT,
  conditioning_channels: np.ndarray,
  *,
  embed: Callable[[Sequence[str]], np.ndarray],
  decode: Callable[[np.ndarray], np.ndarray],
  judge: Judge | None,
  heldout: Callable[[np.ndarray, Sequence[str]], Mapping[str, np.ndarray]] | None,
  parameters: Mapping[str, int],
  pixel_stride: int,
) -> Roles:
  """Builds a worker's functions around a video model, whichever world or checkpoint it is of.

  Args:
    recipe: objective, schedule, geometry.
    dit: the video model.
    conditioning_channels: [extra, height, width], concatenated to every latent frame.
    embed: prompts -> prompt embeddings.
    decode: latents -> uint8 video.
    judge: answers judge jobs; None where the worker is never asked to.
    heldout: the held-out measure, or None.
    parameters: parameter counts of the other models, for the banner.
    pixel_stride: pixels of a latent cell's side.
  """
  mesh = worker_mesh(recipe.settings)
  if mesh is not None:
    dit.mesh = mesh
  graphdef, frozen = nnx.split(dit)
  frozen = place(frozen, mesh)
  policy = WanPolicy(graphdef, recipe.dit, recipe.sampler, recipe.lora.scale)
  objective, transition = recipe.objective, recipe.transition
  functions = objective.functions
  channels = [functions[name] for name in objective.channels]

  @jax.jit
  def predict(adapter, weights, cache, point, conditioning, start_frame):
    def one(p):
      velocity = policy.velocity(
        adapter, weights, p.x, p.timestep, conditioning, cache, start_frame
      )
      if objective.points == "forward":
        return velocity
      return transition.step(p.x, velocity, p.sigma, p.sigma_next)[0]

    return jax.lax.map(one, point)

  @jax.jit
  def condition(weights, embeds):
    return policy.condition(weights, embeds, jnp.asarray(conditioning_channels))

  statistics = [functions[name] for name in objective.statistics]
  return Roles(
    recipe=recipe,
    frozen=frozen,
    initial=init_lora(recipe.lora, recipe.dit, jax.random.key(recipe.settings.seed)),
    rollout=make_rollout(
      policy,
      transition,
      recipe.schedule,
      channels[0],
      recipe.geometry.chunk_shape,
      objective.points,
    ),
    replay=make_replay(policy, transition, channels, statistics),
    update=make_update(recipe.settings.optim),
    predict=predict,
    condition=condition,
    embed=embed,
    decode=decode,
    judge=judge,
    heldout=heldout,
    parameters={
      "video model": _count(frozen),
      **parameters,
      "adapter": recipe.adapter_parameters,
    },
    pixel_stride=pixel_stride,
    mesh=mesh,
  )


def _prompts(settings: Settings) -> tuple[str, ...]:
  """Every prompt that the run uses, in the order in which steps and evaluations meet them."""
  return tuple(p for part in prompt_lib.from_settings(settings) for p in part.prompts)


def worker_mesh(settings: Settings) -> Mesh | None:
  """The mesh (fsdp, seq) over a worker's devices, or None where it has one.

  Raises:
    ValueError: if this process has fewer devices than the settings ask for.
  """
  wanted = settings.runtime.devices_per_worker
  if wanted == 1:
    return None
  devices = jax.local_devices()
  if len(devices) < wanted:
    raise ValueError(
      f"runtime.devices_per_worker={wanted}, but a worker has {len(devices)} "
      f"{devices[0].platform} device(s); ask for at most {len(devices)}"
    )
  return Mesh(np.array(devices[:wanted]).reshape(settings.runtime.mesh), ("fsdp", "seq"))


def place(tree: Params, mesh: Mesh | None) -> Params:
  """Lays parameters or an adapter out over a worker's mesh."""
  return tree if mesh is None else jax.device_put(tree, parameter_shardings(tree, mesh))


def _judge(settings: Settings, models: WorldModels) -> Judge:
  reward = settings.reward

  def build(name: str) -> Judge:
    if name == "function":
      return FunctionJudge(reward.function, catalogue.components_of(reward, name))
    if name == "world":
      assert models.judging is not None, "the checks of a config refuse a world without a judge"
      return WorldJudge(models.judging, reward.views)
    if catalogue.KINDS[name].checkpoint:
      return catalogue.image_judge(reward.image, name)
    return catalogue.conversation_judge(reward.judge, name, mesh=worker_mesh(settings))

  return JudgeTable({name: build(name) for name in reward.judges})


def _count(state: Any) -> int:
  return sum(int(leaf.size) for leaf in jax.tree.leaves(state))
