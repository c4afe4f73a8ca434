"""Steps of environments: played at random, and stacked."""

import numpy as np


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
