"""The recipes for clusters: what they would start, with everything that is a cluster's replaced by a script."""

import functools
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from launch import multihost
from speedyzero_jax.config import loader
from speedyzero_jax.run import topology

ROOT = Path(__file__).resolve().parents[2]
SBATCH = ROOT / "launch/slurm/train.sbatch"
MANIFESTS = sorted((ROOT / "launch/k8s").glob("*.yaml"))

# Notes how it was called, and ends as the test wants.
PYTHON = f"""#!{sys.executable} -IS
import json, os, signal, sys, time
kept = {{k: os.environ[k] for k in ("XLA_PYTHON_CLIENT_MEM_FRACTION", "NODE") if k in os.environ}}
with open(os.environ["CALLS"], "a") as file:
  file.write(json.dumps([sys.argv[1:], kept]) + chr(10))
me = sys.argv[sys.argv.index("--process-id") + 1]
learner = me == "0"
wait = os.environ.get("WAIT") if learner else None
if wait:
  def end(*_):
    os.unlink(wait)  # helpers that are started again wait for the next one
    sys.exit(143)
  signal.signal(signal.SIGTERM, end)
  open(wait, "w").write(str(os.getpid()))
  time.sleep(30)
while learner and "TOGETHER" in os.environ:  # until so many have been started
  wanted = os.environ["TOGETHER"] or sys.argv[sys.argv.index("--num-processes") + 1]
  if len(open(os.environ["CALLS"]).readlines()) >= int(wanted):
    break
  time.sleep(0.02)
code = int(os.environ.get("CODE_" + me, os.environ.get("LEARNER_CODE" if learner else "HELPER_CODE", "0")))
while not learner and "WAIT" in os.environ and not os.path.exists(os.environ["WAIT"]):  # for the learner
  time.sleep(0.02)
first = os.environ.get("AFTER_" + me)  # who is to end before
while first and not (os.path.exists(os.environ["ENDED"]) and first in open(os.environ["ENDED"]).read().split()):
  time.sleep(0.02)
with open(os.environ["ENDED"], "a") as file:
  file.write(me + chr(10))
if code < 0:
  os.kill(os.getpid(), -code)
sys.exit(code)
"""

# Runs the tasks of a step, dealt to nodes in turn. The first that fails takes the others with it, if asked.
SRUN = f"""#!{sys.executable} -IS
import os, signal, subprocess, sys
arguments = sys.argv[1:]
split = next(i for i, x in enumerate(arguments) if not x.startswith("--"))
options = dict(x[2:].partition("=")[::2] for x in arguments[:split])
with open(os.environ["STEPS"], "a") as file:
  file.write(" ".join(arguments[:split]) + chr(10))
tasks, nodes = int(options["ntasks"]), int(options["nodes"])
started = []
for task in range(tasks):
  own = {{"SLURM_PROCID": str(task), "SLURM_LOCALID": str(task // nodes), "NODE": str(task % nodes)}}
  started.append(subprocess.Popen(arguments[split:], env=os.environ | own, process_group=0))
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
sys.exit(highest)
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then tr , '\\n' <<< "$3"; else echo "$@" >> "$SCONTROLLED"; fi
"""
# Signals tasks, but not the processes that they have started: so does Slurm with cgroups.
SCANCEL = """#!/bin/bash
echo "$@" >> "$CANCELLED"
kill -TERM $(< "$TASKS") 2> "$TASKS.gone"
"""
SLEEP = """#!/bin/bash
echo "$1" >> "$SLEPT"
exec /usr/bin/sleep 0.$(($1 < 10 ? 2 : 4))
"""
GETENT = """#!/bin/bash
(($(wc -l < "$SLEPT") >= ${UNKNOWN:-0}))
"""


