"""Tests of the actor with a scripted environment, and an agent of checksums of frames."""

from unittest import mock

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from same import assert_same
from speedyzero_jax.metrics.aggregation import Episode
from speedyzero_jax.replay.replay import Replay
from speedyzero_jax.types import EnvStep, Slots
from speedyzero_jax.workers.actor import Actor, stacked
from speedyzero_jax.workers.weights import Version

STACK = 2
AGENT, INFERENCE = tiny.checksum_parts()
PLAY = {"budget": 1000, "progress": 0.0, "random": False}
RANDOM = PLAY | {"random": True}


def version(step=0):
  return Version(step, AGENT.init())


def make(lanes, seed=0, config=None, **kwargs):
  env, key = tiny.FakeEnv(lanes, seed), jax.random.key(seed)
  return Actor(config or tiny.config(), AGENT, env, INFERENCE, key, **kwargs), env


def make_replay(lanes, capacity=400):
  selector = AGENT.make_selector
  return Replay(AGENT.schema, selector, lanes=lanes, capacity=capacity, frame_stack=2, rng_seed=0)


def collect(actor, budget, *, until=None, random=False):
  """The slots of each call, and all agent steps, until `budget` steps or `until` calls."""
  calls, taken = [], 0
  while taken < budget and len(calls) != until:
    at = version(10 * len(calls))
    slots, count = actor.step(at, budget=budget - taken, progress=0.0, random=random)
    calls.append(slots)
    taken += count
  return calls, taken


def lane_of(calls, lane):
  """A lane's slots of all calls."""
  slots = Slots.concatenate(calls)
  return slots.select(slots.lane == lane)


def places(slots):
  """(lane, time) of each slot."""
  return list(zip(slots.lane.tolist(), slots.time.tolist(), strict=True))


def naive_stacks(frames, first, stack):
  """Stacks [n, S, ...] of one lane's frames, by iterating back to each episode's start."""
  stacks = []
  for t in range(len(frames)):
    rows, at = [], t
    for _ in range(stack):
      rows.insert(0, frames[at])
      at = at if first[at] else at - 1
    stacks.append(np.stack(rows))
  return np.stack(stacks)


@settings(max_examples=25)
@given(
  lanes=st.sampled_from([1, 4]),
  budget=st.integers(1, 45),
  seed=st.integers(0, 999),
  clip=st.booleans(),
)
def test_collects_exactly_its_budget_and_what_the_environment_showed(lanes, budget, seed, clip):
  actor, env = make(lanes, seed, tiny.config(f"env.clip_rewards={clip}"))
  replay = make_replay(lanes)
  calls, taken = collect(actor, budget)
  for t, slots in enumerate(calls):
    acted = np.flatnonzero(slots["action"][:lanes] >= 0).tolist()
    ends = acted if t == len(calls) - 1 else []
    assert places(slots) == [(lane, t) for lane in range(lanes)] + [(lane, t + 1) for lane in ends]
    replay.append(slots)  # refuses gaps, overlaps and episodes that don't hang together
  assert taken == replay.num_transitions == budget
  again = tiny.FakeEnv(lanes, seed)  # its frames follow from the actions
  again.reset()
  played = [lane_of(calls, lane)["action"] for lane in range(lanes)]
  for t in range(len(env.shown) - 1):
    again.step(np.array([max(a[t], 0) if t < len(a) else 0 for a in played]))
  acted = 0
  for lane in range(lanes):
    slots = lane_of(calls, lane)
    n = len(slots)
    fields = env.shown[0]._fields
    shown = {name: np.stack([getattr(step, name)[lane] for step in again.shown]) for name in fields}
    closed = shown["terminated"][:n] | shown["truncated"][:n]
    closed[-1] = True  # the budget ended here, if the episode did not
    reward = np.append(shown["reward"][1:], 0)[:n]
    policy, search_value, value = tiny.of_stacks(
      naive_stacks(slots["frame"], slots["first"], STACK)
    )
    expected = {
      **{name: shown[name][:n] for name in ("frame", "first", "terminated")},
      "truncated": closed & ~shown["terminated"][:n],
      "reward": np.where(closed, 0, np.sign(reward) if clip else reward),
      "policy": policy,
      "search_value": search_value,
      "value": value,
      "step": np.append(10 * np.arange(len(calls)), 10 * (len(calls) - 1))[:n],
    }
    for name, column in expected.items():
      np.testing.assert_allclose(slots[name], column, rtol=1e-6, err_msg=name)
    np.testing.assert_array_equal(slots["action"] == -1, closed)
    acted += int((~closed).sum())
  assert acted == budget


