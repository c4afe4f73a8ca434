"""What a run says of itself: of one unit, of all of them, over restarts, and while nothing is learned."""

import json
import time

import tiny

from speedyzero_jax.metrics import logger, names
from speedyzero_jax.metrics.aggregation import Episode, EpisodeStats
from speedyzero_jax.metrics.logger import Reporter

REPLAY = {"transitions": 30.0, "bytes_per_transition": 10.0, "bytes": 2e9, "priority_age_mean": 4.0,
          "priority_age_max": 9.0}  # fmt: skip
OTHER = {
  names.ENV_STEPS: 50, names.REPLAY_TRANSITIONS: 40.0, names.REPLAY_BYTES_PER_TRANSITION: 30.0,
  names.REPLAY_MEMORY: 1.0, names.PRIORITY_AGE_MEAN: 8.0, names.PRIORITY_AGE_MAX: 7.0, names.POLICY_LAG: 2.0,
  names.POLICY_LAG_MAX: 11.0, names.TARGET_AGE_MAX: 3.0, names.AGENT_STEPS_PER_SECOND: 1e6,
  names.LEARNER_WAIT: 0.75, names.PRESENT_ACTORS: 1, names.PRESENT_REANALYSERS: 2, names.RESTARTS_ACTORS: 3,
  names.EPISODES: 5, names.EPISODE_RETURN: 3.0, names.EPISODE_RETURN_BEST: 4.0,
}  # fmt: skip


def write(reporter, step, env_steps=100, **watched):
  """A line of a unit in which one game was played."""
  episodes = EpisodeStats(1)
  episodes.record(Episode(1.0, 10))
  values = {names.ENV_STEPS: env_steps, **watched}
  reporter.watch(lambda: values)
  reporter.line(learner_steps=step, replay=REPLAY, episodes=episodes)


def rows(folder):
  return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_line_tells_of_all_units(tmp_path):
  told = []

  def share(numbers):
    told.append(dict(numbers))
    return [numbers, OTHER]

  with Reporter(tiny.config(), tmp_path, "", None, share) as reporter:
    reporter.mean(
      {
        names.POLICY_LAG: 6.0,
        names.POLICY_LAG_MAX: 6.0,
        names.LOSS_TOTAL: 1.5,
        names.LEARNER_WAIT: 0.25,
      }
    )
    reporter.mean({names.POLICY_LAG: 10.0, names.POLICY_LAG_MAX: 10.0})
    reporter.latest({names.CHECKPOINT_STEP: 4})
    write(reporter, 6, **{names.PRESENT_ACTORS: 1, names.RESTARTS_ACTORS: 0})
  (row,) = rows(tmp_path)
  expected = {
    names.ENV_STEPS: 150, names.REPLAY_TRANSITIONS: 70, names.REPLAY_BYTES_PER_TRANSITION: 20, names.REPLAY_MEMORY: 3,
    names.PRIORITY_AGE_MEAN: 6, names.PRIORITY_AGE_MAX: 9, names.POLICY_LAG: 5, names.POLICY_LAG_MAX: 11,
    names.TARGET_AGE_MAX: 3, names.AGENT_STEPS_PER_SECOND: 1e6, names.LEARNER_WAIT: 0.75, names.PRESENT_ACTORS: 2,
    names.PRESENT_REANALYSERS: 2, names.RESTARTS_ACTORS: 3, names.EPISODES: 6, names.EPISODE_RETURN: 2,
    names.EPISODE_RETURN_BEST: 4, names.EPISODE_RETURN_LAST: 1, names.LOSS_TOTAL: 1.5, names.CHECKPOINT_STEP: 4,
    names.RESTARTS_LEARNERS: 0, names.SAMPLES_PER_INSERT: 6 * 8 / (150 - 40),
  }  # fmt: skip
  assert {name: row.get(name) for name in expected} == expected
  # What is the same in all units, or this one's alone, is told to nobody.
  assert told[-1][names.ENV_STEPS] == 100 and told[-1][names.POLICY_LAG] == 8
  assert not {names.LOSS_TOTAL, names.CHECKPOINT_STEP, names.EPISODE_RETURN_LAST} & told[-1].keys()


def test_searches_are_counted_by_learner_step(tmp_path):
  name = names.REANALYSED_PER_STEP
  with Reporter(tiny.config(), tmp_path, "", 4) as reporter:
    for step, searched in ((6, 100), (8, 30), (8, 8), (10, 0)):
      reporter.count(names.REANALYSED_PER_SECOND, searched)
      write(reporter, step)
    assert [row.get(name) for row in rows(tmp_path)] == [50, 15, None, 4]
    reporter.rewind(8)
    reporter.count(names.REANALYSED_PER_SECOND, 3)
    write(reporter, 9)
    assert rows(tmp_path)[-1][name] == 3


def test_restarts_add_up(tmp_path):
  def begin(resume_step, step, actors):
    with Reporter(tiny.config(), tmp_path, "", resume_step) as reporter:
      if resume_step is not None:
        reporter.rewind(min(resume_step, 2))  # which forgets lines, but not restarts
      write(reporter, step, **{names.RESTARTS_ACTORS: actors})
    return [
      rows(tmp_path)[-1].get(name) for name in (names.RESTARTS_LEARNERS, names.RESTARTS_ACTORS)
    ]

  assert begin(0, 3, 2) == [0, 2]  # as under a supervisor, where nothing has begun yet
  assert begin(0, 1, 0) == [1, 2]
  assert begin(2, 6, 4) == [2, 6]
  assert begin(6, 7, 1) == [3, 7]


def test_what_goes_on_without_learning_is_told_and_shown_but_makes_no_line(
  tmp_path, monkeypatch, capsys
):
  monkeypatch.setattr(logger, "_REFRESH", 0.02)
  told, now = [], {names.ENV_STEPS: 10, names.PRESENT_ACTORS: 0}

  def share(numbers):
    told.append(dict(numbers))
    return [numbers, {names.PRESENT_ACTORS: 1}]

  with Reporter(tiny.config("topology.actors=2"), tmp_path, "", None, share) as reporter:
    reporter.watch(lambda: now)
    reporter.count(names.AGENT_STEPS_PER_SECOND, 5)
    for actors in (0, 1):
      now[names.PRESENT_ACTORS] = actors
      until = time.monotonic() + 10
      while not told or told[-1].get(names.PRESENT_ACTORS) != actors:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert told[-1][names.ENV_STEPS] == 10 and told[-1][names.AGENT_STEPS_PER_SECOND] > 0
  shown = capsys.readouterr().out
  assert (
    "actors 1/2" in shown and "actors 2/2" in shown
  )  # the latter at the end, the next line not being due
  assert rows(tmp_path) == []
