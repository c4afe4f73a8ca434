"""Tests of the assignment of devices: one for every process, none of them overcommitted."""

import collections
import itertools
import math
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speedyzero_jax.cluster.devices import assign_devices, describe_devices, machine_shares
from speedyzero_jax.config.fields import ConfigError
from speedyzero_jax.run.topology import Topology
from speedyzero_jax.system.gpus import local_gpus


@given(
  st.builds(Topology, st.integers(1, 9), st.integers(0, 9), st.integers(0, 9)), st.integers(1, 24)
)
def test_every_process_has_devices_and_none_is_overcommitted(shape, count):
  batch_size = shape.learners * math.lcm(*range(1, 25))
  if count < shape.learners:
    with pytest.raises(ConfigError, match=f"{shape.learners} learners need a GPU each"):
      assign_devices(shape, count, batch_size)
    return
  assigned = assign_devices(shape, count, batch_size)
  assert len(assigned) == shape.num_processes
  memory = collections.Counter()
  for devices in assigned:
    assert devices.ids and set(devices.ids) <= set(range(count)) and devices.memory > 0
    memory.update(dict.fromkeys(devices.ids, devices.memory))
  assert max(memory.values()) <= 0.9 + 1e-9
  learners = [devices.ids for devices in assigned[: shape.learners]]
  assert len({len(ids) for ids in learners}) == 1  # a mesh of equal parts
  assert len(set(itertools.chain(*learners))) == sum(map(len, learners))
  if count >= shape.num_processes:
    assert {devices.memory for devices in assigned} == {0.9}  # none is shared
  assert count - len(memory) < shape.learners  # no more are unused than can't be shared equally


@pytest.mark.parametrize(
  ("shape", "count", "batch_size", "ids"),
  [
    ((1, 1, 1), 8, 60, [[0, 1, 2, 3, 4, 5], [7], [6]]),
    ((1, 1, 1), 8, 2048, [[0, 1, 2, 3], [7], [6]]),  # 2048 can't be divided by 6
    ((2, 2, 2), 4, 64, [[0, 1], [2, 3], [3], [2], [1], [0]]),
  ],
)
def test_usual_machines(shape, count, batch_size, ids):
  assert [d.ids for d in assign_devices(Topology(*shape), count, batch_size)] == ids


def test_processes_share_a_single_device_and_its_memory(monkeypatch):
  assigned = assign_devices(Topology(1, 1, 1), 1, 64)
  assert [(d.ids, round(d.memory, 3)) for d in assigned] == [([0], 0.3)] * 3
  monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.4")  # the former name
  assert all(d.memory == pytest.approx(0.4 / 3) for d in assign_devices(Topology(1, 1, 1), 1, 64))
  monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.38")  # of one of several runs
  assert all(d.memory == pytest.approx(0.38 / 3) for d in assign_devices(Topology(1, 1, 1), 1, 64))
  assert assign_devices(Topology(2, 1, 1), 0, 64) == [None] * 4


@pytest.fixture(autouse=True)
def no_fraction(monkeypatch):
  for former in ("", "PYTHON_"):
    monkeypatch.delenv(f"XLA_{former}CLIENT_MEM_FRACTION", raising=False)


def test_learners_get_at_most_the_configured_number_of_devices():
  def ids(most):
    return [each.ids for each in assign_devices(Topology(1, 1, 1), 8, 64, per_learner=most)]

  assert ids(2) == [[0, 1], [7], [6]] and ids(7) == ids(0) == [[0, 1, 2, 3], [7], [6]]


@pytest.mark.parametrize("count", [3, 8])
def test_actors_need_no_devices_with_central_inference(count):
  assigned = assign_devices(Topology(1, 4, 1), count, 840, central=True)
  assert assigned == [*(d := assign_devices(Topology(1, 0, 1), count, 840))[:1], *[None] * 4, d[1]]


def test_the_line_on_devices_names_the_unused_ones():
  def text(shape, count):
    return describe_devices(shape, assign_devices(shape, count, 64), count)

  assert text(Topology(1, 1, 1), 4) == "0,1 for learner-0; 3 for actor-0.0; 2 for refresher-0.0"
  assert "; 2 unused" in text(Topology(2, 1, 0), 4)


@pytest.mark.parametrize(
  ("visible", "count"),
  [
    ("", 0), ("0", 1), ("3,1", 2), ("0, 1", 2), ("GPU-a,GPU-b,", 2), ("MIG-a", 1),
    ("-1", 0), ("NoDevFiles", 0), ("0,-1,1", 1), ("0,,1", 1),
  ],
)  # fmt: skip
def test_gpus_are_counted_as_cuda_does(monkeypatch, visible, count):
  monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
  for platforms, expected in (("", count), ("cuda", count), ("cpu,gpu", count), ("cpu", 0)):
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    assert local_gpus() == expected


def test_runs_side_by_side_get_their_own_devices_or_cores(monkeypatch):
  monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 4, 5})
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  assert [share.cores for share in machine_shares(None)] == [[0, 1, 4, 5]]
  assert [share.cores for share in machine_shares(2)] == [[0, 4], [1, 5]]
  assert [share.cores for share in machine_shares(6)] == [[0, 1, 4, 5]] * 6
  monkeypatch.setenv("JAX_PLATFORMS", "cuda")
  monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,7")
  each = [share.variables for share in machine_shares(None)]
  assert each == [{"CUDA_VISIBLE_DEVICES": "3"}, {"CUDA_VISIBLE_DEVICES": "7"}]
  for fraction, half in (("", "0.45"), ("0.5", "0.25")):
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", fraction)
    of_three = [share.variables for share in machine_shares(3)]
    memory = {"XLA_CLIENT_MEM_FRACTION": half, "XLA_PYTHON_CLIENT_MEM_FRACTION": ""}
    assert of_three == [{"CUDA_VISIBLE_DEVICES": device} | memory for device in "373"]
  shares = [share.variables["XLA_CLIENT_MEM_FRACTION"] for share in machine_shares(70)]
  assert 0.99 < sum(map(float, shares)) <= 1
  with pytest.raises(ConfigError, match="--together"):
    machine_shares(0)
