"""The replay as its users see it: experience that is sampled, with targets and priorities that are kept fresh.

The lock of `Experience` makes every method atomic. Must not know who calls it, from which process, or with what
network.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from speedyzero_jax.agents.efficientzero.targets import (
  TargetSpec,
  bootstrap_times,
  compute_targets,
  refreshed_errors,
  rests_on,
)
from speedyzero_jax.agents.efficientzero.config import LossConfig, ReanalyseConfig
from speedyzero_jax.config.schema import PriorityConfig
from speedyzero_jax.replay import snapshot
from speedyzero_jax.replay.device_frames import DeviceFrames
from speedyzero_jax.replay.experience import Experience
from speedyzero_jax.replay.sampler import Eligible
from speedyzero_jax.replay.storage import put, take
from speedyzero_jax.replay.sweep import Sweep
from speedyzero_jax.types import Batch, Segment

SweepName = Literal["refresh", "reanalyse"]


class Replay(Experience):
  """Prioritized replay over lanes of slots (see `types.py` for slots and letters).

  What may be sampled is `eligible.py`'s to say, with K + n slots of lookahead.

  Index arrays are (lane [B] integer, time [B] integer). Slots evicted between two calls are no error: their results
  are dropped, and in a batch their masks are 0.
  """

  def __init__(
    self,
    *,
    lanes: int,
    capacity: int,
    frame_shape: tuple[int, ...],
    frame_dtype: np.dtype | type,
    num_actions: int,
    priority: PriorityConfig,
    loss: LossConfig,
    reanalyse: ReanalyseConfig,
    value_prefix_horizon: int,
    frame_stack: int,
    discount: float,
    rng_seed: int,
    device_frames: DeviceFrames | None = None,
    frame_memory: np.ndarray | None = None,
  ):
    """Makes an empty replay of `capacity` slots per lane.

    With `device_frames`, windows are gathered there. `frame_memory` [lanes, capacity, H, W, C] is where frames are
    kept, if others are to see it.

    Raises:
      ValueError: a size is impossible, min_priority is not positive (eligible transitions must stay reachable), or
        a lane is too short for anything in an unfinished episode to become eligible.
    """
    unroll_steps = loss.unroll_steps
    shortest = frame_stack + unroll_steps + loss.td_steps
    if capacity < shortest:
      raise ValueError(
        f"capacity must be at least {shortest} slots per lane (stack + unroll + n), got {capacity}"
      )
    if not priority.min_priority > 0:
      raise ValueError(f"priority.min_priority must be positive, got {priority.min_priority}")
    for name, value in (
      ("unroll_steps", unroll_steps),
      ("value_prefix_horizon", value_prefix_horizon),
      ("loss.td_steps", loss.td_steps),
    ):
      if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
    super().__init__(
      lanes=lanes,
      capacity=capacity,
      frame_shape=frame_shape,
      frame_dtype=frame_dtype,
      num_actions=num_actions,
      frame_stack=frame_stack,
      device_frames=device_frames,
      frame_memory=frame_memory,
    )
    self._config = loss
    self._ratio = reanalyse.ratio
    self._unroll = unroll_steps
    self._spec = TargetSpec(
      unroll_steps=unroll_steps,
      value_prefix_horizon=value_prefix_horizon,
      td_steps=loss.td_steps,
      age_interval=loss.age_interval,
      discount=discount,
      value_target=reanalyse.value_target,
      mixed_start=reanalyse.mixed_start,
      mixed_newest=reanalyse.mixed_newest,
      renewed=reanalyse.schedule != "off",
    )
    self._one_state = dataclasses.replace(self._spec, unroll_steps=0)
    self._eligible = Eligible(
      self._store,
      stack=frame_stack,
      lookahead=unroll_steps + loss.td_steps,
      alpha=priority.alpha,
      min_priority=priority.min_priority,
    )
    self._sweeps = {"refresh": Sweep(lanes, capacity), "reanalyse": Sweep(lanes, capacity)}
    self._rng = np.random.Generator(np.random.PCG64(rng_seed))

  # --- collecting

  @property
  def num_eligible(self) -> int:
    """Transitions that can be sampled now."""
    return self._eligible.count

  def append_many(self, segments: Sequence[Segment]) -> None:
    """Appends segments of different lanes; transitions that become eligible get the current maximum priority.

    Raises:
      ValueError: anything is wrong with any of them (see `LaneStore.append`); then nothing has changed.
    """
    if not segments:
      return
    with self._lock:
      old_head = self.heads
      super().append_many(segments)
      lane = np.array([segment.lane for segment in segments])
      self._grow_sweeps(old_head)
      self._admit(lane, old_head[lane])

  def truncate(self, lane: int) -> None:
    """Ends a lane's open episode where it is, because its environment was lost (see `LaneStore.truncate`).

    Raises ValueError for an unknown lane.
    """
    with self._lock:
      super().truncate(lane)
      if self._store.head[lane]:
        self._admit(np.array([lane]), self._store.head[[lane]])

  def _grow_sweeps(self, old_head: np.ndarray) -> None:
    capacity = self._store.capacity
    before, after = np.minimum(old_head, capacity), np.minimum(self._store.head, capacity)
    for lane in np.flatnonzero(before != after):
      for sweep in self._sweeps.values():
        sweep.grow(int(lane), int(before[lane]), int(after[lane]))

  def _admit(self, lane: np.ndarray, old_head: np.ndarray) -> None:
    """Makes eligible what has become so since lanes [m] had `old_head` [m]."""
    lane, time = self._eligible.update(lane, old_head)
    # Not scored yet, so as old as the score would be that the stored values give.
    self._eligible.stamp(lane, time, rests_on(self._store, lane, time, self._one_state))

  # --- sampling

  def sample(self, batch_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draws eligible transitions in proportion to priority ** alpha, with replacement.

    Returns:
      lane [B] int32, time [B] int64, probability [B] float64.

    Raises:
      ValueError: nothing is eligible.
    """
    with self._lock:
      return self._eligible.sample(batch_size, self._rng)

  def make_batch(
    self, lane: np.ndarray, time: np.ndarray, probability: np.ndarray, learner_step: int
  ) -> Batch:
    """Actions and targets for sampled transitions, from what is stored at this moment.

    Actions after the end of an episode are random, from the replay's own generator.
    """
    with self._lock:
      store = self._store
      present, safe = self._present(lane, time)
      targets = compute_targets(store, lane, safe, self._spec, learner_step)
      if not present.all():
        targets = targets._replace(
          **{
            name: mask * present.reshape(-1, 1).astype(np.float32)
            for name, mask in targets._asdict().items()
            if name.endswith("_mask")
          }
        )
      states = self._states(lane, safe)
      real = safe[:, None] + np.arange(self._unroll + 1) == states
      flat = store.flat(lane[:, None], states)
      action = take(store.action, flat[:, :-1])
      anything = self._rng.integers(0, store.num_actions, action.shape, np.int32)
      action = np.where(real[:, :-1] & (action >= 0), action, anything)
      age = np.where(real, learner_step - take(store.policy_step, flat), 0)
    return Batch(
      lane=lane.astype(np.int32),
      time=time.astype(np.int64),
      action=action,
      targets=targets,
      probability=probability,
      age=age.astype(np.int32),
    )

  def set_priorities(
    self, lane: np.ndarray, time: np.ndarray, td_error: np.ndarray, step: int
  ) -> None:
    """Priorities |td_error| + min_priority of trained transitions, found with weights of learner step `step`.

    A priority found with newer weights is kept. Raises ValueError for a TD error that is not finite.
    """
    td_error = _finite("td_error", td_error, lane)
    with self._lock:
      keep, _ = self._present(lane, time)
      self._eligible.score(
        lane[keep], time[keep], td_error[keep], np.full(int(keep.sum()), step, np.int32)
      )

  def _states(self, lane: np.ndarray, time: np.ndarray) -> np.ndarray:
    """Times of states time .. time+K, clamped to the episode's last stored frame, [B, K+1] int64."""
    return np.minimum(
      time[:, None] + np.arange(self._unroll + 1), self._store.last(lane, time)[:, None]
    )

  # --- keeping targets and priorities fresh

  def states_to_search(self, lane: np.ndarray, time: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The states of a sampled batch whose policy is to be searched anew: (lane, time), each [m, K+1].

    m is `reanalyse.ratio` of the batch, rounded: its first m samples (they are drawn independently). States beyond
    an episode's end are its last frame.
    """
    with self._lock:
      _, safe = self._present(lane, time)
      m = round(self._ratio * len(time))
      states = self._states(lane, safe)[:m]
      return np.broadcast_to(lane[:m, None], states.shape), states

  def states_to_bootstrap(
    self, lane: np.ndarray, time: np.ndarray
  ) -> tuple[np.ndarray, np.ndarray]:
    """The states whose value ends the n-step returns of a sampled batch: (lane, time), each [B, K+1]."""
    with self._lock:
      _, safe = self._present(lane, time)
      states = bootstrap_times(self._store, lane, safe, self._spec)
      return np.broadcast_to(lane[:, None], states.shape), states

  def write_search(
    self,
    lane: np.ndarray,
    time: np.ndarray,
    policy: np.ndarray,
    search_value: np.ndarray,
    bootstrap_value: np.ndarray,
    step: int,
  ) -> None:
    """Stores search results [B] (policy [B, A]) and root values, found with weights of learner step `step`.

    What was found with newer weights is kept. Raises ValueError for shapes that do not fit or values not finite.
    """
    policy = np.asarray(policy, np.float32)
    if policy.shape != (len(time), self._store.num_actions) or not np.isfinite(policy).all():
      raise ValueError(
        f"policy must be finite and [{len(time)}, {self._store.num_actions}], got {policy.shape}"
      )
    search_value = _finite("search_value", search_value, lane)
    bootstrap_value = _finite("bootstrap_value", bootstrap_value, lane)
    with self._lock:
      store = self._store
      self._write_newer(
        "policy_step", lane, time, step, (store.policy, policy), (store.search_value, search_value)
      )
      self._write_newer("bootstrap_step", lane, time, step, (store.bootstrap, bootstrap_value))

  def write_bootstrap(
    self, lane: np.ndarray, time: np.ndarray, value: np.ndarray, step: int
  ) -> None:
    """Stores values [B] for the ends of n-step returns; as `write_search`, for states that are not searched."""
    value = _finite("value", value, lane)
    with self._lock:
      self._write_newer("bootstrap_step", lane, time, step, (self._store.bootstrap, value))

  def write_values(self, lane: np.ndarray, time: np.ndarray, value: np.ndarray, step: int) -> None:
    """Priority Refresh: stores values [B] found with weights of learner step `step`; older ones are replaced.

    `refresh_priorities` of the same slots is to follow. Raises ValueError for values that are not finite.
    """
    value = _finite("value", value, lane)
    with self._lock:
      self._write_newer("value_step", lane, time, step, (self._store.value, value))

  def _write_newer(
    self,
    stamps: str,
    lane: np.ndarray,
    time: np.ndarray,
    step: int,
    *writes: tuple[np.ndarray, np.ndarray],
  ) -> None:
    present, safe = self._present(lane, time)
    known = self._store.stamps[stamps]
    flat = self._store.flat(lane, safe)
    keep = present & (take(known.step, flat) <= step)
    flat = flat[keep]
    for field, values in writes:
      put(field, flat, values[keep])
    known.set(flat, step)

  def refresh_priorities(self, lane: np.ndarray, time: np.ndarray, step: int) -> None:
    """Scores every transition that rests on the values of these slots: they themselves and the n before each.

    See `refreshed_errors`; `step` is the learner step.
    """
    with self._lock:
      store = self._store
      present, _ = self._present(lane, time)
      times = time[present][:, None] - np.arange(self._config.td_steps + 1)
      lanes = np.broadcast_to(lane[present].astype(np.int64)[:, None], times.shape)
      stored = times >= store.tail[lanes]
      at, cell = np.divmod(
        np.unique(lanes[stored] * store.capacity + store.cell(times[stored])), store.capacity
      )
      when = store.time_of(at, cell)
      held = self._eligible.holds(at, when)
      at, when = at[held], when[held]
      self._eligible.score(at, when, *refreshed_errors(store, at, when, self._one_state, step))

  # --- sweeps

  def next_block(self, sweep: SweepName, n: int) -> tuple[np.ndarray, np.ndarray]:
    """The n states a sweep is to recompute next: lane [n] int32, time [n] int64 (see `Sweep.next_block`)."""
    with self._lock:
      used = np.minimum(self._store.head, self._store.capacity)
      lane, cell = self._sweeps[sweep].next_block(n, used)
      return lane.astype(np.int32), self._store.time_of(lane, cell)

  def quota(self, sweep: SweepName, n: int, max_age: int, delay: int = 0) -> int:
    """States a sweep must recompute per learner step for its bound to hold (see `Sweep.quota`)."""
    with self._lock:
      return self._sweeps[sweep].quota(n, max_age, delay)

  def oldest_step(self, sweep: SweepName) -> int:
    """The learner step of the oldest weights behind any stored value (refresh), or policy (reanalyse).

    Raises ValueError while the buffer is empty.
    """
    with self._lock:
      if not self._store.num_slots():
        raise ValueError("oldest_step: the buffer is empty")
      return self._store.stamps["value_step" if sweep == "refresh" else "policy_step"].oldest()

  def stats(self, learner_step: int) -> dict[str, float]:
    """Sizes, and ages in learner steps of all priorities and all stored searches."""
    with self._lock:
      store = self._store
      priority_age, priority_age_max = self._eligible.ages(learner_step)
      target_age, target_age_max = store.stamps["policy_step"].ages(learner_step)
      memory = store.memory()
      return {
        "transitions": float(store.stored_transitions),
        "collected": float(self.num_transitions),
        "eligible": float(self.num_eligible),
        "slots": float(store.num_slots()),
        "bytes": memory["bytes"],
        "bytes_per_transition": memory["bytes_per_transition"],
        "priority_age_mean": priority_age,
        "priority_age_max": priority_age_max,
        "target_age_mean": target_age,
        "target_age_max": target_age_max,
      }

  # --- saving and restoring

  def state_dict(self) -> dict[str, np.ndarray]:
    """Everything but the frames, as numpy arrays."""
    with self._lock:
      return super().state_dict() | {
        **self._eligible.export(),
        "rng": snapshot.pack_rng(self._rng),
        **{f"sweep_{name}": sweep.state() for name, sweep in self._sweeps.items()},
      }

  def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
    """Restores what `state_dict` gave, after the frames; from then on both replays behave alike, bit for bit.

    Raises:
      ValueError: the state is not of the slots imported; then nothing has changed.
    """
    with self._lock:
      slots = state["slot_action"].shape
      if state["priority"].shape != slots or state["priority_step"].shape != slots:
        raise ValueError(f"state has {len(state['priority'])} priorities for {slots[0]} slots")
      super().load_state_dict(state)
      lane, time = snapshot.live_index(self._store)
      self._eligible.load(lane, time, state["priority"], state["priority_step"])
      self._rng = snapshot.unpack_rng(state["rng"])
      for name, sweep in self._sweeps.items():
        sweep.load(state[f"sweep_{name}"])


def _finite(name: str, values: np.ndarray, lane: np.ndarray) -> np.ndarray:
  values = np.asarray(values, np.float32)
  if values.shape != lane.shape or not np.isfinite(values).all():
    raise ValueError(f"{name} must be finite and {list(lane.shape)}, got {list(values.shape)}")
  return values
