"""Tests of launch recipes for clusters, with fake Slurm commands and fake processes."""

import re
import signal

import pytest

from fake_cluster import ROOT, SBATCH, Cluster, jobs, named, pod_variables
from launched import wait_until
from speedyzero_jax.config import loader
from speedyzero_jax.run import topology

MANIFESTS = [ROOT / "launch/k8s/indexed-job.yaml", ROOT / "launch/k8s/jobset.yaml"]
STORAGE = ROOT / "launch/k8s/storage.yaml"


@pytest.fixture
def cluster(tmp_path):
  return Cluster(tmp_path)


def test_sbatch_options_are_where_slurm_reads_them():
  before, _, after = SBATCH.read_text().partition("\nset -u\n")
  options = re.findall(r"^#SBATCH (\S+)$", before, re.M)
  assert {"--requeue", "--signal=B:USR1@600", "--open-mode=append"} <= set(options)
  assert "#SBATCH" not in after  # Slurm stops at the first command


def test_sbatch_refuses_a_time_limit_that_ends_it_at_once(cluster):
  assert cluster.sbatch(SLURM_JOB_START_TIME="1000", SLURM_JOB_END_TIME="1600") == 2
  assert not cluster.calls()
  assert cluster.sbatch(SLURM_JOB_START_TIME="1000", SLURM_JOB_END_TIME="1900") == 0


def test_sbatch_gives_every_node_a_learner(cluster):
  assert cluster.sbatch(nodes="n1,n2,n3,n4") == 0
  config = cluster.started(["learner"] * 4)
  assert (config.env.game, config.run.dir) == ("Pong", str(cluster.run_dir))
  call, environment = cluster.calls()[0]
  assert call.coordinator == f"n1:{61440 + 5000 % 4096}"
  assert call.devices is None and "XLA_CLIENT_MEM_FRACTION" not in environment
  (step,) = cluster.noted("steps")
  assert "--nodes=4 --ntasks=4" in step and "--overlap" in step and "--kill-on-bad-exit=1" in step


