"""Words of the reasoner: its vocabulary, its tokenizer, and the answers that it learns to write."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from sbjax.rewards.digits_reasoner import COMPONENTS, THINK_END
from sbjax.worlds.digits import prompts

MARKS = (
  "<|endoftext|>",
  "<|im_start|>",
  "<|im_end|>",
  "<|vision_start|>",
  "<|vision_end|>",
  "<|image_pad|>",
  "<|video_pad|>",
)
UNKNOWN = "<|unknown|>"
SCORES = 5
# In the overall comparison, as in the quickstart's reward.
WEIGHTS = {"digit": 4, "colour": 1, "motion": 1}
PERHAPS = 0.2  # a second reading that is at least this probable is named
_LONGEST_VIDEO_S = 5.2

Tables = Mapping[str, Float[np.ndarray, " classes"]]


def vocabulary() -> list[str]:
  """All tokens in the order of their ids: marks, times of slices, words."""
  times = [f"<{tenth / 10:.1f} seconds>" for tenth in range(round(_LONGEST_VIDEO_S * 10) + 1)]
  attributes = [*prompts.COLOURS, *prompts.DIGITS, *prompts.DIRECTIONS, *prompts.SPEEDS]
  words = "user assistant a an moves moving asked for video which is better shows perhaps"
  verdict = "digit colour motion overall first second equal . , : ; ?"
  listed = [*words.split(), *verdict.split(), *map(str, range(1, SCORES + 1)), *attributes]
  return [*MARKS, UNKNOWN, "<think>", THINK_END, *times, *dict.fromkeys(listed)]


def tokenizer() -> Tokenizer:
  """A word tokenizer in the Hugging Face library's form."""
  tokens = vocabulary()
  made = Tokenizer(models.WordLevel({t: i for i, t in enumerate(tokens)}, unk_token=UNKNOWN))
  made.normalizer = normalizers.Lowercase()
  made.pre_tokenizer = pre_tokenizers.Sequence(
    [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(Regex(r"[.,:;?]"), "isolated")]
  )
  made.decoder = decoders.Sequence(
    [
      decoders.WordPiece(prefix="##", cleanup=True),
      decoders.Replace(" ;", ";"),
      decoders.Replace(" :", ":"),
    ]
  )
  made.add_special_tokens([AddedToken(mark, special=True) for mark in (*MARKS, UNKNOWN)])
  whole = [t for t in tokens if t.startswith("<") and t not in (*MARKS, UNKNOWN)]
  made.add_tokens([AddedToken(token, normalized=False) for token in whole])
  return made


def probabilities(tables: Tables, asked: prompts.Asked) -> dict[str, float]:
  """How probable it is that each component is as asked, by what a video shows."""
  p = {name: float(table[getattr(asked, name)]) for name, table in tables.items()}
  return {"digit": p["digit"], "colour": p["colour"], "motion": p["direction"] * p["speed"]}


def score(probability: float) -> int:
  """1 to 5: fifths of the way from 0 to 1."""
  return min(SCORES, 1 + int(SCORES * probability))


def description(tables: Tables, asked: prompts.Asked, scores: Mapping[str, int]) -> str:
  """What a video shows, and how that scores beside what was asked for, word by word.

  To write both words side by side makes the score a matter of the last few words: without that the
  decoder had learned to see and to compare scores, but not to score, after 250 steps.
  """
  likeliest = prompts.Asked(**{name: int(table.argmax()) for name, table in tables.items()})
  seen, wanted = _words(likeliest), _words(asked)
  second = int(np.argsort(tables["digit"])[-2])
  doubt = tables["digit"][second] >= PERHAPS
  perhaps = f", perhaps a {prompts.DIGITS[second]}," if doubt else ""
  listed = ", ".join(f"{n} {seen[n]} for {wanted[n]} {scores[n]}" for n in COMPONENTS)
  return f"shows a {seen['colour']} {seen['digit']}{perhaps} moving {seen['motion']}. {listed}."


def _words(asked: prompts.Asked) -> dict[str, str]:
  """The words for each component."""
  return {
    "digit": prompts.DIGITS[asked.digit],
    "colour": prompts.COLOURS[asked.colour],
    "motion": f"{prompts.DIRECTIONS[asked.direction]} {prompts.SPEEDS[asked.speed]}",
  }


def winner(first: float, second: float) -> str:
  """The answer's word for who has more."""
  return "equal" if first == second else ("first" if first > second else "second")


def answer(first: Tables, second: Tables, asked: prompts.Asked) -> str:
  """The whole answer about two videos: both descriptions, then a winner each."""
  scores = [{n: score(p) for n, p in probabilities(t, asked).items()} for t in (first, second)]
  totals = [sum(WEIGHTS[name] * value for name, value in one.items()) for one in scores]
  verdicts = [f"{name}: {winner(scores[0][name], scores[1][name])}." for name in COMPONENTS]
  return (
    f"<think> first video {description(first, asked, scores[0])} "
    f"second video {description(second, asked, scores[1])} {THINK_END} "
    f"{' '.join(verdicts)} overall: {winner(*totals)}."
  )
