"""LightZero's side of the comparisons in peers.py and peers_learning.py.

Runs in LightZero's virtual environment, which peers.py creates.
"""

import contextlib
import copy
import importlib.metadata
import tempfile
import time
from typing import Any

import envpool
import gymnasium
import numpy as np
import torch
from easydict import EasyDict
from lzero.mcts.buffer.game_buffer_efficientzero import EfficientZeroGameBuffer
from lzero.mcts.buffer.game_segment import GameSegment
from lzero.policy.efficientzero import EfficientZeroPolicy

from peer_side import (
  ACTIONS,
  EPISODE,
  PROGRAMS,
  REUSE,
  STACK,
  TD_STEPS,
  UNROLL,
  Curve,
  Piece,
  Program,
  Work,
  episodes,
  resident,
  serve,
)

ENTRIES = {"efficientzero": "muzero", "rezero_mz": "rezero"}  # by CartPole configuration
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ALL = np.ones(ACTIONS, np.int8)  # every action is legal
LARGE = {
  "observation_shape": (3 * STACK, 96, 96), "image_channel": 3, "action_space_size": ACTIONS,
  "downsample": True, "frame_stack_num": STACK, "num_res_blocks": 1, "num_channels": 64,
  "reward_head_channels": 16, "value_head_channels": 16, "policy_head_channels": 16,
  "lstm_hidden_size": 512, "support_scale": 300, "reward_support_size": 601,
  "value_support_size": 601, "proj_hid": 1024, "proj_out": 1024, "pred_hid": 512, "pred_out": 1024,
  "self_supervised_learning_loss": True, "discrete_action_encoding_type": "not_one_hot",
}  # fmt: skip
SMALL = LARGE | {  # configs/atari_small.yaml with larger frames
  "observation_shape": (STACK, 64, 64), "image_channel": 1, "num_channels": 32,
  "reward_head_channels": 8, "value_head_channels": 8, "policy_head_channels": 8,
  "lstm_hidden_size": 128, "support_scale": 50, "reward_support_size": 101,
  "value_support_size": 101, "proj_hid": 256, "proj_out": 256, "pred_hid": 128, "pred_out": 256,
  "discrete_action_encoding_type": "one_hot",
}  # fmt: skip


def configuration(model: dict[str, Any], **changes: Any) -> EasyDict:
  """LightZero's defaults with EfficientZero's sizes, augmentation and priorities."""
  cfg = EasyDict(EfficientZeroPolicy.default_config())
  cfg.update(EfficientZeroGameBuffer.default_config())
  cfg.model.update(model)
  settings = {
    "cuda": DEVICE == "cuda", "device": DEVICE, "game_segment_length": EPISODE,
    "use_augmentation": True, "use_priority": True, "num_unroll_steps": UNROLL,
    "td_steps": TD_STEPS,
  }  # fmt: skip
  cfg.update(settings | changes)
  return cfg


def make_policy(cfg: EasyDict) -> EfficientZeroPolicy:
  """Creates a policy with a newly initialized network."""
  return EfficientZeroPolicy(cfg, enable_field=["learn", "collect"])


def search(roots: int, simulations: int) -> tuple[Work, dict[str, Any]]:
  """Computes visits and values from observations, by the function used for collecting.

  Observations are [B, S*C, H, W] float32 in [0, 1] in host memory, as LightZero's environments
  give them.
  """
  policy = make_policy(configuration(LARGE, num_simulations=simulations))
  inputs, masks = torch.rand(roots, *LARGE["observation_shape"]), [ALL] * roots
  return (
    lambda: policy._forward_collect(inputs.to(DEVICE), masks, to_play=[-1] * roots) and None,
    {},
  )


def filled(cfg: EasyDict, transitions: int) -> EfficientZeroGameBuffer:
  """Creates a game buffer filled with `episodes`, one segment each."""
  buffer = EfficientZeroGameBuffer(cfg)
  space = gymnasium.spaces.Discrete(ACTIONS)
  for episode in episodes(transitions):
    frames = np.moveaxis(episode.frames, -1, 1).astype(np.float32) / 255
    segment = GameSegment(space, game_segment_length=EPISODE, config=cfg)
    segment.reset([frames[0]] * STACK)
    for t in range(EPISODE):
      segment.append(episode.action[t], frames[t + 1], episode.reward[t], ALL, -1)
      segment.store_search_stats((episode.policy[t] * 1000).tolist(), episode.value[t])
    push(buffer, segment, episode.priority)
  return buffer


