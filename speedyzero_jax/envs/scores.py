"""Games of Atari-100k and human-normalized scores, from `atari100k_scores.json`."""

import functools
import importlib.resources
import json
from typing import Any


@functools.cache
def table() -> dict[str, Any]:
  """Raw, undiscounted returns of full games by random play, humans and published systems."""
  file = importlib.resources.files("speedyzero_jax.envs") / "atari100k_scores.json"
  return json.loads(file.read_text(encoding="utf-8"))


def atari100k_games() -> tuple[str, ...]:
  """The 26 games of Atari-100k, in alphabetical order."""
  return tuple(table()["games"])


def human_normalized(game: str, score: float) -> float | None:
  """Returns (score - random) / (human - random); None for games not in the table.

  Source: Mnih et al. 2015, with the random and human scores of DQN Zoo.
  """
  if game not in table()["games"]:
    return None
  random, human = table()["random"][game], table()["human"][game]
  return (score - random) / (human - random)
