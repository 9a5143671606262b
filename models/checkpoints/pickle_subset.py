"""Reads the pickle inside a torch file by its opcodes; nothing that it names is imported or called.

A pickle is a program for a small stack machine, and a general reader lets it import and call what
it likes. Saved weights need very little of that: containers, numbers, texts, and four calls that
torch writes. Those are worked out here as plain records. Any other name ends the reading, and the
error says which name.
"""

import dataclasses
import pickletools
import struct
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

MAX_OPCODES = 2_000_000
"""A full training checkpoint of the largest model here has about a tenth of that."""

_STORAGES: Mapping[str, str] = {
  "FloatStorage": "float32",
  "HalfStorage": "float16",
  "BFloat16Storage": "bfloat16",
  "DoubleStorage": "float64",
  "Float8_e4m3fnStorage": "float8_e4m3fn",
  "Float8_e5m2Storage": "float8_e5m2",
  "LongStorage": "int64",
  "IntStorage": "int32",
  "ShortStorage": "int16",
  "CharStorage": "int8",
  "ByteStorage": "uint8",
  "BoolStorage": "bool",
  "ComplexFloatStorage": "complex64",
  "ComplexDoubleStorage": "complex128",
}
_ORDERED_DICT = "collections.OrderedDict"
_REBUILD_TENSOR = "torch._utils._rebuild_tensor_v2"
_REBUILD_PARAMETER = "torch._utils._rebuild_parameter"
_SIZE = "torch.Size"
_KNOWN = (
  _ORDERED_DICT,
  _REBUILD_TENSOR,
  _REBUILD_PARAMETER,
  _SIZE,
  *(f"torch.{name}" for name in _STORAGES),
)


@dataclasses.dataclass(frozen=True)
class Storage:
  """A run of elements that tensors look into.

  Attributes:
    key: name of its entry in the archive.
    dtype: type of its elements.
    size: how many there are.
  """

  key: str
  dtype: str
  size: int


@dataclasses.dataclass(frozen=True)
class TensorRecord:
  """A tensor: where it lies in its storage, all in elements."""

  storage: Storage
  offset: int
  shape: tuple[int, ...]
  strides: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class _Name:
  """Something that the pickle would import."""

  dotted: str


class _Mark:
  """The stack machine's bracket."""


class RefusedPickle(ValueError):
  """The pickle holds something that weights do not need; the message names it."""


def read_pickle(stream: BinaryIO) -> Any:
  """The tree that a pickle of weights describes: dictionaries, lists, tuples, scalars, tensors.

  Args:
    stream: what it is read from, up to its end mark.

  Raises:
    RefusedPickle: for a name or call that weights do not need.
    ValueError: for a damaged pickle. Messages of both continue a sentence that names the file.
  """
  machine = _Machine()
  try:
    for count, (opcode, argument, _) in enumerate(pickletools.genops(stream)):
      if count >= MAX_OPCODES:
        raise RefusedPickle(f"has more than {MAX_OPCODES} pickle opcodes")
      if opcode.name == "STOP":
        return machine.pop()
      machine.step(opcode.name, argument)
  except RefusedPickle:
    raise
  except (ValueError, IndexError, KeyError, TypeError, OverflowError, struct.error) as error:
    raise ValueError(f"has a damaged pickle ({error})") from error
  raise ValueError("has a pickle without an end")


