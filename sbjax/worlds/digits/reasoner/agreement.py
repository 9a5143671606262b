"""How often the reasoner is right, and whether it agrees with itself when the videos are swapped.

    python -m sbjax.worlds.digits.reasoner.agreement [--reasoner=DIR] [--pairs=400]

Two kinds of pairs, none of whose videos it learned from:

- drawn: unspoiled videos of the generator half of the drawings, where the truth is known. Each
  component is as asked or is not; the reward weighs them as the quickstart does.
- generated: two videos of the base model for the same prompt, as a group's candidates are. The
  truth is the quickstart's reward, the probability that the world's judge gives; such rewards
  nearly always differ, so the share of right answers is told by how far they do.

Answers are right, tied or wrong; only right ones count as right where the true rewards differ.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import itertools
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from sbjax.rewards import engine_generator
from sbjax.rewards.conversation import ConversationJudge
from sbjax.rewards.digits_reasoner import ANSWERS, COMPONENTS, WEIGHTS, DigitsReasoner
from sbjax.rewards.protocol import Job, Verdict
from sbjax.worlds.digits import data, judge, prompts, training, world
from sbjax.worlds.digits.evaluate import PER_CALL, video_sampler
from sbjax.worlds.digits.reasoner import text

GAPS = (0.05, 0.1, 0.25, 0.5)
GROUP = 4
PER_ROUND = 32


@dataclasses.dataclass(frozen=True)
class Question:
  """Two whole videos, the prompt, and the true rewards of both by component, overall first."""

  videos: tuple[np.ndarray, np.ndarray]
  prompt: str
  truths: tuple[dict[str, float], dict[str, float]]

  def gap(self, name: str) -> float:
    """How much better the first video is."""
    return self.truths[0][name] - self.truths[1][name]


def with_overall(truth: dict[str, float]) -> dict[str, float]:
  """Component rewards and their weighted mean."""
  total = sum(text.WEIGHTS.values())
  return {"overall": sum(text.WEIGHTS[n] * truth[n] for n in COMPONENTS) / total, **truth}


def drawn_questions(images: data.DigitImages, count: int, seed: int) -> list[Question]:
  """Drawn videos; each attribute of either is other than asked in three of ten."""
  rng = np.random.default_rng([seed, 111])
  listed = prompts.all_prompts()
  questions = []
  for number in range(count):
    asked = prompts.parse(listed[rng.integers(len(listed))])
    videos, truths = [], []
    for place in range(2):
      shown = dataclasses.asdict(asked)
      for name, classes in judge.HEADS.items():
        if rng.uniform() < 0.3:
          shown[name] = int(rng.integers(classes))
      same = {name: shown[name] == getattr(asked, name) for name in shown}
      motion = same["direction"] and same["speed"]
      truths.append(
        with_overall(
          {"digit": same["digit"] * 1.0, "colour": same["colour"] * 1.0, "motion": motion * 1.0}
        )
      )
      sentence = prompts.sentence(prompts.Asked(**shown))
      videos.append(data.render(images, sentence, 100_000 * (seed + 1) + 2 * number + place))
    questions.append(
      Question((videos[0], videos[1]), prompts.sentence(asked), (truths[0], truths[1]))
    )
  return questions


def generated_questions(the_world: world.World, count: int, seed: int) -> list[Question]:
  """All pairs of groups of four videos of the base model, prompts of both halves in turn."""
  groups = -(-count // (GROUP * (GROUP - 1) // 2))
  halves = zip(the_world.eval_prompts, the_world.train_prompts, strict=True)
  asked = [text_ for both in halves for text_ in both][:groups]
  rows = [text_ for text_ in asked for _ in range(GROUP)]
  sample_some = video_sampler(the_world)
  progress = training.Progress("generated", -(-len(rows) // PER_CALL))

  videos: list[np.ndarray] = []
  truths: list[dict[str, float]] = []
  for at in range(0, len(rows), PER_CALL):
    some = rows[at : at + PER_CALL]
    key = jax.random.fold_in(jax.random.key(500_000 + seed), at)
    made = sample_some(some, key)
    read = judge.judge_videos(the_world.judge, made, some)
    videos += list(made)
    truths += [with_overall({n: float(read[n][i]) for n in COMPONENTS}) for i in range(len(some))]
    progress.update(at // PER_CALL, 0.0)
  questions = []
  for group, prompt in enumerate(asked):
    for i, j in itertools.combinations(range(group * GROUP, group * GROUP + GROUP), 2):
      questions.append(Question((videos[i], videos[j]), prompt, (truths[i], truths[j])))
  return questions[:count]


def ask(reasoner: ConversationJudge, questions: Sequence[Question], swapped: bool) -> list[Verdict]:
  """The reasoner's verdicts; of swapped videos still from the side of a question's first."""
  progress = training.Progress("asked", -(-len(questions) // PER_ROUND), 4)
  verdicts: list[Verdict] = []
  for at in range(0, len(questions), PER_ROUND):
    some = questions[at : at + PER_ROUND]
    videos = {2 * i + k: q.videos[k] for i, q in enumerate(some) for k in range(2)}
    order = (1, 0) if swapped else (0, 1)
    jobs = [Job((2 * i + order[0], 2 * i + order[1]), q.prompt, 0) for i, q in enumerate(some)]
    verdicts += reasoner.judge(jobs, videos)
    progress.update(at // PER_ROUND, 0.0)
  return [_other_side(v) for v in verdicts] if swapped else verdicts


def _other_side(verdict: Verdict) -> Verdict:
  if verdict.components is None:
    return verdict
  return dataclasses.replace(verdict, components={n: 1 - v for n, v in verdict.components.items()})


def shares(
  questions: Sequence[Question], verdicts: Sequence[Verdict], name: str, least: float
) -> dict[str, Any]:
  """Of the answers about pairs whose true rewards differ by more than `least`: right, tied, wrong.

  Returns:
    "answers": how many there are; "right", "tied" and "wrong": shares of them, None where there is
    none. An answer that cannot be read is wrong.
  """
  counts = collections.Counter(
    _kind(verdict, name, question.gap(name) > 0)
    for question, verdict in zip(questions, verdicts, strict=True)
    if abs(question.gap(name)) > least
  )
  total = counts.total()
  return {
    "answers": total,
    **{kind: counts[kind] / total if total else None for kind in ("right", "tied", "wrong")},
  }


def _kind(verdict: Verdict, name: str, first_is_better: bool) -> str:
  if verdict.components is None:
    return "wrong"
  if verdict.components[name] == 0.5:
    return "tied"
  return "right" if verdict.components[name] == float(first_is_better) else "wrong"


def share_agreeing(one: Sequence[Verdict], other: Sequence[Verdict], name: str) -> float:
  """How often both orders give the same answer; an answer that cannot be read agrees with none."""
  same = [
    a.components is not None
    and b.components is not None
    and a.components[name] == b.components[name]
    for a, b in zip(one, other, strict=True)
  ]
  return float(np.mean(same))


def measure(
  reasoner: ConversationJudge, questions: Sequence[Question], gaps: Sequence[float]
) -> dict[str, Any]:
  """Both orders of all questions: shares right by gap and component, agreement, failures."""
  plain, swapped = ask(reasoner, questions, False), ask(reasoner, questions, True)
  both, twice = [*plain, *swapped], [*questions, *questions]
  result: dict[str, Any] = {
    "pairs": len(questions),
    "unparsable": sum(verdict.components is None for verdict in both),
    "agrees_when_swapped": {name: share_agreeing(plain, swapped, name) for name in ANSWERS},
  }
  for gap in gaps:
    result[f"gap_over_{gap:g}"] = {name: shares(twice, both, name, gap) for name in ANSWERS}
  return result


def load(folder: pathlib.Path, slots: int = PER_ROUND) -> ConversationJudge:
  """The reasoner of a folder, on this process's device."""
  generator = engine_generator.from_checkpoint(
    str(folder), slots=slots, context_tokens=256, total_timeout_s=60.0, mesh=None
  )
  return ConversationJudge(DigitsReasoner(), generator)


def measure_both(
  folder: pathlib.Path, the_world: world.World, pairs: int, seed: int = 0
) -> dict[str, Any]:
  """The agreement table of README.md."""
  reasoner = load(folder)
  return {
    "drawn": measure(reasoner, drawn_questions(the_world.images, pairs, seed), (0.0,)),
    "generated": measure(reasoner, generated_questions(the_world, pairs, seed), (0.0, *GAPS)),
  }


def main() -> None:
  """The command."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--reasoner", type=pathlib.Path, default=WEIGHTS, help="folder of the judge")
  parser.add_argument("--world", default=None, help="world folder; the shipped one by default")
  parser.add_argument("--pairs", type=int, default=400, help="pairs of each kind")
  parser.add_argument("--seed", type=int, default=0)
  asked = parser.parse_args()
  print(
    json.dumps(
      measure_both(asked.reasoner, world.load_world(asked.world), asked.pairs, asked.seed), indent=2
    )
  )


if __name__ == "__main__":
  main()
