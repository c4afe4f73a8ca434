"""Published Atari scores and human-normalised scores.

A score is the raw, undiscounted return of one full game; the table is `atari100k_scores.json`.
"""

import functools
import importlib.resources
import json
from typing import Any, NamedTuple


class Scores(NamedTuple):
  """Scores of one game: raw, undiscounted episode returns."""

  random: float  # of uniformly random play
  human: float  # of the human player of the DQN papers
  systems: dict[str, float]  # published results by system, where it reports this game


@functools.cache
def _table() -> dict[str, Any]:
  file = importlib.resources.files("speedyzero_jax.envs") / "atari100k_scores.json"
  return json.loads(file.read_text(encoding="utf-8"))


def atari100k_games() -> tuple[str, ...]:
  """The 26 games of Atari-100k, in alphabetical order."""
  return tuple(_table()["games"])


def reference_scores(game: str) -> Scores | None:
  """Random, human and published scores of a game of Atari-100k; None for any other game."""
  table = _table()
  if game not in table["games"]:
    return None
  systems = {
    name: system["scores"][game]
    for name, system in table["systems"].items()
    if game in system["scores"]
  }
  return Scores(random=table["random"][game], human=table["human"][game], systems=systems)


def human_normalised(game: str, score: float) -> float | None:
  """(score - random) / (human - random): 0 is random, 1 human; None for games not in the table.

  Source: Mnih et al. 2015, with the random and human scores of DQN Zoo.
  """
  known = reference_scores(game)
  return None if known is None else (score - known.random) / (known.human - known.random)