def push(
  buffer: EfficientZeroGameBuffer, segment: GameSegment, priority: np.ndarray | None
) -> None:
  """Adds a complete episode."""
  segment.game_segment_to_array()
  meta = {"done": True, "unroll_plus_td_steps": UNROLL + TD_STEPS, "priorities": priority}
  buffer.push_game_segments(([segment], [meta]))


def draw(batch: int, transitions: int) -> tuple[Work, dict[str, Any]]:
  """Draws a batch with observations and stored policies, without reanalysis or bootstrap values."""
  before = resident()
  buffer = filled(configuration(LARGE, reanalyze_ratio=0, batch_size=batch), transitions)
  count = buffer.get_num_of_transitions()
  size = sum(
    array.nbytes
    for s in buffer.game_segment_buffer
    for array in vars(s).values()
    if hasattr(array, "nbytes")
  )

  def work() -> None:
    _, _, policies, _ = buffer._make_batch(batch, 0)
    buffer._compute_target_policy_non_reanalyzed(policies, ACTIONS)

  return work, {
    "transitions": count,
    "bytes_per_transition": size / count,
    "resident_bytes_per_transition": (resident() - before) / count,
  }


def fresh(batch: int, simulations: int, transitions: int) -> tuple[Work, dict[str, Any]]:
  """Draws a batch, searching every state and evaluating every bootstrap value."""
  cfg = configuration(LARGE, reanalyze_ratio=1, batch_size=batch, num_simulations=simulations)
  buffer, policy = filled(cfg, transitions), make_policy(cfg)
  return lambda: buffer.sample(batch, policy) and None, {}


def train(batch: int) -> tuple[Work, dict[str, Any]]:
  """Runs a training step on a batch in host memory."""
  cfg = configuration(LARGE, reanalyze_ratio=0, batch_size=batch)
  policy = make_policy(cfg)
  data = filled(cfg, 2 * max(batch, EPISODE)).sample(batch, policy)
  return lambda: policy._forward_learn(data) and None, {}


class Play:
  """Collects in vectorized envpool Breakout, as LightZero's collector does."""

  def __init__(
    self,
    cfg: EasyDict,
    policy: EfficientZeroPolicy,
    buffer: EfficientZeroGameBuffer,
    program: Program,
  ):
    self._cfg, self._policy, self._buffer, self._lanes = cfg, policy, buffer, program.lanes
    self._env = envpool.make_gymnasium(
      "Breakout-v5", num_envs=program.lanes, img_height=program.frame_size,
      img_width=program.frame_size, gray_scale=program.grey, stack_num=1, episodic_life=True,
      use_fire_reset=False, max_episode_steps=3000, reward_clip=True, seed=0,
    )  # fmt: skip
    self._actions = cfg.model.action_space_size
    self._mask = np.ones(self._actions, np.int8)
    self._frames = self._scaled(self._env.reset()[0])
    self._segments = [self._new(lane) for lane in range(program.lanes)]

  @staticmethod
  def _scaled(frames: np.ndarray) -> np.ndarray:
    return frames.astype(np.float32) / 255

  def _new(self, lane: int) -> GameSegment:
    space = gymnasium.spaces.Discrete(self._actions)
    segment = GameSegment(space, game_segment_length=EPISODE, config=self._cfg)
    segment.reset([self._frames[lane]] * STACK)
    return segment

  def step(self, random: bool) -> None:
    """Takes one action in every lane."""
    if random:
      action = np.random.randint(self._actions, size=self._lanes)
      visits, values = np.ones((self._lanes, self._actions)).tolist(), np.zeros(self._lanes)
    else:
      stacked = torch.from_numpy(
        np.stack([np.concatenate(segment.get_obs()) for segment in self._segments])
      )
      masks, players = [self._mask] * self._lanes, [-1] * self._lanes
      output = self._policy._forward_collect(stacked.to(DEVICE), masks, to_play=players)
      action = np.array([output[lane]["action"] for lane in range(self._lanes)])
      visits = [output[lane]["visit_count_distributions"] for lane in range(self._lanes)]
      values = [output[lane]["searched_value"] for lane in range(self._lanes)]
    frames, reward, terminated, truncated, _ = self._env.step(action.astype(np.int32))
    self._frames = self._scaled(frames)
    for lane, segment in enumerate(self._segments):
      segment.store_search_stats(visits[lane], values[lane])
      segment.append(action[lane], self._frames[lane], reward[lane], self._mask, -1)
      if terminated[lane] or truncated[lane] or len(segment.action_segment) == EPISODE:
        push(self._buffer, segment, None)
        self._segments[lane] = self._new(lane)


