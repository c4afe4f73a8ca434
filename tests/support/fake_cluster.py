"""Fakes of a cluster's commands and of a run's processes, for tests of the launch recipes."""

import functools
import json
import subprocess
import sys
from pathlib import Path

import yaml

from launch import multihost
from speedyzero_jax.config import loader
from speedyzero_jax.run import topology

ROOT = Path(__file__).resolve().parents[2]
SBATCH = ROOT / "launch/slurm/train.sbatch"

# A process of the run: records its arguments and exits with CODE_id, or a helper with HELPER_CODE.
# WAIT: the learner waits for SIGTERM, and helpers wait for the file that it creates. TOGETHER: the
# learner waits until that number of processes has started. AFTER_id: waits until that process ends.
PYTHON = f"""#!{sys.executable} -IS
import json, os, signal, sys, time
env, argv = os.environ, sys.argv
def until(condition):
  while not condition():
    time.sleep(0.02)
def lines(name):
  return open(env[name]).read().splitlines() if os.path.exists(env[name]) else []
kept = {{k: env[k] for k in env if k.endswith("MEM_FRACTION") or k == "NODE"}}
with open(env["CALLS"], "a") as file:
  file.write(json.dumps([argv[1:], kept]) + chr(10))
me = argv[argv.index("--process-id") + 1]
learner = me == "0"
if learner and "WAIT" in env:
  def end(*_):
    os.unlink(env["WAIT"])  # helpers that are restarted wait for the next learner
    sys.exit(143)
  signal.signal(signal.SIGTERM, end)
  open(env["WAIT"], "w").write(str(os.getpid()))
  time.sleep(120)
if learner and "TOGETHER" in env:
  wanted = env["TOGETHER"] or argv[argv.index("--num-processes") + 1]
  until(lambda: len(lines("CALLS")) >= int(wanted))
if not learner and "WAIT" in env:
  until(lambda: os.path.exists(env["WAIT"]))
if "AFTER_" + me in env:
  until(lambda: env["AFTER_" + me] in lines("ENDED"))
with open(env["ENDED"], "a") as file:
  file.write(me + chr(10))
code = int(env.get("CODE_" + me, "0" if learner else env.get("HELPER_CODE", "0")))
if code < 0:
  os.kill(os.getpid(), -code)
sys.exit(code)
"""

# Runs the tasks of a step, assigned to nodes round-robin. With --kill-on-bad-exit the first failure
# kills the other tasks.
SRUN = f"""#!{sys.executable} -IS
import os, signal, subprocess, sys
arguments = sys.argv[1:]
split = next(i for i, x in enumerate(arguments) if not x.startswith("--"))
options = dict(x[2:].partition("=")[::2] for x in arguments[:split])
with open(os.environ["STEPS"], "a") as file:
  file.write(" ".join(arguments[:split]) + chr(10))
nodes, started = int(options["nodes"]), []
for task in range(int(options["ntasks"])):
  own = {{"SLURM_PROCID": task, "SLURM_LOCALID": task // nodes, "NODE": task % nodes}}
  env = os.environ | {{key: str(value) for key, value in own.items()}}
  started.append(subprocess.Popen(arguments[split:], env=env, process_group=0))
signal.signal(signal.SIGTERM, lambda *_: [task.terminate() for task in started])
with open(os.environ["TASKS"], "a") as file:
  file.writelines(f"{{task.pid}}{{chr(10)}}" for task in started)
left, highest = {{task.pid for task in started}}, 0
while left:
  pid, status = os.wait()
  left.remove(pid)
  code = os.waitstatus_to_exitcode(status)
  highest = max(highest, code if code >= 0 else 128 - code)
  if code and options.get("kill-on-bad-exit") == "1":
    for other in left:
      os.killpg(other, signal.SIGKILL)
sys.exit(int(os.environ.get("LOST_" + options["job-name"], highest)))
"""
COMMANDS = {
  "python": PYTHON,
  "srun": SRUN,
  "scontrol": """#!/bin/bash
if [ "$1" = show ]; then tr , '\\n' <<< "$3"; else echo "$@" >> "$SCONTROLLED"; fi
""",
  # Signals the tasks but not their child processes, as Slurm with cgroups does.
  "scancel": """#!/bin/bash
echo "$@" >> "$CANCELLED"
until [[ ! $SLOW || -e $SCONTROLLED ]]; do /usr/bin/sleep 0.1; done
kill -TERM $(< "$TASKS") 2> "$TASKS.gone"
""",
  "sleep": """#!/bin/bash
echo "$1" >> "$SLEPT"
exec /usr/bin/sleep ${NAP:-$(($1 < 10 ? 0 : 1)).5}
""",
  "getent": """#!/bin/bash
(($(wc -l < "$SLEPT") >= ${UNKNOWN:-0}))
""",
}