class Cluster:
  """A folder of fake commands and of what they noted."""

  def __init__(self, folder):
    self.folder = folder
    self.run_dir = folder / "run"
    commands = {"srun": SRUN, "scontrol": SCONTROL, "scancel": SCANCEL, "python": PYTHON}
    commands |= {"sleep": SLEEP, "getent": GETENT}
    for name, text in commands.items():
      (folder / name).write_text(text)
      (folder / name).chmod(0o755)
    (folder / "slept").touch()
    names = ("calls", "steps", "tasks", "ended", "slept", "scontrolled", "cancelled")
    self.environment = {
      "PATH": f"{folder}:/usr/bin:/bin",
      "PYTHON": str(folder / "python"),
      "RESTART_PAUSE": "0",
    } | {name.upper(): str(folder / name) for name in names}

  def noted(self, name):
    path = self.folder / name
    return path.read_text().splitlines() if path.exists() else []

  def calls(self):
    """(arguments of multihost.py, environment) of each process, by process id."""
    calls = [json.loads(line) for line in self.noted("calls")]
    assert all(arguments[0] == "launch/multihost.py" for arguments, _ in calls)
    found = [(multihost.parse(arguments[1:]), environment) for arguments, environment in calls]
    return sorted(found, key=lambda call: call[0].process_id)

  def pod(self, manifest, role, index, edit=lambda text: text, **environment):
    """Starts what the pod of this role, with this index among them, would."""
    variables = pod_variables(manifest, role) | {
      "RUN_DIR": str(self.run_dir),
      "JOB_COMPLETION_INDEX": str(index),
    }
    start = edit(named(manifest, "ConfigMap")["sz-start"]["data"]["start.sh"])
    return subprocess.Popen(
      ["bash", "-c", start], env=variables | self.environment | environment, cwd=ROOT
    )

  def sbatch(self, *arguments, nodes="n1", script=SBATCH, **environment):
    slurm = {
      "SLURM_SUBMIT_DIR": str(ROOT),
      "SLURM_JOB_ID": "5000",
      "SLURM_JOB_NODELIST": nodes,
      "TOGETHER": "",
    }
    command = ["bash", script, self.run_dir, *(arguments or ["atari300k", "env.game=Pong"])]
    return subprocess.Popen(
      command, env=self.environment | slurm | environment, stdout=subprocess.PIPE, text=True
    )


@pytest.fixture
def cluster(tmp_path):
  return Cluster(tmp_path)


def check_places(calls, expected):
  """That these are the processes of one run whose roles, by id, are as expected; returns its configuration."""
  arguments = calls[0][0]
  config = loader.load(arguments.config, arguments.overrides)
  shape = topology.resolve(config, arguments.num_processes)
  assert [call.process_id for call, _ in calls] == list(range(len(expected)))
  assert [shape.role(call.process_id).kind for call, _ in calls] == expected
  for call, _ in calls:
    assert (call.coordinator, call.num_processes) == (arguments.coordinator, len(expected))
    assert (call.config, call.overrides, call.resume) == (
      arguments.config,
      arguments.overrides,
      None,
    )
  return config


def finish(process):
  return process.communicate(timeout=20)[0], process.returncode


def test_sbatch_is_valid_and_its_options_are_where_slurm_reads_them():
  subprocess.run(["bash", "-n", SBATCH], check=True)
  before, _, after = SBATCH.read_text().partition("\nset -u\n")
  options = re.findall(r"^#SBATCH (\S+)$", before, re.M)
  assert {"--requeue", "--signal=B:USR1@600", "--open-mode=append"} <= set(options)
  assert "#SBATCH" not in after  # Slurm stops reading them at the first command


def test_sbatch_gives_every_node_a_learner(cluster):
  _, code = finish(cluster.sbatch(nodes="n1,n2,n3,n4"))
  assert code == 0
  config = check_places(cluster.calls(), ["learner"] * 4)
  assert (config.topology.learners, config.env.game, config.run.dir) == (
    4,
    "Pong",
    str(cluster.run_dir),
  )
  assert {call.coordinator for call, _ in cluster.calls()} == {f"n1:{61440 + 5000 % 4096}"}
  assert all(call.devices is None and not environment.get("XLA_PYTHON_CLIENT_MEM_FRACTION")
             for call, environment in cluster.calls())  # fmt: skip
  (step,) = cluster.noted("steps")
  assert "--nodes=4 --ntasks=4" in step and "--overlap" in step and "--kill-on-bad-exit=1" in step


def test_sbatch_puts_helpers_beside_the_learner_that_they_serve(cluster):
  process = cluster.sbatch(nodes="n1,n2", ACTORS="2", REANALYSERS="4", SLURM_GPUS_ON_NODE="2")
  assert finish(process)[1] == 0
  calls = cluster.calls()
  config = check_places(calls, ["learner"] * 2 + ["actor"] * 2 + ["reanalyser"] * 4)
  shape = topology.resolve(config)
  for call, environment in calls:
    assert int(environment["NODE"]) == shape.role(call.process_id).unit
  # On each node: a learner on both GPUs, an actor and two reanalysers dealt over them; three share the fuller one.
  assert [call.devices for call, _ in calls] == [None, None, "0", "0", "1", "1", "0", "0"]
  assert {environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] for _, environment in calls} == {"0.30"}


