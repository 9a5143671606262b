"""The pages of docs/ agree with the code."""

import ast
import importlib.util
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]


def _quickstart():
  path = ROOT / "configs" / "quickstart.py"
  spec = importlib.util.spec_from_file_location("quickstart", path)
  assert spec is not None and spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module.get_config()


def _flat(section, prefix=""):
  for name, value in section.items():
    if hasattr(value, "items"):
      yield from _flat(value, f"{prefix}{name}.")
    else:
      yield prefix + name, value


def test_configs_page_lists_every_field_with_the_quickstart_value():
  rows = re.findall(r"^\| `([a-z0-9_.]+)` \| `([^`]+)` \|", _page("configs.md"), re.MULTILINE)
  documented = {name: ast.literal_eval(value) for name, value in rows}
  assert len(documented) == len(rows)
  assert documented == dict(_flat(_quickstart()))


def test_every_dependency_has_a_reason():
  text = (ROOT / "pyproject.toml").read_text()
  block = re.search(r"^dependencies = \[(.*?)^\]", text, re.MULTILINE | re.DOTALL)
  extras = re.search(r"^\[project\.optional-dependencies\]\n(.*?)^\[", text, re.M | re.S)
  assert block and extras
  wanted = re.findall(r'"([A-Za-z0-9_.-]+)[>=<\["]', block[1] + extras[1])
  page = _page("dependencies.md")
  documented = re.findall(r"^\| `([A-Za-z0-9_.-]+)` \|", page, re.MULTILINE)
  assert set(documented) == set(wanted)


def test_links_inside_the_project_lead_somewhere():
  for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
      if "://" not in target:
        assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_files_that_pages_name_exist():
  for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
    named = re.findall(
      r"`((?:sbjax|models|configs|docs|tests|benchmarks)/[\w./]+\.\w+)`",
      page.read_text(encoding="utf-8"),
    )
    for path in named:
      assert (ROOT / path).exists(), f"{page.name}: {path}"


def _page(name):
  return (ROOT / "docs" / name).read_text(encoding="utf-8")
