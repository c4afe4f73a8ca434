"""Vectorized environments: envpool games with this project's episode conventions.

Episodes (checked in tests/envs, for Atari also against a plain ALE):

- Atari follows NoFrameskip-v4: by default no sticky actions and no automatic FIRE, `frame_skip` raw
  frames per agent step with max-pooling over the last two, and 1 to `noop_max` raw no-op frames
  before the first frame (with `fire_reset`, where a game needs FIRE, one fewer and FIRE).
- In training with `episodic_life` a lost life ends the episode, but not the game: the next episode
  continues the game, again after no-ops. When the last life is lost, the episode ends with the
  game.
- With `fire_reset` and `episodic_life` evaluation continues after a lost life as training does:
  after no-ops and FIRE, in a step that ignores its action, does not count for the cap, and has
  `first` set. envpool drops the rewards of these raw frames, also of games that go on.
- A cap counts the agent steps of the *game*, over all its lives, as in EfficientZero, which applies
  its time limit inside its episodic-life wrapper. Steps that only restart an episode do not count.
  When the cap is reached, the game is truncated and a new one begins.
- CartPole terminates, or is truncated after 500 steps. Catch always lasts nine steps and ignores
  the cap, as do the games below.
- MemoryCatch is Catch with the ball visible only in the first frame of an episode and once it has
  landed. From single frames a policy without memory sees only the paddle, in one of three columns
  after the first step: it catches at most three of five balls, a mean return of 0.2.
- DecoyCatch is Catch, which reports three events: a catch, a miss, and the decoy, which is a miss
  with the ball right beside the paddle. The decoy is easier, as the ball has two sides.
- In a board game one lane plays both sides: each frame shows the board from the perspective of the
  player to move (see `rules.py`), and each reward is for the player who just moved. For evaluation
  against an opponent see `versus.py`.
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
from speedyzero_jax.envs import gymnasium_env
from speedyzero_jax.envs.gymnasium_env import GymnasiumEnv, check_actions
from speedyzero_jax.envs.rules import RULES
from speedyzero_jax.envs.scores import atari100k_games
from speedyzero_jax.types import Env, EnvStep

CATCHES = ("Catch", "MemoryCatch", "DecoyCatch")
VECTOR_GAMES = (*CATCHES, "CartPole")
_EVENTS = {"DecoyCatch": ("catch", "miss", "decoy")}
BOARD_GAMES = tuple(RULES)  # two-player games
# Longest episodes of games that ignore the cap, in agent steps.
_STEPS = {
  **dict.fromkeys(CATCHES, 9),
  **{game: rules.max_moves for game, rules in RULES.items()},
}
_CARTPOLE_STEPS = 500  # time limit of CartPole-v1
# CartPole terminates beyond these |x| [m] and |angle| [rad].
_CARTPOLE_LIMITS = np.array([2.4, math.radians(12)])


class _Task(NamedTuple):
  """envpool's arguments for a game."""

  family: str  # subpackage of envpool
  name: str
  options: dict[str, Any]
  hides_ball: bool = False  # MemoryCatch: blank the ball after the first frame
  event_rewards: tuple[float, ...] = ()  # DecoyCatch: replace its own rewards
  whole_games: bool = False  # Atari: an episode lasts until the game ends, even if envpool's do not


