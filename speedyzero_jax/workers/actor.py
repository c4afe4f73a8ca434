"""The actor: steps a batch of environments (lanes) with an agent and produces slots."""

import zlib

import jax
import numpy as np

from speedyzero_jax.agents.base import ActInputs, ActOutput, Agent
from speedyzero_jax.config.schema import Config
from speedyzero_jax.envs.batched_env import training_reward
from speedyzero_jax.metrics.aggregation import Episode
from speedyzero_jax.types import Env, EnvStep, Slots
from speedyzero_jax.workers.batched_inference import BatchedInference
from speedyzero_jax.workers.inference import Inference
from speedyzero_jax.workers.weights import Version

_fold_in = jax.jit(jax.random.fold_in)  # faster than the eager function


def stacked(step: EnvStep, stack: int, before: np.ndarray | None) -> np.ndarray:
  """Stacks [L, S, H, W, C] of the last S frames, oldest first, from those `before` the step.

  An episode's first frame fills its stack.
  """
  new = np.repeat(step.frame[:, None], stack, axis=1)
  if before is not None:
    new[~step.first, :-1] = before[~step.first, 1:]
  return new


class Actor:
  """Steps environments within a budget of agent steps.

  `finished` has the games that ended with the last step.

  Args:
    env: new environments, which the actor owns.
    lane_offset: index in the replay of the first of the actor's consecutive lanes.
    start: [L], slots of the environments' first frames; None: 0.
    resumable_for: number of steps, in each lane, for which `state_dict` can be restored; it needs
      all actions. None: all steps.
  """

  def __init__(
    self,
    config: Config,
    agent: Agent,
    env: Env,
    inference: Inference | BatchedInference,
    key: jax.Array,
    *,
    lane_offset: int = 0,
    start: np.ndarray | None = None,
    resumable_for: int | None = None,
  ):
    self._config, self._agent, self._env, self._inference = config, agent, env, inference
    self._key = key
    self._lanes = lane_offset + np.arange(env.num_lanes)
    self._actions: list[np.ndarray] = []  # all, or only the latest after `resumable_for` steps
    self._resumable_for = resumable_for
    self._start = np.zeros(env.num_lanes, np.int64) if start is None else start
    self._steps = 0  # taken in each lane
    self._score, self._length = np.zeros(env.num_lanes), np.zeros(env.num_lanes, np.int64)
    self._stacked: np.ndarray | None = None
    self._core = jax.tree.map(np.asarray, agent.initial_core(env.num_lanes))
    self._observe(env.reset())

  def step(
    self, version: Version, *, budget: int, progress: float, random: bool, last: bool = True
  ) -> tuple[Slots, int]:
    """Plays one action in every lane, or in fewer lanes if the budget is smaller.

    Args:
      budget: agent steps left, at least 1. If this call exhausts it, all open episodes are
        truncated at their last frames.
      progress: completed share of training.
      random: play uniformly at random (the first steps of a run).
      last: whether the budget is final. If not, exhausting it truncates only the episodes of lanes
        without an action.

    Returns:
      The new slots: one per lane, in the order of lanes, then the last frames of lanes that are
      closed; and the number of agent steps in them. Resets are not agent steps.
    """
    current = self._current
    ended = current.terminated | current.truncated
    acting = ~ended
    if acting.sum() > budget:
      acting &= np.cumsum(acting) <= budget
    count = int(acting.sum())
    decision = self._decide(version, progress, random)
    if self._resumable_for is not None and self._steps >= self._resumable_for:
      self._actions.clear()
    next_step = self._env.step(np.where(ended, 0, decision.action))
    self._core = decision.core
    self._actions.append(decision.action.astype(np.int16))
    reward = training_reward(self._config.env, next_step.reward)
    slots = self._slots(decision, version, acting, reward)
    self._steps += 1
    self._observe(next_step, acting | ended)
    if count == budget and last:
      ends = self._close(version, progress, random).select(np.flatnonzero(acting))
      slots = Slots.concatenate([slots, ends])
    return slots, count

  def _decide(self, version: Version, progress: float, random: bool) -> ActOutput:
    # The key depends on the slot only, so it is the same for any actor that continues these lanes.
    key = _fold_in(self._key, np.uint32(self._start.max() + self._steps))
    if random:
      return self._random_decision(key)
    lane = self._lanes.astype(np.int32)
    inputs = ActInputs(self._stacked, self._current.first, lane, self._core)
    return self._inference.decide(version, inputs, key, progress, explore=True)

  def _random_decision(self, key: jax.Array) -> ActOutput:
    lanes = len(self._lanes)
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
    action = rng.integers(self._env.num_actions, size=lanes)
    columns = {
      column.name: np.full((lanes, *column.shape), column.fill, column.dtype)
      for column in self._agent.schema.extra
    }
    return ActOutput(action, columns, self._core, {})

  def close_lanes(self, version: Version, *, progress: float, random: bool) -> Slots:
    """Returns slots that truncate all open episodes at the current frames; call it last."""
    self.finished.clear()
    return self._close(version, progress, random)

  def _close(self, version: Version, progress: float, random: bool) -> Slots:
    """Returns one slot per lane that ends its episode at the current frame."""
    lanes = len(self._lanes)
    decision = self._decide(version, progress, random)
    return self._slots(decision, version, np.zeros(lanes, bool), np.zeros(lanes, np.float32))

  def _slots(
    self, decision: ActOutput, version: Version, acting: np.ndarray, reward: np.ndarray
  ) -> Slots:
    """Returns the slots of the current frames; episodes of lanes without `acting` [L] end."""
    current = self._current
    columns = {
      "frame": current.frame,
      "first": current.first,
      "terminated": current.terminated,
      "truncated": current.truncated | ~(acting | current.terminated),
      "action": np.where(acting, decision.action, -1).astype(np.int32),
      "reward": np.where(acting, reward, 0).astype(np.float32),
      "step": np.full(len(acting), version.step, np.int32),
    }
    return Slots(self._lanes, self._start + self._steps, columns | decision.columns)

  def _observe(self, step: EnvStep, counted: np.ndarray | bool = True) -> None:
    """Takes a step of the environments; games that end in lanes not `counted` [L] are discarded."""
    self._current = step
    self._stacked = stacked(step, self._config.env.frame_stack, self._stacked)
    self._score += np.where(step.first, 0.0, step.reward)  # a lost life does not end a game
    self._length += ~step.first
    over = step.game_over | step.truncated
    finished = np.flatnonzero(over & counted)
    self.finished = [Episode(float(self._score[i]), int(self._length[i])) for i in finished]
    self._score[over], self._length[over] = 0, 0

  def close(self) -> None:
    self._env.close()

  def state_dict(self) -> dict[str, np.ndarray]:
    """Returns the state for a checkpoint, including all actions, to replay the environments.

    Empty after more than `resumable_for` steps.
    """
    if len(self._actions) < self._steps:
      return {}
    crc = zlib.crc32(self._current.frame.tobytes())  # detects a replay that differs
    core = {f"core_{i}": np.asarray(x) for i, x in enumerate(jax.tree.leaves(self._core))}
    return {
      "actions": np.array(self._actions, np.int16).reshape(-1, len(self._lanes)),
      "frames_crc": np.array([crc], np.int64),
      "start": self._start.copy(),
      **core,
    }

  def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
    """Restores `state_dict` by replaying the environments, at about 3,000 steps per second.

    Must be called on a new actor with equal environments and the saved `start`.

    Raises RuntimeError if the frames differ, as with another version of envpool or machine type.
    """
    for action in state["actions"]:
      ended = self._current.terminated | self._current.truncated
      self._observe(self._env.step(np.where(ended, 0, action).astype(np.int32)))
    self._actions = list(state["actions"])
    self._steps = len(self._actions)
    leaves, structure = jax.tree.flatten(self._core)
    core = [state[f"core_{i}"] for i in range(len(leaves))]
    self._core = jax.tree.unflatten(structure, core)
    if zlib.crc32(self._current.frame.tobytes()) != state["frames_crc"][0]:
      raise RuntimeError("replaying the environments' actions led to other frames than recorded")
