"""Tests of the package's structure: layers, import cycles, agent-specific words, and sizes."""

import ast
import itertools
import re
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "speedyzero_jax"
FILES = sorted(PACKAGE.rglob("*.py"))
# Lowest first. A folder may import from the layers below its own, and from itself.
LAYERS = (
  ("types",), ("system",), ("config",), ("metrics", "envs"), ("replay",), ("ops",), ("agents",),
  ("workers",), ("run",), ("cluster", "plan", "population", "report", "study"),
)  # fmt: skip
LEVEL = {folder: level for level, folders in enumerate(LAYERS) for folder in folders}


def name_of(path):
  parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
  return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


TREES = {name_of(path): ast.parse(path.read_text()) for path in FILES}
PATHS = {name_of(path): path for path in FILES}


def relative(path):
  return str(path.relative_to(PACKAGE.parent))


def imports(name):
  """Modules of the package that a module imports anywhere in it, also inside functions."""
  found = set()
  for node in ast.walk(TREES[name]):
    if isinstance(node, ast.ImportFrom):
      assert not node.level, f"{name} has a relative import"
      of_each = [(f"{node.module}.{alias.name}", node.module) for alias in node.names]
      found |= {next((m for m in names if m in TREES), "") for names in of_each}
    elif isinstance(node, ast.Import):
      found |= {alias.name for alias in node.names if alias.name in TREES}
  return found - {"", name}


def folder(name):
  return (name.split(".") + [""])[1]


def test_every_folder_has_a_layer_and_a_docstring():
  folders = {folder(name) for name in TREES} - {""}
  assert folders <= LEVEL.keys()
  packages = [name for name, path in PATHS.items() if path.name == "__init__.py"]
  assert [name for name in packages if not ast.get_docstring(TREES[name])] == []
  assert {path.parent for path in FILES} == {PATHS[name].parent for name in packages}


def test_imports_go_to_lower_layers():
  wrong = []
  for name in TREES:
    for target in imports(name):
      ours, theirs = folder(name), folder(target)
      if not ours or not theirs or ours == theirs:
        continue
      if LEVEL[theirs] >= LEVEL[ours]:
        wrong.append(f"{name} -> {target}")
  assert wrong == []


def test_no_files_import_each_other_in_a_circle():
  remaining = {name: imports(name) for name in TREES}
  while leaves := [name for name, targets in remaining.items() if not targets & remaining.keys()]:
    for name in leaves:
      del remaining[name]
  assert remaining == {}


def test_words_of_one_agent_are_used_by_agents_only():
  word = re.compile(r"value_prefix|search_value|reanalys")
  others = [path for path in FILES if PACKAGE / "agents" not in path.parents]
  assert [relative(path) for path in others if word.search(path.read_text())] == []


def code_lines(node, source):
  """Lines of a function's code: without its docstring, blank lines and comments."""
  body = node.body[1:] if ast.get_docstring(node) is not None else node.body
  if not body:
    return 0
  head = range(node.lineno, node.body[0].lineno)
  lines = itertools.chain(head, range(body[0].lineno, node.end_lineno + 1))
  return sum(bool((text := source[n - 1].strip()) and not text.startswith("#")) for n in lines)


def test_files_and_functions_are_short():
  long = []
  for path in FILES:
    source = path.read_text().splitlines()
    if len(source) > 400:
      long.append(f"{relative(path)}: {len(source)} lines")
    for node in ast.walk(TREES[name_of(path)]):
      function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
      if function and code_lines(node, source) > 60:
        long.append(f"{relative(path)}: {node.name} has {code_lines(node, source)} lines of code")
  assert long == []
