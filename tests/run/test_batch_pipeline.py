"""Tests of batches from replay to learner: recomputation, exact weights, concurrent evictions."""

import contextlib
import threading
from unittest import mock

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

import episodes
import reference
import trained
from speedyzero_jax.run import batch_pipeline
from tiny_replay import LANES, STACK, UNROLL, make_agent, make_replay, play, write

BATCH = 30
BETA = ("priority.beta_start=0.4", "priority.beta_end=0.9")


def interrupted(name, call):
  """Makes a `part` context that calls a function when the part of this name begins."""
  return lambda part: contextlib.nullcontext(call() if part == name else None)


def draw(replay, step, *overrides, execute=lambda works, step: None, part=contextlib.nullcontext):
  agent = make_agent(*overrides)
  return batch_pipeline.draw(agent, replay, BATCH, step, execute, part)


@given(
  seed=st.integers(0, 2**32 - 1),
  when=st.sampled_from(["search", "gather", "cells"]),
  end=st.sampled_from([0.05, 0.4]),
)
def test_a_sample_evicted_before_its_frames_are_copied_is_masked(seed, when, end):
  """Actors append after the selection, before the frames' cells are known, or before they are
  copied."""
  rng = np.random.default_rng(seed)
  replay, stream = make_replay(20), reference.Stream(LANES, seed, end)
  while not replay.ready(BATCH) or rng.random() < 0.8:
    play(replay, stream, rng, 0)
  before = {}

  def append():
    lanes, heads = np.arange(LANES), replay.heads
    before.update(frames={}, heads=heads)
    for lane in lanes:
      times = np.arange(replay.tails[lane], heads[lane])
      windows = replay.windows(np.full(len(times), lane), times, after=UNROLL)
      before["frames"] |= {(lane, t): w for t, w in zip(times.tolist(), windows, strict=True)}
    play(replay, stream, rng, 1)

  cells = replay.window_cells
  if when == "cells":

    def late(*args):
      if before:
        return cells(*args)
      before["begun"] = True
      found = cells(*args)
      append()
      return found

    replay.window_cells = late
  part = contextlib.nullcontext if when == "cells" else interrupted(when, append)
  drawn = draw(replay, 1, part=part)
  replay.window_cells = cells
  lane, time = drawn.selection.lane, drawn.selection.time
  live = time >= replay.tails[lane]
  masks = [x for name, x in drawn.arrays.items() if name.endswith("_mask")]
  assert len(masks) == 4
  for i, frames in enumerate(drawn.arrays["frames"]):
    now = replay.windows(lane[i : i + 1], time[i : i + 1], after=UNROLL)[0] if live[i] else None
    if (frames == before["frames"][lane[i], time[i]]).all() or (live[i] and (frames == now).all()):
      continue
    assert not any(mask[i].any() for mask in masks)
  if not replay.tails.any():  # nothing was evicted, and nothing is masked without need
    assert all(mask[:, 0].any() for mask in masks)


@pytest.mark.parametrize(("name", "case"), [("dqn", "windows"), ("r2d2", "trajectories")])
def test_samples_of_every_kind_are_masked_once_evicted(name, case):
  """The lane's oldest slots are evicted between the selection and the copying of frames."""
  short = ("loss.burn_in=1", "loss.sequence_length=3", "loss.stride=1") if name == "r2d2" else ()
  agent = trained.make(3, f"agent={name}", "env.frame_stack=2", "loss.td_steps=1", *short)
  assert agent.window.within_episode == (case == "windows")
  replay, rng = trained.make_replay(agent, 1, 30, 2), np.random.default_rng(0)
  slots = episodes.recorded(agent.schema, 0, episodes.every_end(3, rng)[:-1] * 3, rng)
  replay.append(slots.select(slice(30)))
  part = interrupted("gather", lambda: replay.append(slots.select(slice(30, 42))))
  drawn = batch_pipeline.draw(agent, replay, BATCH, 1, lambda works, step: None, part)
  live = drawn.selection.time >= replay.tails[0]
  mask = drawn.arrays["loss_mask"].reshape(BATCH, -1)
  assert not mask[~live].any() and mask[live].any(axis=1).all() and 0 < live.sum() < BATCH