def test_games_that_end_with_a_step_beyond_the_budget_are_not_counted():
  actor, env = make(3, seed=4)
  score, length, cut_games = np.zeros(3), np.zeros(3, int), 0
  for budget in np.random.default_rng(0).integers(1, 4, 100).tolist():
    slots, _ = actor.step(version(), **PLAY | {"budget": budget}, last=False)
    before, shown = env.shown[-2:]
    cut = (slots["action"] < 0) & ~(before.terminated | before.truncated)
    score, length = score + shown.reward, length + ~shown.first
    over = shown.game_over | shown.truncated
    found = [(game.score, game.length) for game in actor.finished]
    assert found == [(score[i], length[i]) for i in np.flatnonzero(over & ~cut)]
    cut_games += (over & cut).sum()
    score[over], length[over] = 0, 0
  assert cut_games > 3


@pytest.mark.parametrize("stack", [1, 2, 4])
def test_frame_stacks_begin_again_with_each_episode(stack):
  rng, env = np.random.default_rng(stack), tiny.FakeEnv(3, seed=stack)
  stacks = [stacked(env.reset(), stack, None)]
  for _ in range(60):
    stacks.append(stacked(env.step(rng.integers(0, 3, 3)), stack, stacks[-1]))
  for lane in range(3):
    frames, first = (
      [getattr(step, name)[lane] for step in env.shown] for name in ("frame", "first")
    )
    assert sum(first) > 3
    ours = np.stack([s[lane] for s in stacks])  # none was written over by a later push
    np.testing.assert_array_equal(ours, naive_stacks(frames, first, stack))


def test_random_play_is_uniform():
  actor, _ = make(6)
  calls = [actor.step(version(), **RANDOM)[0] for _ in range(800)]
  actions = actor.state_dict()["actions"]
  assert (actions[1:] == actions[:-1]).mean() == pytest.approx(1 / 3, abs=0.03)
  np.testing.assert_allclose(np.bincount(actions.ravel()) / actions.size, 1 / 3, atol=0.05)
  np.testing.assert_allclose(Slots.concatenate(calls)["policy"], 1 / 3)
  assert len({tuple(row) for row in actions.tolist()}) > 300  # lanes do not repeat one another


@settings(max_examples=25)
@given(lanes=st.sampled_from([1, 4]), steps=st.integers(0, 25), seed=st.integers(0, 99))
def test_a_restored_actor_continues_as_if_it_had_never_stopped(lanes, steps, seed):
  actor, _ = make(lanes, seed)
  for i in range(steps):
    actor.step(version(), **(RANDOM if i % 2 == 0 else PLAY))
  state = actor.state_dict()
  kept = {name: array.copy() for name, array in state.items()}
  restored, _ = make(lanes, seed)
  restored.load_state_dict(state)
  again = restored.state_dict()
  for i in range(8):
    arguments = RANDOM if i == 0 else PLAY
    (ours, count), (theirs, other) = (a.step(version(3), **arguments) for a in (actor, restored))
    assert_same(vars(ours), vars(theirs))
    assert count == other and actor.finished == restored.finished
  for name, array in kept.items():
    np.testing.assert_array_equal(again[name], array)
    np.testing.assert_array_equal(state[name], array)  # not changed by what came later


def test_an_actor_may_start_behind_the_slots_of_another():
  """It numbers its slots and lanes from there, and searches with keys that were not used before."""
  start = np.array([7, 7])
  actor, _ = make(2, seed=1, start=start, lane_offset=5)
  first, _ = make(2, seed=1, lane_offset=5)
  calls, from_zero = (collect(a, 20, until=6)[0] for a in (actor, first))
  for t, slots in enumerate(calls):
    assert places(slots) == [(5, 7 + t), (6, 7 + t)]
  ours, others = (Slots.concatenate(x)["action"].tolist() for x in (calls, from_zero))
  assert ours != others
  restored, _ = make(2, seed=1, start=start, lane_offset=5)
  restored.load_state_dict(actor.state_dict())
  assert_same(*(vars(a.step(version(3), **PLAY)[0]) for a in (actor, restored)))
  np.testing.assert_array_equal(restored.state_dict()["start"], start)


def test_the_agent_receives_the_lanes_of_the_replay_and_where_episodes_begin():
  actor, _ = make(2, seed=1, lane_offset=5)
  with mock.patch.object(INFERENCE, "decide", wraps=INFERENCE.decide) as decide:
    for _ in range(20):
      slots, _ = actor.step(version(), **PLAY)
      inputs = decide.call_args.args[1]
      assert inputs.lane.tolist() == [5, 6]
      np.testing.assert_array_equal(inputs.first, slots["first"])


