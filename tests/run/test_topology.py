"""Who is what, and what share each has: nothing is lost or given twice, whatever the numbers."""

import collections
import dataclasses
import itertools
import math

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from speedyzero_jax.config.loader import ConfigError
from speedyzero_jax.config.schema import Config
from speedyzero_jax.run import topology
from speedyzero_jax.run.topology import (
  Role,
  Topology,
  deal_devices,
  dealt_text,
  derived_seed,
  lanes_of_actors,
  resolve,
  unit_config,
)

topologies = st.builds(Topology, st.integers(1, 9), st.integers(0, 20), st.integers(0, 20))


def asked_for(*overrides):
  return tiny.config("actor.lanes=12", "learner.batch_size=24", "run.mode=async", *overrides)


@given(topologies)
def test_every_process_has_a_role_of_its_own_and_every_unit_its_share_of_helpers(shape):
  roles = [shape.role(process) for process in range(shape.num_processes)]
  assert len(set(roles)) == len({str(role) for role in roles}) == shape.num_processes
  assert roles[: shape.learners] == [Role("learner", unit, 0) for unit in range(shape.learners)]
  assert [role.kind for role in roles] == sorted(
    (r.kind for r in roles), key=["learner", "actor", "reanalyser"].index
  )
  for kind, count in (
    ("learner", shape.learners),
    ("actor", shape.actors),
    ("reanalyser", shape.reanalysers),
  ):
    serving = [shape.serving(kind, unit) for unit in range(shape.learners)]
    assert sum(serving) == count and max(serving) - min(serving) <= 1
    for unit, n in enumerate(serving):
      assert sorted(r.number for r in roles if (r.kind, r.unit) == (kind, unit)) == list(range(n))
  with pytest.raises(ValueError, match=f"there are {shape.num_processes} processes"):
    shape.role(shape.num_processes)


def test_roles_and_topologies_are_named():
  assert [str(Topology(2, 2, 2).role(i)) for i in range(6)] == [
    "learner-0", "learner-1", "actor-0.0", "actor-1.0", "reanalyser-0.0", "reanalyser-1.0",
  ]  # fmt: skip
  assert str(Topology(1, 3, 0)) == "1 learner, 3 actors"
  assert str(Topology(2, 1, 2)) == "2 learners, 1 actor, 2 reanalysers"


@given(
  units=st.integers(1, 9),
  each=st.integers(1, 5),
  sizes=st.tuples(*[st.integers(0, 9) | st.integers(0, 10**6)] * 5),
)
def test_the_units_shares_add_up_to_the_run(units, each, sizes):
  capacity, age_interval, newest, random_steps, more = sizes
  base, replace = Config(), dataclasses.replace
  config = replace(
    base,
    actor=replace(base.actor, lanes=units * each, random_steps=random_steps),
    replay=replace(base.replay, capacity=capacity, age_interval=age_interval),
    reanalyse=replace(base.reanalyse, mixed_newest=newest),
    learner=replace(base.learner, batch_size=units * each),
    run=replace(base.run, env_steps=random_steps + more),
  )
  parts = [unit_config(config, unit, units) for unit in range(units)]
  for section, name in (
    ("actor", "lanes"), ("actor", "random_steps"), ("replay", "capacity"), ("replay", "age_interval"),
    ("reanalyse", "mixed_newest"), ("learner", "batch_size"), ("run", "env_steps"),
  ):  # fmt: skip
    whole = getattr(getattr(config, section), name)
    shares = [getattr(getattr(part, section), name) for part in parts]
    if name == "age_interval" and 0 < whole < units:
      assert set(shares) == {1}  # 0 would switch it off
      continue
    assert sum(shares) == whole and max(shares) - min(shares) <= 1, name
  for part in parts:
    assert part.actor.random_steps <= part.run.env_steps
    assert (part.learner.steps, part.env, part.network, part.optim) == (
      base.learner.steps, base.env, base.network, base.optim,
    )  # fmt: skip
  assert unit_config(config, 0, 1) == config


