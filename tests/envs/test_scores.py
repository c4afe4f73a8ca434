"""Tests of reference scores against published numbers."""

import pytest

from speedyzero_jax.envs import scores


def test_games_are_the_26_of_atari_100k():
  games = scores.atari100k_games()
  assert len(set(games)) == 26 and list(games) == sorted(games)
  for game in games:
    assert scores.table()["random"][game] < scores.table()["human"][game]


def test_human_normalized():
  assert scores.human_normalized("Breakout", 1.7) == 0
  assert scores.human_normalized("Breakout", 30.5) == 1
  assert scores.human_normalized("Pong", 21.0) == pytest.approx((21.0 + 20.7) / (14.6 + 20.7))
  below_chance = -227.8 / (7127.7 - 227.8)
  assert scores.human_normalized("Alien", 0.0) == pytest.approx(below_chance)


@pytest.mark.parametrize("game", ["Catch", "breakout", "Venture", ""])
def test_other_games_have_no_scores(game):
  assert scores.human_normalized(game, 1.0) is None
