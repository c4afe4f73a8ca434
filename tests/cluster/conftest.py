"""Fixtures for tests of several processes and of the learner's service."""

import contextlib
import itertools

import pytest

import small_unit
from supervised import Run, pids, wait_for


@pytest.fixture
def run(tmp_path):
  runs = []

  def start(*children, **options):
    runs.append(Run(tmp_path, children, **options))
    return runs[-1]

  yield start
  for one in runs:
    one.process.kill()
    one.process.wait()
    one.process.stdout.close()
    wait_for(lambda one=one: not pids(one.mark))


@pytest.fixture
def make_unit(tmp_path):
  """`small_unit.unit` without a folder, closed at the end of the test."""
  numbers = itertools.count()
  with contextlib.ExitStack() as stack:
    yield lambda *args, **kwargs: stack.enter_context(
      small_unit.unit(tmp_path / f"unit{next(numbers)}", *args, **kwargs)
    )
