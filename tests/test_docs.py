"""Tests of references in the README and docs/: links, commands, settings, metrics and files."""

import argparse
import re
import shlex
from pathlib import Path
from unittest import mock

import pytest

import pages
from benchmarks import picture
from launch import (
  evaluate,
  match,
  multihost,
  plan,
  population,
  profile_run,
  report,
  suite,
  wandb_sync,
)
from pages import PAGES, ROOT
from speedyzero_jax.config import loader
from speedyzero_jax.config.agents import agent_names
from speedyzero_jax.metrics import names
from speedyzero_jax.plan import target
from speedyzero_jax.population import config as populations
from speedyzero_jax.study import study as studies
from tiny_replay import make_replay

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
PLACEHOLDER = re.compile(r"[A-Z_]{3,}|\.\.\.")  # such as RUN_DIR
SOURCES = "".join(path.read_text() for path in (ROOT / "speedyzero_jax").rglob("*.py"))
METRICS = {
  *re.findall(r'"([a-z]+/\w+)"', SOURCES),
  *(names.TIME_PREFIX + part for part in re.findall(r'\.part\("(\w+)"', SOURCES)),
  *(names.present(kind) for kind in ("actor", "refresher")),
  *(names.wait(kind) for kind in ("actor", "learner", "refresher")),
}
GROUPS = "charts", "inference", "learner", "losses", "present", "queue", "replay", "stats", "time"
KEYS = {key for name in agent_names() for key in loader.fields_of(name)}


@pytest.fixture(autouse=True)
def beside_the_examples(tmp_path, monkeypatch):
  """Changes to a folder with the example files of the pages, in which commands are parsed."""
  for name, text in pages.examples().items():
    (tmp_path / name).write_text(text)
  for name in ("configs", "launch"):
    (tmp_path / name).symlink_to(ROOT / name)
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(tmp_path)


@each_page
def test_links_lead_somewhere(page):
  for link in pages.links(page):
    if not re.match(r"https?://", link):
      name, _, anchor = link.partition("#")
      found = (page.parent / name).resolve() if name else page
      assert found.exists(), link
      assert not anchor or anchor in pages.anchors(found), link


class _Parsed(Exception):
  """Carries the arguments that a launcher has parsed."""


def _parsed(main, arguments):
  """The arguments that a launcher parses from a command line; the launcher stops after parsing."""
  parse = argparse.ArgumentParser.parse_args

  def stop(parser, *args, **kwargs):
    raise _Parsed(parse(parser, *args, **kwargs))

  with (
    mock.patch.object(argparse.ArgumentParser, "parse_args", stop),
    pytest.raises(_Parsed) as found,
  ):
    main(arguments)
  return found.value.args[0]


def _load(presets, overrides):
  if not any(PLACEHOLDER.fullmatch(text) for text in (*presets, *overrides)):
    loader.load(presets, overrides)


def _train(arguments):
  if arguments == ["--help"]:
    return
  parsed = multihost.parse([text for text in arguments if text != "--help"])
  if parsed.resume is None:
    _load(parsed.config, parsed.overrides)
  else:
    assert {text.partition("=")[0] for text in parsed.overrides} <= KEYS


def _profile(arguments):
  parsed = profile_run.parse(arguments)
  _load(parsed.config, parsed.overrides)


def _plan(arguments):
  parsed = plan.parse(arguments)
  target.load(parsed.target)
  _load(parsed.config, parsed.overrides)


def _suite(arguments):
  parsed = suite._parser().parse_intermixed_args(arguments)
  if "$" not in parsed.part:
    suite._part(parsed.part)
  studies.runs_of(suite._study(parsed, arguments), parsed.dir or Path())


def _population(arguments):
  populations.load(_parsed(population.main, arguments).population)