@given(actors=st.integers(1, 12), more=st.integers(0, 60))
def test_every_lane_has_one_actor_and_every_actor_a_lane(actors, more):
  parts = lanes_of_actors(actors + more, actors)
  assert list(itertools.chain(*parts)) == list(range(actors + more)) and len(parts) == actors
  sizes = [len(part) for part in parts]
  assert min(sizes) >= 1 and max(sizes) - min(sizes) <= 1


def test_resolving_fills_in_the_learners():
  assert resolve(asked_for()) == (1, 0, 0) == resolve(asked_for(), 1)
  assert resolve(asked_for(), 4) == (4, 0, 0)
  helped = asked_for("topology.actors=3", "topology.reanalysers=2")
  assert resolve(helped) == (1, 3, 2) and resolve(helped, 7) == (2, 3, 2)
  assert resolve(asked_for("topology.learners=2", "topology.actors=2"), 4) == (2, 2, 0)
  assert resolve(
    asked_for("topology.learners=3", "topology.actors=1", "topology.reanalysers=2")
  ) == (3, 1, 2)
  assert resolve(asked_for("run.mode=lockstep"), 1) == (1, 0, 0)


@pytest.mark.parametrize(
  ("overrides", "processes", "error"),
  [
    (
      ["topology.learners=2"],
      3,
      "3 processes were started, but 2 learners, 0 actors and 0 reanalysers make 2",
    ),
    (
      ["topology.actors=4"],
      4,
      "4 processes were started, but 1 learners, 4 actors and 0 reanalysers make 5",
    ),
    (["topology.learners=5"], None, "actor.lanes: must be a multiple of the 5 learners, got 12"),
    (
      ["topology.learners=3", "learner.batch_size=8"],
      None,
      "learner.batch_size: must be a multiple of the 3 .*got 8",
    ),
    (
      ["topology.learners=2", "topology.actors=13"],
      None,
      "actor.lanes: 13 actors need a lane each, got 12",
    ),
    (["topology.learners=2", "run.mode=lockstep"], None, "run.mode: lockstep is for one process"),
    (["topology.actors=1", "run.mode=lockstep"], None, "run.mode: lockstep is for one process"),
    (["topology.learners=2", "profile.steps=5"], None, "profile.steps: is for one learner"),
  ],
)
def test_numbers_that_do_not_fit_are_refused(overrides, processes, error):
  with pytest.raises(ConfigError, match=error):
    resolve(asked_for(*overrides), processes)


@given(
  st.builds(Topology, st.integers(1, 9), st.integers(0, 9), st.integers(0, 9)), st.integers(1, 24)
)
def test_everybody_has_a_device_and_nobody_too_much_of_one(shape, count):
  batch_size = shape.learners * math.lcm(*range(1, 25))
  if count < shape.learners:
    with pytest.raises(
      ConfigError, match=f"{shape.learners} learners need a GPU each, and there are {count};"
    ):
      deal_devices(shape, count, batch_size)
    return
  dealt = deal_devices(shape, count, batch_size)
  assert len(dealt) == shape.num_processes
  used = collections.Counter()
  for devices in dealt:
    assert (
      devices.ids
      and len(set(devices.ids)) == len(devices.ids)
      and set(devices.ids) <= set(range(count))
    )
    assert devices.memory > 0
    used.update(dict.fromkeys(devices.ids, devices.memory))
  assert max(used.values()) <= 0.9 + 1e-9
  learners = [devices.ids for devices in dealt[: shape.learners]]
  assert len({len(ids) for ids in learners}) == 1  # a mesh of equal parts
  assert len(set(itertools.chain(*learners))) == sum(
    map(len, learners)
  )  # NCCL refuses two on one device
  owners = collections.Counter(itertools.chain.from_iterable(devices.ids for devices in dealt))
  if count >= shape.num_processes:
    assert set(owners.values()) == {1} and {devices.memory for devices in dealt} == {0.9}
    assert count - len(owners) < shape.learners  # no more are idle than can't be shared
  else:
    assert len(owners) > count - shape.learners


