"""MinAtar's games (Young and Tian 2019) as Gymnasium environments, with frames of 12 x 12 cells.

    .venv/bin/python -m pip install --no-deps MinAtar==1.0.15
    python launch/suite.py benchmarks/minatar_batch.yaml --together 2

Frames of 10 x 10 cells are padded with zeros, so that SpeedyZero can downsample them by 4. Actions
are repeated with a probability of 0.1, and only those that have an effect in the game are offered.
MinAtar's warnings that it can't import matplotlib and seaborn concern its own display.
"""

import gymnasium
import numpy as np
from minatar.gym import register_envs


def _padded(game: str) -> gymnasium.Env:
  env = gymnasium.make(game)
  channels = env.observation_space.shape[-1]
  space = gymnasium.spaces.Box(0, 1, (12, 12, channels), np.float32)

  def pad(grid: np.ndarray) -> np.ndarray:
    return np.pad(grid, ((1, 1), (1, 1), (0, 0))).astype(np.float32)

  return gymnasium.wrappers.TransformObservation(env, pad, space)


register_envs()
for _name in ("Asterix", "Breakout", "Freeway", "Seaquest", "SpaceInvaders"):
  gymnasium.register(f"{_name}-v1", lambda game=f"MinAtar/{_name}-v1": _padded(game))
