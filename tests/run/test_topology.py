"""Tests of roles and shares of a run's processes: complete and disjoint for all numbers."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speedyzero_jax.config import loader
from speedyzero_jax.config.fields import ConfigError
from speedyzero_jax.run.experiment import Membership, unit_seed
from speedyzero_jax.run.topology import (
  Role,
  Topology,
  derived_seed,
  lanes_of_actors,
  resolve,
  with_learners,
)


def configured(*overrides):
  sizes = ("actor.lanes=12", "learner.batch_size=24", "run.mode=async")
  return loader.load(["quickstart"], [*sizes, *overrides])


@given(st.builds(Topology, st.integers(1, 9), st.integers(0, 20), st.integers(0, 20)))
def test_roles_are_distinct_and_units_have_equal_shares_of_helpers(shape):
  roles = [shape.role(process) for process in range(shape.num_processes)]
  assert len({str(role) for role in roles}) == shape.num_processes
  assert roles[: shape.learners] == [Role("learner", unit, 0) for unit in range(shape.learners)]
  for kind, count in (("actor", shape.actors), ("refresher", shape.refreshers)):
    serving = [shape.serving(kind, unit) for unit in range(shape.learners)]
    assert sum(serving) == count and max(serving) - min(serving) <= 1
    for unit, n in enumerate(serving):
      assert sorted(r.number for r in roles if (r.kind, r.unit) == (kind, unit)) == list(range(n))


def test_roles_and_topologies_have_names():
  assert [str(Topology(2, 2, 2).role(i)) for i in range(6)] == [
    "learner-0", "learner-1", "actor-0.0", "actor-1.0", "refresher-0.0", "refresher-1.0",
  ]  # fmt: skip
  assert Topology(1, 3, 0).counts == "learner=1,actor=3"


@given(
  units=st.integers(1, 9),
  each=st.integers(1, 5),
  sizes=st.tuples(*[st.integers(1, 9) | st.integers(1, 10**6)] * 3),
  small=st.tuples(*[st.integers(0, 20)] * 4),
)
def test_the_shares_of_units_add_up_to_the_run(units, each, sizes, small):
  capacity, random_steps, more = sizes
  actors, refreshers, newest, age_interval = small
  whole = {
    "actor.lanes": units * each,
    "learner.batch_size": units * each,
    "replay.capacity": capacity,
    "actor.random_steps": random_steps,
    "run.env_steps": random_steps + more,
    "reanalyse.mixed_newest": newest,
    "topology.learners": units,
    "topology.actors": actors,
    "topology.refreshers": refreshers,
  }
  run = loader.flat(configured()) | whole | {"loss.age_interval": age_interval}
  config = loader.build(loader.load(["quickstart"]).agent.name, run)
  parts = [loader.flat(loader.divide(config, unit, units)) for unit in range(units)]
  for key, value in run.items():
    shares = [part[key] for part in parts]
    if key in whole:
      assert sum(shares) == value and max(shares) - min(shares) <= 1, key
    elif key == "loss.age_interval":  # 0 disables it
      assert min(shares) >= min(value, 1) and (sum(shares) == value or max(shares) == 1)
    else:
      assert shares == [value] * units, key
  for part in parts:
    assert part["actor.random_steps"] <= part["run.env_steps"]
  assert loader.divide(config, 0, 1) == config


@given(actors=st.integers(1, 12), more=st.integers(0, 60))
def test_every_lane_has_one_actor_and_every_actor_a_lane(actors, more):
  parts = lanes_of_actors(actors + more, actors)
  assert list(itertools.chain(*parts)) == list(range(actors + more)) and len(parts) == actors
  sizes = [len(part) for part in parts]
  assert min(sizes) >= 1 and max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
  ("overrides", "processes", "shape"),
  [
    ([], None, (1, 0, 0)),
    ([], 4, (4, 0, 0)),
    (["topology.actors=3", "topology.refreshers=2"], None, (1, 3, 2)),
    (["topology.actors=3", "topology.refreshers=2"], 7, (2, 3, 2)),
    (["topology.learners=2", "topology.actors=2"], 4, (2, 2, 0)),
    (["run.mode=lockstep"], 1, (1, 0, 0)),
  ],
)
def test_processes_without_another_role_are_learners(overrides, processes, shape):
  config = configured(*overrides)
  assert resolve(config, processes) == shape
  assert with_learners(config, processes).topology.learners == shape[0]


@pytest.mark.parametrize(
  ("overrides", "processes", "error"),
  [
    (["topology.learners=2"], 3, "3 processes were started, but 2 learners, .* make 2"),
    (["topology.actors=4"], 4, "4 processes were started, but 1 learners, 4 actors .* make 5"),
    (["topology.learners=5"], None, "actor.lanes: .* multiple of the 5 learners, got 12"),
    (["topology.learners=3", "learner.batch_size=8"], None, "learner.batch_size: .* got 8"),
    (["topology.learners=2", "topology.actors=13"], None, "actor.lanes: 13 actors"),
    (
      ["topology.learners=2", "topology.actors=1", "topology.inference=central"],
      None,
      "topology.inference: .* each of the 2 learners",
    ),
    (["topology.actors=1", "run.mode=lockstep"], None, "run.mode: "),
    (["topology.learners=2", "profile.steps=5"], None, "profile.steps: "),
  ],
)
def test_numbers_that_do_not_fit_are_refused(overrides, processes, error):
  with pytest.raises(ConfigError, match=error):
    resolve(configured(*overrides), processes)


@pytest.mark.parametrize(
  ("overrides", "error"),
  [
    (["topology.actors=0"], "topology.actors: must be at least 1 with topology.gradients=actors"),
    (["topology.learners=2"], "topology.learners: must be 1 with .*, got 2"),
    (["topology.inference=central"], "topology.inference: must be actors with"),
    (["run.mode=lockstep"], "run.mode: lockstep supports one process only"),
  ],
)
def test_what_gradients_from_actors_need_is_named(overrides, error):
  assert resolve(loader.load(["a3c"])) == (1, 2, 0)
  with pytest.raises(ConfigError, match=error):
    resolve(loader.load(["a3c"], overrides))


def test_seeds_differ_with_the_name_the_seed_and_every_start():
  names = [str(Topology(3, 30, 30).role(process)) for process in range(63)]
  seeds = [derived_seed(*of) for of in itertools.product(range(4), names, range(4))]
  assert len(set(seeds)) == len(seeds)
  assert all(type(seed) is int and 0 <= seed < 2**32 for seed in seeds)
  assert derived_seed(3, "actor-0.1", 2) == derived_seed(3, "actor-0.1", 2)


def test_learners_have_seeds_of_their_own_for_each_purpose():
  config, units = configured("run.seed=5"), [Membership(unit, 3) for unit in range(3)]
  names = "environments", "replay", "search"
  seeds = {unit_seed(config, *of) for of in itertools.product(names, units[1:])}
  assert len(seeds | {5}) == 7
  assert unit_seed(config, "replay", units[0]) == 5