def test_without_devices_there_are_none_to_deal():
  assert deal_devices(Topology(2, 1, 1), 0, 64) == [None] * 4


def test_the_usual_machines():
  assert [d.ids for d in deal_devices(Topology(1, 1, 1), 8, 60)] == [[0, 1, 2, 3, 4, 5], [7], [6]]
  assert [d.ids for d in deal_devices(Topology(1, 1, 1), 8, 2048)] == [
    [0, 1, 2, 3],
    [7],
    [6],
  ]  # 6 share it not equally
  assert [(d.ids, round(d.memory, 3)) for d in deal_devices(Topology(1, 1, 1), 1, 64)] == [
    ([0], 0.3)
  ] * 3
  assert [d.ids for d in deal_devices(Topology(2, 2, 2), 4, 64)] == [
    [0, 1],
    [2, 3],
    [3],
    [2],
    [1],
    [0],
  ]


def test_who_has_which_devices_is_a_line():
  def said(shape, count):
    return dealt_text(shape, deal_devices(shape, count, 64), count)

  assert (
    said(Topology(1, 1, 2), 5)
    == "0,1 for learner-0; 4 for actor-0.0; 3 for reanalyser-0.0; 2 for reanalyser-0.1"
  )
  idle = (
    "0 for learner-0; 1 for learner-1; 3 for actor-0.0; 2 for nobody (they can't be shared equally)"
  )
  assert said(Topology(2, 1, 0), 4) == idle


def test_seeds_differ_with_the_name_the_seed_and_every_start():
  names = [str(Topology(3, 30, 30).role(process)) for process in range(63)]
  names += [
    f"{what} of unit {unit}" for what in ("replay", "environments", "search") for unit in range(8)
  ]
  seeds = [derived_seed(*of) for of in itertools.product(range(4), names, range(4))]
  assert len(set(seeds)) == len(seeds)
  assert all(type(seed) is int and 0 <= seed < 2**32 for seed in seeds)
  assert derived_seed(3, "actor-0.1", 2) == derived_seed(3, "actor-0.1", 2)


@pytest.mark.parametrize(
  ("visible", "count"),
  [
    ("", 0), ("0", 1), ("3,1", 2), ("0, 1", 2), ("GPU-a,GPU-b,", 2), ("MIG-a", 1),
    ("-1", 0), ("NoDevFiles", 0), ("0,-1,1", 1), ("0,,1", 1),
  ],
)  # fmt: skip
def test_gpus_that_may_be_used_are_counted(monkeypatch, visible, count):
  monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
  for platforms in ("", "cuda", "cpu,gpu"):
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    assert topology.local_gpus() == count
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  assert topology.local_gpus() == 0


@pytest.mark.parametrize(
  ("coordinator", "address"), [("127.0.0.1:9", "127.0.0.1"), ("[::1]:9", "::1")]
)
def test_on_the_way_to_a_loopback_a_machine_has_a_loopback(coordinator, address):
  try:
    assert topology.own_address(coordinator) == address
  except OSError as error:
    pytest.skip(f"{coordinator}: {error}")


@pytest.mark.parametrize(
  ("coordinator", "ways", "address"),
  [
    ("node1:9", {"node1": "10.1.0.2"}, "10.1.0.2"),
    (
      "node1:9",
      {"node1": "127.0.1.1", "192.0.2.1": "10.1.0.2"},
      "10.1.0.2",
    ),  # node1 itself, with Debian's /etc/hosts
    ("node1:9", {"node1": "127.0.1.1"}, "127.0.1.1"),  # no network at all
    ("localhost:9", {"localhost": "127.0.0.1", "192.0.2.1": "10.1.0.2"}, "127.0.0.1"),
  ],
)
def test_others_reach_a_machine_by_its_address_towards_the_coordinator(
  monkeypatch, coordinator, ways, address
):
  def towards(host, port):
    if host not in ways:
      raise OSError("no way")
    return ways[host]

  monkeypatch.setattr(topology, "_address_towards", towards)
  assert topology.own_address(coordinator) == address