def test_sbatch_parts_gpus(cluster):
  parted = {"LEARNER_GPUS": "0,1,2,3", "HELPER_GPUS": "4,5,6,7"}
  process = cluster.sbatch(ACTORS="1", REANALYSERS="4", SLURM_GPUS_ON_NODE="8", **parted)
  assert finish(process)[1] == 0
  calls = cluster.calls()
  assert [call.devices for call, _ in calls] == ["0,1,2,3", "4", "5", "6", "7", "4"]
  assert [e["XLA_PYTHON_CLIENT_MEM_FRACTION"] for _, e in calls] == ["0.90"] + ["0.45"] * 5
  assert (
    finish(cluster.sbatch(LEARNER_GPUS="0"))[1] == 2
  )  # a learner's GPUs, but not whose the others are


def test_sbatch_of_a_heterogeneous_job(cluster):
  parts = {"SLURM_JOB_NODELIST_HET_GROUP_0": "g1,g2", "SLURM_JOB_NODELIST_HET_GROUP_1": "c1,c2,c3"}
  process = cluster.sbatch(ACTORS="2", REANALYSERS="4", SLURM_HET_SIZE="2", **parts)
  assert finish(process)[1] == 0
  check_places(cluster.calls(), ["learner"] * 2 + ["actor"] * 2 + ["reanalyser"] * 4)
  steps = {re.search(r"--job-name=(\w+)", step)[1]: step for step in cluster.noted("steps")}
  assert "--het-group=0" in steps["learners"] and "--nodes=2 --ntasks=2" in steps["learners"]
  assert "--het-group=1" in steps["actors"] and "--nodes=2 --ntasks=2" in steps["actors"]
  assert "--het-group=1" in steps["reanalysers"] and "--nodes=3 --ntasks=4" in steps["reanalysers"]


def test_sbatch_goes_on_with_a_run(cluster):
  cluster.run_dir.mkdir()
  (cluster.run_dir / "config.yaml").touch()
  assert finish(cluster.sbatch("atari300k", "topology.host=", nodes="n1,n2"))[1] == 0
  for call, _ in cluster.calls():
    assert call.resume == cluster.run_dir and not call.config
    assert not any(text.startswith("run.dir") for text in call.overrides)


@pytest.mark.parametrize(("code", "starts"), [(0, 1), (1, 1), (2, 1), (134, 3)])
def test_sbatch_starts_all_again_after_a_crash_only(cluster, code, starts):
  output, got = finish(cluster.sbatch(LEARNER_CODE=str(code), MAX_RESTARTS="2"))
  assert (got, len(cluster.noted("steps"))) == (code, starts)
  assert output.count("starting all again") == starts - 1
  assert not cluster.noted("scontrolled")


@pytest.mark.parametrize("code", [1, 2])
@pytest.mark.parametrize("failed", [0, 1])
def test_sbatch_heeds_a_learner_that_failed_though_others_abort_or_are_killed(
  cluster, failed, code
):
  ends = {
    f"CODE_{failed}": str(code),
    f"CODE_{1 - failed}": "134",
    f"AFTER_{1 - failed}": str(failed),
  }
  assert finish(cluster.sbatch(nodes="n1,n2", MAX_RESTARTS="2", **ends))[1] == code
  assert len(cluster.noted("steps")) == 1


def test_sbatch_starts_all_again_when_a_learner_failed_because_another_was_killed(cluster):
  ends = {"CODE_0": "-9", "CODE_1": "1", "AFTER_1": "0"}
  assert finish(cluster.sbatch(nodes="n1,n2", MAX_RESTARTS="2", **ends))[1] == 128 + 9
  assert len(cluster.noted("steps")) == 3


def test_sbatch_starts_a_helper_again_alone(cluster):
  assert finish(cluster.sbatch(ACTORS="2", CODE_1="134", TOGETHER="6", CODE_2="0"))[1] == 0
  places = [call.process_id for call, _ in cluster.calls()]
  assert (places.count(0), places.count(1), places.count(2)) == (1, 4, 1)
  assert len(cluster.noted("steps")) == 2


