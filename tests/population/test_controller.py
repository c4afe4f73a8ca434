"""Tests of the controller on the toy problem of the PBT paper, also when killed at any point."""

import numpy as np
import pytest

from speedyzero_jax.config.fields import ConfigError
from speedyzero_jax.population import config, controller
from speedyzero_jax.population.config import Population
from speedyzero_jax.population.controller import EventLog, Outcome
from speedyzero_jax.population.selection import Knob

KNOBS = (Knob("h0", 0.0, 1.0, False), Knob("h1", 0.0, 1.0, False))
START = {0: {"h0": 1.0, "h1": 0.0}, 1: {"h0": 0.0, "h1": 0.9}}


class Killed(Exception):
  pass


class Toy:
  """Q = 1.2 - |theta|^2; a member climbs 1.2 - h0 theta0^2 - h1 theta1^2 (PBT, figure 2)."""

  def __init__(self, state, kill_after=10**9):
    self.state, self.left = state, kill_after

  def tick(self):
    self.left -= 1
    if self.left < 0:
      raise Killed

  def train(self, members, round_):
    for member, h in members.items():
      self.tick()
      done, theta = self.state[member]
      if done <= round_:
        for _ in range(4):
          theta = theta - 0.02 * 2 * np.array([h["h0"], h["h1"]]) * theta
        self.state[member] = round_ + 1, theta
      self.tick()
      yield Outcome(member, [float(1.2 - self.state[member][1] @ self.state[member][1])])

  def copy(self, member, source, settings, round_):
    self.tick()
    self.state[member] = self.state[source]


def toy_population(monkeypatch, **changes):
  monkeypatch.setattr(controller, "initial", lambda _: {m: dict(h) for m, h in START.items()})
  values = {"members": 2, "rounds": 60, "share": 0.5, "factors": (0.8, 1.25)}
  return Population((), (), KNOBS, **values | changes)


def start():
  return {member: (0, np.array([0.9, 0.9])) for member in START}


def play(population, path, state, kill_after=10**9):
  return controller.run(population, Toy(state, kill_after), EventLog(path))


def test_alone_each_member_is_stuck_and_together_they_reach_the_optimum(monkeypatch, tmp_path):
  alone = play(toy_population(monkeypatch, selection="none"), tmp_path / "a", start())
  assert max(alone["scores"][-1]) == pytest.approx(1.2 - 0.81, abs=0.01)
  together = play(toy_population(monkeypatch, resample=0.5), tmp_path / "b", start())
  assert max(together["scores"][-1]) > 1.15


@pytest.mark.parametrize("selection", ["truncation", "t_test"])
def test_a_replaced_member_trains_with_perturbed_settings_of_its_source(
  monkeypatch, tmp_path, selection
):
  class Rated(Toy):
    """Member 1 is better in every game."""

    def train(self, members, round_):
      for member in members:
        yield Outcome(member, [member + 0.1 * game for game in range(5)])

  population = toy_population(monkeypatch, selection=selection, rounds=3, factors=(0.5,))
  log = EventLog(tmp_path / "events")
  result = controller.run(population, Rated(start()), log)
  trained = {
    (e["round"], e["member"]): e["settings"] for e in log.events if e["event"] == "trained"
  }
  for round_ in range(3):
    assert trained[round_, 1] == START[1]
    assert trained[round_, 0] == ({"h0": 0.0, "h1": 0.45} if round_ else START[0])
  assert (result["best"], result["settings"]) == (1, START[1])


def test_a_controller_killed_again_and_again_makes_the_same_decisions(monkeypatch, tmp_path):
  population = toy_population(monkeypatch, resample=0.5, rounds=12)
  whole = play(population, tmp_path / "whole", start())
  state, rng = start(), np.random.default_rng(0)
  result = None
  for _ in range(200):
    try:
      result = play(population, tmp_path / "killed", state, kill_after=int(rng.integers(2, 9)))
      break
    except Killed:
      with (tmp_path / "killed").open("ab") as file:
        file.write(b'{"event": "trai')  # a write that was cut off
  assert result == whole
  assert (tmp_path / "killed").read_text() == (tmp_path / "whole").read_text()


def test_members_that_fail_are_replaced(monkeypatch, tmp_path):
  class Failing(Toy):
    def train(self, members, round_):
      for outcome in super().train(members, round_):
        yield outcome._replace(returns=[]) if outcome.member == round_ == 0 else outcome

  log = EventLog(tmp_path / "events")
  result = controller.run(toy_population(monkeypatch, rounds=2), Failing(start()), log)
  assert result["scores"][0][0] is None and result["scores"][1][0] is not None
  (event,) = log.of("selected", 0)
  assert [(c["member"], c["source"]) for c in event["copies"]] == [(0, 1)]


class Repaired(Toy):
  """The machine fails while `down`: all members, or some, end with an error."""

  down = ()

  def train(self, members, round_):
    for outcome in super().train(members, round_):
      yield outcome._replace(returns=[]) if outcome.member in self.down else outcome


