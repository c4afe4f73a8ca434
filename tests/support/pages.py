"""Parsing of the README and docs/ for tests: links, commands, files and examples."""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

_FENCED = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?:^|\n)\n((?: {4,}\S[^\n]*\n)+)")
_EXAMPLE = re.compile(r"`([\w.]+)`:\n\n```(?:python|yaml)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`([^`\n]+)`")
_SETTING = re.compile(r"\w+=")


class Command(NamedTuple):
  """A command line for the reader to type."""

  environment: list[str]  # NAME=value
  words: list[str]


def prose(page: Path) -> str:
  """The text without code blocks."""
  return _INDENTED.sub("\n\n", _FENCED.sub("", page.read_text()))


def spans(page: Path) -> list[str]:
  """Inline code."""
  return _SPAN.findall(prose(page))


def links(page: Path) -> list[str]:
  """Targets of links and images."""
  text = _SPAN.sub("", prose(page))
  return re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|href)="([^"]+)"', text)


def anchors(page: Path) -> set[str]:
  """Anchors of a page's headings, as named by GitHub and Sphinx."""
  titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
  return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def commands(page: Path) -> list[Command]:
  """Commands: all lines of indented blocks, and inline code that begins with a command's name."""
  blocks = _INDENTED.findall(_FENCED.sub("", page.read_text()))
  lines = [line for block in blocks for line in block.splitlines()]
  lines += [span for span in spans(page) if re.match(r"(make|python|sbatch) ", span)]
  return [_command(line) for line in lines]


def _command(line: str) -> Command:
  words = ["1" if word in ("N", "I") else word for word in shlex.split(line, comments=True)]
  count = next((i for i, word in enumerate(words) if not _SETTING.match(word)), len(words))
  return Command(words[:count], words[count:])


def examples() -> dict[str, str]:
  """Example files by name: fenced blocks after "`NAME`:"."""
  files = [example for page in PAGES for example in _EXAMPLE.findall(page.read_text())]
  assert len(dict(files)) == len(files), "two example files have the same name"
  return dict(files)


def blocks(page: Path, language: str) -> list[str]:
  """Fenced blocks of a language."""
  return [code for kind, code in _FENCED.findall(page.read_text()) if kind == language]