@pytest.mark.parametrize(("kind", "code", "ended", "pauses"), [
  ("ACTORS", 2, 2, []), ("REANALYSERS", 1, 1, ["5", "10", "20", "40"]), ("ACTORS", 134, 1, ["5", "10", "20", "40"]),
])  # fmt: skip
def test_sbatch_saves_and_fails_when_a_helper_cannot_start(cluster, kind, code, ended, pauses):
  waiting = str(cluster.folder / "waiting")
  output, got = finish(cluster.sbatch(WAIT=waiting, HELPER_CODE=str(code), **{kind: "1"}))
  assert got == ended and "is lost" in output
  assert cluster.noted("slept") == pauses
  assert [call.process_id for call, _ in cluster.calls()] == [0] + [1] * (len(pauses) + 1)
  assert cluster.noted("cancelled") == [
    "--signal=TERM 5000"
  ]  # learners ended by that, in their own time


def test_sbatch_counts_deaths_of_helpers_anew_after_a_long_life(cluster):
  (cluster.folder / "train.sbatch").write_text(
    SBATCH.read_text().replace("SECONDS >= 600", "SECONDS >= 0")
  )
  process = cluster.sbatch(
    script=cluster.folder / "train.sbatch", ACTORS="1", HELPER_CODE="134", TOGETHER="9"
  )
  assert finish(process)[1] == 0
  assert set(cluster.noted("slept")) == {"5"} and len(cluster.noted("slept")) >= 7


def test_sbatch_starts_all_again_when_a_step_of_helpers_is_lost(cluster):
  srun = SRUN.replace(
    "sys.exit(highest)", "sys.exit(137 if options['job-name'] == 'actors' else highest)"
  )
  (cluster.folder / "srun").write_text(srun)
  process = cluster.sbatch(ACTORS="1", WAIT=str(cluster.folder / "waiting"), MAX_RESTARTS="1")
  assert finish(process)[1] == 137
  assert len(cluster.noted("steps")) == 4


@pytest.mark.parametrize(("number", "requeued"), [(signal.SIGUSR1, True), (signal.SIGUSR2, False)])
def test_sbatch_saves_and_is_requeued_when_its_time_is_over(cluster, number, requeued):
  waiting = cluster.folder / "waiting"
  process = cluster.sbatch(WAIT=str(waiting))
  while not (waiting.exists() and waiting.read_text()):
    assert process.poll() is None
    time.sleep(0.02)
  process.send_signal(number)
  assert finish(process)[1] == 143
  assert cluster.noted("cancelled") == [
    "--signal=TERM 5000"
  ]  # to all steps; not to the script itself
  assert cluster.noted("scontrolled") == (["requeue 5000"] if requeued else [])
  assert len(cluster.noted("steps")) == 1


@functools.cache
def documents(manifest):
  return [d for d in yaml.safe_load_all(manifest.read_text()) if d]


def jobs_of(document):
  """[(name, Job's spec)] of a document."""
  if document["kind"] == "JobSet":
    return [(job["name"], job["template"]["spec"]) for job in document["spec"]["replicatedJobs"]]
  return [("sz", document["spec"])] if document["kind"] == "Job" else []


def all_jobs(manifest):
  return [job for document in documents(manifest) for job in jobs_of(document)]


def named(manifest, kind):
  return {d["metadata"]["name"]: d for d in documents(manifest) if d["kind"] == kind}


def pod_variables(manifest, role):
  (container,) = dict(all_jobs(manifest))[role]["template"]["spec"]["containers"]
  variables = {entry["name"]: entry["value"] for entry in container["env"]}
  for source in container.get("envFrom", []):
    variables |= named(manifest, "ConfigMap")[source["configMapRef"]["name"]]["data"]
  return variables


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.stem)
def test_manifest_holds_all_that_it_refers_to(manifest):
  text = manifest.read_text()
  for name, job in all_jobs(manifest):
    pod = job["template"]["spec"]
    assert pod[
      "shareProcessNamespace"
    ]  # a process 1 does not die of signals that it does not handle yet
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    for volume in volumes.values():
      if "secret" in volume:
        assert volume["secret"]["secretName"] in named(manifest, "Secret")
      elif "configMap" in volume:
        assert volume["configMap"]["name"] in named(manifest, "ConfigMap")
      else:
        assert volume["persistentVolumeClaim"]["claimName"] in named(
          manifest, "PersistentVolumeClaim"
        )
    (container,) = pod["containers"]
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
    for source in container.get("envFrom", []):
      assert source["configMapRef"]["name"] in named(manifest, "ConfigMap")
    for folder, file in re.findall(r"=(/secrets/\w+)/(\S+)", text):
      assert (
        file in named(manifest, "Secret")[mounts[folder]["secret"]["secretName"]]["stringData"]
      ), name
    assert "/" + container["command"][1].split("/")[1] in mounts
  for secret in named(manifest, "Secret").values():
    assert not any(secret["stringData"].values())  # nobody's secret, and no well-known one


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.stem)
def test_manifest_starts_the_roles_that_it_promises(manifest, cluster):
  expected = []
  for name, job in all_jobs(manifest):
    assert job["completionMode"] == "Indexed" and job["completions"] == job["parallelism"]
    for index in range(job["completions"]):
      assert cluster.pod(manifest, name, index, HELPER_CODE="2").wait(10) in (0, 2)
    variables = pod_variables(manifest, name)
    if name == "sz":
      actors, reanalysers = int(variables["ACTORS"]), int(variables["REANALYSERS"])
      expected = ["learner"] + ["actor"] * actors + ["reanalyser"] * reanalysers
    else:
      expected += [name] * job["completions"]
  config = check_places(cluster.calls(), expected)
  assert config.topology.token_file and config.run.compile_cache.startswith("/runs/")
  (owner,) = (d for d in documents(manifest) if jobs_of(d))
  pods = f"{owner['metadata']['name']}{'-learner-0' if owner['kind'] == 'JobSet' else ''}"
  assert cluster.calls()[0][0].coordinator.startswith(f"{pods}-0.{owner['metadata']['name']}:")


