"""Tests of the rate limiter: exact counts, no deadlocks, independence of the roles' speeds."""

import math
import threading
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from speedyzero_jax.agents.efficientzero import AGENT_CONFIG
from speedyzero_jax.config import schema
from speedyzero_jax.run.rate_limiter import RateLimiter, Stopped


def make(*, env_steps, random_steps, steps, tail_steps=0, lanes=1, **actor):
  return schema.Config(
    AGENT_CONFIG(),
    actor=schema.ActorConfig(lanes=lanes, random_steps=random_steps, **actor),
    learner=schema.LearnerConfig(steps=steps, tail_steps=tail_steps),
    run=schema.RunConfig(env_steps=env_steps),
  )


@st.composite
def configs(draw):
  env_steps, steps = draw(st.integers(1, 3000)), draw(st.integers(1, 500))
  return make(
    env_steps=env_steps,
    random_steps=draw(st.integers(0, env_steps)),
    steps=steps,
    tail_steps=draw(st.integers(0, steps)),
    lanes=draw(st.integers(1, 40)),
  )


def reference(c, step):
  """Agent steps that learner step `step` waits for, in exact arithmetic."""
  paced = c.learner.steps - c.learner.tail_steps
  if step >= paced:
    return c.run.env_steps
  return c.actor.random_steps + math.ceil(
    Fraction(step * (c.run.env_steps - c.actor.random_steps), paced)
  )


@given(configs())
@example(make(env_steps=58, random_steps=0, steps=14))  # where floating point is not exact
@example(make(env_steps=100_000, random_steps=2_000, steps=12_000, tail_steps=2_000))
def test_the_schedule_is_exact(c):
  limiter = RateLimiter(c)
  schedule = [limiter.required(k) for k in range(c.learner.steps + 1)]
  assert schedule == [reference(c, k) for k in range(c.learner.steps + 1)]
  assert schedule == sorted(schedule) and schedule[-1] == c.run.env_steps
  assert schedule[0] == (
    c.actor.random_steps if c.learner.tail_steps < c.learner.steps else c.run.env_steps
  )


def slack_of(c):
  """Agent steps that collection may be ahead: two steps of all lanes, or two learner steps'
  worth."""
  paced = c.learner.steps - c.learner.tail_steps
  ratio = math.ceil(Fraction(c.run.env_steps - c.actor.random_steps, paced)) if paced else 0
  return max(2 * c.actor.lanes, 2 * ratio)


def play(c, choose):
  """Runs both roles to the end as `choose(may_learn, may_collect)` decides; returns the agent steps
  at each learner step."""
  limiter, seen = RateLimiter(c), []
  while not limiter.finished:
    may_learn, may_collect = limiter.may_learn(), limiter.may_collect()
    assert may_learn or may_collect, "both roles wait for one another"
    ahead = limiter.env_steps - reference(c, limiter.learner_steps)
    assert may_collect == (ahead < slack_of(c) and limiter.env_steps < c.run.env_steps)
    if choose(may_learn, may_collect):
      assert ahead >= 0
      seen.append(limiter.env_steps)
      limiter.add_learner_step()
    else:
      limiter.add_env_steps(min(c.actor.lanes, c.run.env_steps - limiter.env_steps))
  assert not limiter.may_learn() and not limiter.may_collect()
  assert (
    limiter.env_steps == c.run.env_steps
    and limiter.learner_steps == c.learner.steps
    and limiter.progress == 1.0
  )
  return seen


@given(configs(), st.integers(0, 2**32 - 1), st.floats(0, 1))
def test_one_of_the_roles_may_always_go_on(c, seed, learner_share):
  rng = np.random.default_rng(seed)
  play(c, lambda learn, collect: learn and (not collect or rng.random() < learner_share))


@given(configs())
def test_samples_per_insert_do_not_depend_on_who_is_faster(c):
  fast_learner = play(c, lambda learn, collect: learn)
  fast_actor = play(c, lambda learn, collect: not collect)
  for k, (early, late) in enumerate(zip(fast_learner, fast_actor, strict=True)):
    assert reference(c, k) <= early <= late
    assert late < reference(c, k) + slack_of(c) + c.actor.lanes
    assert (
      early < max(reference(c, k), 1) + c.actor.lanes
    )  # a waiting learner learns as soon as it may


