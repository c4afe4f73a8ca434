"""Recurrent state of agents with a core, as actors store it in whole runs."""

import jax
import numpy as np
import pytest

import trained
from speedyzero_jax.agents.base import Variables
from speedyzero_jax.config import loader
from trained import experiment

_RUN = (
  "env.game=CartPole", "env.frame_stack=2", "network.core=lstm", "network.lstm_hidden=5",
  "network.hidden=4", "network.layers=1", "actor.lanes=3", "actor.random_steps=0",
  "learner.steps=2", "learner.batch_size=4", "run.env_steps=400", "run.mode=lockstep",
  "replay.capacity=0", "learner.devices=1",
)  # fmt: skip
_SHORT = {
  "impala": ("loss.unroll_length=5",),
  "r2d2": ("loss.burn_in=2", "loss.sequence_length=3", "loss.stride=2"),
}


def _filled(run):
  """Plays to the end of the run with weights that depend on their input."""
  rng = np.random.default_rng(0)
  fresh = run.state.variables.params
  params = jax.tree.map(lambda x: np.float32(x + 0.3 * rng.normal(size=x.shape)), fresh)
  run.weights.publish(0, Variables(params, ()))
  while not run.limiter.collected:
    run.collector.collect()
  return params


@pytest.mark.parametrize("agent", _SHORT)
def test_stored_states_are_those_of_unrolling_from_the_start_of_the_episode(tmp_path, agent):
  """At every slot, the last ones of episodes and of the run included."""
  config = loader.load([agent], [*_RUN, *_SHORT[agent]])
  with experiment(config, tmp_path) as run:
    torso, core = (_filled(run)[name] for name in ("torso", "core"))
    layer, store, episodes = torso["layers"][0], run.replay.store, 0
    for lane, head in enumerate(store.head):
      starts = np.flatnonzero(store.first[lane, :head])
      for start, end in zip(starts, [*starts[1:], head], strict=True):
        frames = np.float64(store.frame[lane, start:end, 0, 0])
        x = np.concatenate([frames[[0, *range(len(frames) - 1)]], frames], axis=1)
        features = np.maximum(x @ layer["kernel"] + layer["bias"], 0)
        first = np.arange(len(x)) == 0
        _, states = trained.lstm(core, features, first, np.ones(10))
        stored = store["core"][lane, start:end]
        np.testing.assert_allclose(stored[1:], states[1:-1], rtol=1e-4, atol=1e-5)
        episodes += 1
  assert episodes > 6
