"""The actor against a scripted environment that remembers everything, and a stand-in for the search."""

import jax
import numpy as np
import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from speedyzero_jax.metrics import names
from speedyzero_jax.metrics.aggregation import EpisodeStats
from speedyzero_jax.run.builders import Game, make_replay
from speedyzero_jax.workers.actor import Actor, ActorState, FrameStacker, temperature_at
from speedyzero_jax.workers.learner import make_mesh
from speedyzero_jax.workers.weights import Version

CONFIG = tiny.config()
STACK = 2


def make(lanes, seed=0, config=CONFIG, **kwargs):
  env = tiny.FakeEnv(lanes, seed)
  return Actor(
    config, env, tiny.FakeInference(), jax.random.key(seed), EpisodeStats(lanes), **kwargs
  ), env


def collect(actor, budget, *, until=None, random=lambda taken: False):
  """All segments of a collection of `budget` agent steps, broken off after `until` calls; and the steps taken."""
  calls, taken = [], 0
  while taken < budget and len(calls) != until:
    version = Version(10 * len(calls), None)
    segments, count = actor.step(version, budget=budget - taken, progress=0.0, random=random(taken))
    calls.append(segments)
    taken += count
  return calls, taken


def lane_of(calls, lane):
  """A lane's segments joined: field -> array."""
  mine = [segment for segments in calls for segment in segments if segment.lane == lane]
  return {
    name: np.concatenate([getattr(segment, name) for segment in mine])
    for name in mine[0]._fields[2:]
  }


def naive_stacks(frames, first, stack):
  """Stacks [n, S, ...] of one lane's frames, each frame's looked up by walking back to its episode's start."""
  stacks = []
  for t in range(len(frames)):
    rows, at = [], t
    for _ in range(stack):
      rows.insert(0, frames[at])
      at = at if first[at] else at - 1
    stacks.append(np.stack(rows))
  return np.stack(stacks)


@given(
  lanes=st.integers(1, 6), budget=st.integers(1, 45), seed=st.integers(0, 999), clip=st.booleans()
)
def test_collects_exactly_its_budget_and_exactly_what_the_environment_showed(
  lanes, budget, seed, clip
):
  config = tiny.config(f"actor.lanes={lanes}", f"env.clip_rewards={clip}", "actor.random_steps=0")
  actor, env = make(lanes, seed, config)
  replay = make_replay(
    config,
    Game(env.frame_shape, env.frame_dtype, env.num_actions),
    make_mesh(jax.local_devices()[:1]),
    print,
    seed=0,
  )
  calls, taken = collect(actor, budget)
  for segments in calls:
    assert sorted(segment.lane for segment in segments) == list(range(lanes))
    replay.append_many(segments)  # refuses gaps, overlaps and episodes that don't hang together
  assert taken == replay.num_transitions == budget
  acted = 0
  for lane in range(lanes):
    slots = lane_of(calls, lane)
    n = len(slots["frame"])
    shown = {
      name: np.stack([getattr(step, name)[lane] for step in env.shown])
      for name in env.shown[0]._fields
    }
    np.testing.assert_array_equal(slots["frame"], shown["frame"][:n])
    np.testing.assert_array_equal(slots["first"], shown["first"][:n])
    np.testing.assert_array_equal(slots["terminated"], shown["terminated"][:n])
    ends = shown["terminated"][:n] | shown["truncated"][:n]
    closed = ends.copy()
    closed[-1] = True  # the budget ended here, if the episode did not
    np.testing.assert_array_equal(slots["truncated"], closed & ~shown["terminated"][:n])
    np.testing.assert_array_equal(slots["action"] == -1, closed)
    reward = np.append(shown["reward"][1:], 0)[:n]
    np.testing.assert_array_equal(
      slots["reward"], np.where(closed, 0, np.sign(reward) if clip else reward)
    )
    policy, search_value, value = tiny.of_stacks(
      naive_stacks(slots["frame"], slots["first"], STACK)
    )
    np.testing.assert_array_equal(slots["policy"], policy)
    np.testing.assert_array_equal(slots["search_value"], search_value)
    np.testing.assert_array_equal(slots["value"], value)
    steps = 10 * np.arange(len(calls))
    np.testing.assert_array_equal(slots["step"], np.append(steps, steps[-1])[:n])
    acted += int((~closed).sum())
  assert acted == budget