class BatchedEnv:
  """`num_lanes` copies of a game, stepped together. Created by `make_env`; not thread-safe.

  An episode's last frame has `terminated` or `truncated` set. The next step ignores the lane's
  action and returns the first frame of the next episode, with `first` set and reward 0; it is not a
  transition. A new game, rather than just a new life, begins exactly after `game_over | truncated`.
  If the cap coincides with a lost life, the step is `terminated` and `game_over`.

  Attributes:
    num_lanes: number of environments, L.
    num_actions: number of actions; they are 0 .. num_actions - 1.
    frame_shape: shape (H, W, C) of one frame; (1, 1, D) for vectors.
    frame_dtype: uint8 for images, float32 for vectors.
  """

  def __init__(self, task: _Task, lanes: int, seed: int, threads: int):
    # envpool's default of seed + lane would share lanes between runs with adjacent seeds.
    seeds = np.random.SeedSequence(seed).generate_state(lanes) >> 1  # envpool requires int32
    options = {
      **task.options,
      "num_envs": lanes,
      "env_seed": seeds.tolist(),
      "num_threads": min(threads, lanes),
    }
    self._pool: Any = _registry(task.family).make_gymnasium(task.name, **options)
    self._family, self._hides_ball = task.family, task.hides_ball
    self._event_rewards, self._whole_games = task.event_rewards, task.whole_games
    self._episodic_life = task.options.get("episodic_life", False) and not task.whole_games
    self._ended = np.zeros(lanes, bool)  # whether the next step ignores its action
    self._lives = np.zeros(lanes, np.int32)
    shape = self._pool.spec.state_array_spec["obs"].shape
    self.num_lanes = lanes
    self.num_actions = int(self._pool.spec.action_array_spec["action"].maximum) + 1
    if task.family == "atari":
      self.frame_shape = shape[1], shape[2], shape[0]
    elif task.family == "pgx":  # both players' views of the board
      self.frame_shape = shape[1], shape[2], shape[3] + shape[3] % 2  # see `BoardEnv._by_lane`
    else:
      self.frame_shape = 1, 1, math.prod(shape)
    images = task.family in ("atari", "pgx")
    self.frame_dtype = np.dtype(np.uint8 if images else np.float32)

  def reset(self) -> EnvStep:
    """Returns the first frame of every lane. Must be called once, before any step."""
    with warnings.catch_warnings():  # envpool warns about CartPole's bounds
      warnings.filterwarnings("ignore", message=".*precision lowered", category=UserWarning)
      obs, info = self._pool.reset()
    no = np.zeros(self.num_lanes, bool)
    reward = np.zeros(len(info["players"]["env_id"]), np.float32)
    return self._show(~no, *self._by_lane(obs, reward, no, no, info))

  def step(self, action: np.ndarray) -> EnvStep:
    """Takes one agent step in every lane; actions [L] are ignored where an episode has ended.

    Raises ValueError, and steps no lane, if actions have a wrong shape, or are out of range or
    illegal.
    """
    self._check(action)
    return self._show(self._ended, *self._by_lane(*self._pool.step(action.astype(np.int32))))

  def _check(self, action: np.ndarray) -> None:
    check_actions(self, action)

  def close(self) -> None:
    """Closes the environments and their threads. May be called twice."""
    self._pool = None

  def _by_lane(self, obs: Any, *others: Any) -> tuple:
    """Converts envpool's output of a step to arrays with leading dimension L."""
    return obs, *others

  def _show(
    self, first: np.ndarray, obs: Any, reward: Any, ended: Any, capped: Any, info: Any
  ) -> EnvStep:
    """Builds an `EnvStep`; `ended` and `capped` are envpool's `terminated` and `truncated`."""
    # At the cap envpool reports `truncated` even in a terminal state; `real` marks these states.
    if self._family == "atari":
      over, lives = info["terminated"].astype(bool), info["lives"]
      real = capped & (over | (self._episodic_life & (lives > 0) & (lives < self._lives)))
      self._lives = lives
      frame = np.ascontiguousarray(obs.transpose(0, 2, 3, 1))
    else:
      if self._hides_ball:
        paddle = np.arange(obs.shape[1])[:, None] == obs.shape[1] - 1  # bottom row
        obs = np.where(first[:, None, None] | paddle, obs, 0)
      if self._event_rewards:
        beside = (obs[:, -1, 1:] * obs[:, -1, :-1]).any(axis=1)  # ball and paddle in the last row
        events = np.stack([reward > 0, reward < 0, beside], axis=-1)
        reward = events @ np.array(self._event_rewards)
      frame = obs.reshape(self.num_lanes, *self.frame_shape)
      over, real = ended, capped
      if self._family == "classic_control":  # other families ignore the cap
        real = capped & (np.abs(frame[:, 0, 0, [0, 2]]) > _CARTPOLE_LIMITS).any(axis=1)
    self._ended = ended | capped
    return EnvStep(
      frame=frame,
      reward=reward.astype(np.float32),
      first=first,
      terminated=(ended & over if self._whole_games else ended) | real,
      truncated=capped & ~real,
      game_over=over | real,
    )


