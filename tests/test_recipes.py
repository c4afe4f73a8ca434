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
from speedyzero_jax import config_io, topology

ROOT = Path(__file__).resolve().parent.parent
SBATCH = ROOT / "launch/slurm/train.sbatch"
MANIFESTS = sorted((ROOT / "launch/k8s").glob("*.yaml"))

# Notes how it was called, and ends as the test wants.
PYTHON = f"""#!{sys.executable} -IS
import json, os, signal, sys, time
kept = {{k: os.environ[k] for k in ("XLA_PYTHON_CLIENT_MEM_FRACTION", "NODE") if k in os.environ}}
with open(os.environ["CALLS"], "a") as file:
  file.write(json.dumps([sys.argv[1:], kept]) + chr(10))
learner = sys.argv[sys.argv.index("--process-id") + 1] == "0"
wait = os.environ.get("WAIT") if learner else None
if wait:
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
  open(wait, "w").write(str(os.getpid()))
  time.sleep(30)
while learner and "TOGETHER" in os.environ:  # until so many have been started
  wanted = os.environ["TOGETHER"] or sys.argv[sys.argv.index("--num-processes") + 1]
  if len(open(os.environ["CALLS"]).readlines()) >= int(wanted):
    break
  time.sleep(0.02)
sys.exit(int(os.environ.get("LEARNER_CODE" if learner else "HELPER_CODE", "0")))
"""

# Runs the tasks of a step, dealt to nodes in turn.
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
  started.append(subprocess.Popen(arguments[split:], env=os.environ | own))
