"""From a config file and its overrides to checked settings, or to one sentence about what is wrong.

Every refusal is a `ValueError` whose message is one sentence: the field, its value, and what would
do. Nothing here compiles.
"""

import dataclasses
import difflib
import json
import os
import re
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from absl import flags
from ml_collections import config_dict
from ml_collections.config_flags import config_flags

from sbjax.settings import Range, Settings


@dataclasses.dataclass(frozen=True)
class Command:
  """What a command line asked for.

  Attributes:
    config: the config file's fields with the overrides applied, not yet checked.
    config_file: path of the config file.
    overrides: overridden fields by dotted name.
    values: the other flags by name; None where one was not given.
  """

  config: config_dict.ConfigDict
  config_file: str
  overrides: Mapping[str, Any]
  values: Mapping[str, str | None]


def parse(argv: Sequence[str], flag_help: Mapping[str, str]) -> Command:
  """Reads a command line: `--config=FILE`, `--config.FIELD=VALUE` overrides, and string flags.

  Args:
    argv: the command line; the first entry, the program's name, is not looked at.
    flag_help: names of the string flags that the command knows besides `--config`, with their help.

  Raises:
    ValueError: unknown flag or field, wrong type, a list where a tuple is needed, or a config file
      that is missing or cannot be loaded.
  """
  argv = list(argv)
  _check_flag_names(argv, flag_help)
  path = _config_path(argv)
  values = flags.FlagValues()
  for name, text in flag_help.items():
    flags.DEFINE_string(name, None, text, flag_values=values)
  if path.endswith(".json"):
    # A run's own config.json. The library takes such a config as a default that has no file name.
    argv = _without_config(argv)
    config_flags.DEFINE_config_dict(
      "config", from_json(path), flag_values=values, lock_config=True, sys_argv=argv
    )
  else:
    config_flags.DEFINE_config_file(
      "config", None, "config file", flag_values=values, lock_config=True, sys_argv=argv
    )
  # The library loads every config file under one module name, over whatever an earlier one left.
  sys.modules.pop("config_config", None)
  try:
    rest = values(argv)
  except config_flags.UnsupportedOperationError as error:
    name = re.search(r"field config\.(\S+)", str(error))
    field = name.group(1) if name else "a field"
    raise ValueError(
      f"{field} is a list in {path}; write a tuple, such as (1, 2), which can be overridden."
    ) from error
  except config_flags.FlagOrderError as error:
    raise ValueError("--config must come before the fields that override it.") from error
  except flags.Error as error:
    if "whilst parsing config file" in str(error):
      raise ValueError(_config_sentence(path, str(error).rstrip().splitlines()[-1])) from error
    raise ValueError(_flag_sentence(str(error))) from error
  # Third-party code from here on: the config file is the user's own program and may raise anything.
  except Exception as error:
    reason = (str(error).splitlines() or ["no message"])[0].rstrip(".")
    raise ValueError(_config_sentence(path, f"{type(error).__name__}: {reason}")) from error
  if len(rest) > 1:
    raise ValueError(f"{rest[1]!r} is not a flag; write --name=value.")
  config = values["config"].value
  if not isinstance(config, config_dict.ConfigDict):
    raise ValueError(
      f"get_config() of {path} returns {type(config).__name__}; it must return a ConfigDict."
    )
  return Command(
    config=config,
    config_file=path,
    overrides=dict(config_flags.get_override_values(values["config"])),
    values={name: values[name].value for name in flag_help},
  )


def from_json(path: str) -> config_dict.ConfigDict:
  """Reads the resolved config that a run left in its workdir.

  Raises:
    ValueError: the file cannot be read or holds no JSON object.
  """
  try:
    with open(path, encoding="utf-8") as file:
      content = json.load(file)
  except (OSError, ValueError) as error:
    raise ValueError(f"--config is {path!r}, which cannot be read as JSON ({error}).") from error
  if not isinstance(content, dict):
    raise ValueError(f"--config is {path!r}, which holds no JSON object; name a run's config.json.")
  return config_dict.ConfigDict(_tuples(content))


