"""Batched environments behind one small interface, and every Atari convention in one place.

All games come from envpool, which runs the lanes in C++ threads. This module knows nothing of networks, search or
replay; nothing outside it knows of envpool, of lives, or of how an environment restarts itself.

What an episode is (checked in tests/test_envs.py, also against a plain ALE):

- Atari is NoFrameskip-v4: no sticky actions unless asked for, `frame_skip` raw frames an agent step, the maximum over
  the last two of them shown, 1 to `noop_max` raw no-op frames before the first frame, no fire pressed for the agent
  unless asked for.
- In training with `episodic_life` a lost life ends the episode, but the game goes on: the next one begins, after no-ops
  again, where the life was lost. The loss of the last life ends the episode when the game is over.
- A cap counts the agent steps of the *game*, over all its lives, as in EfficientZero, whose time limit sits under
  its episodic life; steps that only restart an episode are not counted. After a cap a new game begins.
- CartPole ends by itself or, truncated, after 500 steps. Catch always lasts nine steps: no cap applies to it.

"""

import difflib
import functools
import importlib
import importlib.util
import math
import re
import sys
import warnings
from typing import Any, NamedTuple

import numpy as np

from speedyzero_jax.config.schema import EnvConfig
from speedyzero_jax.envs import scores
from speedyzero_jax.types import EnvStep

VECTOR_GAMES = ("Catch", "CartPole")
_CARTPOLE_STEPS = 500  # of CartPole-v1
_CARTPOLE_LIMITS = np.array(
  [2.4, math.radians(12)]
)  # |x| in metres and |angle| beyond which the pole has fallen
_NO_CAP = 2**30  # envpool adds one to its cap, so its largest int would overflow
_MIN_SIDE, _MAX_SIDE = 8, 512  # pixels; the screen is 210 x 160


class _Task(NamedTuple):
  """A game as envpool is to make it."""

  family: str  # the package inside envpool
  name: str
  options: dict[str, Any]