class Cluster:
  """A folder with fake commands and the files in which they record their calls."""

  def __init__(self, folder):
    self.folder, self.run_dir, self.waiting = folder, folder / "run", folder / "waiting"
    for name, text in COMMANDS.items():
      (folder / name).write_text(text)
      (folder / name).chmod(0o755)
    (folder / "slept").touch()
    notes = ("calls", "steps", "tasks", "ended", "slept", "scontrolled", "cancelled")
    self.environment = {name.upper(): str(folder / name) for name in notes} | {
      "PATH": f"{folder}:/usr/bin:/bin",
      "PYTHON": str(folder / "python"),
      "RESTART_PAUSE": "0",
    }

  def noted(self, name):
    path = self.folder / name
    return path.read_text().splitlines() if path.exists() else []

  def calls(self):
    """(arguments of multihost.py, environment) of each process, sorted by process id."""
    calls = [json.loads(line) for line in self.noted("calls")]
    assert all(arguments[0] == "launch/multihost.py" for arguments, _ in calls)
    parsed = [(multihost.parse(arguments[1:]), environment) for arguments, environment in calls]
    return sorted(parsed, key=lambda call: call[0].process_id)

  def started(self, expected):
    """Asserts that one run's processes have started with these roles; returns its configuration."""
    first, calls = self.calls()[0][0], [call for call, _ in self.calls()]
    config = loader.load(first.config, first.overrides)
    shape = topology.resolve(config, first.num_processes)
    assert [call.process_id for call in calls] == list(range(len(expected)))
    assert [shape.role(call.process_id).kind for call in calls] == expected
    for call in calls:
      assert vars(call) | {"process_id": 0, "devices": None} == vars(first) | {"devices": None}
    return config

  def pod(self, manifest, role, index, minimum_life=600, **environment):
    """Starts the process of the index-th pod of this role."""
    own = {"RUN_DIR": str(self.run_dir), "JOB_COMPLETION_INDEX": str(index), "NAP": "0.1"}
    variables = pod_variables(manifest, role) | own | self.environment | environment
    bash, script = container(manifest, role)["command"]
    start = (ROOT / script).read_text().replace("-ge 600", f"-ge {minimum_life}")
    return subprocess.Popen([bash, "-c", start], env=variables, cwd=ROOT)

  def start_sbatch(self, *arguments, nodes="n1", script=SBATCH, **environment):
    slurm = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": "5000", "SLURM_JOB_NODELIST": nodes}
    command = ["bash", script, self.run_dir, *(arguments or ["atari300k", "env.game=Pong"])]
    env = self.environment | slurm | {"TOGETHER": ""} | environment
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)

  def sbatch(self, *arguments, **options):
    """Runs the batch script and returns its exit code; `output` is what it printed."""
    process = self.start_sbatch(*arguments, **options)
    self.output = process.communicate(timeout=60)[0]
    return process.returncode


@functools.cache
def documents(manifest):
  return [d for d in yaml.safe_load_all(manifest.read_text()) if d]


def named(manifest, kind):
  return {d["metadata"]["name"]: d for d in documents(manifest) if d["kind"] == kind}


def jobs(manifest):
  """The specification of each Job, by role."""
  for jobset in named(manifest, "JobSet").values():
    return {job["name"]: job["template"]["spec"] for job in jobset["spec"]["replicatedJobs"]}
  return {name: job["spec"] for name, job in named(manifest, "Job").items()}


def container(manifest, role):
  (only,) = jobs(manifest)[role]["template"]["spec"]["containers"]
  return only


def pod_variables(manifest, role):
  variables = {entry["name"]: entry["value"] for entry in container(manifest, role)["env"]}
  for source in container(manifest, role).get("envFrom", []):
    variables |= named(manifest, "ConfigMap")[source["configMapRef"]["name"]]["data"]
  return variables
