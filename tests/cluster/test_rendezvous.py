"""Tests of the rendezvous with real processes: shared devices, death and return of a process."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import jax
import pytest
from jax.errors import JaxRuntimeError

from ports import reserved_address
from speedyzero_jax.cluster import rendezvous as rendezvous_module
from speedyzero_jax.cluster.rendezvous import (
  Place,
  Rendezvous,
  RendezvousError,
  cluster,
  detect,
)
from speedyzero_jax.config.fields import ConfigError

ROOT = Path(__file__).resolve().parents[2]
MEMBER = """
import os, sys
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from speedyzero_jax.cluster.rendezvous import Place, Rendezvous, RendezvousError
address, number = sys.argv[1], int(sys.argv[2])
rendezvous = Rendezvous(Place(address, 3, number))
rendezvous.share_devices(2)
print("devices", len(jax.devices()), len(jax.local_devices()), flush=True)
if number < 2:
  mesh = Mesh(jax.local_devices(0) + jax.local_devices(1), "d")
  def total(x):
    return jax.lax.psum(x, "d")
  add = jax.jit(jax.shard_map(total, mesh=mesh, in_specs=P("d"), out_specs=P()))
  mine = np.array([1.0, 2.0]) + 2 * number
  mine = jax.make_array_from_process_local_data(NamedSharding(mesh, P("d")), mine)
  for turn in range(2):
    rendezvous.lookup(f"turn/{turn}", 60)
    print("sum", float(np.asarray(add(mine).addressable_shards[0].data)[0]), flush=True)
  events = []
  jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
  for turn in range(2, 5):
    rendezvous.lookup(f"turn/{turn}", 60)
    jax.clear_caches()
    add(mine).block_until_ready()
    print("cached", events.count("/jax/compilation_cache/cache_hits"), flush=True)
else:
  print("alone", float(jax.numpy.ones(2).sum()), rendezvous.count("came"), flush=True)
  for line in sys.stdin:
    rendezvous.publish(f"turn/{line.strip()}", "")
sys.stdin.read()
if number < 2:  # process 2 leaves without a value
  try:
    rendezvous.lookup_of(2, "x/2", 60)
    sys.exit("it did not leave")
  except RendezvousError as error:
    assert "process 2 has left the run" in str(error)
