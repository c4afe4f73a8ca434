"""Tests of the configuration: overrides, validation, saved settings, agents."""

import math
import re
import sys
import typing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import speedyzero_jax.agents
from speedyzero_jax.config import agents, loader
from speedyzero_jax.config.fields import ConfigError, show

AGENT = "efficientzero"
FIELDS = loader.fields_of(AGENT)
KEYS = list(FIELDS)
DEFAULT = loader.load()


def get(config, key):
  return loader.flat(config)[key]


def replaced(config, changes):
  """The configuration with other values, which are not validated."""
  return loader.build(config.agent.name, loader.flat(config) | changes)


def values_of(kind):
  if typing.get_origin(kind) is typing.Literal:
    return st.sampled_from(typing.get_args(kind))
  number = st.floats(allow_nan=False, allow_infinity=False)
  text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
  return {bool: st.booleans(), int: st.integers(), float: number, str: text}.get(
    kind, st.lists(number).map(tuple)
  )


@st.composite
def configs(draw):
  keys = draw(st.sets(st.sampled_from(KEYS), max_size=12))
  return replaced(DEFAULT, {key: draw(values_of(FIELDS[key].type)) for key in keys})


# --- Saved settings ---


@settings(max_examples=20)
@given(configs(), configs())
def test_yaml_round_trip_is_exact_and_changes_that_a_run_forbids_are_named(a, b):
  assert loader.from_yaml(loader.to_yaml(a)) == a
  changes = [f"{key}: {show(get(a, key))} != {show(get(b, key))}" for key in KEYS
             if get(a, key) != get(b, key) and not FIELDS[key].metadata["mutable"]]  # fmt: skip
  assert loader.fixed_changes(a, b) == changes


@pytest.mark.parametrize(
  "game", ["off", "1e5", "null", "~", "", " x ", "[1]", "a: b", "#", "é\n\u2028"]
)
def test_text_that_yaml_could_misread_survives(game):
  config = replaced(DEFAULT, {"env.game": game})
  assert loader.from_yaml(loader.to_yaml(config)) == config


def test_yaml_lacking_keys_takes_defaults():
  text = f"agent: {DEFAULT.agent.name}\nenv: {{game: Pong}}"
  assert loader.from_yaml(text) == replaced(DEFAULT, {"env.game": "Pong"})


def test_saved_config_is_a_preset(tmp_path):
  config = loader.load(["atari_small"], ["env.game=Pong", "run.seed=3"])
  (tmp_path / "config.yaml").write_text(loader.to_yaml(config))
  assert loader.load([str(tmp_path / "config.yaml")]) == config


# --- Overrides ---


@pytest.mark.parametrize(
  ("override", "value"),
  [
    ("env.game=Pong", "Pong"),
    ("run.dir=runs/a=b", "runs/a=b"),
    ("run.dir=", ""),
    ("learner.steps=3_000", 3000),
    ("learner.steps=1e5", 100_000),
    ("run.seed=4294967295", 4294967295),
    ("optim.learning_rate=1e-3", 0.001),
    ("env.grayscale=true", True),
    ("env.episodic_life=no", False),
    ("env.clip_rewards=off", False),
    ("reanalyse.schedule=off", "off"),
    ("search.temperatures=[1, 0.5, 2]", (1.0, 0.5, 2.0)),
    ("search.temperatures=1,0.5,2e0", (1.0, 0.5, 2.0)),
  ],
)
def test_override_is_parsed_by_its_type_and_changes_nothing_else(override, value):
  key = override.partition("=")[0]
  config = loader.load([], [override])
  assert get(config, key) == value and type(get(config, key)) is type(value)
  assert config == replaced(DEFAULT, {key: value})


@pytest.mark.parametrize(
  ("override", "value"),
  [
    ("1e5", 100_000),
    ("3_000", 3000),
    ('"4"', 4),
    ("0x10", None),
    ("~", None),
    ("true", None),
    ("[3]", None),
  ],
)
def test_yaml_spells_integers_as_overrides_do(override, value):
  text = f"agent: {DEFAULT.agent.name}\nlearner: {{steps: {override}}}"
  if value is None:
    with pytest.raises(ConfigError, match=r"learner\.steps: expected an integer"):
      loader.from_yaml(text)
  else:
    assert loader.from_yaml(text).learner.steps == value


