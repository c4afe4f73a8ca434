"""A profile tells what there was, costs a run nothing but time, and comes from one command."""

import json
import math

import jax
import numpy as np
import pytest
import tiny

from launch import profile as launcher
from speedyzero_jax.agents.efficientzero.inference import make_recurrent_fn
from speedyzero_jax.config import loader
from speedyzero_jax.run import loops, profiler, run_dir
from speedyzero_jax.run.profiler import Profiler, Watched
from speedyzero_jax.system import costs
from speedyzero_jax.system.compilation import Compilations, WarmUp


@pytest.fixture(autouse=True)
def shared(monkeypatch):
  tiny.share_compiled(monkeypatch)
  monkeypatch.setattr(costs, "peak_flops", lambda dtype: 1e12)
  monkeypatch.setattr(costs, "peak_bandwidth", lambda: 1e11)


LONGER = ("learner.steps=30", "run.env_steps=300")  # enough to get warm


def run(folder, *overrides, steps=3, said=None):
  """Runs to the end while a profiler looks on; returns the run's hash and whether it was profiled."""
  said = [] if said is None else said
  with (
    Compilations() as compilations,
    tiny.training(tiny.config(*LONGER, *overrides), folder) as training,
  ):
    warm_up = WarmUp(compilations, lambda: training.in_full_work)
    training.after_step.append(warm_up.step)
    with Profiler(folder, steps, compilations, said.append) as profiler:
      profiler.watch(training, warm_up)
      assert isinstance(training.inference.search, Watched)
      assert loops.run(training)
    assert not isinstance(training.inference.search, Watched) and not isinstance(
      training.learner.update, Watched
    )
    return training.parameters_hash(), profiler.done


def read(folder):
  def refuse(name):
    raise ValueError(f"{name} is not JSON")

  return json.loads((folder / "profile.json").read_text(), parse_constant=refuse)


def test_a_lockstep_run_stays_what_it_was(tmp_path):
  with tiny.training(tiny.config(*LONGER), tmp_path / "plain") as training:
    assert loops.run(training)
    digest = training.parameters_hash()
  said: list[str] = []
  profiled, done = run(tmp_path / "profiled", said=said)
  assert done and profiled == digest

  result = read(tmp_path / "profiled")
  first, last = result["learner_steps"]
  assert first >= 5 and last == first + 3
  assert result["compiled_meanwhile"] == []
  # In lockstep the parts share one thread, and with what is left they make up all of the time.
  assert {row["thread"] for row in result["parts"]} == {"learner"}
  assert {"act", "sample", "search", "refresh", "gather", "train", "host"} <= {
    row["part"] for row in result["parts"]
  }
  assert math.fsum(row["seconds"] for row in result["parts"]) == pytest.approx(
    result["seconds_per_step"], rel=1e-3
  )
  functions = {row["name"]: row for row in result["functions"]}
  assert set(functions) == {
    "train step, batch 8",
    "search, 3 roots",
    "search, 32 roots",
    "values, 32 states",
  }
  assert functions["train step, batch 8"]["calls"] == 1
  assert all(
    row["seconds"] > 0 and row["flops"] > 0 and row["bytes"] > 0 for row in functions.values()
  )
  traces = [path.name for path in (tmp_path / "profiled" / "plugins").rglob("*") if path.is_file()]
  assert "perfetto_trace.json.gz" in traces and any(name.endswith(".xplane.pb") for name in traces)
  (text,) = said
  assert all(name in text for name in ("train step, batch 8", "refresh", "host", "profile.json"))


def test_functions_that_devices_share_are_counted_for_one_of_them(tmp_path):
  run(tmp_path, "learner.devices=2")
  functions = {row["name"]: row for row in read(tmp_path)["functions"]}
  assert set(functions) == {
    "train step, batch 8",
    "search, 3 roots",
    "search, 32 roots",
    "values, 32 states",
  }
  assert all(row["seconds"] > 0 and row["flops"] > 0 for row in functions.values())