signal.signal(signal.SIGTERM, lambda *_: [task.terminate() for task in started])
sys.exit(max(task.wait() for task in started))
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then tr , '\\n' <<< "$3"; else echo "$@" >> "$SCONTROLLED"; fi
"""
SCANCEL = """#!/bin/bash
echo "$@" >> "$CANCELLED"
kill -TERM "$(< "$WAIT")"
"""


class Cluster:
  """A folder of fake commands and of what they noted."""

  def __init__(self, folder):
    self.folder = folder
    self.run_dir = folder / "run"
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, "scancel": SCANCEL, "python": PYTHON}.items():
      (folder / name).write_text(text)
      (folder / name).chmod(0o755)
    names = ("calls", "steps", "scontrolled", "cancelled")
    self.environment = {"PATH": f"{folder}:/usr/bin:/bin", "PYTHON": str(folder / "python"), "RESTART_PAUSE": "0"} | {
      name.upper(): str(folder / name) for name in names
    }

  def noted(self, name):
    path = self.folder / name
    return path.read_text().splitlines() if path.exists() else []

  def calls(self):
    """(arguments of multihost.py, environment) of each process, by process id."""
    calls = [json.loads(line) for line in self.noted("calls")]
    assert all(arguments[0] == "launch/multihost.py" for arguments, _ in calls)
    found = [(multihost.parse(arguments[1:]), environment) for arguments, environment in calls]
    return sorted(found, key=lambda call: call[0].process_id)

  def sbatch(self, *arguments, nodes="n1", **environment):
    slurm = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": "5000", "SLURM_JOB_NODELIST": nodes, "TOGETHER": ""}
    command = ["bash", SBATCH, self.run_dir, *(arguments or ["atari300k", "env.game=Pong"])]
    return subprocess.Popen(command, env=self.environment | slurm | environment, stdout=subprocess.PIPE, text=True)


@pytest.fixture
def cluster(tmp_path):
  return Cluster(tmp_path)


def check_places(calls, expected):
  """That these are the processes of one run whose roles, by id, are as expected; returns its configuration."""
  arguments = calls[0][0]
  config = config_io.load(arguments.config, arguments.overrides)
  shape = topology.resolve(config, arguments.num_processes)
  assert [call.process_id for call, _ in calls] == list(range(len(expected)))
  assert [shape.role(call.process_id).kind for call, _ in calls] == expected
  for call, _ in calls:
    assert (call.coordinator, call.num_processes) == (arguments.coordinator, len(expected))
    assert (call.config, call.overrides, call.resume) == (arguments.config, arguments.overrides, None)
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
  assert (config.topology.learners, config.env.game, config.run.dir) == (4, "Pong", str(cluster.run_dir))
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
  assert all("--kill-on-bad-exit" not in step for step in cluster.noted("steps") if "--job-name=learners" not in step)


def test_sbatch_parts_gpus(cluster):
  parted = {"LEARNER_GPUS": "0,1,2,3", "HELPER_GPUS": "4,5,6,7"}
  process = cluster.sbatch(ACTORS="1", REANALYSERS="4", SLURM_GPUS_ON_NODE="8", **parted)
  assert finish(process)[1] == 0
  calls = cluster.calls()
  assert [call.devices for call, _ in calls] == ["0,1,2,3", "4", "5", "6", "7", "4"]
  assert [e["XLA_PYTHON_CLIENT_MEM_FRACTION"] for _, e in calls] == ["0.90"] + ["0.45"] * 5
  assert finish(cluster.sbatch(LEARNER_GPUS="0"))[1] == 2  # a learner's GPUs, but not whose the others are


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


def test_sbatch_starts_a_helper_again_alone(cluster):
  (cluster.folder / "sleep").write_text("#!/bin/bash\n")
  (cluster.folder / "sleep").chmod(0o755)
  assert finish(cluster.sbatch(ACTORS="1", HELPER_CODE="134", TOGETHER="5"))[1] == 0
  places = [call.process_id for call, _ in cluster.calls()]
  assert places.count(0) == 1 and places.count(1) >= 4
  assert len(cluster.noted("steps")) == 2


@pytest.mark.parametrize(("number", "requeued"), [(signal.SIGUSR1, True), (signal.SIGUSR2, False)])
def test_sbatch_saves_and_is_requeued_when_its_time_is_over(cluster, number, requeued):
  waiting = cluster.folder / "waiting"
  process = cluster.sbatch(WAIT=str(waiting))
  while not (waiting.exists() and waiting.read_text()):
    assert process.poll() is None
    time.sleep(0.02)
  process.send_signal(number)
  assert finish(process)[1] == 143
  assert cluster.noted("cancelled") == ["--signal=TERM 5000"]  # to all steps; not to the script itself
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


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.stem)
def test_manifest_holds_all_that_it_refers_to(manifest):
  text = manifest.read_text()
  for name, job in all_jobs(manifest):
    pod = job["template"]["spec"]
    assert pod["shareProcessNamespace"]  # a process 1 does not die of signals that it does not handle yet
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    for volume in volumes.values():
      if "secret" in volume:
        assert volume["secret"]["secretName"] in named(manifest, "Secret")
      elif "configMap" in volume:
        assert volume["configMap"]["name"] in named(manifest, "ConfigMap")
      else:
        assert volume["persistentVolumeClaim"]["claimName"] in named(manifest, "PersistentVolumeClaim")
    (container,) = pod["containers"]
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
    for source in container.get("envFrom", []):
      assert source["configMapRef"]["name"] in named(manifest, "ConfigMap")
    for folder, file in re.findall(r"=(/secrets/\w+)/(\S+)", text):
      assert file in named(manifest, "Secret")[mounts[folder]["secret"]["secretName"]]["stringData"], name
    assert "/" + container["command"][1].split("/")[1] in mounts
  for secret in named(manifest, "Secret").values():
    assert not any(secret["stringData"].values())  # nobody's secret, and no well-known one


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.stem)
def test_manifest_starts_the_roles_that_it_promises(manifest, cluster):
  start = named(manifest, "ConfigMap")["sz-start"]["data"]["start.sh"]
  expected = []
  for name, job in all_jobs(manifest):
    assert job["completionMode"] == "Indexed" and job["completions"] == job["parallelism"]
    (container,) = job["template"]["spec"]["containers"]
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    for source in container.get("envFrom", []):
      variables |= named(manifest, "ConfigMap")[source["configMapRef"]["name"]]["data"]
    variables["RUN_DIR"] = str(cluster.run_dir)
    for index in range(job["completions"]):
      own = variables | cluster.environment | {"JOB_COMPLETION_INDEX": str(index), "HELPER_CODE": "2"}
      done = subprocess.run(["bash", "-c", start], env=own, cwd=ROOT, timeout=10)
      assert done.returncode in (0, 2)
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