@pytest.mark.parametrize(
  ("override", "words"),
  [
    ("learner.steps=1.5", ["learner.steps", "'1.5'", "an integer"]),
    ("learner.steps=", ["learner.steps", "''", "an integer"]),
    ("optim.learning_rate=fast", ["optim.learning_rate", "'fast'", "a number"]),
    ("optim.learning_rate=nan", ["optim.learning_rate", "'nan'", "a number"]),
    ("env.grayscale=1", ["env.grayscale", "'1'", "true or false"]),
    ("search.algorithm=Puct", ["search.algorithm", "'Puct'", "gumbel", "puct"]),
    ("search.temperatures=1,x", ["search.temperatures", "'1,x'", "list of numbers"]),
    ("learner.steps", ["learner.steps", "key=value"]),
    ("batch_size=3", ["'batch_size'", "learner.batch_size"]),
    ("learner.bach_size=3", ["'learner.bach_size'", "learner.batch_size"]),
    ("env.simulations=3", ["'env.simulations'", "search.simulations"]),
    ("optim.learnin_rate=3", ["'optim.learnin_rate'", "optim.learning_rate"]),
    ("max_age=3", ["'max_age'", "reanalyse.max_age or refresh.max_age"]),
    ("=3", ["unknown key ''"]),
  ],
)
def test_bad_override_is_one_message_naming_what_is_wrong(override, words):
  with pytest.raises(ConfigError) as caught:
    loader.load([], [override])
  message = str(caught.value)
  assert "\n" not in message
  for word in words:
    assert word in message


def test_override_of_a_config_keeps_the_rest_and_the_original():
  before = loader.load(["atari_small"])
  after = loader.override(before, ["run.seed=3", "learner.steps=9", "learner.steps=8"])
  assert after == replaced(before, {"run.seed": 3, "learner.steps": 8})
  for bad in ("learner.steps", "learner.step=3", "learner.steps=x", "learner.steps=0"):
    with pytest.raises(ConfigError, match=r"learner\.step"):
      loader.override(before, [bad])
  assert before == loader.load(["atari_small"])


# --- Ranges ---


@pytest.mark.parametrize(
  ("overrides", "key"),
  [
    (["learner.tail_steps=11", "learner.steps=10"], "learner.tail_steps"),
    (["actor.random_steps=11", "run.env_steps=10"], "actor.random_steps"),
    (["optim.trust_min=0.5", "optim.trust_max=0.4"], "optim.trust_min"),
    (["optim.decay=linear", "optim.decay_steps=9", "learner.steps=1010"], "optim.decay_steps"),
    (["network.channels=1"], "network.channels"),
    (["network.downsample=5"], "network.downsample"),
    (["network.downsample=1"], "network.downsample"),
    (["env.game=Catch"], "network.downsample"),
    (["env.frame_size=84"], "network.downsample"),
    (["search.temperatures=1,0.5"], "search.temperatures"),
    (["search.temperature_stages=0.75,0.5"], "search.temperature_stages"),
    (["learner.devices=3", "learner.batch_size=256"], "learner.batch_size"),
    (["env.noop_max=0"], "env.noop_max"),
    (["actor.max_lag=10", "actor.weights_interval=10"], "actor.max_lag"),
    (["env.discount=0"], "env.discount"),
    (["env.discount=1.01"], "env.discount"),
    (["priority.min_weight=1.1"], "priority.min_weight"),
    (["optim.momentum=1"], "optim.momentum"),
    (["run.seed=4294967296"], "run.seed"),
  ],
)
def test_settings_that_cannot_go_together_are_refused(overrides, key):
  with pytest.raises(ConfigError, match=rf"^{key}: [^\n]*$"):
    loader.load([], overrides)


def test_problems_that_a_stored_configuration_has_already_are_ignored():
  stored = loader.override(
    loader.load(), ["optim.trust_min=0.5", "optim.trust_max=0.4"], check=False
  )
  assert loader.override(stored, ["evaluation.episodes=3"]).evaluation.episodes == 3
  with pytest.raises(ConfigError, match=r"^optim.trust_min: [^\n]* got 0.6$"):
    loader.override(stored, ["optim.trust_min=0.6"])
  with pytest.raises(ConfigError, match=r"^evaluation.episodes: [^\n]*$"):
    loader.override(stored, ["evaluation.episodes=0"])