def test_a_drawn_batch_has_the_weights_frames_and_ages_of_its_samples():
  rng = np.random.default_rng(0)
  replay, stream = make_replay(60, *BETA), reference.Stream(LANES, 0)
  for step in range(12):
    play(replay, stream, rng, step)
  lane, time = replay.next_block("refresh", 16)
  write(replay, "refresh", lane, time, 20, value=rng.normal(size=16))
  state = replay.state_dict()
  at = {key: i for i, key in enumerate(stream.live(60))}
  for step in (0, 5, 12):
    drawn = draw(replay, step, *BETA)
    arrays, keys = drawn.arrays, list(zip(*drawn.selection[:2], strict=True))
    chosen = np.array([state["priority"][at[key]] for key in keys]) / state["priority"].sum()
    weight = chosen ** -(0.4 + 0.5 * step / 12)
    np.testing.assert_allclose(arrays["weight"], weight / weight.max(), rtol=1e-5)
    assert arrays["weight"].dtype == np.float32 and len(set(arrays["weight"].tolist())) > 3
    ages = []
    for i, (l, t) in enumerate(keys):
      window = reference.window(stream, l, t, STACK - 1, UNROLL, 60)
      np.testing.assert_array_equal(arrays["frames"][i].reshape(-1, 3), window)
      episode, place = stream.find(l, t)
      states = episode.slots[place : place + UNROLL + 1]
      ages += [step - slot.policy_step for slot in states if slot.action >= 0]
    info = drawn.info
    assert info["replay/target_age_mean"] == pytest.approx(np.mean(ages))
    assert info["replay/target_age_max"] == max(0, *ages)


def test_what_the_agent_wants_recomputed_is_recomputed_before_the_batch_is_assembled():
  replay, stream = make_replay(60), reference.Stream(LANES, 0)
  for step in range(12):
    play(replay, stream, np.random.default_rng(step), 0)
  seen = []

  def execute(works, step):
    seen.append([work.task for work in works])
    for work in works:
      time = (work.time[:, None] + np.arange(work.real.shape[1]))[work.real]
      lane = np.broadcast_to(work.lane[:, None], work.real.shape)[work.real]
      n = len(time)
      policy = np.broadcast_to(np.float32([0, 0, 1]), (n, 3))
      found = {"policy": policy, "search_value": np.zeros(n), "value": np.full(n, 50.0)}
      write(replay, work.task, lane, time, step, **found)

  drawn = draw(replay, 4, execute=execute)
  assert seen == [["reanalyse", "bootstrap"]]
  policy, acted = drawn.arrays["policy"], drawn.arrays["policy_mask"] > 0
  assert (policy[acted] == [0, 0, 1]).all() and drawn.info["replay/target_age_max"] == 0
  assert np.abs(drawn.arrays["value"]).max() > 30  # bootstrapped from 50


@pytest.mark.parametrize("name", ["batch_work", "assemble"])
def test_nothing_is_appended_while_an_agent_reads_the_store(name):
  replay, stream = make_replay(20), reference.Stream(LANES, 0)
  while not replay.ready(BATCH):
    play(replay, stream, np.random.default_rng(0), 0)
  function, more = getattr(make_agent(), name), stream.play(0, 3)
  thread = threading.Thread(target=replay.append, args=(more,))

  def reading(*args):
    thread.start()
    thread.join(0.02)
    assert thread.is_alive()
    return function(*args)

  with mock.patch.object(make_agent(), name, reading):
    draw(replay, 0)
  thread.join(10)
  assert replay.heads.tolist() == list(stream.heads)


def test_mixed_targets_begin_at_their_learner_step():
  rng = np.random.default_rng(0)
  replay, stream = make_replay(60), reference.Stream(LANES, 0)
  for step in range(12):
    play(replay, stream, rng, step)
  mixed = "reanalyse.value_target=mixed", "reanalyse.mixed_start=5", "reanalyse.mixed_newest=0"
  agent, drawn = make_agent(*mixed), replay.select(BATCH)
  early, late = (agent.assemble(replay, drawn, step)[0]["value"] for step in (4, 5))
  assert (early != late).any()