def test_a_run_too_short_to_get_warm_says_so(tmp_path):
  said: list[str] = []
  assert not run(tmp_path, "learner.steps=4", said=said)[1]
  assert said == ["no profile: the run ended before its steps were taken"]
  assert not (tmp_path / "profile.json").exists()


def test_a_device_too_full_to_measure_costs_the_run_nothing(tmp_path, monkeypatch):
  def full(dtype):
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.")

  monkeypatch.setattr(costs, "peak_flops", full)
  said: list[str] = []
  assert not run(tmp_path, said=said)[1]
  assert said == ["no profile: its measurements need more memory than the run leaves"]


def test_every_simulation_of_a_search_counts(tmp_path):
  """A root inference, as many recurrent ones as there are simulations, and what the tree itself costs."""
  config = tiny.config()
  assert config.agent.search.simulations == 2
  with tiny.training(config, tmp_path) as training:
    inference, blueprint = training.inference, training.learner.blueprint
    variables = training.weights.latest("reanalyser").variables
    frames = np.zeros((32, 2, 1, 1, 50), np.float32)
    lowered = inference.search.lower(variables, frames, jax.random.key(0), 1.0, explore=True)
    searched = profiler.search_cost(lowered, config, blueprint, variables, 32)
    root = costs.cost_of(inference.value.lower(variables, frames))
    state = jax.ShapeDtypeStruct((32, 1, 1, 8), "float32")
    carry = (jax.ShapeDtypeStruct((32, 8), "float32"),) * 2
    action = jax.ShapeDtypeStruct((32,), "int32")
    step = costs.cost_of(
      jax.jit(make_recurrent_fn(blueprint)).lower(variables, state, carry, action)
    )
  assert 0 < searched.flops - root.flops - 2 * step.flops < step.flops


# --- The command


def test_one_command_profiles_a_new_run(tmp_path, capsys):
  folder = tmp_path / "out"
  changes = [*tiny.OVERRIDES, *LONGER, "run.mode=async", "reanalyse.schedule=batch"]
  arguments = ["--config", "quickstart", *changes, "--fill", "60", "--out", str(folder)]
  assert launcher.main(arguments) == 0
  result = read(folder)
  assert result["learner_steps"][1] - result["learner_steps"][0] == launcher.STEPS
  assert 60 < result["transitions"] < run_dir.read_config(folder).run.env_steps  # it ended there
  threads = {row["part"]: row["thread"] for row in result["parts"]}
  assert threads["train"] == threads["host"] == "learner" and threads["act"] == "actor"
  assert threads["search"] == threads["sample"] == threads["gather"] == "batches"
  assert "profile of learner steps" in capsys.readouterr().out
  assert launcher.main(arguments) == 2  # the folder is taken
  assert "already holds a run" in capsys.readouterr().err


def test_a_filled_run_goes_at_the_same_pace():
  config = loader.load(
    ["quickstart"], ["run.env_steps=10500", "learner.steps=5200", "learner.tail_steps=200"]
  )
  filled = launcher.filled(config, 5500)
  assert (filled.actor.random_steps, filled.run.env_steps, filled.learner.tail_steps) == (
    5500,
    10500,
    0,
  )
  assert filled.learner.steps == 2500  # 5,000 steps for 10,000 agent steps, so 2,500 for 5,000


def test_a_filled_run_is_long_enough_to_get_warm():
  """However few steps the configuration has: what it has not, the run never gets to."""
  config = loader.load(["atari100k", "tryout"], ["profile.steps=5"])
  filled = launcher.filled(config, 2500)
  assert filled.learner.steps == 210  # sweeps have ages of 100
  assert (
    filled.run.env_steps == 2500 + 210 * (config.run.env_steps - config.actor.random_steps) // 20
  )


@pytest.mark.parametrize("fill", ["100", "28000"])
def test_a_fill_that_cannot_be_is_refused(tmp_path, monkeypatch, capsys, fill):
  monkeypatch.chdir(tmp_path)
  assert launcher.main(["--config", "quickstart", "--fill", fill]) == 2
  assert capsys.readouterr().err.startswith(
    "error: --fill: must be from actor.random_steps (500) to below 28000"
  )
  assert not list(tmp_path.iterdir())
