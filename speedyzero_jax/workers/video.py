"""GIF of an episode: the environment's frames beside the agent's outputs."""

import math
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from speedyzero_jax.agents.base import Arrays
from speedyzero_jax.envs.batched_env import BOARD_GAMES, CATCHES

SIZE = 320  # pixels, side of the environment's picture; the agent's outputs have the same size
STEP_MS = 66  # duration of an agent step: Atari's at 60 frames per second and a frame skip of 4
SHORT_MS, LONGEST_STEP_MS = 4000, 400  # steps of episodes shorter than SHORT_MS last longer
END_MS = 1500  # duration of the last picture
MAX_STEPS = 2000  # the rest of a longer episode is not recorded

_BACKGROUND, _TEXT, _BAR, _CHOSEN = (24, 26, 30), (226, 228, 232), (92, 122, 160), (240, 180, 60)
_COLORS = np.array([[86, 180, 233], [230, 159, 0], [0, 158, 115], [213, 94, 0], [204, 121, 167]])
_BAR_HEIGHT, _LABELED_HEIGHT, _LINE = 14, 10, 18  # pixels; lower bars have no numbers


class Video:
  """Records the steps of one episode. Arrays [A] are drawn as bars and scalars as text."""

  def __init__(self, game: str, num_actions: int):
    self._game, self._num_actions = game, num_actions
    self._font = ImageFont.load_default(12)
    self._pictures: list[Image.Image] = []

  def add(self, frame: np.ndarray, action: int | None, score: float, numbers: Arrays) -> None:
    """Adds a step.

    Args:
      frame: [H, W, C], from the environment.
      action: chosen in this step; None at the end of the episode.
      score: return of the episode so far.
      numbers: the agent's outputs by name; those with shapes other than [] and [A] are left out.
    """
    if len(self._pictures) >= MAX_STEPS:
      return
    canvas = Image.new("RGB", (2 * SIZE, SIZE), _BACKGROUND)
    canvas.paste(picture(self._game, frame), (0, 0))
    draw = ImageDraw.Draw(canvas)
    x, y = SIZE + 14, 10
    chosen = "end" if action is None else f"action {action}"
    for line in (self._game, f"step {len(self._pictures)}   return {score:g}   {chosen}"):
      draw.text((x, y), line, fill=_TEXT, font=self._font)
      y += _LINE
    shapes = {name: np.asarray(value) for name, value in numbers.items()}
    for name, value in shapes.items():
      if value.shape == ():
        draw.text((x, y), f"{name.replace('_', ' ')} {value:.3f}", fill=_TEXT, font=self._font)
        y += _LINE
    arrays = [item for item in shapes.items() if item[1].shape == (self._num_actions,)]
    for i, (name, value) in enumerate(arrays):
      bottom = y + (SIZE - 4 - y) // (len(arrays) - i)  # equal shares
      y = self._bars(draw, y + 4, bottom, name, value, action)
    self._pictures.append(canvas.quantize(64, dither=Image.Dither.NONE))

  def _bars(
    self,
    draw: ImageDraw.ImageDraw,
    y: int,
    bottom: int,
    name: str,
    values: np.ndarray,
    action: int | None,
  ) -> int:
    """Draws a bar per action above `bottom`, from the minimum value or 0; returns the next y."""
    x, width = SIZE + 14, SIZE - 90
    draw.text((x, y), name.replace("_", " "), fill=_TEXT, font=self._font)
    y += _LINE
    # Illegal actions may have -inf.
    values = np.nan_to_num(values.astype(float), posinf=0, neginf=0)
    height = max(min(_BAR_HEIGHT, (bottom - y) // max(len(values), 1)), 1)
    low = min(float(values.min()), 0.0)
    span = (float(values.max()) - low) or 1.0
    for i, value in enumerate(values):
      top = y + i * height
      length = int(width * (float(value) - low) / span)
      color = _CHOSEN if i == action else _BAR
      draw.rectangle((x + 26, top, x + 26 + length, top + max(height - 3, 0)), fill=color)
      if height >= _LABELED_HEIGHT:
        draw.text((x, top - 2), str(i), fill=_TEXT, font=self._font)
        draw.text((x + 32 + length, top - 2), f"{value:.2f}", fill=_TEXT, font=self._font)
    return y + height * len(values)

  def save(self, path: Path) -> None:
    """Writes the GIF. Raises OSError if that fails, and ValueError if there are no steps."""
    if not self._pictures:
      raise ValueError("the video has no steps")
    first, *rest = self._pictures
    step_ms = max(STEP_MS, min(LONGEST_STEP_MS, SHORT_MS // len(self._pictures)))
    times = [step_ms] * len(rest) + [END_MS]
    first.save(path, format="GIF", save_all=True, append_images=rest, duration=times, loop=0)


def picture(game: str, frame: np.ndarray) -> Image.Image:
  """Draws a frame [H, W, C] of a game as a picture of `SIZE` x `SIZE` pixels."""
  if game == "CartPole":
    return _cartpole(frame.reshape(-1))
  if game in CATCHES:  # 10 rows of 5 cells, the paddle in the last
    cells = frame.reshape(10, 5)
    paddle = np.arange(10)[:, None] == 9
    image = _planes(np.stack([cells * ~paddle, cells * paddle], axis=-1))
  elif game in BOARD_GAMES:  # Go's first two planes are the current position
    image = _planes(frame[..., :2])
  elif frame.shape[:2] == (1, 1):  # other vectors: one cell per number, colored by sign
    small = np.tanh(frame.reshape(1, -1))
    image = _planes(np.stack([small, -small], axis=-1))
  elif frame.dtype == np.uint8:  # gray or color, without further channels
    channels = 3 if frame.shape[2] >= 3 else 1
    image = np.repeat(frame[..., :channels], 3 // channels, axis=2)
  else:
    image = _planes(frame)
  height, width = image.shape[:2]
  scale = SIZE / max(height, width)
  shown = Image.fromarray(image).resize(
    (max(int(width * scale), 1), max(int(height * scale), 1)), Image.Resampling.NEAREST
  )
  square = Image.new("RGB", (SIZE, SIZE), _BACKGROUND)
  square.paste(shown, ((SIZE - shown.width) // 2, (SIZE - shown.height) // 2))
  return square


def _planes(cells: np.ndarray) -> np.ndarray:
  """Renders planes [H, W, C] in [0, 1] as colors [8H, 8W, 3], later planes on top, and a grid."""
  image = np.full((*cells.shape[:2], 3), 44.0)
  for plane in range(cells.shape[2]):
    share = np.clip(cells[..., plane : plane + 1].astype(float), 0, 1)
    image = image * (1 - share) + _COLORS[plane % len(_COLORS)] * share
  image = image.repeat(8, axis=0).repeat(8, axis=1)
  image[::8] = image[:, ::8] = _BACKGROUND
  return image.astype(np.uint8)


def _cartpole(state: np.ndarray) -> Image.Image:
  """Draws cart and pole from (x in meters, velocity, angle in radians, angular velocity)."""
  image = Image.new("RGB", (SIZE, SIZE), _BACKGROUND)
  draw = ImageDraw.Draw(image)
  ground, meter = SIZE * 3 // 4, SIZE / 5.2  # 2.4 meters to either side
  draw.line((0, ground, SIZE, ground), fill=_TEXT)
  x, angle = SIZE / 2 + state[0] * meter, state[2]
  draw.rectangle((x - 24, ground - 20, x + 24, ground), fill=_BAR)
  tip = x + math.sin(angle) * 2 * meter, ground - 20 - math.cos(angle) * 2 * meter
  draw.line((x, ground - 20, *tip), fill=_CHOSEN, width=6)
  return image
