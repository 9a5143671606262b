"""The tiny model, built once: schemes that are compared share what it compiles."""

import dataclasses
import functools

from tests.runtime import tiny

_build = functools.cache(tiny.build_roles)


def build_roles(run, judges):
  """The same roles for every scheme of a run; they do not depend on it."""
  return _build(dataclasses.replace(run, scheme="colocated"), judges)
