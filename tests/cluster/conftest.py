"""What tests of several processes share."""

import pytest
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