@pytest.mark.parametrize(
  "overrides",
  [
    ["learner.tail_steps=10", "learner.steps=10"],
    ["actor.max_lag=11", "actor.weights_interval=10"],
    ["actor.random_steps=10", "run.env_steps=10"],
    ["optim.trust_min=0.5", "optim.trust_max=0.5"],
    ["env.frame_size=84", "network.downsample=4"],
    ["env.discount=1"],
    ["search.temperatures=1", "search.temperature_stages=[]"],
    ["learner.devices=8", "learner.batch_size=256"],
    ["env.game=CartPole", "network.downsample=1"],
    ["env.game=Catch", "network.downsample=1", "network.channels=1"],
    ["reanalyse.schedule=sweep", "refresh.weights_interval=500"],  # of a sweep that is replaced
    ["env.game=Venture"],  # of Atari, but not of Atari-100k
  ],
)
def test_the_edges_of_the_ranges_are_allowed(overrides):
  loader.load([], overrides)


@pytest.mark.parametrize(
  ("overrides", "key", "interval"),
  [
    (["actor.weights_interval=1e9"], "refresh.max_age", "actor.weights_interval"),
    (["refresh.weights_interval=200"], "refresh.max_age", "refresh.weights_interval"),
    (["reanalyse.schedule=sweep", "reanalyse.max_age=26"], "reanalyse.max_age", "reanalyse"),
    (["refresh.block=15"], "refresh.block", "16"),
  ],
)
def test_bounds_that_no_sweep_can_keep_are_refused(overrides, key, interval):
  with pytest.raises(ConfigError, match=rf"^{key}: .*{interval}[^\n]*$"):
    loader.load([], overrides)


@pytest.mark.parametrize(
  ("overrides", "needs"),
  [
    (["reanalyse.schedule=batch"], "reanalyse.schedule=sweep, got batch"),
    (["reanalyse.schedule=off"], "reanalyse.schedule=sweep, got off"),
    (["reanalyse.schedule=sweep", "search.algorithm=puct"], "search.algorithm=gumbel, got puct"),
  ],
)
def test_values_are_reused_only_by_sweeps_with_gumbel_search(overrides, needs):
  with pytest.raises(ConfigError, match=f"^reanalyse.reuse: needs {needs}$"):
    loader.load([], ["reanalyse.reuse=true", *overrides])


def test_every_number_has_an_interval_and_all_problems_are_reported_at_once():
  exempt = {"network.downsample"}  # one of a few values
  for bad in (-1e30, 1e30, math.nan, math.inf):
    wrong = {}
    for key, field in FIELDS.items():
      if field.type in (int, float, tuple[float, ...]) and key not in exempt:
        wrong[key] = (
          (bad,) * max(len(field.default), 1) if isinstance(field.default, tuple) else bad
        )
    with pytest.raises(ConfigError) as caught:
      loader.validate(replaced(DEFAULT, wrong))
    reported = {line.split(":")[0] for line in str(caught.value).splitlines()}
    assert wrong.keys() <= reported


def test_help_has_every_key():
  text = loader.help_text()
  assert [key for key in KEYS if f"\n  {key}=" not in text] == []
  marked = set(re.findall(r"^  (\S+?)=.* \*$", text, re.MULTILINE))
  assert {"run.log_interval", "evaluation.episodes"} <= marked and "learner.steps" not in marked


# --- Agents ---


def test_an_agent_brings_its_sections():
  for name in ("another", "..dqn", ""):
    message = rf"unknown agent '{re.escape(name)}'.* dqn, efficientzero, "
    with pytest.raises(ConfigError, match=message):
      loader.load([], [f"agent={name}"])
  with pytest.raises(ConfigError, match="agent"):
    loader.override(DEFAULT, ["agent=another"])
  assert loader.load([], ["agent=efficientzero"]) == DEFAULT