def test_a_restored_limiter_continues():
  c = make(env_steps=50, random_steps=10, steps=8)
  limiter = RateLimiter(c)
  limiter.restore(15, 2)
  assert (limiter.env_steps, limiter.learner_steps, limiter.progress) == (15, 2, 0.25)
  assert not limiter.may_learn()
  limiter.add_env_steps(5)
  assert limiter.may_learn()


def start(call):
  """Starts a thread that calls and waits; returns it and the list for its result."""
  ended: list = []

  def body():
    try:
      ended.append(call())
    except Stopped:
      ended.append("stopped")

  thread = threading.Thread(target=body, daemon=True)
  thread.start()
  thread.join(0.02)
  assert thread.is_alive() and not ended
  return thread, ended


def waiting(limiter, predicate):
  return start(lambda: limiter.wait_until(predicate) or "done")


@pytest.mark.parametrize("event", ["env_steps", "learner_step", "notify"])
def test_every_change_wakes_the_waiting(event):
  limiter, box = RateLimiter(make(env_steps=50, random_steps=10, steps=8)), []
  predicate, change = {
    "env_steps": (limiter.may_learn, lambda: limiter.add_env_steps(10)),
    "learner_step": (lambda: limiter.learner_steps == 1, limiter.add_learner_step),
    "notify": (lambda: bool(box), lambda: (box.append(1), limiter.notify())),
  }[event]
  thread, ended = waiting(limiter, predicate)
  change()
  thread.join(10)
  assert ended == ["done"]


def test_the_end_of_an_actors_step_wakes_a_learner_that_waits_for_it():
  lag = {"max_lag": 2, "weights_interval": 1}
  limiter = RateLimiter(make(env_steps=50, random_steps=10, steps=8, **lag))
  limiter.begin_acting("actor")
  limiter.add_learner_step()
  thread, ended = waiting(limiter, lambda: not limiter.lag_exceeded)
  limiter.end_acting("actor")
  thread.join(10)
  assert ended == ["done"]


def test_stop_wakes_all_with_stopped_for_good():
  limiter = RateLimiter(make(env_steps=50, random_steps=10, steps=8))
  waiters = [waiting(limiter, lambda: False) for _ in range(3)]
  limiter.stop()
  for thread, ended in waiters:
    thread.join(10)
    assert ended == ["stopped"]
  assert limiter.stopping
  with pytest.raises(Stopped):  # even if there is nothing to wait for
    limiter.wait_until(lambda: True)


def never():
  return False