class BatchedEnv:
  """`num_lanes` copies of a game stepped together. Made by `make_env`; not safe to use from two threads at once.

  An episode's last frame is shown with `terminated` or `truncated`. The step after it ignores the lane's action and
  shows the next episode's first frame: `first`, reward 0, no transition. A new game, not just a new life, begins
  exactly after `game_over | truncated`; so a cap that falls on a lost life is `terminated` and `game_over`.

  Attributes:
    num_lanes: L.
    num_actions: actions are 0 .. num_actions - 1.
    frame_shape: (H, W, C) of one frame; (1, 1, D) for vectors.
    frame_dtype: uint8 for images, float32 for vectors.
  """

  def __init__(self, task: _Task, lanes: int, seed: int, threads: int):
    # Seeds of lanes are hashed from the run's: envpool's own seed + lane would give neighbouring runs the same lanes.
    seeds = np.random.SeedSequence(seed).generate_state(lanes) >> 1  # envpool wants an int32
    options = {
      **task.options,
      "num_envs": lanes,
      "env_seed": seeds.tolist(),
      "num_threads": min(threads, lanes),
    }
    self._new_pool = functools.partial(_registry(task.family).make_gymnasium, task.name, **options)
    self._pool: Any = self._new_pool()
    self._family = task.family
    self._episodic_life = task.options.get("episodic_life", False)
    self._ended: np.ndarray | None = (
      None  # [L] bool, the frame shown last ends its episode; None before the reset
    )
    self._lives = np.zeros(lanes, np.int32)
    shape = self._pool.spec.state_array_spec["obs"].shape
    self.num_lanes = lanes
    self.num_actions = int(self._pool.spec.action_array_spec["action"].maximum) + 1
    images = task.family == "atari"
    self.frame_shape = (shape[1], shape[2], shape[0]) if images else (1, 1, math.prod(shape))
    self.frame_dtype = np.dtype(np.uint8 if images else np.float32)

  def reset(self) -> EnvStep:
    """The first frame of every lane. Called again, it starts everything anew, from the same seed.

    Raises:
      RuntimeError: the environment is closed.
    """
    self._check_open()
    if self._ended is not None:
      self._pool = (
        self._new_pool()
      )  # envpool's own reset would go on with a game whose lives are left
    with warnings.catch_warnings():
      warnings.filterwarnings(
        "ignore", message=".*precision lowered", category=UserWarning
      )  # of CartPole's bounds
      obs, info = self._pool.reset()
    no = np.zeros(self.num_lanes, bool)
    return self._show(obs, np.zeros(self.num_lanes, np.float32), ~no, no, no, info)

  def step(self, action: np.ndarray) -> EnvStep:
    """Takes one agent step in every lane.

    Args:
      action: [L] integers below `num_actions`; ignored, but checked, in lanes whose episode has just ended.

    Raises:
      ValueError: wrong shape, type or range; nothing was stepped.
      RuntimeError: the environment was not reset yet, or is closed.
    """
    self._check_open()
    if self._ended is None:
      raise RuntimeError("step() before reset()")
    action = np.asarray(action)
    if action.shape != (self.num_lanes,) or action.dtype.kind not in "iu":
      raise ValueError(
        f"action must be [{self.num_lanes}] integers, got {action.dtype} {list(action.shape)}"
      )
    if action.min() < 0 or action.max() >= self.num_actions:
      raise ValueError(
        f"action must be in 0..{self.num_actions - 1}, got {action.min()}..{action.max()}"
      )
    obs, reward, ended, capped, info = self._pool.step(action.astype(np.int32))
    return self._show(obs, reward, self._ended, ended, capped, info)

  def close(self) -> None:
    """Ends the environments and their threads. May be called twice."""
    self._pool = None

  def _check_open(self) -> None:
    if self._pool is None:
      raise RuntimeError("the environment is closed")

  def _show(
    self,
    obs: np.ndarray,
    reward: np.ndarray,
    first: np.ndarray,
    ended: np.ndarray,
    capped: np.ndarray,
    info: dict[str, Any],
  ) -> EnvStep:
    """Puts what envpool says into our words; `ended` and `capped` are its `terminated` and `truncated`."""
    # envpool calls every end at the cap a truncation. One that falls on a real end is none: nothing comes after it.
    if self._family == "atari":
      over, lives = info["terminated"].astype(bool), info["lives"]
      real = capped & (over | (self._episodic_life & (lives > 0) & (lives < self._lives)))
      self._lives = lives
      frame = np.ascontiguousarray(obs.transpose(0, 2, 3, 1))
    else:
      frame = obs.reshape(self.num_lanes, *self.frame_shape)
      over = ended
      real = capped & (np.abs(frame[:, 0, 0, [0, 2]]) > _CARTPOLE_LIMITS).any(
        axis=1
      )  # Catch is never capped
    step = EnvStep(
      frame=frame,
      reward=reward.astype(np.float32),
      first=first,
      terminated=ended | real,
      truncated=capped & ~real,
      game_over=over | real,
    )
    self._ended = step.terminated | step.truncated
    return step


def make_env(
  config: EnvConfig, lanes: int, seed: int, *, training: bool, max_episode_steps: int | None = None
) -> BatchedEnv:
  """Makes a batch of environments.

  Equal arguments and actions give equal frames and rewards, bit for bit, whatever the number of threads; a lane's
  randomness depends on the seed and on its own index only.

  Args:
    config: the game and its conventions. Of `episodic_life`, only training takes notice.
    lanes: environments stepped together, at least 1.
    seed: any integer from 0 on.
    training: whether lost lives may end episodes. Rewards are raw either way: see `training_reward`.
    max_episode_steps: the cap in agent steps of a game; None: in training `config.max_episode_steps`, otherwise none.

  Raises:
    ValueError: a setting makes no sense, or the game is unknown (the message names the nearest known ones).
  """
  cap = (
    max_episode_steps
    if max_episode_steps is not None
    else config.max_episode_steps
    if training
    else _NO_CAP
  )
  _check_range("lanes", lanes, 1)
  _check_range("seed", seed, 0)
  _check_range("max_episode_steps", cap, 1, _NO_CAP)
  _check_range("env.threads", config.threads, 0)
  return BatchedEnv(_task(config, training, cap), lanes, seed, config.threads)


def episode_cap(game: str, cap: int) -> int:
  """Agent steps after which a game is truncated that is to be capped at `cap`: CartPole has a cap of its own."""
  return min(cap, _CARTPOLE_STEPS) if game == "CartPole" else cap


