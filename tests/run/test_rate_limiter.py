"""The pacing rule: exact, free of deadlock, and indifferent to who is fast."""

import dataclasses
import math
import threading
import time
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from speedyzero_jax.config import schema
from speedyzero_jax.run.rate_limiter import Pacer, Stopped


@st.composite
def configs(draw):
  env_steps = draw(st.integers(1, 3000))
  steps = draw(st.integers(1, 500))
  return schema.Config(
    actor=schema.ActorConfig(
      lanes=draw(st.integers(1, 40)), random_steps=draw(st.integers(0, env_steps))
    ),
    learner=schema.LearnerConfig(steps=steps, tail_steps=draw(st.integers(0, steps))),
    run=schema.RunConfig(env_steps=env_steps),
  )


def make(*, env_steps, random_steps, steps, tail_steps=0, lanes=1):
  return schema.Config(
    actor=schema.ActorConfig(lanes=lanes, random_steps=random_steps),
    learner=schema.LearnerConfig(steps=steps, tail_steps=tail_steps),
    run=schema.RunConfig(env_steps=env_steps),
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
def test_the_schedule_is_exact(c):
  pacer = Pacer(c)
  schedule = [pacer.required(k) for k in range(c.learner.steps + 1)]
  assert schedule == [reference(c, k) for k in range(c.learner.steps + 1)]
  assert schedule == sorted(schedule) and schedule[-1] == c.run.env_steps
  assert schedule[0] == (
    c.actor.random_steps if c.learner.tail_steps < c.learner.steps else c.run.env_steps
  )


def test_the_schedule_is_exact_where_floating_point_is_not():
  assert math.ceil(7 * (58 / 14)) == 30  # why it isn't computed so
  pacer = Pacer(make(env_steps=58, random_steps=0, steps=14))
  assert [pacer.required(k) for k in range(14)] == [-(-58 * k // 14) for k in range(14)]


def test_the_papers_pace():
  """100k learner steps over 100k agent steps, then 20k more (EfficientZero)."""
  pacer = Pacer(make(env_steps=100_000, random_steps=2_000, steps=120_000, tail_steps=20_000))
  assert (pacer.required(0), pacer.required(50_000), pacer.required(99_999)) == (
    2_000,
    51_000,
    100_000,
  )
  assert {pacer.required(k) for k in (100_000, 110_000, 119_999)} == {100_000}


def slack_of(c):
  """Agent steps that collection may be ahead: two steps of all lanes, or what two learner steps are worth."""
  paced = c.learner.steps - c.learner.tail_steps
  ratio = math.ceil(Fraction(c.run.env_steps - c.actor.random_steps, paced)) if paced else 0
  return max(2 * c.actor.lanes, 2 * ratio)


def play(c, choose):
  """Lets `choose(may_learn, may_collect)` run both roles to the end; returns agent steps seen at each learner step."""
  pacer, seen = Pacer(c), []
  while not pacer.finished:
    may_learn, may_collect = pacer.may_learn(), pacer.may_collect()
    assert may_learn or may_collect, "both roles wait for one another"
    ahead = pacer.env_steps - reference(c, pacer.learner_steps)
    assert may_collect == (ahead < slack_of(c) and pacer.env_steps < c.run.env_steps)
    if choose(may_learn, may_collect):
      assert ahead >= 0
      seen.append(pacer.env_steps)
      pacer.add_learner_step()
    else:
      pacer.add_env_steps(min(c.actor.lanes, c.run.env_steps - pacer.env_steps))
  assert not pacer.may_learn() and not pacer.may_collect()
  assert (
    pacer.env_steps == c.run.env_steps
    and pacer.learner_steps == c.learner.steps
    and pacer.progress == 1.0
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


def test_tail_steps_wait_for_everything():
  c = make(env_steps=30, random_steps=10, steps=8, tail_steps=3, lanes=1)
  pacer = Pacer(c)
  for _ in range(5):
    pacer.add_env_steps(pacer.required(pacer.learner_steps) - pacer.env_steps)
    pacer.add_learner_step()
  pacer.add_env_steps(29 - pacer.env_steps)
  assert not pacer.may_learn() and pacer.may_collect() and not pacer.collected
  pacer.add_env_steps(1)
  assert pacer.collected and not pacer.finished
  for _ in range(3):
    assert pacer.may_learn()
    pacer.add_learner_step()
  assert pacer.finished


def test_a_resumed_pacer_goes_on():
  c = make(env_steps=50, random_steps=10, steps=8)
  pacer = Pacer(c, env_steps=15, learner_steps=2)
  assert (pacer.env_steps, pacer.learner_steps, pacer.progress) == (15, 2, 0.25)
  assert not pacer.may_learn()
  pacer.add_env_steps(5)
  assert pacer.may_learn()


def waiting(pacer, predicate):
  """A thread in `wait_until`, and the list that says how it ended."""
  ended = []

  def body():
    try:
      pacer.wait_until(predicate)
      ended.append("done")
    except Stopped:
      ended.append("stopped")

  thread = threading.Thread(target=body, daemon=True)
  thread.start()
  time.sleep(0.05)
  assert thread.is_alive() and not ended
  return thread, ended


@pytest.mark.parametrize("event", ["env_steps", "learner_step", "notify"])
def test_every_change_wakes_who_waits_for_it(event):
  pacer, box = Pacer(make(env_steps=50, random_steps=10, steps=8)), []
  predicate, change = {
    "env_steps": (pacer.may_learn, lambda: pacer.add_env_steps(10)),
    "learner_step": (lambda: pacer.learner_steps == 1, pacer.add_learner_step),
    "notify": (lambda: bool(box), lambda: (box.append(1), pacer.notify())),
  }[event]
  thread, ended = waiting(pacer, predicate)
  change()
  thread.join(10)
  assert ended == ["done"]


def test_stop_wakes_everybody_with_stopped_and_for_good():
  pacer = Pacer(make(env_steps=50, random_steps=10, steps=8))
  waiters = [waiting(pacer, lambda: False) for _ in range(3)]
  pacer.stop()
  for thread, ended in waiters:
    thread.join(10)
    assert ended == ["stopped"]
  assert pacer.stopping
  with pytest.raises(Stopped):  # even if there is nothing to wait for
    pacer.wait_until(lambda: True)


def never():
  return False


@given(configs(), st.integers(0, 2**32 - 1))
def test_steps_that_are_promised_are_taken_or_come_back_and_nobody_is_stuck(c, seed):
  """Several actors that use some of what they were promised, or none, or never answer; and a learner."""
  rng, pacer = np.random.default_rng(seed), Pacer(c)
  held = [0] * int(rng.integers(1, 5))
  lost = int(
    rng.integers(-1, len(held) - 1)
  )  # -1 or one of several that keeps what it was promised
  share = -(-c.actor.lanes // len(held))
  while not pacer.finished:
    moved = pacer.may_learn()
    if moved and rng.random() < 0.7:
      pacer.add_learner_step()
    for i in rng.permutation(len(held)).tolist():
      if held[i]:
        if i != lost or (pacer.pool == 0 and not pacer.may_learn()):
          used = int(rng.integers(0, held[i] + 1))
          pacer.add_env_steps(used, reserved=held[i])
          held[i], moved = 0, True
      elif pacer.pool:
        before, may = pacer.pool, pacer.may_collect()
        count = pacer.reserve(int(rng.integers(1, share + 1)), 0.0, never)
        assert (count is not None) == may
        if count is not None:
          assert 0 < count <= share and pacer.pool == before - count
          held[i], moved = count, True
      assert pacer.pool == c.run.env_steps - pacer.env_steps - sum(held) >= 0
    assert moved, "everybody waits for somebody"
  assert pacer.env_steps == c.run.env_steps


def test_a_promise_says_why_there_is_none():
  pacer = Pacer(make(env_steps=20, random_steps=10, steps=8, lanes=2))
  assert pacer.reserve(20, 0.0, never) == 20  # the rule looks at what was promised before
  assert (
    pacer.reserve(1, 0.0, never) is None and pacer.reserve(1, 0.0, lambda: True) is None
  )  # may come back
  pacer.release(5)
  assert not pacer.may_collect() and pacer.reserve(9, 0.01, never) is None  # too far ahead
  assert pacer.reserve(9, 0.0, lambda: True) == 5  # somebody needs them
  pacer.add_env_steps(20, reserved=20)
  assert pacer.collected and pacer.reserve(1, 10.0, never) == 0


@pytest.mark.parametrize("event", ["release", "learner_step", "stop", "collected"])
def test_who_waits_for_a_promise_is_woken(event):
  pacer, got = Pacer(make(env_steps=20, random_steps=2, steps=9, lanes=2)), []
  assert pacer.reserve(20 if event in ("release", "collected") else 7, 0.0, never)
  thread = threading.Thread(target=lambda: got.append(pacer.reserve(3, 20.0, never)), daemon=True)
  thread.start()
  time.sleep(0.05)
  assert not got
  expected, change = {
    "release": (3, lambda: pacer.release(18)),
    "learner_step": (3, lambda: [pacer.add_learner_step() for _ in range(3)]),
    "stop": (None, pacer.stop),
    "collected": (0, lambda: pacer.add_env_steps(20, reserved=20)),
  }[event]
  change()
  thread.join(10)
  assert got == [expected]


def test_waiting_for_a_while_ends_with_the_while_the_stop_or_what_was_waited_for():
  pacer, box = Pacer(make(env_steps=50, random_steps=10, steps=8)), []
  begin = time.monotonic()
  pacer.wait_for(never, 0.05)
  assert 0.05 <= time.monotonic() - begin < 5
  for change in (lambda: (box.append(1), pacer.notify()), pacer.stop):
    thread = threading.Thread(target=pacer.wait_for, args=(lambda: bool(box), 20.0), daemon=True)
    box.clear()
    thread.start()
    time.sleep(0.02)
    assert thread.is_alive()
    change()
    thread.join(10)
    assert not thread.is_alive()


def test_in_a_hurry_batches_are_due_at_once_and_nothing_else_changes():
  pacer = Pacer(make(env_steps=50, random_steps=10, steps=8))
  assert not pacer.may_draw(0)
  thread, ended = waiting(pacer, lambda: pacer.may_draw(3))
  pacer.hurry()
  thread.join(10)
  assert ended == ["done"] and pacer.may_draw(7)
  assert (
    not (pacer.may_learn() or pacer.stopping or pacer.collected)
    and pacer.may_collect()
    and pacer.pool == 50
  )


def test_batches_are_due_with_their_steps():
  pacer = Pacer(make(env_steps=58, random_steps=0, steps=14))
  pacer.add_env_steps(30)
  assert [pacer.may_draw(k) for k in range(14)] == [k <= 7 for k in range(14)]


@given(
  interval=st.integers(1, 5),
  leeway=st.integers(1, 5),
  moves=st.lists(
    st.sampled_from(["learn", "publish", "begin 0", "begin 1", "end 0", "end 1"]), max_size=60
  ),
)
def test_nobody_acts_with_weights_that_are_too_old(interval, leeway, moves):
  """Weights are published after their learner step, some time before the next one."""
  c = make(env_steps=10, random_steps=0, steps=1000)
  pacer = Pacer(
    dataclasses.replace(
      c, actor=schema.ActorConfig(max_lag=interval + leeway, weights_interval=interval)
    )
  )
  newest, acting = 0, {}
  for move in moves:
    kind, _, who = move.partition(" ")
    if kind == "begin":
      pacer.begin_acting(who)
      acting[who] = newest
    elif kind == "end":
      pacer.end_acting(who)
      acting.pop(who, None)
    elif kind == "learn" and pacer.lagging:
      assert acting
    elif kind == "learn":
      newest = pacer.learner_steps // interval * interval  # at the latest
      pacer.add_learner_step()
    elif pacer.learner_steps % interval == 0:
      newest = pacer.learner_steps
    assert all(pacer.learner_steps - weights <= interval + leeway for weights in acting.values())


def test_who_acts_holds_nobody_up_unless_asked():
  pacer = Pacer(make(env_steps=10, random_steps=0, steps=1000))
  pacer.begin_acting("who")
  for _ in range(100):
    pacer.add_learner_step()
  assert not pacer.lagging