@given(lanes=st.integers(1, 4), seed=st.integers(0, 999))
def test_the_actions_recorded_are_those_played(lanes, seed):
  """The scripted environment's frames follow from the actions: playing the stored ones again gives the same frames."""
  actor, env = make(lanes, seed)
  calls, _ = collect(actor, 30)
  again = tiny.FakeEnv(lanes, seed)
  again.reset()
  streams = [lane_of(calls, lane)["action"] for lane in range(lanes)]
  for t in range(len(env.shown) - 1):
    action = np.array(
      [stream[t] if t < len(stream) and stream[t] >= 0 else 0 for stream in streams]
    )
    step = again.step(action)
    for lane, stream in enumerate(streams):
      if t + 1 < len(stream):
        np.testing.assert_array_equal(step.frame[lane], env.shown[t + 1].frame[lane])


def test_a_step_of_lanes_that_all_restart_counts_nothing():
  actor, env = make(1, seed=3)
  ended = lambda: bool((env.shown[-1].terminated | env.shown[-1].truncated)[0])  # noqa: E731
  counts = {True: set(), False: set()}
  for _ in range(60):
    was = ended()
    (segment,), count = actor.step(Version(0, None), budget=1000, progress=0.0, random=False)
    counts[was].add(count)
    assert (segment.action[0] == -1) == was
  assert counts == {True: {0}, False: {1}}


@pytest.mark.parametrize("stack", [1, 2, 4])
def test_frame_stacks_begin_anew_with_each_episode(stack):
  rng, env = np.random.default_rng(stack), tiny.FakeEnv(3, seed=stack)
  stacker = FrameStacker(stack)
  stacks = [stacker.push(env.reset())]
  stacks += [stacker.push(env.step(rng.integers(0, 3, 3))) for _ in range(60)]
  for lane in range(3):
    frames, first = (
      [getattr(step, name)[lane] for step in env.shown] for name in ("frame", "first")
    )
    assert sum(first) > 3
    np.testing.assert_array_equal(
      np.stack([s[lane] for s in stacks]), naive_stacks(frames, first, stack)
    )


def test_what_was_pushed_earlier_is_not_written_over():
  env, stacker = tiny.FakeEnv(2), FrameStacker(3)
  stacks = [stacker.push(env.reset())]
  before = stacks[0].copy()
  stacker.push(env.step(np.zeros(2, int)))
  np.testing.assert_array_equal(stacks[0], before)


def test_random_play_is_uniform_and_asks_no_network():
  actor, _ = make(4, seed=1)
  calls, _ = collect(actor, 300, random=lambda taken: taken < 300)
  assert not actor._inference.temperatures
  policies = np.concatenate([segment.policy for segments in calls for segment in segments])
  np.testing.assert_allclose(policies, 1 / 3)
  actions = np.concatenate([segment.action for segments in calls for segment in segments])
  counts = np.bincount(actions[actions >= 0], minlength=3)
  assert counts.sum() == 300 and counts.min() > 70
  play = lambda calls: [tuple(segment.action[0] for segment in segments) for segments in calls]  # noqa: E731
  assert len(set(play(calls))) > len(calls) / 3  # neither calls nor lanes repeat one another
  assert play(collect(make(4, seed=2)[0], 60, random=lambda _: True)[0])[:10] != play(calls)[:10]


def test_lane_offset_names_the_lanes():
  actor, _ = make(2, lane_offset=5)
  segments, _ = actor.step(Version(0, None), budget=9, progress=0.0, random=False)
  assert [segment.lane for segment in segments] == [5, 6]


