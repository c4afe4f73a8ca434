"""Topology of a run: the role of every process, and each one's share of the work.

A *unit* is a learner process with its replay and the actors and refreshers attached to it. All
functions are pure, so every process of a run derives the same topology from the configuration.
"""

import dataclasses
import itertools
from typing import Literal, NamedTuple, get_args

import numpy as np

from speedyzero_jax.config.fields import ConfigError
from speedyzero_jax.config.schema import Config, TopologyConfig

Kind = Literal["learner", "actor", "refresher"]


class Role(NamedTuple):
  """The role of one process."""

  kind: Kind
  unit: int  # index of its learner
  number: int  # index among the unit's processes of this kind

  def __str__(self) -> str:
    return f"{self.kind}-{self.unit}" + (f".{self.number}" if self.kind != "learner" else "")


class Topology(NamedTuple):
  """Number of processes of each kind.

  Process ids are given to learners first, then to actors, then to refreshers; the i-th actor and
  the i-th refresher belong to unit i % learners.
  """

  learners: int
  actors: int
  refreshers: int

  @property
  def num_processes(self) -> int:
    return sum(self)

  def role(self, process_id: int) -> Role:
    return self._roles()[process_id]

  def serving(self, kind: Kind, unit: int) -> int:
    """Number of a unit's processes of this kind."""
    return sum((role.kind, role.unit) == (kind, unit) for role in self._roles())

  def _roles(self) -> list[Role]:
    return [
      Role(kind, index % self.learners, index // self.learners)
      for kind, count in zip(get_args(Kind), self, strict=True)
      for index in range(count)
    ]

  @property
  def counts(self) -> str:
    """The numbers as in `--processes`."""
    counts = zip(get_args(Kind), self, strict=True)
    return ",".join(f"{kind}={count}" for kind, count in counts if count)


def resolve(config: Config, num_processes: int | None = None) -> Topology:
  """Resolves the topology for `num_processes` started processes; None: the number configured.

  Raises ConfigError if the numbers contradict each other, the lanes or the batch can't be divided
  among the learners, or a setting does not support several processes.
  """
  requested = config.topology
  helpers = requested.actors + requested.refreshers
  learners = requested.learners or max((num_processes or 0) - helpers, 1)
  topology = Topology(learners, requested.actors, requested.refreshers)
  if num_processes is not None and topology.num_processes != num_processes:
    raise ConfigError(
      f"topology: {num_processes} processes were started, but {learners} learners, "
      f"{topology.actors} actors and {topology.refreshers} refreshers make {topology.num_processes}"
    )
  if requested.inference == "central" and topology.actors < learners:
    raise ConfigError(
      f"topology.inference: central needs an actor process for each of the {learners} learners, "
      f"got topology.actors={topology.actors}"
    )
  _check_gradients(requested, topology)
  lanes, batch_size = config.actor.lanes, config.learner.batch_size
  for key, value in (("actor.lanes", lanes), ("learner.batch_size", batch_size)):
    if value % learners:
      raise ConfigError(f"{key}: must be a multiple of the {learners} learners, got {value}")
  if lanes // learners < -(-topology.actors // learners):
    raise ConfigError(f"actor.lanes: {topology.actors} actors need a lane each, got {lanes}")
  if config.run.mode == "lockstep" and topology.num_processes > 1:
    raise ConfigError("run.mode: lockstep supports one process only; set run.mode=async")
  if config.profile.steps and learners > 1:
    raise ConfigError(
      "profile.steps: supports one learner only; others would time out waiting for the profiled one"
    )
  return topology


def _check_gradients(requested: TopologyConfig, topology: Topology) -> None:
  if requested.gradients == "learner":
    return
  for key, value, wanted, wrong in (
    ("actors", topology.actors, "at least 1", not topology.actors),
    ("learners", topology.learners, "1", topology.learners > 1),
    ("inference", requested.inference, "actors", requested.inference == "central"),
  ):
    if wrong:
      raise ConfigError(
        f"topology.{key}: must be {wanted} with topology.gradients=actors, got {value}"
      )


def with_learners(config: Config, num_processes: int | None = None) -> Config:
  """Returns the configuration with the resolved number of learners. Raises as `resolve` does."""
  learners = resolve(config, num_processes).learners
  return dataclasses.replace(
    config, topology=dataclasses.replace(config.topology, learners=learners)
  )


def process_options(config: Config) -> list[str]:
  """The launcher's `--processes` option for a run, new or resumed; empty for one process."""
  shape = resolve(config)
  return ["--processes", shape.counts] if shape.num_processes > 1 else []


def lanes_of_actors(lanes: int, actors: int) -> list[range]:
  """Divides a unit's lanes among its actors as evenly as possible."""
  bounds = np.linspace(0, lanes, actors + 1).round().astype(int).tolist()
  return [range(a, b) for a, b in itertools.pairwise(bounds)]


def derived_seed(seed: int, name: str, incarnation: int = 0) -> int:
  """Returns a seed for a named part of a run, such as its search, distinct for every restart."""
  return int(np.random.SeedSequence([seed, incarnation, *name.encode()]).generate_state(1)[0])
