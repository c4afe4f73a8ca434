"""Our side of peers.py, and mctx driven naively."""

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import mctx
import numpy as np
from common import ROOT
from jax.sharding import NamedSharding, PartitionSpec
from peers_work import (
  ACTIONS,
  EPISODE,
  RUNS,
  STACK,
  Piece,
  Work,
  episodes,
  resident,
  serve,
)
from speed import random_batch

from speedyzero_jax.agents.efficientzero import losses
from speedyzero_jax.agents.efficientzero.inference import Inference
from speedyzero_jax.agents.efficientzero.networks import initial_carry
from speedyzero_jax.agents.efficientzero.reanalyse import BatchReanalyser
from speedyzero_jax.config import loader
from speedyzero_jax.config.schema import Config
from speedyzero_jax.envs.batched_env import make_env
from speedyzero_jax.metrics import names
from speedyzero_jax.metrics.jsonl import read_rows
from speedyzero_jax.replay.replay import Replay
from speedyzero_jax.replay.sweep import Sweep
from speedyzero_jax.run import batch_pipeline
from speedyzero_jax.run.builders import Game, make_replay
from speedyzero_jax.types import Segment
from speedyzero_jax.workers.learner import Learner, make_mesh
from speedyzero_jax.workers.weights import REANALYSER, WeightsStore

LANES = 16
FRAME = (96, 96, 3)
OBSERVATION = (96, 96, 3 * STACK)


def configuration(*changes: str) -> Config:
  """EfficientZero's, with changes, and what peers.py was told by --set."""
  told = os.environ.get("PEERS_SET", "").split()
  return loader.load(
    ["efficientzero"], ["replay.frames=host", f"actor.lanes={LANES}", *changes, *told]
  )


def make_learner(config: Config) -> Learner:
  """On all devices there are."""
  return Learner(config, OBSERVATION, ACTIONS, make_mesh(jax.local_devices()))


def searching(simulations: int, algorithm: str) -> tuple[Inference, Any, Config]:
  """A search with a fresh network."""
  config = configuration(f"search.algorithm={algorithm}", f"search.simulations={simulations}")
  learner = make_learner(config)
  return (
    Inference(config, learner.blueprint, learner.mesh),
    learner.init(jax.random.key(0)).variables,
    config,
  )


def stacks(count: int) -> np.ndarray:
  """Frames of states, [B, S, H, W, C] uint8 in host memory, as actors and replays have them."""
  return np.random.default_rng(0).integers(0, 256, (count, STACK, *FRAME), dtype=np.uint8)


def search(roots: int, simulations: int, algorithm: str) -> tuple[Work, dict[str, Any]]:
  """From frames to policies and values, in host memory both."""
  inference, variables, _ = searching(simulations, algorithm)
  frames = stacks(roots)

  def work() -> None:
    jax.device_get(inference.search(variables, frames, jax.random.key(0), 1.0, explore=True))

  return work, {}


def naive(roots: int, simulations: int) -> tuple[Work, dict[str, Any]]:
  """mctx as its own examples drive it: mctx's own Q transform, the value prefix taken for a reward."""
  config = configuration()
  learner = make_learner(config)
  blueprint = learner.blueprint
  variables = jax.device_put(learner.init(jax.random.key(0)).variables, jax.local_devices()[0])
  frames = stacks(roots)

  def recurrent(params, key, action, embedding):
    del key
    network = blueprint.bind(params)
    state, carry, prefix_logits = network.step(*embedding, action)
    value_logits, policy_logits = network.predict(state, False)
    reward = losses.decode(prefix_logits)
    discount = jax.numpy.full_like(reward, config.env.discount)
    output = mctx.RecurrentFnOutput(
      reward=reward,
      discount=discount,
      prior_logits=policy_logits,
      value=losses.decode(value_logits),
    )
    return output, (state, carry)

  @jax.jit
  def run(params, frames, key):
    network = blueprint.bind(params)
    observation = losses.normalise(losses.stack_frames(frames, STACK)[:, 0])
    state = network.represent(observation, False)
    value_logits, policy_logits = network.predict(state, False)
    root = mctx.RootFnOutput(
      prior_logits=policy_logits,
      value=losses.decode(value_logits),
      embedding=(state, initial_carry(config.agent.network, roots)),
    )
    output = mctx.gumbel_muzero_policy(params, key, root, recurrent, simulations)
    return output.action, output.action_weights, output.search_tree.summary().value

  return lambda: jax.device_get(run(variables, frames, jax.random.key(0))) and None, {}


def value(states: int) -> tuple[Work, dict[str, Any]]:
  """h and f: what a value costs."""
  inference, variables, _ = searching(1, "gumbel")
  frames = stacks(states)
  return lambda: np.asarray(inference.value(variables, frames)) is None or None, {}


def train(batch: int) -> tuple[Work, dict[str, Any]]:
  """A learner step on a batch in host memory."""
  config = configuration(f"learner.batch_size={batch}")
  learner = make_learner(config)
  state = learner.init(jax.random.key(0))
  there = random_batch(config, FRAME, ACTIONS, batch)

  def work() -> None:
    nonlocal state
    state, result = learner.step(state, learner.put(there), jax.random.key(1))
    jax.device_get(result)
    jax.block_until_ready(state)

  return work, {}


