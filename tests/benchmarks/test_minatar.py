"""Test of benchmarks/minatar.py with a stand-in for MinAtar, which is not installed."""

import importlib
import sys
from types import ModuleType

import gymnasium
import numpy as np

from speedyzero_jax.config.schema import EnvConfig
from speedyzero_jax.envs import batched_env


class Full(gymnasium.Env):
  observation_space = gymnasium.spaces.Box(0, 1, (10, 10, 4), bool)
  action_space = gymnasium.spaces.Discrete(3)

  def reset(self, *, seed=None, options=None):
    super().reset(seed=seed)
    return np.ones((10, 10, 4), bool), {}

  def step(self, action):
    return np.ones((10, 10, 4), bool), 1.0, False, False, {}


def test_frames_have_a_border_of_zeros(monkeypatch):
  package, registers = ModuleType("minatar"), ModuleType("minatar.gym")
  registers.register_envs = lambda: gymnasium.register("MinAtar/Breakout-v1", Full)
  monkeypatch.setitem(sys.modules, "minatar", package)
  monkeypatch.setitem(sys.modules, "minatar.gym", registers)
  monkeypatch.setattr(gymnasium.envs.registration, "registry", {})
  monkeypatch.delitem(sys.modules, "benchmarks.minatar", raising=False)
  importlib.import_module("benchmarks.minatar")
  config = EnvConfig(game="gymnasium:benchmarks.minatar:Breakout-v1")
  env = batched_env.make_env(config, 2, 0, training=True)
  assert (env.frame_shape, env.frame_dtype, env.num_actions) == ((12, 12, 4), np.float32, 3)
  for frame in (env.reset().frame, env.step(np.zeros(2, int)).frame):
    assert frame[:, 1:-1, 1:-1].all() and frame.sum() == 2 * 10 * 10 * 4
