"""Every judge by its name: what it gives, how its jobs are formed, how it is built.

The checks of a config read it too, so nothing here imports JAX.
"""

import dataclasses
import pathlib
from typing import Any

from models.clip import folder
from sbjax.rewards import digits_reasoner, unified_reward, unified_reward_flex, vr_thinker
from sbjax.rewards.combined import CombinedReward
from sbjax.rewards.conversation import ConversationJudge, DialogueProtocol
from sbjax.rewards.generator import Generator
from sbjax.rewards.http_generator import HTTPConfig, HTTPGenerator
from sbjax.rewards.pairwise import PairwiseReward
from sbjax.rewards.protocol import Judge, PointwiseReward, Reward
from sbjax.settings import SettingsImage, SettingsJudge, SettingsReward


@dataclasses.dataclass(frozen=True)
class JudgeKind:
  """What is known of a judge before it is built.

  Attributes:
    components: names of its values; empty where its user names them.
    pairwise: whether it compares two videos.
    conversation: whether it is a dialogue with a language model.
    checkpoint: field of `reward.image` that names its folder; empty where it has none.
  """

  components: tuple[str, ...]
  pairwise: bool = False
  conversation: bool = False
  checkpoint: str = ""


KINDS = {
  "world": JudgeKind(("digit", "colour", "motion")),
  "function": JudgeKind(()),
  "hps_v21": JudgeKind(("overall",), checkpoint="hps_checkpoint"),
  "clip_score": JudgeKind(("overall",), checkpoint="clip_checkpoint"),
  "unified_reward": JudgeKind(("overall", *unified_reward.SCORES), conversation=True),
  "unified_reward_flex": JudgeKind(
    ("overall", "dimensions", *unified_reward_flex.CATEGORIES), pairwise=True, conversation=True
  ),
  "digits_reasoner": JudgeKind(
    ("overall", "dimensions", *digits_reasoner.COMPONENTS), pairwise=True, conversation=True
  ),
  "vr_thinker": JudgeKind(
    ("overall", "dimensions", *(n for n in vr_thinker.KEYS.values() if n != "overall")),
    pairwise=True,
    conversation=True,
  ),
}


def components_of(settings: SettingsReward, name: str) -> tuple[str, ...]:
  """The configured components that a judge gives, by its own names.

  With one judge that is all of them; with several, those written `name.component`.
  """
  if not settings.also:
    return settings.components
  prefix = f"{name}."
  return tuple(c.removeprefix(prefix) for c in settings.components if c.startswith(prefix))


def reward_of(settings: SettingsReward) -> Reward:
  """The driver's part of the configured reward."""
  parts = {name: _part(settings, name) for name in settings.judges}
  return CombinedReward(parts, settings.components, settings.optional)


def _part(settings: SettingsReward, name: str) -> Reward:
  if KINDS[name].pairwise:
    judge = settings.judge
    return PairwiseReward(judge.mode == "pairwise_anchor", judge.unparsable, judge.swap_orders)
  optional = {c.removeprefix(f"{name}.") if settings.also else c for c in settings.optional}
  return PointwiseReward(tuple(c for c in components_of(settings, name) if c not in optional))


def protocol_of(settings: SettingsJudge, name: str) -> DialogueProtocol:
  """How the named vision-language judge is asked."""
  tokens, temperature = settings.max_tokens, settings.temperature
  if name == "unified_reward":
    return unified_reward.UnifiedReward(settings.frames, tokens, temperature)
  if name == "digits_reasoner":
    return digits_reasoner.DigitsReasoner(tokens, temperature)
  if name == "unified_reward_flex":
    lenient = settings.unparsable == "tie"
    return unified_reward_flex.UnifiedRewardFlex(settings.frames, tokens, temperature, lenient)
  return vr_thinker.VRThinker(
    pool=settings.pool_frames,
    initial=settings.initial_frames,
    calls=settings.calls,
    frames_per_call=settings.frames_per_call,
    max_tokens=tokens,
    temperature=temperature,
  )