def _make(arguments):
  (goal,) = (text for text in arguments if "=" not in text)
  known = re.findall(r"^([\w -]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE)
  assert goal in " ".join(known).split()
  variables = dict(text.split("=", 1) for text in arguments if text != goal)
  assert variables.keys() <= {"ARGS", "CONFIG", "PYTHON"}
  if goal == "train":
    _train(["--config", variables.get("CONFIG", "quickstart"), *variables.get("ARGS", "").split()])


def _sbatch(arguments):
  if "--wrap" in arguments:
    _check(pages.Command([], shlex.split(arguments[-1])))
  else:
    script, folder, *settings = (text for text in arguments if not text.startswith("--"))
    assert (ROOT / script).exists() and folder == "RUN_DIR"
    _load([text for text in settings if "=" not in text], [t for t in settings if "=" in t])


LAUNCHERS = {
  "launch/multihost.py": _train,
  "launch/profile_run.py": _profile,
  "launch/plan.py": _plan,
  "launch/suite.py": _suite,
  "launch/population.py": _population,
  "launch/evaluate.py": lambda arguments: _parsed(evaluate.main, arguments),
  "launch/match.py": lambda arguments: _parsed(match.main, arguments),
  "launch/wandb_sync.py": lambda arguments: _parsed(wandb_sync.main, arguments),
  "launch/report.py": lambda arguments: _parsed(report.main, arguments),
}


def _check(command):
  program, *arguments = command.words
  if program.rpartition("/")[2] == "python":
    script, *arguments = arguments
    if script in LAUNCHERS:
      LAUNCHERS[script](arguments)
    else:
      assert (ROOT / script).exists(), script
  elif program == "make":
    _make(arguments)
  else:
    assert program == "sbatch", command
    _sbatch(arguments)


def test_the_figures_are_of_the_committed_results():
  for path, figure in picture.figures().items():
    assert path.read_text() == figure, "run python benchmarks/picture.py"


@each_page
def test_commands_can_be_run(page):
  for command in pages.commands(page):
    try:
      _check(command)
    except (Exception, SystemExit) as error:
      raise AssertionError(f"{' '.join(command.words)}: {error!r}") from error


def test_messages_of_the_troubleshooting_page_are_the_programs():
  text = (ROOT / "docs" / "troubleshooting.md").read_text()
  quoted = re.findall(r"^\| `([^`]+)`", text, re.MULTILINE)
  program = SOURCES + "".join(path.read_text() for path in (ROOT / "launch").glob("*.py"))
  program = re.sub(r'"\s*\n\s*f?"', "", program)
  program += (ROOT / "Makefile").read_text() + (ROOT / "launch/slurm/train.sbatch").read_text()
  parts = [part for message in quoted for part in re.split(r"\.\.\.|RUN_DIR|\d+|python3", message)]
  assert [part for part in parts if len(part) > 5 and part.strip() not in program] == []


@each_page
def test_settings_metrics_and_files_exist(page):
  sections = {key.partition(".")[0] for key in KEYS}
  metrics = METRICS | {names.REPLAY_PREFIX + name for name in make_replay(20).stats(0)}
  wrong, written = [], pages.examples()
  for span in pages.spans(page):
    name = span.partition("=")[0]
    section, _, last = name.partition(".")
    if section in sections and re.fullmatch(r"(?!json|yaml)[a-z_]+|\w*\*", last):
      found = any(re.fullmatch(name.replace("*", r"\w*"), key) for key in KEYS)
    elif re.fullmatch(
      r"(configs|tests|launch)/[\w./-]+|[\w./-]+\.(py|sh|md|sbatch|svg|lock)", span
    ):
      folders = [ROOT, ROOT / "speedyzero_jax", ROOT / "benchmarks"]
      found = span in written or "NAME" in span or any((f / span).exists() for f in folders)
    elif re.fullmatch(rf"({'|'.join(GROUPS)})/[a-z_]+", span):
      found = span in metrics
    else:
      continue
    if not found:
      wrong.append(span)
  assert wrong == []