def assert_same_segments(a, b):
  for left, right in zip(a, b, strict=True):
    for name, x, y in zip(left._fields, left, right, strict=True):
      np.testing.assert_array_equal(x, y, err_msg=name)


@given(lanes=st.integers(1, 4), steps=st.integers(0, 25), seed=st.integers(0, 99))
def test_a_restored_actor_goes_on_as_if_it_had_never_stopped(lanes, steps, seed):
  actor, _ = make(lanes, seed)
  for i in range(steps):
    actor.step(Version(0, None), budget=1000, progress=0.0, random=i % 2 == 0)
  state = actor.state()
  assert state.actions.shape == (steps, lanes) and state.actions.dtype == np.int16
  np.testing.assert_array_equal(state.start, np.zeros(lanes))
  restored, _ = make(lanes, seed)
  restored.restore(state)
  assert restored.stats.summary() == actor.stats.summary()
  again = restored.state()
  np.testing.assert_array_equal(again.actions, state.actions)
  assert again.frames_crc == state.frames_crc
  for i in range(8):
    arguments = {"budget": 1000, "progress": 0.0, "random": i == 0}
    ours, theirs = (a.step(Version(3, None), **arguments) for a in (actor, restored))
    assert_same_segments(ours[0], theirs[0])
    assert ours[1] == theirs[1]


def test_an_actor_may_start_behind_the_slots_of_another():
  """It says so when it is saved, numbers its slots from there, and searches with keys that were not used before."""
  start = np.array([7, 7])
  actor, _ = make(2, seed=1, start=start)
  first, _ = make(2, seed=1)
  calls, from_zero = (collect(a, 20, until=6)[0] for a in (actor, first))
  assert [segment.start for segment in calls[0]] == [7, 7] and [
    segment.start for segment in calls[-1]
  ] == [12, 12]
  played = lambda calls: [segment.action[0] for segments in calls for segment in segments]  # noqa: E731
  assert played(calls) != played(from_zero)
  state = actor.state()
  np.testing.assert_array_equal(state.start, start)
  restored, _ = make(2, seed=1)
  restored.restore(state)
  ours, theirs = (
    a.step(Version(3, None), budget=99, progress=0.0, random=False)[0] for a in (actor, restored)
  )
  assert_same_segments(ours, theirs)
  np.testing.assert_array_equal(restored.state().start, start)


def test_the_state_saved_is_not_changed_by_going_on():
  actor, _ = make(2)
  actor.step(Version(0, None), budget=1000, progress=0.0, random=True)
  state = actor.state()
  actions = state.actions.copy()
  actor.step(Version(0, None), budget=1000, progress=0.0, random=True)
  np.testing.assert_array_equal(state.actions, actions)


@pytest.mark.parametrize("tamper", ["action", "missing", "crc", "other seed"])
def test_a_log_that_leads_elsewhere_is_refused(tamper):
  actor, env = make(2, seed=4)
  for _ in range(12):
    actor.step(Version(0, None), budget=1000, progress=0.0, random=True)
  state, seed = actor.state(), 4
  if tamper == "action":
    ended = env.shown[-2].terminated | env.shown[-2].truncated
    assert not ended.all()
    state.actions[-1, np.flatnonzero(~ended)[0]] += 1
    state.actions[-1] %= 3
  elif tamper == "missing":
    state = state._replace(actions=state.actions[:-1])
  elif tamper == "crc":
    state = state._replace(frames_crc=state.frames_crc ^ 1)
  else:
    seed = 5
  with pytest.raises(RuntimeError, match="other frames"):
    make(2, seed)[0].restore(ActorState(*state))


def test_temperatures_follow_the_stages():
  config = tiny.config("search.temperatures=1,0.5,0.25", "search.temperature_stages=0.5,0.75")
  shares = {0.0: 1.0, 0.49: 1.0, 0.5: 0.5, 0.74: 0.5, 0.75: 0.25, 1.0: 0.25}
  assert {share: temperature_at(config, share) for share in shares} == shares
  actor, _ = make(1, config=config)
  for share in shares:
    actor.step(Version(0, None), budget=1000, progress=share, random=False)
  assert actor._inference.temperatures == list(shares.values())