def http_config(settings: SettingsJudge) -> HTTPConfig:
  """The servers and their limits."""
  return HTTPConfig(
    endpoints=settings.endpoints,
    model=settings.model,
    connect_timeout_s=settings.connect_timeout_s,
    total_timeout_s=settings.total_timeout_s,
    attempts=settings.attempts,
    backoff_s=settings.backoff_s,
    evict_after=settings.evict_after,
    cooldown_s=settings.cooldown_s,
    concurrency=settings.concurrency,
  )


def conversation_judge(
  settings: SettingsJudge,
  name: str,
  generator: Generator | None = None,
  *,
  mesh: Any = None,
) -> ConversationJudge:
  """Builds a vision-language judge.

  Args:
    settings: how it is asked.
    name: which one.
    generator: who answers; None: the configured checkpoint or servers.
    mesh: the worker's devices, where there is more than one, for a checkpoint.
  """
  return ConversationJudge(protocol_of(settings, name), generator or _generator(settings, mesh))


def _generator(settings: SettingsJudge, mesh: Any) -> Generator:
  if not settings.checkpoint:
    return HTTPGenerator(http_config(settings))
  from sbjax.rewards import engine_generator  # imports JAX

  return engine_generator.from_checkpoint(
    str(checkpoint_folder(settings.checkpoint)),
    slots=settings.slots,
    context_tokens=settings.context_tokens,
    total_timeout_s=settings.total_timeout_s,
    weights_dtype=settings.weights_dtype,
    mesh=mesh,
  )


def image_judge(settings: SettingsImage, name: str) -> Judge:
  """Builds a judge of single frames from its checkpoint.

  Raises:
    ValueError: the checkpoint is damaged or does not fit.
  """
  from sbjax.rewards.clip_judge import ClipJudge  # imports JAX

  return ClipJudge(
    getattr(settings, KINDS[name].checkpoint),
    hps=name == "hps_v21",
    frames=settings.frames,
    best_share=settings.best_share,
    jpeg=settings.jpeg,
  )


def check(settings: SettingsReward) -> None:
  """Refuses judges and settings of theirs that do not go together.

  Raises:
    ValueError: one sentence with the field, its value and what would do.
  """
  unknown = [name for name in settings.also if name not in KINDS]
  if unknown:
    known = ", ".join(map(repr, KINDS))
    raise ValueError(f"reward.also has {unknown[0]!r}; judges are {known}.")
  if len(set(settings.judges)) != len(settings.judges):
    raise ValueError(f"reward.also is {settings.also!r}; name each judge once.")
  _check_components(settings)
  talking = [name for name in settings.judges if KINDS[name].conversation]
  if len(talking) > 1:
    raise ValueError(
      f"reward.also is {settings.also!r}; reward.judge describes one vision-language judge, so use "
      f"{talking[0]!r} or {talking[1]!r}."
    )
  _check_conversation(settings, talking[0] if talking else None)
  _check_images(settings)


def _check_images(settings: SettingsReward) -> None:
  used = {KINDS[name].checkpoint: name for name in settings.judges if KINDS[name].checkpoint}
  for field in ("hps_checkpoint", "clip_checkpoint"):
    path = getattr(settings.image, field)
    if field not in used:
      if path:
        raise ValueError(
          f"reward.image.{field} is {path!r}, but no judge of {settings.judges!r} uses it; leave "
          "it empty."
        )
      continue
    if not path:
      raise ValueError(f"reward.image.{field} is ''; {used[field]!r} needs a folder.")
    if not pathlib.Path(path, "tokenizer.json").is_file():
      raise ValueError(
        f"reward.image.{field} is {path!r}, where tokenizer.json is missing; name a folder with "
        "weights and a CLIP's tokenizer."
      )
    try:
      folder.config_of(path)
      folder.weights_of(path)
    except ValueError as error:
      raise ValueError(f"reward.image.{field} cannot be used: {error}") from error