def convert(config: config_dict.ConfigDict | Mapping[str, Any]) -> Settings:
  """Builds typed settings from a config's fields; checks each field by itself.

  Raises:
    ValueError: an unknown or missing field, a wrong type, a value out of its range or choices.
  """
  return _record(Settings, config, "")


def validate(config: config_dict.ConfigDict | Mapping[str, Any]) -> Settings:
  """Builds settings and checks that they can work together.

  Raises:
    ValueError: as `convert`, and what `sbjax.checks.check` refuses.
  """
  from sbjax import checks

  settings = convert(config)
  checks.check(settings)
  return settings


def field_names(record: type = Settings, prefix: str = "") -> tuple[str, ...]:
  """Gives the dotted names of all fields that a config holds, in order."""
  names = []
  for name, hint in get_type_hints(record).items():
    if dataclasses.is_dataclass(hint):
      names.extend(field_names(hint, f"{prefix}{name}."))  # pyright: ignore[reportArgumentType]
    else:
      names.append(f"{prefix}{name}")
  return tuple(names)


def suggestion(name: str, known: Sequence[str]) -> str:
  """Gives ' Did you mean …?'-style help for a misspelt name, as the end of a sentence."""
  # A field that was put into the wrong section is the likeliest slip after a typing error.
  same_leaf = [k for k in known if k.rsplit(".", 1)[-1] == name.rsplit(".", 1)[-1]]
  close = same_leaf or difflib.get_close_matches(name, known, n=1, cutoff=0.5)
  return f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}."


def _record(record: type, value: Any, path: str) -> Any:
  if not isinstance(value, Mapping | config_dict.ConfigDict):
    raise ValueError(f"{path} is {value!r}; it must be a section (a ConfigDict) of fields.")
  hints = get_type_hints(record, include_extras=True)
  prefix = f"{path}." if path else ""
  for name in value:
    if name not in hints:
      raise ValueError(
        f"the config has no field {prefix}{name}; {suggestion(f'{prefix}{name}', field_names())}"
      )
  fields = {}
  defaults = {f.name for f in dataclasses.fields(record) if f.default is not dataclasses.MISSING}
  for name, hint in hints.items():
    if name not in value and name in defaults:
      continue
    if name not in value:
      raise ValueError(
        f"the config lacks the field {prefix}{name}; add c.{prefix}{name} = … as in "
        "configs/quickstart.py."
      )
    item = value[name]
    if dataclasses.is_dataclass(hint):
      fields[name] = _record(hint, item, f"{prefix}{name}")  # pyright: ignore[reportArgumentType]
    else:
      fields[name] = _value(hint, item, f"{prefix}{name}")
  return record(**fields)


def _value(hint: Any, value: Any, path: str) -> Any:
  origin = get_origin(hint)
  if origin is Annotated:
    inner, bounds = get_args(hint)
    number = _value(inner, value, path)
    if isinstance(bounds, Range) and not bounds.holds(number):
      raise ValueError(f"{path} is {value!r}; it must be {bounds}.")
    return number
  if origin is Literal:
    if value not in get_args(hint) or isinstance(value, bool):
      choices = ", ".join(repr(choice) for choice in get_args(hint))
      raise ValueError(f"{path} is {value!r}; use one of {choices}.")
    return value
  if origin is tuple:
    return _tuple(get_args(hint), value, path)
  if origin in (Union, types.UnionType):
    raise TypeError(f"{path} has an optional type, which settings do not use")
  if hint is bool and isinstance(value, bool):
    return value
  if hint is int and isinstance(value, int) and not isinstance(value, bool):
    return value
  if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
    number = float(value)
    if number - number != 0.0:
      raise ValueError(f"{path} is {value!r}; it must be a finite number.")
    return number
  if hint is str and isinstance(value, str):
    return value
  wanted = {bool: "True or False", int: "an integer", float: "a number", str: "a string"}[hint]
  raise ValueError(f"{path} is {value!r}; it must be {wanted}.")


