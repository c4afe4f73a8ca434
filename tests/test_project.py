"""Tests of the lock files, the gate's exit code, and the absence of registry addresses."""

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


def pins_of(name):
  lines = (ROOT / name).read_text().splitlines()
  return {pin[1]: pin[2] for pin in map(PIN.fullmatch, lines) if pin}


def test_the_locks_pin_what_the_project_needs():
  project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
  extras, pins = project["optional-dependencies"], pins_of("requirements.lock")
  check(project["dependencies"] + extras["dev"], pins)
  for extra in ("docs", "wandb"):
    check(extras[extra], pins | pins_of(f"requirements-{extra}.lock"))


def check(requirements, pins):
  for requirement in map(Requirement, requirements):
    assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), requirement


@pytest.mark.parametrize("cuda", ["cuda12", "cuda13"])
def test_cuda_locks_add_the_plugin_of_the_same_jax(cuda):
  pins, more = pins_of("requirements.lock"), pins_of(f"requirements-{cuda}.lock")
  assert not pins.keys() & more.keys()
  assert more[f"jax-{cuda}-plugin"] == more[f"jax-{cuda}-pjrt"] == pins["jax"] == pins["jaxlib"]


def test_the_cuda_lock_has_the_libraries_that_the_plugin_needs():
  found = [*(ROOT / ".venv/gpu-compiler").glob("jax_cuda12_plugin-*.dist-info/METADATA")]
  assert found, "`make test` installs the plugin; so does `make gpu-plan`"
  needed = re.findall(r'^Requires-Dist: (.*); .*extra == "with-cuda"', found[0].read_text(), re.M)
  assert len(needed) > 5
  check(needed, pins_of("requirements-cuda12.lock"))


@pytest.mark.parametrize(
  ("failing", "called"),
  [
    ("none", "test commands lint docs"), ("test", "test"), ("commands", "test commands"),
    ("lint", "test commands lint"), ("docs", "test commands lint docs"),
  ],
)  # fmt: skip
def test_the_gate_runs_tests_linters_and_docs_and_fails_with_any(tmp_path, failing, called):
  log, make = tmp_path / "log", tmp_path / "make"
  # 5 is pytest's exit code when no test was found.
  make.write_text(f'#!/bin/sh\necho "$1" >> {log}\n[ "$1" != {failing} ] || exit 5\n')
  (tmp_path / "chromium").write_text("#!/bin/sh\n")  # else it would be installed
  for path in (make, tmp_path / "chromium"):
    path.chmod(0o755)
  environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
  done = subprocess.run([ROOT / ".ci" / "run"], env=environment, check=False)
  assert (done.returncode == 0) == (failing == "none")
  assert log.read_text().split() == called.split()


def test_no_registry_address_is_written_down():
  command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
  listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
  if listed.returncode:
    pytest.skip("not a git checkout")
  address = re.compile(rb"pypi\.org|python[h]osted|(extra-)?index[-]url|find[-]links|file[:]//")
  for name in filter(None, listed.stdout.decode().split("\0")):
    path = ROOT / name
    if path.is_file():
      assert not (found := address.search(path.read_bytes())), f"{name}: {found[0]!r}"