HELPERS = [(MANIFESTS[0], "sz", 3), (MANIFESTS[1], "reanalyser", 0)]  # manifest, role, index


@pytest.mark.parametrize(("manifest", "role", "index"), HELPERS)
@pytest.mark.parametrize("code", [1, 2])
def test_a_pod_gives_up_a_helper_that_cannot_start(manifest, role, index, code, cluster):
  assert cluster.pod(manifest, role, index, HELPER_CODE=str(code)).wait(20) == 2
  assert cluster.noted("slept") == (["5", "10", "20", "40"] if code == 1 else [])
  assert len(cluster.calls()) == 1 + len(cluster.noted("slept"))


@pytest.mark.parametrize(("manifest", "role", "index"), HELPERS)
def test_a_pod_counts_deaths_of_helpers_anew_after_a_long_life(manifest, role, index, cluster):
  pod = cluster.pod(
    manifest, role, index, lambda text: text.replace("-ge 600", "-ge 0"), HELPER_CODE="134"
  )
  while len(cluster.noted("slept")) < 6:
    assert pod.poll() is None
    time.sleep(0.02)
  pod.terminate()
  assert pod.wait(10) == -signal.SIGTERM
  assert set(cluster.noted("slept")) == {"5"}


@pytest.mark.parametrize(("manifest", "role", "index"), HELPERS)
def test_a_pod_waits_for_process_0_to_have_one_and_ends_at_once_when_told_to(
  manifest, role, index, cluster
):
  waiting = cluster.folder / "waiting"
  pod = cluster.pod(manifest, role, index, UNKNOWN="7", WAIT=str(waiting))
  while not cluster.calls():
    assert pod.poll() is None
    time.sleep(0.02)
  assert cluster.noted("slept") == ["5"] * 7
  pod.terminate()
  assert pod.wait(10) == -signal.SIGTERM
  waiting.touch()  # a container's other processes end with it


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.stem)
def test_manifest_fails_when_a_pod_gives_up_and_bounds_its_restarts(manifest):
  for _, job in all_jobs(manifest):
    assert job["template"]["spec"]["restartPolicy"] == "Never" and job["backoffLimit"] <= 20
    (rule,) = (rule for rule in job["podFailurePolicy"]["rules"] if rule["action"] == "FailJob")
    assert rule["onExitCodes"] == {"operator": "In", "values": [2]}
  for jobset in named(manifest, "JobSet").values():
    (rule,) = jobset["spec"]["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    assert "targetReplicatedJobs" not in rule  # any


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.stem)
def test_manifest_lets_nobody_else_near(manifest):
  (policy,) = named(manifest, "NetworkPolicy").values()
  (rule,) = policy["spec"]["ingress"]
  assert rule == {"from": [{"podSelector": policy["spec"]["podSelector"]}]}
  ((key, value),) = policy["spec"]["podSelector"]["matchLabels"].items()
  (owner,) = (d for d in documents(manifest) if jobs_of(d))
  assert value == owner["metadata"]["name"] and key.endswith(owner["kind"].lower() + "-name")


def test_readme_and_page_name_the_recipes():
  page = (ROOT / "docs/topology.md").read_text()
  for recipe in [SBATCH, *MANIFESTS]:
    assert str(recipe.relative_to(ROOT)) in page
  assert "docs/topology.md" in (ROOT / "README.md").read_text()
