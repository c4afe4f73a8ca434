"""Tests of R2D2: loss and priorities of sequences across episodes in float64, and sampling."""

import functools

import numpy as np
import pytest

import episodes
import trained
from speedyzero_jax.agents import r2d2
from speedyzero_jax.agents.base import Variables
from speedyzero_jax.config import loader
from speedyzero_jax.replay.selector import Selection
from trained import experiment, gathered

_BURN_IN, _LENGTH, _STRIDE, _N, _STACK, _DISCOUNT = 3, 5, 2, 3, 2, 0.9
_BATCH, _ACTIONS, _ETA = 48, 3, 0.9
_TINY = (
  "agent=r2d2", "env.game=CartPole", f"env.frame_stack={_STACK}", f"env.discount={_DISCOUNT}",
  "network.hidden=4", "network.layers=1", "network.lstm_hidden=3", f"loss.burn_in={_BURN_IN}",
  f"loss.sequence_length={_LENGTH}", f"loss.stride={_STRIDE}", f"loss.td_steps={_N}",
  "priority.beta_start=0.5", "priority.beta_end=1", "priority.min_weight=0.3",
  f"learner.batch_size={_BATCH}", f"loss.priority_max={_ETA}",
)  # fmt: skip


def _agent(*overrides):
  return trained.make(_ACTIONS, *_TINY, *overrides)


def _burn_in(core):
  return _BURN_IN if core == "lstm" else 0


@functools.cache
def _gradient(core="lstm"):
  return trained.gradient(_agent(f"network.core={core}"), 2)


@functools.cache
def _start(core="lstm"):
  """Parameters and target parameters."""
  agent = _agent(f"network.core={core}")
  return trained.random_params(agent, 4), trained.random_params(agent, 5)


@functools.cache
def _batch(core="lstm"):
  """All sequences of two lanes with episode ends at all positions, the selection and the slots."""
  agent = _agent(f"network.core={core}")
  rng, stored, played = np.random.default_rng(7), [], []
  replay = trained.make_replay(agent, 2, 200, _STACK)
  for lane in range(2):
    played.append(episodes.every_end(_N + 2, rng))
    stored.append(episodes.recorded(agent.schema, lane, played[-1], rng))
    replay.append(stored[-1])
  slots = _burn_in(core) + _LENGTH + _N
  found = [(lane, t) for lane in range(2) for t in range(0, len(stored[lane]) - slots + 1, _STRIDE)]
  assert replay.selector.count == len(found) < _BATCH
  lane, time = np.array(found)[np.arange(_BATCH) % len(found)].T
  selection = Selection(lane.astype(np.int32), time, np.linspace(0.001, 0.1, _BATCH))
  return gathered(agent, replay, selection), selection, stored, played


def _found(batch, core="lstm"):
  params, target = _start(core)
  return _gradient(core)(params, batch, target)


# --- the loss, from the slots as they were stored


def _n_step(played, slot):
  """The n-step return of a slot of a lane; None where no action was taken."""
  start = 0
  for episode in played:
    if slot < start + episode.slots:
      i = slot - start
      return (
        None if i == len(episode.rewards) else episodes.n_step_return(episode, i, _N, _DISCOUNT)
      )
    start += episode.slots


@functools.cache
def _reference(core="lstm"):
  """Errors and Q(s, a) [B, T], 0 without an action, and the loss for fixed targets."""
  _, selection, stored, played = _batch(core)
  params, target = _start(core)
  samples, goals, burn_in = [], np.zeros((_BATCH, _LENGTH)), _burn_in(core)
  for b, (lane, time) in enumerate(zip(selection.lane, selection.time, strict=True)):
    slots, times = stored[lane], np.arange(time, time + burn_in + _LENGTH + _N)
    x = np.stack([episodes.observation(slots, t, _STACK) for t in times])
    first, state = slots["first"][times], None if core == "none" else slots["core"][time]
    (q, states), (next_q, _) = (trained.q_values(p, x, first, state) for p in (params, target))
    warm = None if core == "none" else states[burn_in]
    chosen = []
    for i in range(burn_in, burn_in + _LENGTH):
      if (returns := _n_step(played[lane], time + i)) is not None:
        reward, discount, steps = returns
        value = trained.inverse_h(next_q[i + steps, q[i + steps].argmax()])
        action = slots["action"][time + i]
        chosen.append((i - burn_in, action))
        goals[b, i - burn_in] = trained.h(reward + discount * value)
    samples.append((x[burn_in:], first[burn_in:], warm, chosen))
  weight = np.linspace(0.001, 0.1, _BATCH) ** -(0.5 + 0.5 * 0.5)
  weight = np.maximum(weight / weight.max(), 0.3)

  def values(params):
    found = np.zeros((_BATCH, _LENGTH))
    for b, (x, first, warm, chosen) in enumerate(samples):
      q, _ = trained.q_values(params, x, first, warm)
      for i, action in chosen:
        found[b, i] = q[i, action]
    return found

  def loss(params):
    return (weight * (0.5 * (goals - values(params)) ** 2).sum(1)).mean()

  return goals - values(params), values(params), loss


