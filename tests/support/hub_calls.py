"""What the tests of the hub share: what its callers do."""

import jax
import numpy as np
import pytest
import tiny
from small_unit import Seer

from speedyzero_jax.cluster import messages
from speedyzero_jax.metrics.aggregation import EpisodeStats
from speedyzero_jax.workers.actor import Actor
from speedyzero_jax.workers.weights import ACTOR

QUICK = 0.02


def join(unit, actor=0, incarnation=0):
  return unit.hub.join_actor(messages.ActorJoin(actor, incarnation))


def grant(unit, sequence=0, steps=9, actor=0, incarnation=0, seconds=QUICK):
  return unit.hub.grant(messages.GrantRequest(actor, incarnation, sequence, steps), seconds)


def append(unit, segments, sequence=0, actor=0, incarnation=0, episodes=()):
  score, length = (
    np.array([e.score for e in episodes]),
    np.array([e.length for e in episodes], np.int64),
  )
  return unit.hub.append(
    messages.Append(actor, incarnation, sequence, list(segments), score, length)
  )


def player(unit, actor=0, seed=0):
  """An actor as its process has it."""
  lanes = unit.lanes[actor]
  return Actor(
    unit.config, tiny.FakeEnv(len(lanes), seed), Seer(), jax.random.key(seed), EpisodeStats(len(lanes)),
    lane_offset=lanes.start, start=unit.replay.heads[lanes.start : lanes.stop],
  )  # fmt: skip


def play(unit, who, granted):
  segments, count = who.step(
    unit.weights.latest(ACTOR),
    budget=granted.steps,
    progress=0.0,
    random=False,
    last=granted.closing,
  )
  return segments, count


def unchanged(unit, call, match):
  """`call` is refused and the replay, the pacer and what would be on disk are as they were."""
  before = unit.replay.state_dict(), unit.pacer.pool, unit.pacer.env_steps, len(unit.taken)
  with pytest.raises(ValueError, match=match):
    call()
  after = unit.replay.state_dict(), unit.pacer.pool, unit.pacer.env_steps, len(unit.taken)
  assert before[1:] == after[1:]
  for name, array in before[0].items():
    np.testing.assert_array_equal(array, after[0][name], err_msg=name)


def hello(unit, reanalyser=0, incarnation=0):
  return unit.hub.join_reanalyser(messages.ReanalyserJoin(reanalyser, incarnation))


def work(unit, reanalyser=0, incarnation=0, seconds=QUICK):
  return unit.hub.work(messages.WorkRequest(reanalyser, incarnation), seconds)