def _tuple(hints: tuple[Any, ...], value: Any, path: str) -> tuple[Any, ...]:
  if isinstance(value, list):
    raise ValueError(f"{path} is the list {value!r}; write the tuple {tuple(value)!r}.")
  if not isinstance(value, tuple):
    example = "(1.0, 0.5)" if hints[0] is float else "('a', 'b')" if hints[0] is str else "(1, 2)"
    raise ValueError(f"{path} is {value!r}; it must be a tuple, such as {example}.")
  if hints[-1] is Ellipsis:
    hints = (hints[0],) * len(value)
  if len(value) != len(hints):
    raise ValueError(f"{path} is {value!r}; it must have {len(hints)} entries.")
  return tuple(
    _value(hint, item, f"{path}[{i}]")
    for i, (hint, item) in enumerate(zip(hints, value, strict=True))
  )


def _tuples(value: Any) -> Any:
  """Gives JSON's lists back as the tuples that they were."""
  if isinstance(value, dict):
    return {name: _tuples(item) for name, item in value.items()}
  return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def _check_flag_names(argv: Sequence[str], flag_help: Mapping[str, str]) -> None:
  """Refuses a misspelt flag or field before the flag library meets it with a long message."""
  for i, word in enumerate(argv[1:], 1):
    if not word.startswith("-") or word == "--":
      continue
    name = word.lstrip("-").split("=", 1)[0]
    if name.startswith("config."):
      field = name.removeprefix("config.")
      if field in field_names():
        continue
      if any(known.startswith(f"{field}.") for known in field_names()):
        inside = [known for known in field_names() if known.startswith(f"{field}.")]
        raise ValueError(f"{field} is a section; override a field of it, such as {inside[0]}.")
      raise ValueError(f"the config has no field {field}; {suggestion(field, field_names())}")
    # A negative number may be the value of the flag before it.
    if name not in ("config", *flag_help) and not (i > 1 and re.fullmatch(r"-[\d.e-]+", word)):
      known = tuple(f"--{flag}" for flag in ("config", *flag_help))
      raise ValueError(f"there is no flag {word.split('=', 1)[0]}; known are {', '.join(known)}.")


def _without_config(argv: Sequence[str]) -> list[str]:
  """Drops `--config=FILE` and `--config FILE`, and keeps `--config.FIELD=VALUE`."""
  kept, skip = [], False
  for word in argv:
    if skip:
      skip = False
    elif re.fullmatch(r"--?config", word):
      skip = True
    elif not re.match(r"--?config=", word):
      kept.append(word)
  return kept


def _config_path(argv: Sequence[str]) -> str:
  value = None
  for i, word in enumerate(argv[1:], 1):
    if re.fullmatch(r"--?config", word):
      value = argv[i + 1] if i + 1 < len(argv) else ""
    elif re.match(r"--?config=", word):
      value = word.split("=", 1)[1]
  if value is None:
    raise ValueError("--config is missing; name a config file, such as configs/quickstart.py.")
  path = value.split(":", 1)[0]
  if os.path.isfile(path):
    return path
  near = os.path.dirname(path) or "."
  beside = sorted(
    os.path.join(near, name) if near != "." else name
    for name in (os.listdir(near) if os.path.isdir(near) else ())
    if name.endswith(".py") and not name.startswith("_")
  )
  there = f"there are {', '.join(beside[:5])}" if beside else "an example is configs/quickstart.py"
  raise ValueError(f"--config is {value!r}, which is not a file; {there}.")


def _flag_sentence(message: str) -> str:
  """Turns 'flag --config.x=y: reason' into a sentence in the manner of all others."""
  match = re.match(r"flag --(?:config\.)?([^=]+)=(.*?): (.*)", message, re.DOTALL)
  if not match:
    return message.splitlines()[0].rstrip(".") + "."
  field, value, reason = match.groups()
  wanted = (
    ("float", "a number"),
    ("int", "an integer"),
    ("bool", "True or False"),
    ("tuple", "a tuple, such as \"('a', 'b')\""),
  )
  for word, sentence in wanted:
    if word in reason:
      return f"{field} is {value!r}; it must be {sentence}."
  return f"{field} is {value!r}; {reason.splitlines()[0].rstrip('.')}."


def _config_sentence(path: str, reason: str) -> str:
  return (
    f"the config file {path} cannot be loaded ({reason}); it must be a Python file whose "
    "get_config() returns a ConfigDict."
  )
