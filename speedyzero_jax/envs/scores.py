"""Games of Atari-100k and human-normalized scores, from `atari100k_scores.json`."""

import functools
import importlib.resources
import json


@functools.cache
def table() -> dict[str, dict[str, float]]:
  """Raw, undiscounted returns of full games by game: of `random`, `human` and published systems."""
  file = importlib.resources.files("speedyzero_jax.envs") / "atari100k_scores.json"
  stored = json.loads(file.read_text(encoding="utf-8"))
  games, columns = stored["scores"].keys(), zip(*stored["scores"].values(), strict=True)
  return {
    name: dict(zip(games, column, strict=True))
    for name, column in zip(stored["sources"], columns, strict=True)
  }


def atari100k_games() -> tuple[str, ...]:
  """The 26 games of Atari-100k, in alphabetical order."""
  return tuple(table()["human"])


def human_normalized(game: str, score: float) -> float | None:
  """Returns (score - random) / (human - random); None for games not in the table.

  Source: Mnih et al. 2015, with the random and human scores of DQN Zoo.
  """
  random, human = table()["random"].get(game), table()["human"].get(game)
  if random is None or human is None:
    return None
  return (score - random) / (human - random)
