"""Steps of environments: played at random, stacked and compared."""

import numpy as np


def assert_same(a, b):
  for name, x, y in zip(a._fields, a, b, strict=True):
    np.testing.assert_array_equal(x, y, err_msg=name)


def play(env, steps, action=None, seed=0):
  """The EnvSteps of `steps` steps, the reset's first; uniformly random actions where none is
  given."""
  rng = np.random.default_rng(seed)
  shown = [env.reset()]
  for _ in range(steps):
    shown.append(
      env.step(rng.integers(env.num_actions, size=env.num_lanes) if action is None else action)
    )
  return shown


def stacked(shown):
  """The fields of these steps as [T, L, ...] arrays."""
  return type(shown[0])(*(np.stack(x) for x in zip(*shown, strict=True)))
