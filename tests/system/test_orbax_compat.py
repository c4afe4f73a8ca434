"""Tests of Orbax: concurrent, separate checkpoints of processes in one jax.distributed cluster."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint._src.multihost import multihost

from ports import reserved_address
from speedyzero_jax.system import orbax_compat

ROOT = Path(__file__).resolve().parents[2]

_PROCESS = """
import sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/tests/support"]
from pathlib import Path
import jax
number = int(sys.argv[4])
jax.distributed.initialize(sys.argv[3], num_processes=2, process_id=number)
jax.devices()  # of both: neither is ready before the other
from same import assert_same
from snapshots import read, snapshot, write
folder = Path(sys.argv[2]) / str(number)
folder.mkdir()
write(folder, *range(4, 41, 4))
restored, reported = read(folder)
assert not reported
assert_same(restored, snapshot(40))
assert jax.process_count() == 2 and jax.process_index() == number
print("done", flush=True)
sys.stdin.readline()  # leave together: neither may end while the other works
"""


def test_processes_write_at_the_same_time(tmp_path):
  processes = []
  with contextlib.ExitStack() as stack:
    address = stack.enter_context(reserved_address())
    stack.callback(lambda: [process.kill() or process.communicate() for process in processes])
    command = [sys.executable, "-W", "ignore", "-c", _PROCESS, ROOT, tmp_path, address]
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    options["env"] = os.environ | {"JAX_COORDINATOR_BIND_ADDRESS": address}
    processes += [subprocess.Popen([*command, str(number)], **options) for number in range(2)]
    assert [process.stdout.readline() for process in processes] == ["done\n"] * 2
    for process in processes:
      process.stdin.write("\n")
      process.stdin.flush()
    assert [process.wait(60) for process in processes] == [0, 0]


def test_orbax_is_as_before_afterwards(tmp_path):
  original = multihost.process_index
  with orbax_compat.checkpointer() as writer:
    args = ocp.args.Composite(x=ocp.args.StandardSave({"a": np.arange(3)}))
    writer.save(tmp_path / "1", args=args)
  with pytest.raises(FileNotFoundError), orbax_compat.checkpointer() as reader:
    reader.restore(tmp_path / "2", args=ocp.args.Composite(x=ocp.args.StandardRestore()))
  assert multihost.process_index is original