def test_sbatch_places_helpers_beside_the_learner_that_they_serve(cluster):
  counts = {"ACTORS": "2", "REFRESHERS": "4", "SLURM_GPUS_ON_NODE": "2"}
  counts |= {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9"}
  assert cluster.sbatch(nodes="n1,n2", **counts) == 0
  config = cluster.started(["learner"] * 2 + ["actor"] * 2 + ["refresher"] * 4)
  shape, calls = topology.resolve(config), cluster.calls()
  for call, environment in calls:
    assert int(environment["NODE"]) == shape.role(call.process_id).unit
  # Each node: a learner on both GPUs; an actor and a refresher on GPU 0, a refresher on GPU 1.
  assert [call.devices for call, _ in calls] == [None, None, [0], [0], [1], [1], [0], [0]]
  for _, environment in calls:
    del environment["NODE"]
    assert environment == {"XLA_CLIENT_MEM_FRACTION": "0.30"}


@pytest.mark.parametrize(
  ("stored", "given", "central"),
  [("", "actors central", True), ("central", "", True), ("central", "actors", False)],
)
def test_sbatch_gives_actors_no_gpu_with_central_inference(cluster, stored, given, central):
  key = "topology.inference="
  if stored:
    cluster.run_dir.mkdir()
    config = loader.load(["impala"], [key + stored])
    (cluster.run_dir / "config.yaml").write_text(loader.to_yaml(config))
  counts = {"ACTORS": "8", "REFRESHERS": "1", "SLURM_GPUS_ON_NODE": "2"}
  assert cluster.sbatch("impala", *(key + value for value in given.split()), **counts) == 0
  calls = cluster.calls()
  memory = [environment.get("XLA_CLIENT_MEM_FRACTION") for _, environment in calls]
  if central:
    assert [call.devices for call, _ in calls] == [None] * 9 + [[0]]
    assert memory == ["0.45", *[None] * 8, "0.45"]
  else:
    assert [call.devices for call, _ in calls] == [None, *[[0], [1]] * 4, [0]]
    assert memory == ["0.15"] * 10


def test_sbatch_separates_gpus(cluster):
  gpus = {"LEARNER_GPUS": "0,1,2,3", "HELPER_GPUS": "4,5,6,7", "SLURM_GPUS_ON_NODE": "8"}
  assert cluster.sbatch(ACTORS="1", REFRESHERS="4", **gpus) == 0
  calls = cluster.calls()
  assert [call.devices for call, _ in calls] == [[0, 1, 2, 3], [4], [5], [6], [7], [4]]
  assert [e["XLA_CLIENT_MEM_FRACTION"] for _, e in calls] == ["0.90"] + ["0.45"] * 5
  assert cluster.sbatch(LEARNER_GPUS="0") == 2  # without HELPER_GPUS


def test_sbatch_of_a_heterogeneous_job(cluster):
  parts = {"SLURM_JOB_NODELIST_HET_GROUP_0": "g1,g2", "SLURM_JOB_NODELIST_HET_GROUP_1": "c1,c2,c3"}
  assert cluster.sbatch(ACTORS="2", REFRESHERS="4", SLURM_HET_SIZE="2", **parts) == 0
  cluster.started(["learner"] * 2 + ["actor"] * 2 + ["refresher"] * 4)
  steps = {re.search(r"--job-name=(\w+)", step)[1]: step for step in cluster.noted("steps")}
  for name, group, size in (
    ("learners", 0, "--nodes=2 --ntasks=2"),
    ("actors", 1, "--nodes=2 --ntasks=2"),
    ("refreshers", 1, "--nodes=3 --ntasks=4"),
  ):
    assert f"--het-group={group}" in steps[name] and size in steps[name]


def test_sbatch_resumes_a_run(cluster):
  cluster.run_dir.mkdir()
  (cluster.run_dir / "config.yaml").touch()
  assert cluster.sbatch("atari300k", "topology.host=", nodes="n1,n2") == 0
  for call, _ in cluster.calls():
    assert call.resume == cluster.run_dir and not call.config
    assert not any(text.startswith("run.dir") for text in call.overrides)


@pytest.mark.parametrize(
  ("ends", "code", "starts"),
  [
    ({"CODE_0": "0", "CODE_1": "0"}, 0, 1),
    ({"CODE_0": "1", "CODE_1": "134", "AFTER_1": "0"}, 1, 1),  # a failure, and then an abort
    ({"CODE_0": "134", "CODE_1": "1", "AFTER_0": "1"}, 1, 1),
    ({"CODE_0": "2", "CODE_1": "134", "AFTER_1": "0"}, 2, 1),
    ({"CODE_0": "134", "NAP": "0.1"}, 134, 3),
    ({"CODE_0": "-9", "CODE_1": "1", "AFTER_1": "0"}, 128 + 9, 3),  # a failure by a lost peer
  ],
)
def test_sbatch_restarts_all_after_a_crash_only(cluster, ends, code, starts):
  nodes = "n1,n2" if "CODE_1" in ends else "n1"
  assert cluster.sbatch(nodes=nodes, MAX_RESTARTS="2", **ends) == code
  assert len(cluster.noted("steps")) == starts
  assert not cluster.noted("scontrolled")


@pytest.mark.parametrize(
  ("kind", "code", "ended", "pauses"),
  [("ACTORS", 2, 2, []), ("REFRESHERS", 134, 1, ["5", "10", "20", "40"])],
)
def test_sbatch_saves_and_fails_when_a_helper_cannot_start(cluster, kind, code, ended, pauses):
  helper = {kind: "1", "HELPER_CODE": str(code), "NAP": "0.1"}
  assert cluster.sbatch(WAIT=str(cluster.waiting), **helper) == ended
  assert cluster.noted("slept") == pauses
  assert [call.process_id for call, _ in cluster.calls()] == [0] + [1] * (len(pauses) + 1)
  assert cluster.noted("cancelled") == ["--signal=TERM 5000"]


def test_sbatch_restarts_a_helper_alone_and_forgets_deaths_after_a_long_life(cluster):
  script = cluster.folder / "train.sbatch"
  script.write_text(SBATCH.read_text().replace("SECONDS >= 600", "SECONDS >= 0"))
  ends = {"CODE_1": "134", "CODE_2": "0", "NAP": "0.1"}
  assert cluster.sbatch(script=script, ACTORS="2", TOGETHER="10", **ends) == 0
  ids = [call.process_id for call, _ in cluster.calls()]
  assert ids.count(0) == ids.count(2) == 1 and ids.count(1) >= 8
  assert set(cluster.noted("slept")) == {"5"} and len(cluster.noted("steps")) == 2


def test_sbatch_counts_restarts_again_after_a_long_attempt(cluster):
  script = cluster.folder / "train.sbatch"
  script.write_text(SBATCH.read_text().replace("SECONDS - begun >= 600", "SECONDS - begun >= 0"))
  process = cluster.start_sbatch(script=script, MAX_RESTARTS="1", CODE_0="134", NAP="0.1")
  assert wait_until(lambda: len(cluster.noted("steps")) >= 4, process)
  process.send_signal(signal.SIGUSR2)
  process.communicate(timeout=60)
  assert process.returncode in (134, 143)


@pytest.mark.parametrize("code", [1, 137])  # 1: a failure of srun itself
def test_sbatch_restarts_all_when_a_step_is_lost(cluster, code):
  lost = {"WAIT": str(cluster.waiting), "LOST_actors": str(code)}
  assert cluster.sbatch(ACTORS="1", MAX_RESTARTS="1", **lost) == code
  assert len(cluster.noted("steps")) == 4
  assert cluster.sbatch(MAX_RESTARTS="1", LOST_learners=str(code)) == code
  assert f"ended with code {code}; giving up after 1 consecutive" in cluster.output
  assert len(cluster.noted("steps")) == 6


@pytest.mark.parametrize(
  ("number", "slow", "requeued"),
  [(signal.SIGUSR1, "", True), (signal.SIGUSR1, "yes", True), (signal.SIGUSR2, "", False)],
)
def test_sbatch_saves_and_is_requeued_before_its_time_limit(cluster, number, slow, requeued):
  """A slow learner ends only after it has been requeued."""
  process = cluster.start_sbatch(WAIT=str(cluster.waiting), SLOW=slow)
  assert wait_until(lambda: cluster.noted("tasks"), process)
  assert wait_until(lambda: cluster.waiting.exists() and cluster.waiting.read_text(), process)
  process.send_signal(number)
  process.communicate(timeout=60)
  assert process.returncode == 143
  assert cluster.noted("cancelled") == ["--signal=TERM 5000"]  # the steps, not this script
  assert cluster.noted("scontrolled") == (["requeue 5000"] if requeued else [])
  assert len(cluster.noted("steps")) == 1


each_manifest = pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.stem)