class _Machine:
  """Stack and memo; one method per opcode that is understood."""

  def __init__(self):
    self._stack: list[Any] = []
    self._memo: dict[int, Any] = {}

  def pop(self) -> Any:
    return self._stack.pop()

  def step(self, name: str, argument: Any) -> None:
    if name in _IGNORED:
      return
    if name in _PUSHES_ARGUMENT:
      self._stack.append(argument)
    elif name in _PUSHES:
      self._stack.append(_PUSHES[name]())
    elif name in ("BINPUT", "LONG_BINPUT", "PUT"):
      self._memo[argument] = self._stack[-1]
    elif name == "MEMOIZE":
      self._memo[len(self._memo)] = self._stack[-1]
    elif name in ("BINGET", "LONG_BINGET", "GET"):
      self._stack.append(self._memo[argument])
    elif name in ("GLOBAL", "STACK_GLOBAL"):
      self._name(argument)
    elif name in _STEPS:
      _STEPS[name](self)
    else:
      raise RefusedPickle(f"uses the pickle opcode {name}, which weights do not need")

  def _name(self, argument: str | None) -> None:
    if argument is None:
      name, module = self.pop(), self.pop()
      if not (isinstance(module, str) and isinstance(name, str)):
        raise ValueError("a name that is no text")
      dotted = f"{module}.{name}"
    else:
      dotted = argument.replace(" ", ".", 1)
    if dotted not in _KNOWN:
      raise RefusedPickle(f"would import and run {dotted!r}")
    self._stack.append(_Name(dotted))

  def marked(self) -> list[Any]:
    """Everything above the last mark, which goes too."""
    for at in range(len(self._stack) - 1, -1, -1):
      if isinstance(self._stack[at], _Mark):
        items = self._stack[at + 1 :]
        del self._stack[at:]
        return items
    raise ValueError("a mark is missing")

  def tuple_of(self, count: int) -> None:
    if len(self._stack) < count:
      raise ValueError("the stack is empty")
    items = tuple(self._stack[len(self._stack) - count :])
    del self._stack[len(self._stack) - count :]
    self._stack.append(items)

  def dictionary(self) -> None:
    items = self.marked()
    self._stack.append({})
    self._set(items)

  def set_items(self) -> None:
    self._set(self.marked())

  def set_item(self) -> None:
    value, key = self.pop(), self.pop()
    self._set([key, value])

  def _set(self, items: list[Any]) -> None:
    target = self._stack[-1]
    if not isinstance(target, dict) or len(items) % 2:
      raise ValueError("items that belong to no dictionary")
    for key, value in zip(items[::2], items[1::2], strict=True):
      # Hashing a deeply shared tuple could take for ever, and weights have no such keys.
      if not isinstance(key, str | int):
        raise RefusedPickle(f"has a dictionary key of type {type(key).__name__}")
      target[key] = value

  def extend(self) -> None:
    items = self.marked()
    self._list().extend(items)

  def append(self) -> None:
    item = self.pop()
    self._list().append(item)

  def _list(self) -> list[Any]:
    if not isinstance(self._stack[-1], list):
      raise ValueError("items that belong to no list")
    return self._stack[-1]

  def persistent(self) -> None:
    self._stack.append(_storage(self.pop()))

  def build(self) -> None:
    """State of an object: torch hangs version numbers on its dictionaries, which say nothing."""
    state, target = self.pop(), self._stack[-1]
    if not (isinstance(target, dict) and isinstance(state, dict)):
      raise RefusedPickle(f"sets the state of a {type(target).__name__}")

  def call(self) -> None:
    arguments, name = self.pop(), self.pop()
    if not isinstance(name, _Name) or not isinstance(arguments, tuple):
      raise RefusedPickle(f"calls a {type(name).__name__}")
    if name.dotted == _ORDERED_DICT:
      pairs = arguments[0] if arguments else []
      self._stack.append({})
      self._set([item for pair in pairs for item in pair])
    elif name.dotted == _REBUILD_TENSOR:
      self._stack.append(_tensor(*arguments[:4]))
    elif name.dotted == _REBUILD_PARAMETER and isinstance(arguments[0], TensorRecord):
      self._stack.append(arguments[0])
    elif name.dotted == _SIZE:
      self._stack.append(tuple(arguments[0]))
    else:
      raise RefusedPickle(f"calls {name.dotted!r}")


def _storage(identifier: Any) -> Storage:
  if not (
    isinstance(identifier, tuple) and len(identifier) in (5, 6) and identifier[0] == "storage"
  ):
    raise RefusedPickle("refers to something outside of itself that is no tensor storage")
  _, kind, key, _, size = identifier[:5]
  if not isinstance(kind, _Name) or not isinstance(key, str) or not _natural(size):
    raise ValueError("a storage of unknown form")
  dtype = _STORAGES.get(kind.dotted.removeprefix("torch."))
  if dtype is None:
    raise RefusedPickle(f"has a storage of type {kind.dotted!r}")
  return Storage(key, dtype, size)


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any) -> TensorRecord:
  if not isinstance(storage, Storage) or not _natural(offset):
    raise ValueError("a tensor without storage")
  for numbers in (shape, strides):
    if not (isinstance(numbers, tuple) and len(numbers) <= 8 and all(map(_natural, numbers))):
      raise ValueError("a tensor of unknown shape")
  if len(shape) != len(strides):
    raise ValueError("a tensor with more axes than strides")
  # Python's own integers: nothing here can wrap around. An expanded tensor (stride 0) is small in
  # the file and may be as large as it likes in memory, so it counts by its elements too.
  elements = 1
  for n in shape:
    elements *= n
  reach = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1
  if elements and (reach > storage.size or elements > storage.size):
    raise RefusedPickle(
      f"has a tensor of shape {list(shape)} that reaches past its storage of {storage.size}"
    )
  return TensorRecord(storage, offset, shape, strides)


def _natural(value: Any) -> bool:
  return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


_IGNORED = frozenset({"PROTO", "FRAME"})
_PUSHES_ARGUMENT = frozenset(
  {
    *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "INT", "LONG", "BINFLOAT", "FLOAT"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE"),
    *("BINBYTES", "SHORT_BINBYTES"),
  }
)
_PUSHES: Mapping[str, Callable[[], Any]] = {
  "MARK": _Mark,
  "EMPTY_DICT": dict,
  "EMPTY_LIST": list,
  "EMPTY_TUPLE": tuple,
  "NONE": lambda: None,
  "NEWTRUE": lambda: True,
  "NEWFALSE": lambda: False,
}
_STEPS: Mapping[str, Callable[[_Machine], Any]] = {
  "POP": _Machine.pop,
  "POP_MARK": _Machine.marked,
  "TUPLE": lambda m: m._stack.append(tuple(m.marked())),
  "TUPLE1": lambda m: m.tuple_of(1),
  "TUPLE2": lambda m: m.tuple_of(2),
  "TUPLE3": lambda m: m.tuple_of(3),
  "LIST": lambda m: m._stack.append(m.marked()),
  "DICT": _Machine.dictionary,
  "SETITEM": _Machine.set_item,
  "SETITEMS": _Machine.set_items,
  "APPEND": _Machine.append,
  "APPENDS": _Machine.extend,
  "BINPERSID": _Machine.persistent,
  "BUILD": _Machine.build,
  "REDUCE": _Machine.call,
}
