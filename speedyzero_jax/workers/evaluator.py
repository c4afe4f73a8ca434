"""The evaluator: full episodes with raw rewards, played greedily or with exploration.

Board games are played against an opponent. The agent moves first in episodes 0, 2, 4, ...
"""

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from speedyzero_jax.agents.base import ActInputs, Agent
from speedyzero_jax.config.schema import Config
from speedyzero_jax.envs.batched_env import episode_cap, make_env
from speedyzero_jax.envs.opponents import Opponent, play_at_random
from speedyzero_jax.envs.rules import RULES
from speedyzero_jax.envs.scores import human_normalized
from speedyzero_jax.envs.versus import VersusEnv
from speedyzero_jax.metrics import names
from speedyzero_jax.system.files import write_atomically
from speedyzero_jax.types import Env
from speedyzero_jax.workers.actor import stacked
from speedyzero_jax.workers.inference import Inference
from speedyzero_jax.workers.video import Video
from speedyzero_jax.workers.weights import Version

_REPORT_SECONDS = 10
MAX_LANES = 64  # environments stepped together, an even number; further episodes run afterwards


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """Results of an evaluation. Returns are raw and undiscounted.

  `human_normalized` is None for games without reference scores.
  """

  game: str
  step: int  # learner steps of the weights
  episodes: int
  mean: float
  median: float
  std: float
  human_normalized: float | None
  returns: list[float]
  lengths: list[int]  # agent steps
  capped: int  # truncated episodes, at `max_episode_steps` or by the environment
  max_episode_steps: int
  explore: bool  # acted as in training
  seed: int

  def write(self, path: Path) -> None:
    """Writes JSON atomically."""
    write_atomically(path, json.dumps(dataclasses.asdict(self), indent=1) + "\n")

  def metrics(self) -> dict[str, float]:
    """Returns the metrics to log, without unknown ones."""
    values = {
      key: getattr(self, key) for key in ("step", "mean", "median", "std", "human_normalized")
    }
    return {names.EVALUATION_PREFIX + key: x for key, x in values.items() if x is not None}

  def __str__(self) -> str:
    normalized = (
      "" if self.human_normalized is None else f", human-normalized {self.human_normalized:.3f}"
    )
    capped = f", {self.capped} truncated" if self.capped else ""
    explored = " with exploration" if self.explore else ""
    return (
      f"{self.game} after {self.step} learner steps, "
      f"{self.episodes} episode{'s' * (self.episodes != 1)}{explored}: "
      f"mean {self.mean:.2f}, median {self.median:.2f}, std {self.std:.2f}{normalized}{capped}"
    )


def evaluate(
  config: Config,
  agent: Agent,
  inference: Inference,
  version: Version,
  *,
  episodes: int,
  seed: int,
  opponent: Opponent | None = None,
  opening: int = 0,
  video: Video | None = None,
  should_stop: Callable[[], bool] = lambda: False,
  report: Callable[[str], None] = lambda line: None,
) -> Evaluation | None:
  """Plays full episodes and returns their results; None if stopped.

  Args:
    opponent: plays the other side in board games; None: at random.
    opening: number of random moves at the start of board games.
    video: receives the first episode.
    should_stop: called between steps; if it returns true, the evaluation stops.
    report: receives a progress line every ten seconds.
  """
  cap = episode_cap(config.env.game, config.evaluation.max_episode_steps)
  lanes = min(episodes, MAX_LANES)
  played: list[tuple[float, int, bool]] = []
  while len(played) < episodes:
    seeds = np.random.SeedSequence([seed, len(played) // lanes, 0xE7A1])
    seeded = int(seeds.generate_state(1)[0] >> 1)
    env: Env
    if rules := RULES.get(config.env.game):
      env = VersusEnv(rules, lanes, seeded, opponent or play_at_random(rules), opening)
    else:
      env = make_env(config.env, lanes, seeded, training=False, max_episode_steps=cap)
    # Agents that explore differently in each training lane act as in all of them.
    episode, training_lanes = len(played) + np.arange(lanes), config.actor.lanes
    lane = (episode * training_lanes // episodes % training_lanes).astype(np.int32)
    with contextlib.closing(env):
      recorder = None if played else video
      key = jax.random.key(seeded)
      results = _play(
        config, agent, inference, version, env, lane, key, recorder, should_stop, report
      )
    if results is None:
      return None
    played += results
  del played[episodes:]
  returns = [score for score, _, _ in played]
  mean = float(np.mean(returns))
  return Evaluation(
    game=config.env.game,
    step=version.step,
    episodes=episodes,
    mean=mean,
    median=float(np.median(returns)),
    std=float(np.std(returns)),
    human_normalized=human_normalized(config.env.game, mean),
    returns=returns,
    lengths=[length for _, length, _ in played],
    capped=sum(capped for _, _, capped in played),
    max_episode_steps=cap,
    explore=config.evaluation.explore,
    seed=seed,
  )


def _play(
  config: Config,
  agent: Agent,
  inference: Inference,
  version: Version,
  env: Env,
  lane: np.ndarray,
  key: jax.Array,
  video: Video | None,
  should_stop: Callable[[], bool],
  report: Callable[[str], None],
) -> list[tuple[float, int, bool]] | None:
  """Plays one episode in every lane; returns (return, length, truncated) of each."""
  explore, frames = config.evaluation.explore, None
  core = jax.tree.map(np.asarray, agent.initial_core(env.num_lanes))
  score, length = np.zeros(env.num_lanes), np.zeros(env.num_lanes, np.int64)
  playing, capped = np.ones(env.num_lanes, bool), np.zeros(env.num_lanes, bool)
  step = env.reset()
  reported = time.monotonic()
  while playing.any():
    if should_stop():
      return None
    if time.monotonic() - reported > _REPORT_SECONDS:
      reported = time.monotonic()
      report(
        f"evaluating: {playing.sum()} of {len(playing)} episodes running, at step {length.max()}"
      )
    frames = stacked(step, config.env.frame_stack, frames)
    inputs = ActInputs(frames, step.first, lane, core)
    key, act_key = jax.random.split(key)
    out = inference.act(version.variables, inputs, act_key, np.float32(1), explore=explore)
    core = jax.device_get(out.core)
    if video and playing[0]:
      numbers = {name: x[0] for name, x in {**out.columns, **out.diagnostics}.items()}
      video.add(step.frame[0], int(out.action[0]), score[0], numbers)
    step = env.step(np.asarray(out.action))
    score += np.where(playing, step.reward, 0)
    length += playing & ~step.first
    capped |= playing & step.truncated
    if video and playing[0] and (step.terminated | step.truncated)[0]:
      video.add(step.frame[0], None, score[0], {})
    playing &= ~(step.terminated | step.truncated)
  return list(zip(score.tolist(), length.tolist(), capped.tolist(), strict=True))
