"""Published Atari scores, and what a score is worth next to a random player and a human one.

Reads `atari100k_scores.json`, nothing else: it knows neither environments nor runs. A score is the raw,
undiscounted return of one full game.
"""

import functools
import importlib.resources
import json
from typing import Any, NamedTuple


class Scores(NamedTuple):
  """What is known of one game. Raw, undiscounted episode returns."""

  random: float  # a player that picks actions uniformly
  human: float  # the human player of the DQN papers
  systems: dict[
    str, float
  ]  # published results by the name of the system, where it reports this game


@functools.cache
def _table() -> dict[str, Any]:
  file = importlib.resources.files("speedyzero_jax.envs") / "atari100k_scores.json"
  return json.loads(file.read_text(encoding="utf-8"))


def atari100k_games() -> tuple[str, ...]:
  """The names of the 26 games of the Atari-100k benchmark, in alphabetical order."""
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
  """(score - random) / (human - random): 0 plays like chance, 1 like the human. None if the game is not in the table.

  Source: Mnih et al. 2015, with the table of random and human scores that DQN Zoo uses.
  """
  known = reference_scores(game)
  return None if known is None else (score - known.random) / (known.human - known.random)
