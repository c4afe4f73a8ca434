"""The project's own files: what is pinned, what `make` and the gate do, what must not be written
down."""

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PIN = re.compile(r"([a-z0-9-]+)==(\S+)((?: ; [^\\]*)?) \\")
HASH = re.compile(r"    --hash=sha256:[0-9a-f]{64}( \\)?")


LOCKS = ("requirements.lock", "requirements-cuda12.lock", "requirements-cuda13.lock")


@pytest.fixture(scope="module")
def lock():
  return lines_of("requirements.lock")


def lines_of(name):
  return (ROOT / name).read_text().splitlines()


def pins_of(lines):
  return {pin[1]: pin[2] for pin in map(PIN.fullmatch, lines) if pin}


@pytest.fixture(scope="module")
def project():
  return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("name", LOCKS)
def test_locks_hold_names_versions_and_hashes_only(name):
  hashes = {}
  for line in lines_of(name):
    pin = PIN.fullmatch(line)
    if pin:
      hashes[pin[1]] = 0
      name = pin[1]
    else:
      assert HASH.fullmatch(line), line
      hashes[name] += 1
  assert hashes and all(hashes.values())


def test_lock_pins_what_the_project_needs(lock, project):
  pins = pins_of(lock)
  for text in project["dependencies"] + project["optional-dependencies"]["dev"]:
    requirement = Requirement(text)
    assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), text


@pytest.mark.parametrize("cuda", ["cuda12", "cuda13"])
def test_cuda_locks_add_the_plugin_of_the_same_jax(lock, cuda):
  pins, more = pins_of(lock), pins_of(lines_of(f"requirements-{cuda}.lock"))
  assert not pins.keys() & more.keys()
  assert more[f"jax-{cuda}-plugin"] == more[f"jax-{cuda}-pjrt"] == pins["jax"] == pins["jaxlib"]


def test_package_reads_its_version_from_one_place(project):
  assert project["name"] == "speedyzero-jax" and project["requires-python"] == ">=3.11"
  assert project["license"] == "Apache-2.0"
  licence = (ROOT / "LICENSE").read_text()
  assert "Apache License" in licence and "END OF TERMS AND CONDITIONS" in licence


@pytest.mark.parametrize(
  ("target", "command"),
  [
    ("train", ".venv/bin/python launch/multihost.py --config quickstart"),
    ("test", ".venv/bin/python -m pytest -n auto --maxprocesses 4 --dist worksteal"),
    ("lint", ".venv/bin/mypy"),
  ],
)
def test_make_targets(target, command):
  outer = ("MAKEFLAGS", "MAKELEVEL", "ARGS", "CONFIG")
  environment = {key: value for key, value in os.environ.items() if key not in outer}
  dry_run = ["make", "--no-print-directory", "--dry-run", "--always-make", target]
  done = subprocess.run(
    dry_run, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
  )
  lines = [line.strip() for line in done.stdout.splitlines()]
  assert lines[-1] == command
  assert any("--require-hashes" in line and "-r requirements.lock" in line for line in lines)
  if target == "lint":
    assert {".venv/bin/ruff check .", ".venv/bin/ruff format --check ."} <= set(lines)
  assert (ROOT / "launch" / "multihost.py").is_file()


@pytest.mark.parametrize(
  ("failing", "called"), [("none", "test lint"), ("test", "test"), ("lint", "test lint")]
)
def test_gate_runs_tests_then_linters_and_fails_with_either(tmp_path, failing, called):
  log, make = tmp_path / "log", tmp_path / "make"
  make.write_text(
    f'#!/bin/sh\necho "$1" >> {log}\n[ "$1" != {failing} ] || exit 5\n'
  )  # pytest's 5: no test was found
  make.chmod(0o755)
  done = subprocess.run(
    [ROOT / ".ci" / "run"], env={"PATH": f"{tmp_path}:{os.environ['PATH']}"}, check=False
  )
  assert (done.returncode == 0) == (failing == "none")
  assert log.read_text().split() == called.split()


def test_no_registry_address_is_written_down():
  listed = subprocess.run(
    ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
    cwd=ROOT,
    capture_output=True,
    check=False,
  )
  if listed.returncode:
    pytest.skip("not a git checkout")
  address = re.compile(rb"pypi\.org|python[h]osted|(extra-)?index[-]url|find[-]links|file[:]//")
  for name in filter(None, listed.stdout.decode().split("\0")):
    path = ROOT / name
    if path.is_file():
      assert not (found := address.search(path.read_bytes())), f"{name}: {found[0]!r}"