def largest_value(config: EnvConfig) -> float | None:
  """The largest discounted return of a training episode; None if it is not known.

  Catch ends with the only reward, 1 or -1; CartPole gives 1 in each step.
  """
  if config.game == "CartPole":
    steps = episode_cap(config.game, config.max_episode_steps)
    return sum(config.discount**t for t in range(steps))
  return 1.0 if config.game == "Catch" else None


def training_reward(config: EnvConfig, reward: np.ndarray) -> np.ndarray:
  """Rewards as they are trained on, float32: their sign if `config.clip_rewards`, otherwise unchanged."""
  return (np.sign(reward) if config.clip_rewards else np.asarray(reward)).astype(np.float32)


def game_names() -> list[str]:
  """All that `EnvConfig.game` can name: Catch, CartPole, the 26 of Atari-100k, then envpool's other Atari games."""
  known = [*VECTOR_GAMES, *scores.atari100k_games()]
  return known + sorted(_atari_games() - set(known))


def check_game(game: str) -> None:
  """Raises ValueError for a game there is not; the message names the nearest ones, or those of Atari-100k."""
  known = (*VECTOR_GAMES, *scores.atari100k_games())
  if (
    game not in known and game not in _atari_games()
  ):  # all of them are seconds away, see `_registry`
    near = _nearest(game)
    hint = (
      f"did you mean {' or '.join(near)}?"
      if near
      else f"known are {', '.join(known)} and more of Atari's"
    )
    raise ValueError(f"unknown game {game!r}; {hint}")


def _task(config: EnvConfig, training: bool, cap: int) -> _Task:
  """Translates the settings for envpool, or raises ValueError."""
  if config.game == "Catch":
    return _Task("toy_text", "Catch-v0", {})
  if config.game == "CartPole":
    return _Task(
      "classic_control", "CartPole-v1", {"max_episode_steps": episode_cap(config.game, cap)}
    )
  check_game(config.game)
  _check_range("env.frame_size", config.frame_size, _MIN_SIDE, _MAX_SIDE)
  _check_range("env.frame_skip", config.frame_skip, 1)
  _check_range("env.noop_max", config.noop_max, 1)  # at 0 envpool crashes the process
  _check_range("env.sticky_actions", config.sticky_actions, 0, 1)
  options = {
    "img_height": config.frame_size,
    "img_width": config.frame_size,
    "gray_scale": config.grayscale,
    "stack_num": 1,  # frames are stored once; whoever needs a stack makes it
    "frame_skip": config.frame_skip,
    "noop_max": config.noop_max,
    "use_fire_reset": config.fire_reset,
    "episodic_life": training and config.episodic_life,
    "repeat_action_probability": config.sticky_actions,
    "max_episode_steps": cap,
  }
  return _Task("atari", f"{config.game}-v5", options)


def _check_range(name: str, value: float, low: float, high: float = math.inf) -> None:
  if not low <= value <= high:
    raise ValueError(
      f"{name} must be at least {low}{f' and at most {high}' if high < math.inf else ''}, got {value}"
    )


def _nearest(game: str) -> list[str]:
  """Names like an unknown one, looking past case, separators and the decoration that gym puts around a name."""
  plain = {re.sub(r"[^a-z0-9]", "", name.lower()): name for name in game_names()}
  wanted = re.sub(
    r"[^a-z0-9]", "", re.sub(r"^ale/|(noframeskip|deterministic)?-v\d+$", "", game.lower())
  )
  close = difflib.get_close_matches(wanted, plain, n=3)
  close = [wanted] if wanted in plain else close
  return [plain[name] for name in close]


@functools.cache
def _atari_games() -> frozenset[str]:
  specs = _registry("atari").specs
  return frozenset(
    name.removesuffix("-v5") for name, (package, *_) in specs.items() if package == "envpool.atari"
  )


@functools.cache
def _registry(family: str) -> Any:
  """envpool's registry with one family of games in it. Imported late: it takes a second or two."""
  try:
    importlib.import_module("envpool")
  except ModuleNotFoundError as error:
    spec = importlib.util.find_spec("envpool")
    if spec is None or not (error.name or "").startswith("envpool."):
      raise
    # The package imports every family. Where only some are installed, use it as a bare folder of modules.
    sys.modules["envpool"] = importlib.util.module_from_spec(spec)
  importlib.import_module(f"envpool.{family}.registration")
  return importlib.import_module("envpool.registration").registry