@pytest.mark.parametrize("resumable_for", [0, 7])
def test_an_actor_has_a_state_and_keeps_actions_for_some_steps_only(resumable_for):
  actor, _ = make(2, resumable_for=resumable_for)
  for i in range(1, 20):
    actor.step(version(), **(RANDOM if i % 2 else PLAY))
    assert bool(actor.state_dict()) == (i <= max(resumable_for, 1))
  assert len(actor._actions) == 1


@pytest.mark.parametrize("tamper", ["action", "missing", "crc", "other seed"])
def test_a_log_that_leads_elsewhere_is_refused(tamper):
  actor, env = make(2, seed=4)
  for _ in range(12):
    actor.step(version(), **RANDOM)
  state, seed = actor.state_dict(), 4
  if tamper == "action":
    acting = ~(env.shown[-2].terminated | env.shown[-2].truncated)
    state["actions"][-1, acting] = (state["actions"][-1, acting] + 1) % 3
    assert acting.any()
  elif tamper == "missing":
    state["actions"] = state["actions"][:-1]
  elif tamper == "crc":
    state["frames_crc"] ^= 1
  else:
    seed = 5
  with pytest.raises(RuntimeError, match="other frames"):
    make(2, seed)[0].load_state_dict(state)


def test_actions_depend_on_the_progress_and_the_lanes_that_are_given():
  def played(progress, lane_offset=0):
    arguments = PLAY | {"progress": progress}
    actor, _ = make(4, lane_offset=lane_offset)
    return [actor.step(version(), **arguments)[0]["action"].tolist() for _ in range(9)]

  assert played(0.0) == played(0.0) != played(0.5)
  assert played(0.0) != played(0.0, lane_offset=1)


@settings(max_examples=25)
@given(lanes=st.sampled_from([1, 4]), seed=st.integers(0, 999), calls=st.integers(0, 20))
def test_a_budget_that_is_not_the_last_closes_nothing(lanes, seed, calls):
  """Repeated steps of exactly as many lanes as have open episodes, then `close_lanes`."""
  (actor, env), (other, _) = make(lanes, seed), make(lanes, seed)
  replay = make_replay(lanes)
  for _ in range(calls):
    moving = int((~(env.shown[-1].terminated | env.shown[-1].truncated)).sum())
    slots, count = actor.step(version(4), **PLAY | {"budget": max(moving, 1)}, last=False)
    assert count == moving and slots.lane.tolist() == list(range(lanes))
    assert_same(vars(slots), vars(other.step(version(4), **PLAY)[0]))
    replay.append(slots)
  closing = actor.close_lanes(version(4), progress=0.0, random=False)
  assert not actor.finished  # those games were reported already
  replay.append(closing)
  shown, (went_on, _) = env.shown[-1], other.step(version(4), **PLAY)
  assert places(closing) == places(went_on)
  assert (closing["action"] == -1).all()
  assert (closing["truncated"] | shown.terminated | shown.truncated).all()
  np.testing.assert_array_equal(closing["frame"], shown.frame)
  for column in AGENT.schema.extra:  # what the agent says of the frame in any case
    np.testing.assert_array_equal(closing[column.name], went_on[column.name])


def test_lanes_beyond_a_budget_are_closed_even_if_it_is_not_the_last():
  actor, _ = make(3, seed=8)
  slots, count = actor.step(version(), **PLAY | {"budget": 2}, last=False)
  assert count == 2 and (slots["action"] >= 0).tolist() == [True, True, False]
  assert slots["truncated"].tolist() == [False, False, True]


def test_finished_games_are_reported_once():
  actor, env = make(2, seed=5)
  reported = []
  for _ in range(60):
    actor.step(version(), **PLAY)
    assert len(actor.finished) == (env.shown[-1].game_over | env.shown[-1].truncated).sum()
    reported += actor.finished
  assert len(reported) > 3


def test_games_continue_across_lost_lives_and_end_at_game_over_or_cap():
  actor, _ = make(2)

  def finished(rewards, flags):
    """Flags: per lane any of f(irst), t(erminated), c(ap), o(ver)."""
    kinds = [np.array([letter in flag for flag in flags]) for letter in "ftco"]
    actor._observe(EnvStep(actor._current.frame, np.float32(rewards), *kinds))
    return actor.finished

  assert finished([0, 0], ["f", "f"]) == []
  assert finished([4, 1], ["", ""]) == []
  assert finished([0, 1], ["t", ""]) == []  # a life is lost
  assert finished([0, 1], ["f", ""]) == []  # not a step
  assert finished([-1, 1], ["to", "c"]) == [Episode(3.0, 3), Episode(4.0, 4)]
  assert finished([0, 0], ["f", "f"]) == []
  assert finished([2, 5], ["to", ""]) == [Episode(2.0, 1)]