class BoardEnv(BatchedEnv):
  """A board game. Each lane plays both sides; see the module docstring. Created by `make_env`."""

  def __init__(self, task: _Task, lanes: int, seed: int, threads: int):
    super().__init__(task, lanes, seed, threads)
    self._mover = np.zeros(lanes, np.int32)  # the player to move, 0 or 1
    self._legal = np.zeros((lanes, self.num_actions), bool)

  def _check(self, action: np.ndarray) -> None:
    super()._check(action)
    legal = self._legal[np.arange(self.num_lanes), action] | self._ended
    if not legal.all():
      raise ValueError(f"illegal moves in lanes {np.flatnonzero(~legal).tolist()}, got {action}")

  def _by_lane(self, obs: Any, *others: Any) -> tuple:
    # envpool returns multi-player games in the order in which threads finish, with both views.
    reward, ended, capped, info = others
    order, sides = np.argsort(info["env_id"]), np.argsort(info["players"]["env_id"], kind="stable")
    lanes = np.arange(self.num_lanes)
    reward = reward[sides].reshape(-1, 2)[lanes, self._mover]
    self._mover, self._legal = info["current_player"][order], info["legal_action_mask"][order]
    obs = obs[sides].reshape(-1, 2, *obs.shape[1:])[lanes, self._mover].astype(np.uint8)
    if obs.shape[-1] % 2:  # Go's last plane is 1 for White; the rules need the number of moves
      white, moves = obs[..., -1:], info["elapsed_step"][order].astype(np.uint8)
      moves = moves[:, None, None, None] * np.concatenate([1 - white, white], axis=-1)
      obs = np.concatenate([obs[..., :-1], moves], axis=-1)
    return obs, reward, ended[order], capped[order], info


def make_env(
  config: EnvConfig, lanes: int, seed: int, *, training: bool, max_episode_steps: int | None = None
) -> Env:
  """Creates vectorized environments.

  Frames and rewards are deterministic, bit for bit, given the arguments and actions, for any number
  of threads. A lane's randomness depends only on the seed and the lane's index. Rewards are always
  raw (see `training_reward`).

  `config.episodic_life` and `config.event_rewards` apply only in `training`; otherwise episodes are
  whole games. `max_episode_steps` replaces the configured cap of a game, in agent steps.

  Raises:
    ValueError: the game is unknown, or reports another number of events than `event_rewards`.
  """
  cap = episode_cap(config.game, max_episode_steps or config.max_episode_steps)
  weights = config.event_rewards
  if config.game.startswith(gymnasium_env.PREFIX):
    return GymnasiumEnv(config.game, lanes, seed, cap, weights if training else ())
  names = _EVENTS.get(config.game, ())
  if weights and len(weights) != len(names):
    reported = ", ".join(names) or "no events"
    raise ValueError(f"event_rewards: {config.game} reports {reported}; got {len(weights)} numbers")
  kind = BoardEnv if config.game in BOARD_GAMES else BatchedEnv
  return kind(_task(config, training, cap), lanes, seed, config.threads)


def episode_cap(game: str, cap: int) -> int:
  """The effective cap, in agent steps, given the environment's own time limit."""
  if game.startswith(gymnasium_env.PREFIX):
    return min(cap, gymnasium_env.probe(game)[3])
  return _STEPS.get(game) or (min(cap, _CARTPOLE_STEPS) if game == "CartPole" else cap)


