"""Published recipes: transition, objective, advantages and step subset that belong together.

The numbers are those of the reference implementations, which take the mean over latent dimensions.
They are starting points: a clip range depends on the transition and the number of latent
dimensions.
"""

import dataclasses
import types
from collections.abc import Callable, Mapping

from sbjax.algorithms.advantages import AdvantageConfig
from sbjax.algorithms.objectives import GSPO, KVPO, Clipped, DiffusionNFT, FlowDPPO, Guard
from sbjax.algorithms.transitions import SDE, DanceSDE, Renoise
from sbjax.separation.channels import Transition
from sbjax.separation.objective import Objective


@dataclasses.dataclass(frozen=True)
class Recipe:
  """What makes up an algorithm.

  Attributes:
    name: the algorithm.
    transition: how a denoising step explores.
    objective: the loss.
    advantages: how rewards become advantages.
    train_steps: which stochastic steps are trained, in the words of `selection.trained_steps`.
  """

  name: str
  transition: Transition
  objective: Objective
  advantages: AdvantageConfig
  train_steps: str


def dance_grpo() -> Recipe:
  """DanceGRPO for flow models: constant-strength SDE, group advantages, 60 % of the steps."""
  return Recipe("dance_grpo", DanceSDE(), Clipped(), AdvantageConfig(), "fraction:0.6")


def flow_grpo() -> Recipe:
  """Flow-GRPO for Stable Diffusion 3.5: its SDE, one deviation for all rewards, a KL of 0.04."""
  return Recipe(
    "flow_grpo",
    SDE(),
    Clipped(kl_coef=0.04, kl_channel="kl_flow_grpo"),
    AdvantageConfig(std="global_population", eps=1e-4),
    "all",
  )


def flow_dppo() -> Recipe:
  """Flow-DPPO as in verl-omni: a KL mask in the place of the clip, advantages unclipped."""
  return Recipe(
    "flow_dppo",
    SDE(noise_level=1.2),
    FlowDPPO(),
    AdvantageConfig(std="global_unbiased", eps=1e-4, clip=None),
    "window:2",
  )


def grpo_guard() -> Recipe:
  """GRPO-Guard as in verl-omni: centred and scaled log-ratios, a clip of 2e-6."""
  return Recipe(
    "grpo_guard",
    SDE(noise_level=1.2),
    Guard(),
    AdvantageConfig(std="global_unbiased", eps=1e-4),
    "window:2",
  )


def gspo(steps: int = 3) -> Recipe:
  """GSPO on a re-noising sampler: one ratio per candidate, the mean over its trained steps.

  Args:
    steps: trained denoising steps per candidate.
  """
  return Recipe("gspo", Renoise(), GSPO(steps=steps), AdvantageConfig(), "all")


def diffusion_nft() -> Recipe:
  """DiffusionNFT as in verl-omni's recipe: forward process, mixing 0.1, reference weight 1e-4."""
  return Recipe(
    "diffusion_nft",
    Renoise(),
    DiffusionNFT(mix_beta=0.1, ref_kl_coef=1e-4),
    AdvantageConfig(std="global_unbiased", eps=1e-4),
    "all",
  )


def kvpo() -> Recipe:
  """KVPO on a re-noising sampler: softmax over the branches, an anchor as the baseline."""
  return Recipe("kvpo", Renoise(), KVPO(), AdvantageConfig(baseline="anchor", clip=2.5), "all")


RECIPES: Mapping[str, Callable[[], Recipe]] = types.MappingProxyType(
  {
    "dance_grpo": dance_grpo,
    "flow_grpo": flow_grpo,
    "flow_dppo": flow_dppo,
    "grpo_guard": grpo_guard,
    "gspo": gspo,
    "diffusion_nft": diffusion_nft,
    "kvpo": kvpo,
  }
)
"""Recipes by the name that `algorithm.name` takes."""
