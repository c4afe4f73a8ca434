"""Tests of GIFs of episodes: one picture per step, and bars in proportion to numbers."""

import numpy as np
import pytest
from PIL import Image

from speedyzero_jax.workers import video
from speedyzero_jax.workers.video import SIZE, Video, picture


def test_a_gif_has_a_picture_for_each_step_and_bars_as_long_as_the_numbers(tmp_path):
  made = Video("Breakout", 4)
  numbers = {"value": np.float32(1.5), "policy": np.array([0.1, 0.2, 0.3, 0.4]), "core": np.ones(9)}
  for step in range(5):
    made.add(np.full((8, 8, 3), 40 * step, np.uint8), step % 4, 2.0, numbers)
  made.add(np.full((8, 8, 3), 200, np.uint8), None, 3.0, {})
  made.save(tmp_path / "episode.gif")
  with Image.open(tmp_path / "episode.gif") as gif:
    assert gif.n_frames == 6 and gif.size == (2 * SIZE, SIZE)
    for step in range(5):
      gif.seek(step)
      pixels = np.asarray(gif.convert("RGB")).astype(int)
      assert np.abs(pixels[SIZE // 2, SIZE // 2] - 40 * step).max() < 8
      chosen = (np.abs(pixels[:, SIZE:] - video._CHOSEN).max(axis=-1) < 8).sum(axis=1).max()
      longest = (np.abs(pixels[:, SIZE:] - video._BAR).max(axis=-1) < 8).sum(axis=1).max()
      share = (0.1, 0.2, 0.3, 0.4)[step % 4] / (0.3 if step % 4 == 3 else 0.4)
      assert chosen / longest == pytest.approx(share, abs=0.03)


@pytest.mark.parametrize("actions", [9, 18, 82])  # TicTacToe, many Atari games, Go9
def test_every_action_has_a_bar_for_every_output(tmp_path, actions):
  made, policy = Video("Breakout", actions), np.full(actions, 0.5)
  numbers = {"value": 1.0, "search_value": 1.0, "policy": policy, "visits": policy}
  made.add(np.zeros((8, 8, 3), np.uint8), actions - 1, 0.0, numbers)
  made.save(tmp_path / "episode.gif")
  pixels = np.asarray(Image.open(tmp_path / "episode.gif").convert("RGB")).astype(int)
  shown = pixels[:, SIZE + 45]  # a column in all bars
  rows = [(np.abs(shown - color).max(axis=-1) < 8).sum() for color in (video._CHOSEN, video._BAR)]
  assert rows[0] >= 2 and rows[1] >= 2 * (actions - 1)


def test_numbers_that_are_not_finite_are_drawn_as_none(tmp_path):
  pictures = []
  for values in ([1, -np.inf, np.nan], [1, np.inf, 0], [1, 0, 0]):
    made = Video("Breakout", 3)
    made.add(np.zeros((8, 8, 3), np.uint8), 0, 0.0, {"q": np.array(values)})
    made.save(tmp_path / "episode.gif")
    pictures.append((tmp_path / "episode.gif").read_bytes())
  assert pictures[0] == pictures[1] == pictures[2]


@pytest.mark.parametrize(
  ("game", "frame", "at", "color"),
  [
    ("Breakout", np.full((48, 48, 1), 200, np.uint8), (160, 160), (200, 200, 200)),
    ("Catch", np.eye(50, dtype=np.float32)[49].reshape(1, 1, 50), (310, 230), video._COLORS[1]),
    ("ConnectFour", np.ones((6, 7, 2), np.uint8), (150, 150), video._COLORS[1]),
    ("Grid", np.ones((12, 12, 5), np.float32), (150, 150), video._COLORS[4]),
    ("Grid", np.eye(7, dtype=np.float32)[np.full((12, 12), 6)], (150, 150), video._COLORS[1]),
    ("Grid", np.ones((12, 12, 5), np.float32), (160, 160), video._BACKGROUND),  # between cells
    ("gymnasium:A-v0", np.full((8, 8, 4), 200, np.uint8), (160, 160), (200, 200, 200)),
    ("gymnasium:A-v0", np.full((1, 1, 50), 99, np.float32), (160, 163), video._COLORS[0]),
    ("CartPole", np.zeros((1, 1, 4), np.float32), (160, 160), video._CHOSEN),
  ],
)
def test_every_kind_of_game_is_drawn(game, frame, at, color):
  image = picture(game, frame)
  assert image.size == (SIZE, SIZE)
  np.testing.assert_array_equal(np.asarray(image)[at], color)


def test_a_cart_to_the_right_whose_pole_leans_left_is_drawn_so():
  image = np.asarray(picture("CartPole", np.array([1.2, 0, -0.2, 0]).reshape(1, 1, 4)))
  pole = np.argwhere((image == video._CHOSEN).all(axis=-1))
  assert pole[:, 1].max() > SIZE * 0.7 and pole[pole[:, 0].argmin(), 1] < pole[:, 1].max() - 20
