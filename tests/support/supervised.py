"""Supervisor in a separate process, with small child processes that end in various ways."""

import contextlib
import json
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMITS = {"pause": 0.05, "longest_pause": 0.2, "grace": 0.3, "save_patience": 10.0}
LIMITS["kill_after"] = 0.3

# Arguments: children as [name, command, vital], and limits. Prints reports, finally the restarts.
SUPERVISOR = """
import json, os, sys
from pathlib import Path
from speedyzero_jax.cluster import supervisor as module
from speedyzero_jax.cluster.child import Child
from speedyzero_jax.cluster.supervisor import Limits, Supervisor

module._DUPLICATE_SECONDS, module._CAUSE_SECONDS = 1.0, 2.0  # long, for slow machines
if os.isatty(0):
  os.close(os.open(os.ttyname(0), os.O_RDWR))  # makes it the terminal that Ctrl-C is typed on
children, limits = json.loads(sys.argv[1]), json.loads(sys.argv[2])
report = lambda text: print(text, flush=True)
children = [Child(name, command, {}, vital) for name, command, vital in children]
progress = lambda: len(list(Path().glob("checkpoint-*")))
supervisor = Supervisor(children, Path("logs"), report, Limits(**limits), progress)
code = supervisor.run()
report("restarts " + json.dumps(supervisor.restarts))
assert not {"jax", "numpy", "grpc"} & sys.modules.keys()
sys.exit(code)
"""

# Code shared by all children.
COMMON = """
import os, signal, sys, time
from pathlib import Path

name, starts = sys.argv[1], Path("logs", sys.argv[1] + ".log").read_text().count("--- ")
resumed = starts > 1
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

def touch(what):
  Path(what).write_text(str(os.getpid()))

def until(what):
  while not Path(what).exists():
    time.sleep(0.01)

def on_stop(handler):
  for number in STOPS:
    signal.signal(number, handler)

def save(number, _frame):  # as launch/multihost.py: a later SIGINT has its usual effect
  on_stop(signal.SIG_IGN)
  signal.signal(signal.SIGINT, signal.SIG_DFL)
  time.sleep(0.2)
  touch(f"saved-{name}")
  sys.exit(128 + number)

def ready():
  touch(f"ready-{name}")
"""
SLEEP = "ready(); time.sleep(100)"
SAVE = f"on_stop(save); {SLEEP}"
STUBBORN = f"on_stop(signal.SIG_IGN); {SLEEP}"
STOP = (
  f"signal.signal(signal.SIGTERM, lambda *_: (print('got it', flush=True), sys.exit())); {SLEEP}"
)
COUNTED = """
n = len(list(Path().glob("was-*")))
touch(f"was-{n}")
if n > 3: touch("finish")
"""
KILLED = "os.kill(os.getpid(), signal.SIGKILL)"


class Run:
  """A supervisor in its own folder, and access to its children's files and logs."""

  def __init__(self, folder, children, stdin=None, **limits):
    self.folder = folder
    self.mark = f"mark-{uuid.uuid4().hex}"  # on the command lines of all processes
    commands = []
    for name, code, vital in children:
      (folder / f"{name}.py").write_text(f"{COMMON}\n{code}\n")
      commands.append((name, [sys.executable, "-S", f"{name}.py", name, self.mark], vital))
    self.process = subprocess.Popen(
      [sys.executable, "-c", SUPERVISOR, json.dumps(commands), json.dumps(LIMITS | limits)],
      cwd=folder,
      env=os.environ | {"PYTHONPATH": str(ROOT)},
      stdin=stdin,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      start_new_session=True,
      text=True,
    )

  def until(self, *names):
    wait_for(lambda: all((self.folder / name).exists() for name in names))
    return self

  def status(self):
    return json.loads((self.folder / "logs" / "supervisor.json").read_text())

  def child(self, name):
    return next(child for child in self.status()["children"] if child["name"] == name)

  def log(self, name):
    return (self.folder / "logs" / f"{name}.log").read_text()

  def end(self, code):
    """Waits for the exit, asserts its code and that no process is left; returns the output."""
    self.output = self.process.communicate(timeout=30)[0]
    assert self.process.returncode == code, self.output
    wait_for(lambda: not pids(self.mark), 5.0)  # of the killed ones, only children are waited for
    assert {child["pid"] for child in self.status()["children"]} == {None}
    return self.output

  def restarts(self):
    return json.loads(self.output.splitlines()[-1].removeprefix("restarts "))


def wait_for(condition, seconds=20.0, what="timeout"):
  until = time.monotonic() + seconds
  while not (result := condition()):
    assert time.monotonic() < until, what
    time.sleep(0.01)
  return result


def pids(mark):
  """Ids of processes, excluding zombies, with this mark on their command line."""
  result = []
  for path in Path("/proc").glob("[0-9]*/cmdline"):
    with contextlib.suppress(OSError):
      if mark.encode() in path.read_bytes():
        result.append(int(path.parent.name))
  return result