@given(configs(), st.integers(0, 2**32 - 1))
def test_granted_steps_are_taken_or_come_back_without_deadlock(c, seed):
  """A learner and several actors that use some or none of their grants, or never answer."""
  rng, limiter = np.random.default_rng(seed), RateLimiter(c)
  held = [0] * int(rng.integers(1, 5))
  lost = int(rng.integers(-1, len(held) - 1))  # -1, or the actor that keeps its grant
  share = -(-c.actor.lanes // len(held))
  while not limiter.finished:
    moved = limiter.may_learn()
    if moved and rng.random() < 0.7:
      limiter.add_learner_step()
    for i in rng.permutation(len(held)).tolist():
      if held[i]:
        if i != lost or (limiter.pool == 0 and not limiter.may_learn()):
          used = int(rng.integers(0, held[i] + 1))
          limiter.add_env_steps(used, reserved=held[i])
          held[i], moved = 0, True
      elif limiter.pool:
        before, may = limiter.pool, limiter.may_collect()
        count = limiter.reserve(int(rng.integers(1, share + 1)), 0.0, never)
        assert (count is not None) == may
        if count is not None:
          assert 0 < count <= share and limiter.pool == before - count
          held[i], moved = count, True
      assert limiter.pool == c.run.env_steps - limiter.env_steps - sum(held) >= 0
    assert moved, "all wait"
  assert limiter.env_steps == c.run.env_steps


def test_why_nothing_is_granted():
  limiter = RateLimiter(make(env_steps=20, random_steps=10, steps=8, lanes=2))
  assert limiter.reserve(20, 0.0, never) == 20
  assert (
    limiter.reserve(1, 0.0, never) is None and limiter.reserve(1, 0.0, lambda: True) is None
  )  # may come back
  limiter.add_env_steps(0, reserved=5)
  assert not limiter.may_collect() and limiter.reserve(9, 0.01, never) is None  # too far ahead
  assert limiter.reserve(9, 0.0, lambda: True) == 5  # needed urgently
  limiter.add_env_steps(20, reserved=20)
  assert limiter.collected and limiter.reserve(1, 10.0, never) == 0


@pytest.mark.parametrize("event", ["release", "learner_step", "stop", "collected", "time"])
def test_a_grant_or_its_end_wakes_the_waiting(event):
  limiter = RateLimiter(make(env_steps=20, random_steps=2, steps=9, lanes=2))
  assert limiter.reserve(20 if event in ("release", "collected") else 7, 0.0, never)
  seconds = 0.5 if event == "time" else 20.0
  thread, got = start(lambda: limiter.reserve(3, seconds, never))
  expected, change = {
    "release": (3, lambda: limiter.add_env_steps(0, reserved=18)),
    "learner_step": (3, lambda: [limiter.add_learner_step() for _ in range(3)]),
    "stop": (None, limiter.stop),
    "collected": (0, lambda: limiter.add_env_steps(20, reserved=20)),
    "time": (None, lambda: None),
  }[event]
  change()
  thread.join(10)
  assert got == [expected]


def test_to_finish_together_learner_steps_are_due_at_once_and_nothing_else_changes():
  limiter = RateLimiter(make(env_steps=50, random_steps=10, steps=8))
  assert not limiter.may_draw(0)
  thread, ended = waiting(limiter, lambda: limiter.may_draw(3))
  limiter.stop_pacing()
  thread.join(10)
  assert ended == ["done"] and limiter.may_draw(7) and limiter.may_learn()
  assert not (limiter.stopping or limiter.collected)
  assert limiter.may_collect() and limiter.pool == 50


@given(
  interval=st.integers(1, 5),
  leeway=st.integers(1, 5),
  moves=st.lists(
    st.sampled_from(["learn", "publish", "begin 0", "begin 1", "end 0", "end 1"]), max_size=60
  ),
)
@example(interval=1, leeway=1, moves=["begin 0", *["learn", "begin 1"] * 3])
def test_weights_acted_with_are_never_too_old(interval, leeway, moves):
  """Weights are published after their learner step, some time before the next one."""
  lag = {"max_lag": interval + leeway, "weights_interval": interval}
  limiter = RateLimiter(make(env_steps=10, random_steps=0, steps=1000, **lag))
  newest, acting = 0, {}
  for move in moves:
    kind, _, who = move.partition(" ")
    if kind == "begin":
      limiter.begin_acting(who)
      acting[who] = newest
    elif kind == "end":
      limiter.end_acting(who)
      acting.pop(who, None)
    elif kind == "learn" and limiter.lag_exceeded:
      assert acting
    elif kind == "learn":
      newest = limiter.learner_steps // interval * interval  # at the latest
      limiter.add_learner_step()
    elif limiter.learner_steps % interval == 0:
      newest = limiter.learner_steps
    assert all(limiter.learner_steps - weights <= interval + leeway for weights in acting.values())


def test_for_a_synchronous_agent_only_what_is_urgent_is_collected():
  limiter = RateLimiter(make(env_steps=50, random_steps=0, steps=3), synchronous=True)
  assert limiter.may_draw(2) and limiter.may_learn() and not limiter.may_collect()
  assert limiter.reserve(5, 0.0, never) is None and limiter.reserve(5, 0.0, lambda: True) == 5
  for _ in range(3):
    assert not limiter.may_collect()
    limiter.add_learner_step()
  assert limiter.may_collect() and not limiter.may_learn()  # what is left is collected
