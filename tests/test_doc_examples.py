"""Tests of the example code in docs/: each example works as its page claims."""

import importlib
import re
import runpy

import jax
import numpy as np
import pytest

import pages
import reference
import tiny
import tiny_replay
import trained
from pages import PAGES
from speedyzero_jax.config import loader
from speedyzero_jax.run import steps

RUN = ("run.mode=lockstep", "learner.devices=1", "evaluation.episodes=32")
SMALL = (
  "network.hidden=8", "learner.batch_size=4", "run.env_steps=400", "actor.lanes=4",
  "loss.unroll_length=5", "learner.steps=10", "replay.capacity=0",
)  # fmt: skip


@pytest.fixture(autouse=True)
def written(tmp_path, monkeypatch):
  for name, text in pages.examples().items():
    (tmp_path / name).write_text(text)
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(tmp_path)


def test_every_block_of_code_is_an_example():
  fences = {kind for page in PAGES for kind in re.findall(r"^```(\S+)", page.read_text(), re.M)}
  assert fences <= {"python", "yaml", "text", "{toctree}"}  # commands are indented, and tested so
  known = {text.strip() for text in pages.examples().values()}
  blocks = [b for page in PAGES for kind in ("python", "yaml") for b in pages.blocks(page, kind)]
  assert {block.strip() for block in blocks} == known


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_own_network_of_speedyzero_is_folded(dtype):
  own = ["agent=layered", "network.channels=8", f"network.dtype={dtype}"]
  config = loader.load(["quickstart"], own)
  made = importlib.import_module("layered").make_agent(config, (1, 1, 5), np.float32, 2).network_def
  x = np.random.default_rng(0).normal(size=(3, 1, 1, 5)).astype(np.float32)

  @jax.jit
  def states(key):
    variables = made.init(key)
    assert "embed" in variables.params["representation"]
    networks = made.bind(variables), made.bind_folded(made.fold(variables))
    return [network.represent(x, False) for network in networks]

  plain, folded = states(jax.random.key(0))
  assert plain.shape == (3, 1, 1, 8) and plain.std() > 0 and plain.dtype == dtype
  np.testing.assert_allclose(plain, folded, atol=1e-6 if dtype == "float32" else 0.02)


def test_an_own_target_mixes_what_it_says():
  config = tiny.config("agent=mixture", "loss.search_share=0.25", *tiny_replay.OVERRIDES)
  make_agent = importlib.import_module("mixture").make_agent
  mixture = make_agent(config, reference.FRAME_SHAPE, np.uint8, reference.NUM_ACTIONS)
  replay, rng = tiny_replay.make_replay(64), np.random.default_rng(0)
  stream = reference.Stream(tiny_replay.LANES, seed=0)
  for step in range(12):
    tiny_replay.play(replay, stream, rng, step)
  drawn = replay.select(32)
  plain, mixed = (a.assemble(replay, drawn, 12)[0] for a in (tiny_replay.make_agent(), mixture))
  acted, searched = plain["policy_mask"] > 0, np.zeros(plain["value"].shape, bool)
  for i, k in zip(*np.nonzero(acted), strict=True):
    slot = stream.slot(drawn.lane[i], drawn.time[i] + k)
    searched[i, k] = slot.policy_step > 0
    share = 0.25 * searched[i, k]
    expected = (1 - share) * plain["value"][i, k] + share * slot.search_value
    assert mixed["value"][i, k] == pytest.approx(expected, abs=1e-6)
  assert 0 < searched.sum() < acted.sum() < acted.size
  np.testing.assert_array_equal(mixed["value"][~searched], plain["value"][~searched])
  assert mixed["value"].dtype == np.float32


def test_an_own_network_is_trained_and_read_in_a_notebook(tmp_path):
  folder = tmp_path / "runs" / "quickstart-Catch-s0"
  config = loader.load(["impala"], ["agent=normed", *RUN, *SMALL])
  trained_params = trained.run(config, folder, after=lambda made: made.state.variables.params)
  assert np.abs(jax.device_get(trained_params["norm"]["bias"])).max() > 0  # it began at 0
  (folder / "config.yaml").write_text(loader.to_yaml(config))
  read = runpy.run_path("values.py")
  assert read["weights"].step == config.learner.steps
  jax.tree.map(np.testing.assert_array_equal, read["params"], trained_params)


def test_an_own_agent_learns_catch(tmp_path):
  small = (
    "learner.steps=200", "run.env_steps=4000", "actor.lanes=32", "optim.learning_rate=5e-3",
  )  # fmt: skip
  config = loader.load(["sarsa.yaml"], [*RUN, *small])
  assert trained.run(config, tmp_path, after=steps.evaluate_now).mean >= 0.9  # 1 is perfect
