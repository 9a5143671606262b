"""Scripts, switches, and lines that are typed meanwhile."""

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbjax.sampling import script as script_lib
from sbjax.sampling.interactive import TypedPrompts
from sbjax.sampling.script import Cue, Script, Switch, director_of, load, read_switch


def accept(prompt):
  if "cat" in prompt:
    raise ValueError("no cats.")


def played(script, per_chunk, frames):
  director = director_of(script, per_chunk)
  return [director(start) for start in range(0, frames, per_chunk)]


def test_a_switch_waits_for_the_next_chunk():
  """LongLive's frames 40 and 80 are 42 and 81 where chunks have three frames."""
  cues = played(Script("a", (Switch(40, "b"), Switch(80, "c"))), 3, 120)
  assert [i * 3 for i, cue in enumerate(cues) if cue.switched] == [42, 81]
  assert [cue.prompt for cue in cues] == ["a"] * 14 + ["b"] * 13 + ["c"] * 13


@given(st.integers(1, 5), st.sets(st.integers(1, 60), max_size=6))
def test_every_switch_that_passes_the_check_happens_once(per_chunk, frames):
  script = Script("0", tuple(Switch(f, str(f)) for f in sorted(frames)))
  length = 14 * per_chunk
  try:
    script_lib.check(script, length, per_chunk)
  except ValueError:
    starts = [-(-f // per_chunk) for f in sorted(frames)]
    assert len(set(starts)) < len(starts) or starts[-1] > 13
    return
  cues = played(script, per_chunk, length)
  assert [cue.prompt for cue in cues if cue.switched] == [s.prompt for s in script.switches]
  shown = ["0"]
  for cue in cues:
    shown += [cue.prompt] if cue.prompt != shown[-1] else []
  assert shown == ["0", *(s.prompt for s in script.switches)]


def test_a_switch_is_frame_colon_prompt():
  assert read_switch(" 12 : at noon: a cat ") == Switch(12, "at noon: a cat")
  for text in ("12", "12:", ":a", "-1:a", "1.5:a", "a:12"):
    with pytest.raises(ValueError, match="--switch is "):
      read_switch(text)


def test_a_jsonl_file_holds_switches(tmp_path):
  path = tmp_path / "a.jsonl"
  rows = [
    {"prompt": "one", "switches": [{"frame": 3, "prompt": " two "}, {"frame": 6, "prompt": "3"}]},
    {"prompt": "four", "id": 7},
  ]
  path.write_text(json.dumps(rows[0]) + "\n\n" + json.dumps(rows[1]) + "\n")
  assert load(str(path), accept) == (
    Script("one", (Switch(3, "two"), Switch(6, "3"))),
    Script("four"),
  )
  text = tmp_path / "a.txt"
  text.write_text("one\ntwo\n")
  assert load(str(text), accept) == (Script("one"), Script("two"))


@pytest.mark.parametrize(
  ("switches", "says"),
  [
    ({"frame": 3, "prompt": "two"}, None),  # one switch need not be in a list
    ([{"frame": "3", "prompt": "two"}], "line 2 has the switch"),
    ([{"frame": True, "prompt": "two"}], "line 2 has the switch"),
    ([{"frame": 3}], "line 2 has the switch"),
    ([{"frame": 3, "prompt": " "}], "line 2 has the switch"),
    (["3:two"], "line 2 has the switch"),
    ("3:two", "line 2 has the switch"),
    ([{"frame": 3, "prompt": "a cat"}], "line 2, switch at 3: no cats"),
  ],
)
def test_other_switches_are_refused_with_their_line(tmp_path, switches, says):
  path = tmp_path / "a.jsonl"
  path.write_text('\n{"prompt": "one", "switches": ' + json.dumps(switches) + "}\n")
  if says is None:
    assert load(str(path), accept)[0].switches == (Switch(3, "two"),)
    return
  with pytest.raises(ValueError, match=says):
    load(str(path), accept)


@pytest.fixture
def pipe():
  ends = os.pipe()
  yield ends
  for end in ends:
    try:
      os.close(end)
    except OSError:
      continue  # the test closed it


def test_typed_lines_are_prompts_one_a_chunk_and_the_end_ends(pipe):
  read, write = pipe
  said = []
  director = TypedPrompts("one", accept, said.append, descriptor=read)
  os.write(write, b"two\nthr")  # half a line is no line yet
  assert director(0) == Cue("one")
  assert director(3) == Cue("two", switched=True)
  assert director(6) == Cue("two")
  os.write(write, b"ee\n\n three \na cat\nfour")
  assert director(9) == Cue("three", switched=True)
  assert director(12) == director(15) == Cue("three")  # an empty line, the same again
  assert director(18) == Cue("three")
  assert said[-1] == "no cats."
  os.close(write)
  assert director(21) == Cue("four", switched=True)  # the last line needs no end
  assert director(24) is None
  assert said[0] == "latent frame 3: two" and "ends at latent frame 24" in said[-1]


def test_nothing_typed_never_waits(pipe):
  director = TypedPrompts("one", accept, lambda text: None, descriptor=pipe[0])
  assert [director(frame) for frame in range(4)] == [Cue("one")] * 4