def _check_components(settings: SettingsReward) -> None:
  for name in settings.judges:
    mine = components_of(settings, name)
    if not mine:
      raise ValueError(
        f"reward.components is {settings.components!r}; judge {name!r} gives none of them, so add "
        f"'{name}.…' or leave the judge out."
      )
    known = KINDS[name].components
    wrong = [c for c in mine if known and c not in known]
    if wrong:
      gives = "the world's judge" if name == "world" else f"judge {name!r}"
      raise ValueError(
        f"reward.components has {wrong[0]!r}; {gives} gives {', '.join(map(repr, known))}."
      )
  owned = sum(len(components_of(settings, name)) for name in settings.judges)
  if settings.also and owned != len(settings.components):
    raise ValueError(
      f"reward.components is {settings.components!r}; with reward.also each is written as judge, "
      f"dot, component, where a judge is one of {', '.join(map(repr, settings.judges))}."
    )
  stray = [c for c in settings.optional if c not in settings.components]
  if stray:
    raise ValueError(
      f"reward.optional has {stray[0]!r}; it must be one of reward.components "
      f"{settings.components!r}."
    )
  if set(settings.optional) >= set(settings.components):
    raise ValueError(
      f"reward.optional is {settings.optional!r}; at least one component must be required."
    )


def _check_conversation(settings: SettingsReward, name: str | None) -> None:
  judge = settings.judge
  pairwise = name is not None and KINDS[name].pairwise
  if pairwise != (judge.mode != "pointwise"):
    use = "'pairwise_all' or 'pairwise_anchor'" if pairwise else "'pointwise'"
    which = f"{name!r} compares two videos" if pairwise else "no judge here compares videos"
    raise ValueError(f"reward.judge.mode is {judge.mode!r}; {which}, so use {use}.")
  for field in ("endpoints", "checkpoint") if name is None else ():
    if getattr(judge, field):
      raise ValueError(
        f"reward.judge.{field} is {getattr(judge, field)!r}, but no judge of {settings.judges!r} "
        "is a vision-language model; set reward.name to one that is, or leave it empty."
      )
  if name is None:
    return
  if bool(judge.endpoints) == bool(judge.checkpoint):
    raise ValueError(
      f"reward.judge.endpoints is {judge.endpoints!r} and reward.judge.checkpoint is "
      f"{judge.checkpoint!r}; {name!r} needs one of them, servers or a folder."
    )
  if judge.checkpoint:
    _check_checkpoint(judge.checkpoint)
  else:
    HTTPGenerator(http_config(judge))
    if not judge.model:
      raise ValueError("reward.judge.model is ''; name the model that the servers run.")
  longest_s = judge.total_timeout_s * (1 + settings.retries)
  if longest_s > settings.timeout_s:
    raise ValueError(
      f"reward.judge.total_timeout_s is {judge.total_timeout_s:g}; with reward.retries "
      f"{settings.retries} a judgement may take {longest_s:g} s, so use at most "
      f"{settings.timeout_s / (1 + settings.retries):g} or a reward.timeout_s of at least "
      f"{longest_s:g}."
    )


def checkpoint_folder(path: str) -> pathlib.Path:
  """The folder that `reward.judge.checkpoint` names; 'world' is the shipped judge."""
  return digits_reasoner.WEIGHTS if path == "world" else pathlib.Path(path)


def _check_checkpoint(path: str) -> None:
  folder = checkpoint_folder(path)
  missing = [n for n in ("config.json", "tokenizer.json") if not (folder / n).is_file()]
  if missing:
    raise ValueError(
      f"reward.judge.checkpoint is {path!r}, where {missing[0]} is missing; name a folder in the "
      "Hugging Face layout."
    )