def whole(size: str, steps: int, simulations: int) -> tuple[Work, dict[str, Any]]:
  """Alternates collecting, reanalysing a batch and learning; measures the second half."""
  program = PROGRAMS[size]
  cfg = configuration(
    (SMALL if size == "small" else LARGE) | {"action_space_size": 4},
    reanalyze_ratio=1,
    batch_size=program.batch,
    num_simulations=simulations,
    replay_buffer_size=program.stored,
    gray_scale=program.grey,
  )
  policy, buffer = make_policy(cfg), EfficientZeroGameBuffer(cfg)
  play = Play(cfg, policy, buffer, program)

  def learn() -> None:
    data = buffer.sample(program.batch, policy)
    output = policy._forward_learn(data)
    buffer.update_priority(data, output["value_priority_orig"].detach().cpu().numpy())

  def work() -> dict[str, Any]:
    while buffer.get_num_of_transitions() < program.stored:
      play.step(random=True)
    collected = 0
    for step in range(steps):
      if step == steps // 2:
        begin = time.perf_counter()
      while collected < program.agent_steps * (step + 1):
        play.step(random=False)
        collected += program.lanes
      buffer.remove_oldest_data_to_fit()
      learn()
    return {
      "samples_per_second": program.batch * (steps - steps // 2) / (time.perf_counter() - begin)
    }

  return work, {}


class Finished(Exception):
  """Ends a training run of LightZero."""


def learn(
  method: str, seed: int, agent_steps: int, interval: int, episodes: int
) -> tuple[Work, dict[str, Any]]:
  """Trains on CartPole by LightZero's entry; returns the curve of evaluations."""
  entry = importlib.import_module(f"lzero.entry.train_{ENTRIES[method]}")
  zoo = importlib.import_module(f"zoo.classic_control.cartpole.config.cartpole_{method}_config")
  config, create = copy.deepcopy((zoo.main_config, zoo.create_config))
  batch = config.policy.batch_size
  policy = {
    "update_per_collect": None, "replay_ratio": REUSE / batch, "eval_freq": 10**9,
    "evaluator_env_num": episodes,
  }  # fmt: skip
  env = {"evaluator_env_num": episodes, "n_evaluator_episode": episodes}
  config.policy.update(policy)
  config.env.update(env)
  create.env_manager.type = "base"  # environments in this process
  curve, evaluators = Curve(), []

  class Evaluator(entry.Evaluator):
    """Adds its evaluations to the curve; never ends training."""

    def __init__(self, *args: Any, **settings: Any):
      super().__init__(*args, **settings)
      evaluators.append(self)
      curve.begin()  # everything has been made

    def eval(self, _: Any, iteration: int, envstep: int) -> tuple[bool, None]:
      with curve.evaluation(batch * iteration, envstep) as point:
        point.append(float(super().eval(None, iteration, envstep)[1]["eval_episode_return_mean"]))
      return False, None

  class Learner(entry.BaseLearner):
    """Evaluates, and ends training, after as many samples as our side."""

    def train(self, data: Any, envstep: int) -> Any:
      result, samples = super().train(data, envstep), batch * self.train_iter
      if samples % (interval * REUSE) == 0:
        evaluators[0].eval(None, self.train_iter, envstep)
      if samples >= agent_steps * REUSE:
        raise Finished
      return result

  def work() -> dict[str, Any]:
    entry.Evaluator, entry.BaseLearner = Evaluator, Learner
    suppress = contextlib.suppress(Finished)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), suppress:
      getattr(entry, f"train_{ENTRIES[method]}")([config, create], seed=seed)
    return {"curve": curve.points}

  return work, {"changes": policy | env | {"env_manager": "base"}}


def versions() -> tuple[Work, dict[str, Any]]:
  """Reports versions and device; does no work."""
  names = ("LightZero", "DI-engine", "torch", "numpy")
  return lambda: None, {
    "versions": {name: importlib.metadata.version(name) for name in names},
    "device": DEVICE,
  }


PIECES: dict[str, Piece] = {
  piece.__name__: piece for piece in (search, train, draw, fresh, whole, learn, versions)
}

if __name__ == "__main__":
  torch.manual_seed(0)
  torch.set_float32_matmul_precision("high")  # as jax's default: TF32 if available
  serve(PIECES)