def test_members_that_failed_are_trained_again_by_the_next_call(monkeypatch, tmp_path):
  population = toy_population(monkeypatch, rounds=3)
  whole = play(population, tmp_path / "whole", start())
  for down in ((0, 1), (0,)):
    path = tmp_path / f"down{len(down)}"
    trainer = Repaired(start(), kill_after=10**9 if len(down) == 2 else 3)
    trainer.down = down
    log = EventLog(path)
    with pytest.raises((controller.NoMemberFinished, Killed)):  # killed before the selection
      controller.run(population, trainer, log)
    assert play(population, path, trainer.state) == whole


def test_a_return_that_is_not_a_number_is_no_score(monkeypatch, tmp_path):
  class Broken(Toy):
    def train(self, members, round_):
      for outcome in super().train(members, round_):
        yield outcome._replace(returns=[float("nan")]) if outcome.member == 0 else outcome

  log = EventLog(tmp_path / "events")
  result = controller.run(toy_population(monkeypatch, rounds=2), Broken(start()), log)
  assert result["best"] == 1 and [row[0] for row in result["scores"]] == [None, None]
  # It is complete: nothing is trained again.
  assert controller.run(toy_population(monkeypatch, rounds=2), Toy({}, kill_after=0), log) == result


GOOD = """
config: [impala]
settings: [env.game=CartPole]
explore:
  optim.learning_rate: [1e-6, 1e-1, log]
  loss.entropy_coefficient: [0, 0.1, linear]
"""


def test_the_exponent_of_stored_priorities_is_not_explored(tmp_path):
  path = tmp_path / "p.yaml"
  text = GOOD.replace("[impala]", "[dqn]")
  path.write_text(text.replace("loss.entropy_coefficient", "priority.beta_start"))
  config.load(path)
  path.write_text(text.replace("loss.entropy_coefficient", "priority.alpha"))
  with pytest.raises(ConfigError, match=r"'priority.alpha' is not a float setting"):
    config.load(path)


def test_a_description_is_read(tmp_path):
  path = tmp_path / "p.yaml"
  path.write_text(GOOD + "factors: 0.5,2\nmembers: 4\n")
  population = config.load(path)
  assert population.members == 4 and population.factors == (0.5, 2.0)
  assert population.knobs == (
    Knob("optim.learning_rate", 1e-6, 0.1, True),
    Knob("loss.entropy_coefficient", 0, 0.1, False),
  )


def test_elements_of_a_list_are_explored_one_by_one(tmp_path):
  path = tmp_path / "p.yaml"
  path.write_text(GOOD + "  env.event_rewards: [[0, 1, linear], [0.1, 2, log]]\n")
  knobs = config.load(path).knobs[2:]
  assert knobs == (
    Knob("env.event_rewards.0", 0, 1, False),
    Knob("env.event_rewards.1", 0.1, 2, True),
  )
  values = {"optim.learning_rate": 0.1, **{knob.key: knob.high for knob in knobs}}
  assert config.texts(values) == ["optim.learning_rate=0.1", "env.event_rewards=1.0,2.0"]


@pytest.mark.parametrize(
  "change, message",
  [
    (("members", "member"), "unknown key 'member'; known keys: members, rounds"),
    (("members: 4", "members: 1"), "members: must lie in [2, 1000], got 1"),
    (
      ("optim.learning_rate", "optim.name"),
      "'optim.name' is not a float setting of impala",
    ),
    (("1e-6", "0"), "optim.learning_rate: low must be less than high, and positive for log, got"),
    (("1e-1", "1e99"), "optim.learning_rate: must lie in (0, 1e9], got 1e+99"),
    (("[impala]", "[nonsense]"), "unknown preset 'nonsense'"),
    (("CartPole", "CartPole, env.gam=x"), "unknown key 'env.gam'"),
    (
      ("loss.entropy_coefficient", "loss.unroll_length"),
      "'loss.unroll_length' is not a float setting of",
    ),
    (
      ("loss.entropy_coefficient", "env.sticky_actions"),
      "'env.sticky_actions' is not a float setting of impala that can change during training",
    ),
    (("members: 4", "factors: []"), "factors: at least one"),
    (("members: 4", "rounds: 1000000"), "rounds: must be at most the"),
    (("CartPole]", "CartPole, evaluation.at_end=off]"), "evaluation.at_end must be true"),
    (("CartPole]", "CartPole, run.seed=1]"), "run.seed=1 can't be set"),
    (("members: 4", "members: 4\nmembers: 5"), "duplicate key 'members'"),
    (("explore:", "explore:\n  env.event_rewards:"), "event_rewards: a list of ranges is"),
    (("explore:", "factor:"), "explore: settings with their ranges are needed"),
  ],
)
def test_a_wrong_description_is_refused_in_one_line(tmp_path, change, message):
  path = tmp_path / "p.yaml"
  path.write_text((GOOD + "members: 4\n").replace(*change))
  with pytest.raises(ConfigError) as caught:
    config.load(path)
  text = str(caught.value)
  assert str(path) in text and message in text