@each_manifest
def test_a_manifest_holds_all_that_it_refers_to(manifest):
  for job in jobs(manifest).values():
    pod = job["template"]["spec"]
    assert pod["shareProcessNamespace"]  # process 1 ignores signals that it does not handle yet
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    for volume in volumes.values():
      for key, kind, name in (
        ("secret", "Secret", "secretName"),
        ("configMap", "ConfigMap", "name"),
        ("persistentVolumeClaim", "PersistentVolumeClaim", "claimName"),
      ):
        held = named(STORAGE if kind == "PersistentVolumeClaim" else manifest, kind)
        assert key not in volume or volume[key][name] in held
    (container,) = pod["containers"]
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert len(mounts) == len(volumes)
    for folder, file in re.findall(r"=(/secrets/\w+)/(\S+)", manifest.read_text()):
      secret = named(manifest, "Secret")[mounts[folder]["secret"]["secretName"]]
      assert secret["stringData"][file] == ""  # to be filled in, no well-known one


@each_manifest
def test_a_manifest_starts_the_roles_that_it_promises(manifest, cluster):
  expected = []
  for name, job in jobs(manifest).items():
    assert job["completionMode"] == "Indexed" and job["completions"] == job["parallelism"]
    for index in range(job["completions"]):
      assert cluster.pod(manifest, name, index, HELPER_CODE="2").wait(60) in (0, 2)
    roles = [name] * job["completions"]
    if name == "sz":
      counts = pod_variables(manifest, name)
      helpers = ["actor"] * int(counts["ACTORS"]) + ["refresher"] * int(counts["REFRESHERS"])
      roles = ["learner", *helpers]
    expected += roles
  config = cluster.started(expected)
  assert config.topology.token_file and config.run.compile_cache.startswith("/runs/")
  host = "sz-learner-0-0.sz" if named(manifest, "JobSet") else "sz-0.sz"
  assert cluster.calls()[0][0].coordinator.startswith(f"{host}:")