@pytest.mark.parametrize("core", ["lstm", "none"])
def test_errors_loss_and_gradient_on_two_devices(core):
  """The burn-in has no gradient: the reference's state after it does not depend on parameters."""
  found, (errors, values, loss) = _found(_batch(core)[0], core), _reference(core)
  acted = errors != 0
  assert 0 < acted.mean() < 1
  np.testing.assert_array_equal(_batch(core)[0]["loss_mask"], acted)
  size, value = np.abs(errors), (values.sum(1) / acted.sum(1)).mean()
  mean = size.sum(1) / acted.sum(1)
  expected = _ETA * size.max(1) + (1 - _ETA) * mean
  np.testing.assert_allclose(found.priority, expected, rtol=1e-3, atol=1e-3)
  np.testing.assert_allclose(found.metrics[r2d2.TD_ERROR], mean.mean(), rtol=1e-3)
  np.testing.assert_allclose(found.metrics[r2d2.Q_VALUE], value, rtol=1e-3)
  np.testing.assert_allclose(found.loss, loss(_start(core)[0]), rtol=1e-3)
  trained.assert_gradient(_start(core)[0], found.of_params, loss, rtol=5e-3, atol=5e-3)


def test_the_state_after_the_burn_in_counts():
  batch, _, _, _ = _batch()
  other = batch | {"state": batch["state"] + 1}
  here, there = (_found(x).priority for x in (batch, other))
  reset = batch["first"][:, 1 : _BURN_IN + 1].any(1) | batch["first"][:, 0]
  assert reset.any() and not reset.all()
  np.testing.assert_array_equal(here[reset], there[reset])
  assert (here[~reset] != there[~reset]).any()


def test_masked_slots_and_sequences_have_no_gradient():
  batch, _, _, _ = _batch()
  masked = np.arange(_BATCH) % 3 == 0
  mask = batch["loss_mask"] * ~masked[:, None]
  other = {
    "frames": np.where(masked[:, None, None, None, None], 9, batch["frames"]).astype(np.float32),
    "stack": np.where(masked[:, None, None], 1000, batch["stack"]).astype(np.int32),
    "state": np.where(masked[:, None], 3, batch["state"]).astype(np.float32),
    "reward": np.where(mask == 0, 5, batch["reward"]).astype(np.float32),
    "action": np.where(mask == 0, 0, batch["action"]).astype(np.int32),
  }
  priority = trained.assert_masked(_found, batch, {"loss_mask": mask}, other).priority
  assert not priority[masked].any() and priority[~masked].all()


# --- acting


def test_stored_states_are_those_of_unrolling_from_the_start_of_the_episode(tmp_path):
  """At every slot, including the last ones of episodes and of the run."""
  config = loader.load(
    ["r2d2"],
    ["env.game=CartPole", "env.frame_stack=2", "network.lstm_hidden=5", "network.hidden=4",
     "network.layers=1", "actor.lanes=3", "actor.random_steps=0", "learner.steps=2",
     "learner.batch_size=4", "run.env_steps=400", "run.mode=lockstep", "replay.capacity=0",
     "learner.devices=1", "loss.burn_in=2", "loss.sequence_length=3", "loss.stride=2"],
  )  # fmt: skip
  with experiment(config, tmp_path) as run:
    params = trained.random_params(run.agent, 0)
    run.weights.publish(0, Variables(params, ()))
    while not run.limiter.collected:
      run.collector.collect()
    layer, store, count = params["torso"]["layers"][0], run.replay.store, 0
    for lane, head in enumerate(store.head):
      starts = np.flatnonzero(store.first[lane, :head])
      for start, end in zip(starts, [*starts[1:], head], strict=True):
        frames = np.float64(store.frame[lane, start:end, 0, 0])
        x = np.concatenate([frames[[0, *range(len(frames) - 1)]], frames], axis=1)
        features = np.maximum(x @ layer["kernel"] + layer["bias"], 0)
        first = np.arange(len(x)) == 0
        _, states = trained.lstm(params["core"], features, first, np.ones(10))
        stored = store["core"][lane, start:end]
        np.testing.assert_allclose(stored[1:], states[1:-1], rtol=1e-4, atol=1e-5)
        count += 1
  assert count > 6


# --- sampling


def test_there_is_always_a_sequence():
  agent = _agent()
  least = _STACK + agent.lookahead  # slots, with which there is always a sequence
  replay = trained.make_replay(agent, 1, least, _STACK)
  rng = np.random.default_rng(0)
  whole = episodes.recorded(agent.schema, 0, episodes.every_end(5, rng), rng)
  replay.append(whole.select(slice(least)))
  for t in range(least, len(whole)):
    replay.append(whole.select(slice(t, t + 1)))
    assert replay.selector.count == len(set(replay.select(32).time)) >= 1