def filled(config: Config, transitions: int) -> Replay:
  """A replay that holds `episodes`."""
  game = Game(FRAME, np.dtype(np.uint8), ACTIONS)
  replay = make_replay(config, game, make_mesh(jax.local_devices()), lambda _: None, seed=0)
  heads = np.zeros(LANES, np.int64)
  slots = EPISODE + 1
  for i, episode in enumerate(episodes(transitions)):
    lane, start = i % LANES, int(heads[i % LANES])
    last = np.arange(slots) == EPISODE

    def slot(x: np.ndarray, end: Any) -> np.ndarray:
      return np.concatenate([x, np.asarray(end, x.dtype)[None]])

    segment = Segment(
      lane=lane, start=start, frame=episode.frames, first=np.arange(slots) == 0, terminated=last,
      truncated=np.zeros(slots, bool), action=slot(episode.action.astype(np.int32), -1),
      reward=slot(episode.reward, 0), policy=slot(episode.policy, np.full(ACTIONS, 1 / ACTIONS)),
      search_value=slot(episode.value, 0), value=slot(episode.value, 0), step=np.zeros(slots, np.int32),
    )  # fmt: skip
    replay.append(segment)
    replay.set_priorities(np.full(EPISODE, lane), start + np.arange(EPISODE), episode.priority, 0)
    heads[lane] += slots
  return replay


def capacity(transitions: int) -> int:
  """`replay.capacity` that keeps so many, in equal lanes of whole episodes."""
  return -(-transitions // EPISODE // LANES + 1) * LANES * (EPISODE + 1)


def draw(batch: int, transitions: int) -> tuple[Work, dict[str, Any]]:
  """A batch with its frames, without reanalysis."""
  before = resident()
  config = configuration(f"learner.batch_size={batch}", f"replay.capacity={capacity(transitions)}")
  replay = filled(config, transitions)
  facts = {
    "transitions": replay.num_transitions,
    "bytes_per_transition": replay.stats(0)["bytes_per_transition"],
  }
  facts["resident_bytes_per_transition"] = (resident() - before) / replay.num_transitions
  return lambda: batch_pipeline.draw(config, replay, None, 0) and None, facts


def fresh(
  batch: int, simulations: int, algorithm: str, transitions: int
) -> tuple[Work, dict[str, Any]]:
  """A batch of which every policy is searched and every bootstrap value evaluated, as EfficientZero does."""
  config = configuration(
    f"learner.batch_size={batch}", f"replay.capacity={capacity(transitions)}", "reanalyse.ratio=1",
    f"search.algorithm={algorithm}", f"search.simulations={simulations}",
  )  # fmt: skip
  inference, variables, _ = searching(simulations, algorithm)
  replay = filled(config, transitions)
  everywhere = NamedSharding(make_mesh(jax.local_devices()), PartitionSpec())
  weights = WeightsStore({REANALYSER: 1}, everywhere, variables)
  reanalyse = BatchReanalyser(config, inference, weights, jax.random.key(0))
  return lambda: batch_pipeline.draw(config, replay, reanalyse, 0) and None, {}


def quota(transitions: int, max_age: int, block: int) -> tuple[Work, dict[str, Any]]:
  """No work but a fact: states that the preset `sweep` searches each learner step, with another bound on their age."""
  config = loader.load(["atari100k", "sweep"])
  delay = max(config.agent.reanalyse.weights_interval, config.actor.weights_interval)
  sweep = Sweep(LANES, -(-transitions // LANES))
  for lane in range(LANES):
    sweep.grow(lane, 0, sweep.capacity)
  return lambda: None, {"states": sweep.quota(block, max_age, delay)}


def environment(lanes: int) -> tuple[Work, dict[str, Any]]:
  """A hundred agent steps of every lane."""
  env = make_env(configuration().env, lanes, 0, training=True)
  actions = np.random.default_rng(0).integers(0, env.num_actions, (100, lanes)).astype(np.int32)
  env.reset()

  def work() -> None:
    for action in actions:
      env.step(action)

  return work, {"steps": 100}


def whole(size: str, steps: int, simulations: int) -> tuple[Work, dict[str, Any]]:
  """The launcher on a real game, sweeping; its rate over the later half of its learner steps."""
  run = RUNS[size]
  presets = ["atari_small"] if size == "small" else ["atari100k", "sweep"]
  env_steps = run.stored + int(run.each * steps)
  overrides = [
    "env.game=Breakout", f"env.frame_size={run.frame_size}", f"env.grayscale={str(run.grey).lower()}",
    f"actor.lanes={run.lanes}", f"actor.random_steps={run.stored}", f"run.env_steps={env_steps}",
    f"learner.batch_size={run.batch}", f"learner.steps={steps}", f"search.simulations={simulations}",
    f"replay.capacity={run.stored}", f"run.log_interval={min(10, steps // 4)}", "evaluation.at_end=false",
    *os.environ.get("PEERS_SET", "").split(),
  ]  # fmt: skip

  def work() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
      command = [sys.executable, str(ROOT / "launch/multihost.py"), "--config", *presets]
      subprocess.run([*command, *overrides, f"run.dir={folder}/run"], check=True, stdout=sys.stderr)
      rows, _ = read_rows(Path(folder) / "run" / "metrics.jsonl")
    rows = [row for row in rows if row[names.STEP] >= steps // 2]
    taken, seconds = (rows[-1][name] - rows[0][name] for name in (names.STEP, names.TIME))
    return {
      "samples_per_second": run.batch * taken / seconds,
      "searches_per_step": statistics.fmean(row[names.REANALYSED_PER_STEP] for row in rows[1:]),
      "target_age_max": max(row[names.TARGET_AGE_MAX] for row in rows),
    }

  return work, {}


PIECES: dict[str, Piece] = {
  piece.__name__: piece
  for piece in (search, naive, value, train, draw, fresh, quota, environment, whole)
}

if __name__ == "__main__":
  serve(PIECES)