DECLARATION = """
from dataclasses import dataclass
from typing import ClassVar
from speedyzero_jax.config.fields import opt
from speedyzero_jax.config.schema import AgentConfig
make_agent = None

@dataclass(frozen=True)
class Loss:
  x: int = opt(1, 'x')

@dataclass(frozen=True)
class AGENT_CONFIG(AgentConfig):
  name: ClassVar[str] = "broken"
  loss: Loss = Loss()
"""


OVERRIDDEN = """
@dataclass(frozen=True)
class Other(Loss):
  x: int = opt(2, 'x')

class AGENT_CONFIG(AGENT_CONFIG):
  loss: Other = Other()
"""


def declared(old, new):
  assert old in DECLARATION
  return DECLARATION.replace(old, new)


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("import no_such_package", "can't be imported: ModuleNotFoundError: .*no_such_package"),
    ("AGENT_CONFIG = 1", "has no make_agent"),
    ("", "has no AGENT_CONFIG and no make_agent"),
    ("from speedyzero_jax.agents.impala import *", "must be 'broken', got 'impala'"),
    (declared("opt(1, 'x')", "1"), "loss.x must be declared by opt"),
    (declared("x: int", "x: int | None"), r"loss.x must be .*, got int \| None"),
    (declared("x: int", "x: tuple[int, ...]"), "loss.x must be .*, got tuple"),
    (declared("loss: Loss", "optim: Loss"), "'optim' has the name of a section that all"),
    (declared("loss: Loss", "loss: int"), "'loss' must have a dataclass as its type"),
    (
      declared("@dataclass(frozen=True)\nclass Loss:", "class Loss(AgentConfig):"),
      "class Loss must be",
    ),
    (declared("@dataclass(frozen=True)\nclass AGENT", "class AGENT"), "class AGENT_CONFIG must be"),
    (DECLARATION + OVERRIDDEN, "class AGENT_CONFIG must be decorated"),
    (declared("class AGENT_CONFIG(", "class Other("), "has no AGENT_CONFIG"),
    (
      declared("make_agent = None", "make_agent = None\nclass Bad: name = 'broken'")
      + "AGENT_CONFIG = Bad",
      "must be a subclass",
    ),
    ("from __future__ import annotations\n" + DECLARATION, "remove `from __future__ import"),
  ],
)
def test_a_broken_agent_is_named(tmp_path, monkeypatch, text, message):
  """One has the configuration of another agent, which would be trained instead."""
  (tmp_path / "broken.py").write_text(text)
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.delitem(sys.modules, "broken", raising=False)
  with pytest.raises(ConfigError, match=f"^agent: .*broken.* {message}"):
    loader.load(["impala"], ["agent=broken"])


def test_a_module_with_the_name_of_a_built_in_agent_is_refused(tmp_path, monkeypatch):
  monkeypatch.syspath_prepend(tmp_path)
  (tmp_path / "dqn.py").write_text("other = 1")  # defines no agent
  (tmp_path / "impala").mkdir()
  for name in ("dqn", "impala"):
    loader.load([name])
  monkeypatch.delitem(sys.modules, "refresh", raising=False)
  (tmp_path / "refresh.py").write_text(declared("broken", "refresh"))  # no built-in agent
  assert loader.load([], ["agent=refresh"]).agent.name == "refresh"
  (tmp_path / "dqn.py").write_text(declared("broken", "dqn"))
  with pytest.raises(ConfigError, match=r"^agent: dqn is the name of a .*rename .*/dqn\.py"):
    loader.load(["dqn"])


@pytest.mark.parametrize("text", ["import no_such_package", "AGENT_CONFIG = 1", DECLARATION])
def test_an_unfinished_agent_among_the_built_in_ones_is_not_listed(tmp_path, monkeypatch, text):
  (tmp_path / "unfinished.py").write_text(text)
  monkeypatch.setattr(
    speedyzero_jax.agents, "__path__", [*speedyzero_jax.agents.__path__, str(tmp_path)]
  )
  agents.agent_names.cache_clear()
  monkeypatch.delitem(sys.modules, "speedyzero_jax.agents.unfinished", raising=False)
  with pytest.raises(ConfigError, match=r"^agent: .*unfinished"):
    agents.agent_module("unfinished")
  names = agents.agent_names()
  agents.agent_names.cache_clear()
  assert "dqn" in names and "unfinished" not in names