HELPER = (MANIFESTS[0], "sz", 3)


@pytest.mark.parametrize("code", [1, 2])
def test_a_pod_gives_up_a_helper_that_cannot_start(code, cluster):
  assert cluster.pod(*HELPER, HELPER_CODE=str(code)).wait(60) == 2
  assert cluster.noted("slept") == (["5", "10", "20", "40"] if code == 1 else [])
  assert len(cluster.calls()) == 1 + len(cluster.noted("slept"))


def test_a_helper_that_ends_well_is_started_again_in_a_plain_job_only(cluster):
  assert cluster.pod(MANIFESTS[1], "refresher", 0).wait(60) == 0
  assert cluster.pod(MANIFESTS[1], "refresher", 0, ROLE="refreshers").wait(60) == 2
  pod = cluster.pod(*HELPER)
  assert wait_until(lambda: len(cluster.calls()) > 7, pod)  # more often than failures are
  pod.kill()
  assert set(cluster.noted("slept")) == {"5"}


def test_a_pod_forgets_deaths_after_a_long_life(cluster):
  pod = cluster.pod(*HELPER, minimum_life=0, HELPER_CODE="134")
  assert wait_until(lambda: len(cluster.noted("slept")) >= 6, pod)
  pod.terminate()
  assert pod.wait(60) == -signal.SIGTERM
  assert set(cluster.noted("slept")) == {"5"}


def test_a_pod_waits_for_the_coordinator_and_ends_at_once_by_sigterm(cluster):
  pod = cluster.pod(*HELPER, UNKNOWN="7", WAIT=str(cluster.waiting))
  assert wait_until(cluster.calls, pod)
  assert cluster.noted("slept") == ["5"] * 7
  pod.terminate()
  assert pod.wait(60) == -signal.SIGTERM
  cluster.waiting.touch()  # a container's other processes end with it


@each_manifest
def test_a_manifest_bounds_restarts_and_admits_only_its_own_pods(manifest):
  for job in jobs(manifest).values():
    assert job["template"]["spec"]["restartPolicy"] == "Never" and job["backoffLimit"] <= 20
    (rule,) = (rule for rule in job["podFailurePolicy"]["rules"] if rule["action"] == "FailJob")
    assert rule["onExitCodes"] == {"operator": "In", "values": [2]}
  for jobset in named(manifest, "JobSet").values():
    (rule,) = jobset["spec"]["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    assert "targetReplicatedJobs" not in rule  # any
  (policy,) = named(manifest, "NetworkPolicy").values()
  (rule,) = policy["spec"]["ingress"]
  assert rule == {"from": [{"podSelector": policy["spec"]["podSelector"]}]}
