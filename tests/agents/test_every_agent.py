"""Tests of all agents without a test module of their own: whole runs on Catch, bad settings."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import trained
from same import assert_same
from speedyzero_jax.config import loader
from speedyzero_jax.config.agents import agent_module
from speedyzero_jax.config.fields import ConfigError
from speedyzero_jax.run import factories, steps
from whole_runs import everything

RUN = ("run.mode=lockstep", "learner.devices=1", "evaluation.episodes=32")
_ON_POLICY = (
  "network.hidden=8", "learner.batch_size=4", "run.env_steps=620", "actor.lanes=4",
  "loss.unroll_length=5",
)  # fmt: skip
_LSTM = ("network.core=lstm", "network.lstm_hidden=8")
# By preset: settings of a run of 30 learner steps, and of the least one that learns Catch.
SHORT = {
  "appo": (*_ON_POLICY, "run.env_steps=420", "replay.capacity=260"),
  "apex": (
    "network.hidden=8", "learner.batch_size=8", "run.env_steps=500", "actor.random_steps=100",
    "loss.target_interval=7", "refresh.enabled=true", "refresh.max_age=20",
  ),
  "impala": (*_ON_POLICY, *_LSTM, "replay.capacity=0"),
  "ppo": (
    *_ON_POLICY, "learner.batch_size=2", "run.env_steps=150", "loss.minibatches=2",
    "loss.epochs=3", "actor.weights_interval=6", "replay.capacity=0",
  ),
  "r2d2": (
    *_LSTM, "network.hidden=8", "learner.batch_size=8", "run.env_steps=500",
    "actor.random_steps=100", "loss.target_interval=7", "loss.burn_in=2", "loss.sequence_length=4",
    "loss.stride=2", "priority.initial=actor", "refresh.enabled=true", "refresh.max_age=20",
  ),
  "alphazero": (
    "network.channels=4", "network.blocks=1", "search.simulations=4", "learner.batch_size=8",
    "run.env_steps=300", "actor.lanes=4", "replay.capacity=200",
  ),
}  # fmt: skip
LEARNS = {
  "c51": (
    "learner.steps=200", "run.env_steps=4000", "actor.lanes=32", "optim.learning_rate=5e-3",
    "loss.target_interval=30", "network.atoms=21",
  ),
  "impala": (
    "learner.steps=120", "run.env_steps=22000", "actor.lanes=64", "learner.batch_size=16",
    "optim.learning_rate=1e-2", "network.hidden=32", "loss.unroll_length=10", "replay.capacity=0",
  ),
  "ppo": (
    "learner.steps=200", "run.env_steps=17000", "actor.lanes=64", "learner.batch_size=16",
    "optim.learning_rate=1e-2", "loss.unroll_length=16", "replay.capacity=0",
  ),
  "r2d2": (
    "learner.steps=150", "run.env_steps=3500", "actor.lanes=32", "actor.random_steps=500",
    "optim.learning_rate=5e-3", "network.hidden=32", "network.lstm_hidden=32",
    "loss.target_interval=20", "loss.burn_in=2", "loss.sequence_length=10",
  ),
}  # fmt: skip


@pytest.mark.parametrize("agent", SHORT)
def test_a_resumed_run_ends_as_one_that_was_not_interrupted(tmp_path, agent):
  short = ("learner.steps=30", "run.checkpoint_interval=10", *SHORT[agent])
  config = loader.load([agent], [*RUN, *short])
  for name in ("whole", "parts"):
    (tmp_path / name).mkdir()
  whole = trained.run(config, tmp_path / "whole", after=everything)
  trained.run(config, tmp_path / "parts", stop=17)
  parts = trained.run(config, tmp_path / "parts", resume=True, after=everything)
  assert whole["counters"] == [config.run.env_steps, 30]
  assert_same(whole, parts)


@pytest.mark.parametrize("agent", LEARNS)
def test_catch_is_learned(tmp_path, agent):
  config = loader.load([agent], [*RUN, *LEARNS[agent]])
  assert trained.run(config, tmp_path, after=steps.evaluate_now).mean >= 0.9  # 1 is perfect


@pytest.mark.parametrize("agent", ["alphazero", "ppo", "r2d2"])
def test_a_subclass_has_its_own_network(monkeypatch, agent):
  module = agent_module(agent)

  class Network(module.make_agent.network):
    def __init__(self, *arguments, **options):
      super().__init__(*arguments, **options)
      self.added = nnx.Param(jnp.zeros(3))

  class Agent(module.make_agent):
    network = Network

  monkeypatch.setattr(module, "make_agent", Agent)
  made = factories.make_agent(loader.load([agent]))
  assert jax.eval_shape(made.init, jax.random.key(0)).params["added"].shape == (3,)


@pytest.mark.parametrize(
  ("agent", "override", "message"),
  [
    ("dqn", "network.torso=nature", "network.torso: must be mlp for Catch"),
    ("dqn", "loss.td_steps=0", "loss.td_steps: must lie in"),
    ("dqn", "network.atoms=1", "network.atoms: must be 0 or at least 2"),
    ("c51", "refresh.enabled=true", "network.atoms: must be 0 with .* refresh.enabled, .* got 51"),
    ("c51", "priority.initial=actor", "network.atoms: must be 0 with priority.initial=actor"),
    (
      "dqn",
      "topology.refreshers=1",
      "topology.refreshers: must be 0, as dqn .* nothing",
    ),
    (
      "efficientzero",
      "topology.refreshers=1 reanalyse.schedule=off refresh.enabled=false",
      "topology.refreshers: must be 0, as efficientzero",
    ),
    ("apex", "refresh.enabled=true refresh.max_age=11", "refresh.max_age: .* = 12, got 11"),
    ("r2d2", "refresh.enabled=true refresh.block=9", "refresh.block: must be 0 or at least 16"),
    ("dqn", "network.value_max=-10", r"network.value_max: must be greater than .*min \(-10.0\)"),
    ("dqn", "search.simulations=8", "search.simulations is a setting of alphazero, efficientzero"),
    ("dqn", "env.game=TicTacToe", "env.game: TicTacToe is for two players"),
    ("efficientzero", "env.game=ConnectFour", "env.game: ConnectFour is for two players"),
    ("alphazero", "env.game=Breakout", "env.game: must be one of TicTacToe, ConnectFour"),
    ("alphazero", "env.frame_stack=2", "env.frame_stack: must be 1"),
    ("alphazero", "actor.random_steps=9", "actor.random_steps: must be 0"),
    ("alphazero", "search.algorithm=uct", "search.algorithm: expected one of gumbel, puct"),
    ("impala", "network.torso=nature", "network.torso: must be mlp for Catch"),
    ("impala", "network.core=gru", "network.core: expected one of none, lstm"),
    ("impala", "network.lstm_hidden=0", "network.lstm_hidden: must lie in"),
    ("impala", "actor.random_steps=9", "actor.random_steps: must be 0"),
    ("impala", "learner.tail_steps=9", "learner.tail_steps: must be 0"),
    ("impala", "run.env_steps=200", "run.env_steps: must be higher, .* 2 trajectories.* got 200$"),
    ("impala", "learner.steps=375", "learner.steps: must be at most 374, .* 2992 trajectories"),
    ("impala", "replay.capacity=809", "replay.capacity: must be 0 or at least 810"),
    ("a2c", "learner.batch_size=24", r"actor.lanes: must divide .* at a time \(24\) .* got 16"),
    ("a2c", "actor.weights_interval=2", r"actor.weights_interval: must divide .* \(1\)"),
    ("a2c", "topology.actors=2", "topology.actors: must be at most one per learner"),
    ("a3c", "topology.actors=3", r"actor.lanes: must be topology.actors \(3\) times a .* got 16"),
    ("a3c", "learner.batch_size=4", r"actor.lanes: .* a divisor of learner.batch_size \(4\)"),
    ("a3c", "loss.synchronous=false", "topology.gradients: must be learner, as impala with these"),
    ("a3c", "actor.max_lag=5", "actor.max_lag: must be 0 with topology.gradients=actors, got 5"),
    ("a3c", "topology.refreshers=1", "topology.refreshers: must be 0"),
    ("dqn", "topology.gradients=actors", "topology.gradients: must be learner, as dqn"),
    ("ppo", "topology.gradients=actors", "topology.gradients: must be learner, as ppo"),
    ("ppo", "loss.minibatches=3", r"actor.lanes: must divide .* at a time \(3 x 8\) .* got 32"),
    ("ppo", "actor.weights_interval=5", r"actor.weights_interval: must divide .* \(16\)"),
    ("ppo", "loss.replay_proportion=0.5", "loss.replay_proportion: must be 0 with"),
    ("ppo", "learner.steps=609", "learner.steps: must be at most 608, .* blocks of 4 .* 4 epochs"),
    ("ppo", "loss.epochs=0", "loss.epochs: must lie in"),
    (
      "ppo",
      "loss.rho_bar=1",
      "loss.rho_bar is a setting of impala, but the agent of this run is ppo",
    ),
    ("appo", "loss.clip_value=true", "loss.clip_value: must be off with loss.advantages=vtrace"),
    ("appo", "learner.steps=936", "learner.steps: must be at most 935, .* and 0.25 replayed"),
    ("r2d2", "network.torso=nature", "network.torso: must be mlp for Catch"),
    ("r2d2", "loss.stride=0", "loss.stride: must lie in"),
    ("r2d2", "loss.priority_max=1.1", "loss.priority_max: must lie in"),
    (
      "r2d2",
      "loss.burn_in=3728",
      "loss.sequence_length: .* 3751 slots; .* got 30000",
    ),
  ],
)
def test_a_bad_setting_is_named(agent, override, message):
  with pytest.raises(ConfigError, match=message):
    first = ["learner.steps=374"] if agent == "impala" else []
    loader.load([agent], [*first, *override.split()])