rendezvous.leave()
os._exit(0)
"""


def start(address, number, cache, program=MEMBER):
  environment = os.environ | {
    "JAX_COMPILATION_CACHE_DIR": str(cache),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_NUM_CPU_DEVICES": "2",
    "http_proxy": "http://127.0.0.1:9",
    "https_proxy": "http://127.0.0.1:9",
    "JAX_PLATFORMS": "cpu",
    "TF_CPP_MIN_LOG_LEVEL": "3",
  }
  command = [sys.executable, "-c", program, address, str(number)]
  pipe = subprocess.PIPE
  return subprocess.Popen(
    command, cwd=ROOT, env=environment, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True
  )


def value(process, word):
  """The numbers of the next output line that begins with this word (libraries print, too)."""
  others = []
  for line in process.stdout:
    if line.startswith(word + " "):
      return [float(x) for x in line.split()[1:]]
    others.append(line)
  text = "".join(others)
  raise AssertionError(f"ended with {process.wait()} before printing '{word}':\n{text}")


def turn(helper, number):
  """Lets the learners go on."""
  helper.stdin.write(f"{number}\n")
  helper.stdin.flush()


def test_learners_share_devices_and_programs_and_another_dies_and_comes_back(tmp_path):
  with contextlib.ExitStack() as stack:
    address, members = stack.enter_context(reserved_address()), []
    stack.callback(lambda: [process.kill() or process.wait() for process in members])
    members += [start(address, number, tmp_path) for number in range(3)]
    helper = members[2]
    assert value(helper, "devices") == [2, 2]
    assert value(helper, "alone") == [2, 0]
    turn(helper, 0)
    for learner in members[:2]:
      assert value(learner, "devices") == [4, 2]
      assert value(learner, "sum") == [10]
    helper.send_signal(signal.SIGKILL)
    helper.wait()
    members.append(start(address, 2, tmp_path))
    assert value(members[3], "alone") == [2, 1]
    turn(members[3], 1)
    for learner in members[:2]:
      assert value(learner, "sum") == [10]
    turn(members[3], 2)
    for learner in members[:2]:
      assert value(learner, "cached") == [1]  # each learner's programs, not only the first one's
    entries = sorted(tmp_path.glob("jit_total-*-cache"))
    assert len(entries) == 2
    entries[1].write_bytes(entries[1].read_bytes()[:100])  # as after a kill
    turn(members[3], 3)
    for learner in members[:2]:
      assert value(learner, "cached") == [1]  # both compile it
    turn(members[3], 4)
    for learner in members[:2]:
      assert value(learner, "cached") == [2]  # both entries are replaced
    assert sorted(tmp_path.glob("jit_total-*")) == entries
    rest = members[0], members[1], members[3]
    for process in rest:
      process.stdin.close()
    assert [process.wait(60) for process in rest] == [0, 0, 0]


LEARNER = """
import os, sys
from speedyzero_jax.cluster import rendezvous
rendezvous._HEARTBEAT_TIMEOUT, rendezvous._WATCH_SECONDS = 4, 0.1
address, number = sys.argv[1], int(sys.argv[2])
learner = rendezvous.Rendezvous(rendezvous.Place(address, COUNT, number))
learner.share_devices(COUNT)
print("ready", number, flush=True)
failed = sys.stdin.readline() == "fail\\n"
learner.leave(failed=failed)
os._exit(failed)
"""


@pytest.mark.parametrize("loss", ["frozen", "failed"])
def test_learners_abort_when_one_is_lost_but_not_when_one_has_left(loss, tmp_path):
  with contextlib.ExitStack() as stack:
    address, members = stack.enter_context(reserved_address()), []
    stack.callback(lambda: [process.kill() or process.wait() for process in members])
    count = 3 if loss == "frozen" else 2
    program = LEARNER.replace("COUNT", str(count))
    members += [start(address, number, tmp_path, program) for number in range(count)]
    for number, process in enumerate(members):
      assert value(process, "ready") == [number]
    if loss == "frozen":
      members[2].stdin.close()
      assert members[2].wait(60) == 0
      with pytest.raises(subprocess.TimeoutExpired):  # process 2 counts as dead in the meantime
        members[1].wait(8)
      members[1].send_signal(signal.SIGSTOP)
    else:
      members[1].communicate("fail\n")
    assert members[0].wait(60) == -signal.SIGABRT
    assert "process 1, a learner, is lost" in members[0].stdout.read()


@pytest.mark.parametrize(
  ("method", "function"),
  [("publish", "key_value_set"), ("lookup", "blocking_key_value_get"),
   ("published", "key_value_dir_get"), ("count", "key_value_increment")],
)  # fmt: skip
def test_a_lost_coordinator_is_reported(method, function):
  alone, gone = Rendezvous.__new__(Rendezvous), JaxRuntimeError("UNAVAILABLE: gone\nmore")
  alone._client = mock.Mock(**{f"{function}.side_effect": gone})
  arguments = {"publish": ["value"], "lookup": [1.0]}.get(method, [])
  with pytest.raises(RendezvousError, match=r"'name'.*\(UNAVAILABLE: gone\)$"):
    getattr(alone, method)("name", *arguments)


def test_a_slow_process_is_waited_for_until_it_leaves():
  rendezvous = Rendezvous.__new__(Rendezvous)
  left = {"speedyzero/left/2": "", "speedyzero/left/1": "failed"}
  both = {"speedyzero/x/0": "4", "speedyzero/x/1": "5"}
  rendezvous.published = mock.Mock(
    side_effect=[{}, {}, {}, {"speedyzero/x/0": "4"}, left, both, left, {}, {}, {}]
  )
  assert rendezvous.lookup_of(1, "x/1", 60) == "5"  # published before it left
  with pytest.raises(RendezvousError, match="process 1 has left the run"):
    rendezvous.lookup_of(1, "x/1", 60)
  with pytest.raises(RendezvousError, match="process 1 has not published 'x/1' in -1 s"):
    rendezvous.lookup_of(1, "x/1", -1)


def test_a_process_finds_its_place_in_a_cluster_of_slurm(monkeypatch):
  slurm = {"JOB_ID": "5000", "STEP_NODELIST": "g1,g2", "NTASKS": "4", "PROCID": "2", "LOCALID": "0"}
  for name, value in slurm.items():
    monkeypatch.setenv(f"SLURM_{name}", value)
  monkeypatch.setenv("JAX_COORDINATOR_PORT", "1234")
  assert detect() == Place("g1:1234", 4, 2)
  monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")  # in a shell of `salloc --ntasks=4`
  assert detect() is None
  with monkeypatch.context() as mpi:  # started there by Open MPI
    mpi.setenv("OMPI_MCA_orte_hnp_uri", "1.0;tcp://10.0.0.1:1")
    for name, value in {"SIZE": "4", "RANK": "2", "LOCAL_RANK": "0"}.items():
      mpi.setenv(f"OMPI_COMM_WORLD_{name}", value)
    assert detect() == Place("10.0.0.1:1234", 4, 2)
  monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
  monkeypatch.setenv("SLURM_PROCID", "two")
  with pytest.raises(ConfigError, match=r"SlurmCluster was detected but can't be used: Val.*two"):
    detect()
  monkeypatch.setenv("SLURM_NTASKS", "1")
  assert detect() is None


def test_a_cluster_whose_detection_fails_is_named(monkeypatch):
  kind = mock.Mock(opt_in_only_method=False, is_env_present=mock.Mock(side_effect=TypeError("no")))
  kind.__name__ = "Odd"
  monkeypatch.setattr(cluster.ClusterEnv, "_cluster_types", [kind])
  with pytest.raises(ConfigError, match=r"Odd was detected but can't be used: TypeError: no;"):
    detect()


@pytest.mark.parametrize(
  ("platform", "wanted", "usable"), [("cpu", "", False), ("cpu", "cpu", True), ("gpu", "", True)]
)
def test_a_process_uses_the_devices_given_to_it(monkeypatch, platform, wanted, usable):
  monkeypatch.setenv("JAX_PLATFORMS", wanted)
  monkeypatch.setattr(jax, "default_backend", lambda: platform)
  monkeypatch.setattr(rendezvous_module.distributed, "global_state", mock.Mock())
  monkeypatch.setattr(Rendezvous, "_set_up_compilation_cache", lambda *_: None)
  with (
    mock.patch.object(jax.config, "update"),
    mock.patch.object(jax.distributed, "initialize") as joined,
  ):
    rendezvous = Rendezvous(Place("localhost:1", 3, 1), devices=[2, 3])
    refused = pytest.raises(RendezvousError, match="jax can't use the GPUs")
    with contextlib.nullcontext() if usable else refused:
      rendezvous.share_devices(1)
  given = joined.call_args.kwargs
  assert (given["process_id"], given["local_device_ids"]) == (1, [2, 3])
