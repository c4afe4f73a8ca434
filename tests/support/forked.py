"""Processes that are killed at any moment."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_LOOP = """
import os, sys
for _ in sys.stdin:
  child = os.fork()
  if not child:
    work(*sys.argv[1:])
  os.write(1, b"pid %d\\n" % child)
  os.waitpid(child, 0)
  os.write(1, b"dead\\n")
"""


@contextlib.contextmanager
def killing(work, *arguments):
  """Yields a function (count, seconds) that runs `work` in a process and returns its lines.

  `work` is Python code that defines a function of this name, which prints lines with `os.write`.
  The process is killed some seconds after it has printed `count` lines.

  One process imports, and forks those that are killed: an interpreter takes a second to start.
  """
  command = [sys.executable, "-W", "ignore", "-c", work + _LOOP, *map(str, arguments)]
  paths = [ROOT, ROOT / "tests/support", ROOT / "tests/run"]
  environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
  with subprocess.Popen(
    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
  ) as parent:

    def run(count, seconds):
      parent.stdin.write("next\n")
      parent.stdin.flush()
      child, lines = 0, []
      while not child or len(lines) < count:
        line = parent.stdout.readline()
        if line.startswith("pid "):
          child = int(line.removeprefix("pid "))
        else:
          assert line not in ("", "dead\n"), "it ended by itself"
          lines.append(line)
      time.sleep(seconds)
      os.kill(child, signal.SIGKILL)
      return lines + list(iter(parent.stdout.readline, "dead\n"))

    yield run
    parent.stdin.close()
    assert parent.wait() == 0