@pytest.mark.parametrize("hold", [1.0, 5.0])
def test_random_play_holds_actions_as_long_as_it_is_told(hold):
  """The share of steps that keep the action before: held, or drawn again by chance. All actions come up equally."""
  actor, env = make(6, config=tiny.config("actor.lanes=6", f"actor.random_hold={hold}"))
  for _ in range(1500):
    actor.step(Version(0, None), budget=1000, progress=0.0, random=True)
  actions = actor.state().actions
  kept = (actions[1:] == actions[:-1]).mean()
  assert kept == pytest.approx(1 - 1 / hold + 1 / hold / env.num_actions, abs=0.03)
  np.testing.assert_allclose(
    np.bincount(actions.ravel(), minlength=env.num_actions) / actions.size, 1 / 3, atol=0.05
  )


def replay_of(config, env):
  game = Game(env.frame_shape, env.frame_dtype, env.num_actions)
  return make_replay(config, game, make_mesh(jax.local_devices()[:1]), print, seed=0)


@given(lanes=st.integers(1, 5), seed=st.integers(0, 999), calls=st.integers(0, 20))
def test_a_budget_that_is_not_the_last_closes_nothing(lanes, seed, calls):
  """Steps of exactly as many as there are lanes in motion, again and again, then one that is the last; or `close`."""
  config = tiny.config(f"actor.lanes={lanes}")
  actor, env = make(lanes, seed, config)
  other, _ = make(lanes, seed, config)
  replay = replay_of(config, env)
  version, arguments = Version(4, None), {"progress": 0.0, "random": False}
  for _ in range(calls):
    ended = env.shown[-1].terminated | env.shown[-1].truncated
    moving = int((~ended).sum())
    segments, count = actor.step(version, budget=max(moving, 1), last=False, **arguments)
    theirs, _ = other.step(version, budget=1000, **arguments)
    assert count == moving and [len(segment.frame) for segment in segments] == [1] * lanes
    assert_same_segments(segments, theirs)
    replay.append_many(segments)
  finished = list(env.shown[-1].terminated | env.shown[-1].truncated)
  closing = actor.close(version, **arguments)
  assert not actor.finished  # games that were told of already
  replay.append_many(closing)
  state = replay.state_dict()
  ends = np.cumsum(replay.heads) - 1
  assert (state["slot_action"][ends] == -1).all()
  np.testing.assert_array_equal(
    state["slot_truncated"][ends] & ~np.array(finished), ~np.array(finished)
  )
  for segment, shown in zip(closing, env.shown[-1].frame, strict=True):
    np.testing.assert_array_equal(segment.frame[0], shown)
  calls_of = lambda segments: [
    (s.lane, s.start, s.value[0], s.policy[0].tolist()) for s in segments
  ]
  theirs, _ = other.step(version, budget=1000, **arguments)
  assert calls_of(closing) == calls_of(
    theirs
  )  # what the actor would have said of these frames anyway


def test_lanes_beyond_a_budget_are_closed_even_if_it_is_not_the_last():
  actor, _ = make(3, seed=8, config=tiny.config("actor.lanes=3"))
  segments, count = actor.step(Version(0, None), budget=2, progress=0.0, random=False, last=False)
  assert count == 2 and [s.action[0] >= 0 for s in segments] == [True, True, False]
  assert [bool(s.truncated[0]) for s in segments] == [False, False, True]


def test_games_that_finish_are_told_once():
  actor, env = make(2, seed=5)
  told = []
  for _ in range(60):
    actor.step(Version(0, None), budget=1000, progress=0.0, random=False)
    over = env.shown[-1].game_over | env.shown[-1].truncated
    assert len(actor.finished) == over.sum()
    told += actor.finished
  assert len(told) > 3
  assert actor.stats.summary()[names.EPISODES] == len(told)
  assert actor.stats.summary()[names.EPISODE_RETURN_BEST] == max(episode.score for episode in told)
