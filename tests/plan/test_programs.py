"""Tests of the planned programs' calls and of the planned memory against numbers by hand."""

import jax
import pytest

import tiny
from speedyzero_jax.plan import plan, target
from speedyzero_jax.plan.programs import ROLES, learner_roles, programs
from speedyzero_jax.run import factories
from speedyzero_jax.workers.learner import Learner, make_mesh


def planned(*overrides):
  config = tiny.config("agent=quick_agent", *overrides)
  agent, mesh = factories.make_agent(config), make_mesh(jax.local_devices()[:1])
  return config, agent, Learner(config, agent, mesh), mesh


def test_a_runs_calls_of_its_programs():
  at = "evaluation.interval=6", "evaluation.at_end=true", "evaluation.episodes=65"
  config, agent, learner, mesh = planned(*at)
  found = {made.name: made.calls for made in programs(config, config, agent, learner, mesh, ROLES)}
  blocks = 95 / 32 + 1.5  # of the states stored on average, of 40 to 150, with padding
  assert found == pytest.approx(
    {
      "train": 12,
      "publish": 8,  # learner steps that are multiples of 2 or 3
      "evaluate": 2 * 2 * 9,  # after steps 6 and 12, of 64 episodes and of one
      "act": 110 / 3,  # all but 40 random agent steps, in 3 lanes
      "reanalyse": 12 * blocks / 4,  # every state once in max_age - weights_interval - 1 steps
      "refresh": 12 * blocks / 3,
    }
  )


@pytest.mark.parametrize(
  ("counts", "inference", "expected"),
  [
    ("1,0,0", "actors", {"actor", "refresher"}), ("1,4,1", "actors", set()),
    ("1,4,1", "central", {"actor"}), ("2,1,2", "actors", {"actor"}),
  ],
)  # fmt: skip
def test_the_roles_of_the_busiest_learner_are_planned(counts, inference, expected):
  shape = zip(("learners", "actors", "refreshers"), counts.split(","), strict=True)
  overrides = [f"topology.{kind}={count}" for kind, count in shape]
  config = tiny.config(
    f"topology.inference={inference}", "actor.lanes=4", "run.mode=async", *overrides
  )
  assert learner_roles(config) == expected


def test_the_memory_includes_frames_on_the_devices_and_all_programs():
  for frames, size in (("device", 3 * 2000 * 200), ("host", 0)):  # 2,000 frames in each lane
    config, agent, learner, _ = planned(f"replay.frames={frames}", "replay.capacity=6000")
    costs = [plan.ProgramCost("train", 8, 12, size, True, *[0] * 10) for size in (5, 7)]
    memory = plan._memory(config, agent, learner, 1, target.load("h200"), costs)
    assert (memory["frames of the replay"], memory["programs"]) == (size, 5 + 7)