def frame_sides(config: EnvConfig) -> tuple[int, int]:
  """Height and width of a one-player game's frames; (1, 1) for vectors.

  Raises ValueError for a board game, and as `GymnasiumEnv` does.
  """
  if config.game.startswith(gymnasium_env.PREFIX):
    return gymnasium_env.probe(config.game)[0][:2]
  if config.game in BOARD_GAMES:
    raise ValueError(f"{config.game} is for two players; agent=alphazero plays it")
  side = 1 if config.game in VECTOR_GAMES else config.frame_size
  return side, side


def training_reward(config: EnvConfig, reward: np.ndarray) -> np.ndarray:
  """Rewards for training, float32: the sign if `config.clip_rewards`, else unchanged.

  Those of events are never clipped.
  """
  clip = config.clip_rewards and not config.event_rewards
  return (np.sign(reward) if clip else np.asarray(reward)).astype(np.float32)


def check_game(game: str) -> None:
  """Raises ValueError for an unknown game; the message suggests the closest match."""
  if game.startswith(gymnasium_env.PREFIX):
    gymnasium_env.probe(game)
    return
  known = (*VECTOR_GAMES, *BOARD_GAMES, *atari100k_games())
  if game in known or game in _atari_games():  # in this order, as loading envpool is slow
    return
  plain = {_plain(name): name for name in (*known, *sorted(_atari_games()))}
  near = difflib.get_close_matches(_plain(game), plain, n=1)
  hint = f"did you mean {plain[near[0]]}?" if near else f"available: {', '.join(known)} and more"
  raise ValueError(f"unknown game {game!r}; {hint}")


def _plain(game: str) -> str:
  """Normalizes a game's name: lower case, without separators and gym's prefixes and suffixes."""
  name = re.sub(r"^ale/|(noframeskip|deterministic)?-v\d+$", "", game.lower())
  return re.sub(r"[^a-z0-9]", "", name)


def _task(config: EnvConfig, training: bool, cap: int) -> _Task:
  """Translates settings to envpool's arguments. Raises ValueError for an unknown game."""
  if config.game in CATCHES:
    weights = config.event_rewards if training else ()
    return _Task("toy_text", "Catch-v0", {}, config.game == "MemoryCatch", weights)
  if config.game == "CartPole":
    return _Task("classic_control", "CartPole-v1", {"max_episode_steps": cap})
  if config.game in BOARD_GAMES:
    return _Task("pgx", f"{'Go9x9' if config.game == 'Go9' else config.game}-v1", {})
  check_game(config.game)
  options = {
    "img_height": config.frame_size,
    "img_width": config.frame_size,
    "gray_scale": config.grayscale,
    "stack_num": 1,  # the replay stores each frame once and stacks frames when sampling
    "frame_skip": config.frame_skip,
    "noop_max": config.noop_max,
    "use_fire_reset": config.fire_reset,
    # In evaluation, too, FIRE is pressed after every lost life if it is in training.
    "episodic_life": config.episodic_life and (training or config.fire_reset),
    "repeat_action_probability": config.sticky_actions,
    "max_episode_steps": cap,
  }
  return _Task("atari", f"{config.game}-v5", options, whole_games=not training)


@functools.cache
def _atari_games() -> frozenset[str]:
  specs = _registry("atari").specs
  return frozenset(
    name.removesuffix("-v5") for name, (package, *_) in specs.items() if package == "envpool.atari"
  )


@functools.cache
def _registry(family: str) -> Any:
  """Returns envpool's registry with one family of games.

  Importing the package would load every family and its rendering libraries, which takes a second.
  Its submodules are imported through an empty placeholder package instead, which is then removed.
  """
  spec = importlib.util.find_spec("envpool")
  if spec is None:
    raise ModuleNotFoundError("envpool is not installed")
  whole = sys.modules.get("envpool")
  sys.modules["envpool"] = whole or importlib.util.module_from_spec(spec)
  try:
    importlib.import_module(f"envpool.{family}.registration")
    return importlib.import_module("envpool.registration").registry
  finally:
    if whole is None:
      del sys.modules["envpool"]
