"""Topology of a run: the role of every process, and each one's share of the work.

A *unit* is a learner process with its replay and the actors and refreshers attached to it. All
functions are pure, so every process of a run derives the same topology from the configuration.
"""

import dataclasses
import itertools
from typing import Literal, NamedTuple, get_args

import numpy as np

from speedyzero_jax.config.loader import ConfigError
from speedyzero_jax.config.schema import Config

Kind = Literal["learner", "actor", "refresher"]


class Role(NamedTuple):
  """The task of one process."""

  kind: Kind
  unit: int  # the learner's number
  number: int  # among the unit's processes of this kind

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
    """The number of a unit's processes of a kind."""
    return sum((role.kind, role.unit) == (kind, unit) for role in self._roles())

  def _roles(self) -> list[Role]:
    return [
      Role(kind, index % self.learners, index // self.learners)
      for kind, count in zip(get_args(Kind), self, strict=True)
      for index in range(count)
    ]

  def __str__(self) -> str:
    counts = zip(get_args(Kind), self, strict=True)
    return ", ".join(f"{count} {kind}{'s' * (count > 1)}" for kind, count in counts if count)


def resolve(config: Config, num_processes: int | None = None) -> Topology:
  """The topology of a configuration, for so many started processes; None: as many as it says.

  Raises ConfigError if the numbers contradict each other, lanes or batch can't be divided by the
  learners, or a setting is not for several processes.
  """
  wanted = config.topology
  helpers = wanted.actors + wanted.refreshers
  learners = wanted.learners or max((num_processes or 0) - helpers, 1)
  topology = Topology(learners, wanted.actors, wanted.refreshers)
  if num_processes is not None and topology.num_processes != num_processes:
    raise ConfigError(
      f"topology: {num_processes} processes were started, but {learners} learners, "
      f"{wanted.actors} actors and {wanted.refreshers} refreshers make {topology.num_processes}"
    )
  if wanted.inference == "central" and wanted.actors < learners:
    raise ConfigError(
      f"topology.inference: central needs an actor process for each of the {learners} learners, "
      f"got topology.actors={wanted.actors}"
    )
  lanes, batch_size = config.actor.lanes, config.learner.batch_size
  for key, value in (("actor.lanes", lanes), ("learner.batch_size", batch_size)):
    if value % learners:
      raise ConfigError(f"{key}: must be a multiple of the {learners} learners, got {value}")
  if lanes // learners < -(-wanted.actors // learners):
    raise ConfigError(f"actor.lanes: {wanted.actors} actors need a lane each, got {lanes}")
  if config.run.mode == "lockstep" and topology.num_processes > 1:
    raise ConfigError("run.mode: lockstep is for one process; several always overlap")
  if config.profile.steps and learners > 1:
    raise ConfigError(
      "profile.steps: is for one learner; others would time out waiting for the profiled one"
    )
  return topology


def with_learners(config: Config, num_processes: int | None = None) -> Config:
  """The configuration with the number of learners that `resolve` finds. Raises as it does."""
  learners = resolve(config, num_processes).learners
  return dataclasses.replace(
    config, topology=dataclasses.replace(config.topology, learners=learners)
  )


def lanes_of_actors(lanes: int, actors: int) -> list[range]:
  """The lanes of each of a unit's actors, as equal in number as possible."""
  bounds = np.linspace(0, lanes, actors + 1).round().astype(int).tolist()
  return [range(a, b) for a, b in itertools.pairwise(bounds)]


def derived_seed(seed: int, name: str, incarnation: int = 0) -> int:
  """A seed for one part of a run (environments, search), distinct for every name and restart."""
  return int(np.random.SeedSequence([seed, incarnation, *name.encode()]).generate_state(1)[0])
