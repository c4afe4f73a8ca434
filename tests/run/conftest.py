"""Fixtures for tests of checkpoints."""

import shutil

import pytest

from snapshots import write


@pytest.fixture(scope="session")
def two(tmp_path_factory):
  """A folder with checkpoints 4 and 8, and their snapshots."""
  folder = tmp_path_factory.mktemp("two")
  return folder, write(folder, 4, 8)


@pytest.fixture
def copied(two, tmp_path):
  shutil.copytree(two[0], tmp_path / "run")
  return tmp_path / "run", two[1]
