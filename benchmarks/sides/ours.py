"""This project's side of the comparisons in peers.py and peers_learning.py."""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

import pieces
from common import ROOT
from peer_side import (
  ACTIONS,
  CARTPOLE_STEPS,
  EPISODE,
  PROGRAMS,
  REUSE,
  STACK,
  Curve,
  Piece,
  Work,
  episodes,
  resident,
  serve,
)
from speedyzero_jax.config import loader
from speedyzero_jax.metrics import jsonl, names
from speedyzero_jax.run import run_dir, steps
from speedyzero_jax.run.signals import Signals
from speedyzero_jax.run.train import train as run

LANES = 16
FRAME = (96, 96, 3)
SET = os.environ.get("PEERS_SET", "").split()


def configuration(*changes: str) -> Any:
  """Loads EfficientZero's preset with changes and the overrides given to peers.py."""
  settings = ["replay.frames=host", f"actor.lanes={LANES}", *changes, *SET]
  return pieces.load(argparse.ArgumentParser(), ["efficientzero"], settings)


def make_agent(config: Any) -> Any:
  return pieces.make_agent(config, FRAME, ACTIONS)


def make_model(config: Any) -> pieces.Model:
  return pieces.Model(make_agent(config), jax.local_devices())


def search(roots: int, simulations: int, algorithm: str) -> tuple[Work, dict[str, Any]]:
  """Searches from random frames [B, S, H, W, C] uint8 in host memory, as from a replay."""
  changes = f"search.algorithm={algorithm}", f"search.simulations={simulations}"
  model = make_model(configuration(*changes))
  frames = np.random.default_rng(0).integers(0, 256, (roots, STACK, *FRAME), dtype=np.uint8)
  return lambda: model.run("reanalyse", frames) and None, {}


def train(batch: int) -> tuple[Work, dict[str, Any]]:
  """Runs a training step on a batch in host memory."""
  config = configuration(f"learner.batch_size={batch}")
  training = pieces.Training(config, make_agent(config), jax.local_devices(), from_host=True)
  return training.step, {}


def replay_settings(batch: int, transitions: int) -> list[str]:
  """Settings with capacity for this many transitions, in lanes of equally many whole episodes."""
  capacity = (-(-transitions // EPISODE // LANES) + 1) * LANES * (EPISODE + 1)
  return [f"learner.batch_size={batch}", f"replay.capacity={capacity}"]


def filled(config: Any, transitions: int) -> Any:
  """Creates a replay filled with `episodes`."""
  replay = pieces.empty_replay(config, make_agent(config))
  heads = [0] * LANES
  slots = EPISODE + 1
  last = np.arange(slots) == EPISODE
  for i, episode in enumerate(episodes(transitions)):
    lane, start = i % LANES, heads[i % LANES]
    columns = {
      "frame": episode.frames,
      "first": np.arange(slots) == 0,
      "terminated": last,
      "truncated": np.zeros(slots, bool),
      "action": np.append(episode.action, -1).astype(np.int32),
      "reward": np.append(episode.reward, np.float32(0)),
      "step": np.zeros(slots, np.int32),
      "policy": np.concatenate([episode.policy, np.full((1, ACTIONS), 1 / ACTIONS, np.float32)]),
    }
    value = np.append(episode.value, np.float32(0))
    columns |= {"value": value, "search_value": value}
    replay.append(pieces.Slots.of_lane(lane, start, columns))
    times = start + np.arange(EPISODE)
    chosen = pieces.Selection(np.full(EPISODE, lane), times, np.ones(EPISODE))
    replay.update(chosen, episode.priority, 0)
    heads[lane] += slots
  return replay


def draw(batch: int, transitions: int) -> tuple[Work, dict[str, Any]]:
  """Draws a batch with its frames, without reanalysis."""
  before = resident()
  config = configuration(*replay_settings(batch, transitions))
  replay = filled(config, transitions)
  drawn = pieces.batch_drawing(config, make_agent(config), replay, None)
  count = replay.num_transitions
  return lambda: drawn() and None, {
    "transitions": count,
    "bytes_per_transition": replay.stats(0)["bytes_per_transition"],
    "resident_bytes_per_transition": (resident() - before) / count,
  }


def fresh(batch: int, simulations: int, transitions: int) -> tuple[Work, dict[str, Any]]:
  """Draws a batch, searching every state and evaluating every bootstrap value."""
  settings = [*replay_settings(batch, transitions), "reanalyse.ratio=1"]
  settings += ["search.algorithm=gumbel", f"search.simulations={simulations}"]
  config = configuration(*settings)
  model = make_model(config)
  drawn = pieces.batch_drawing(config, model.agent, filled(config, transitions), model)
  return lambda: drawn() and None, {}


def whole(size: str, steps: int, simulations: int) -> tuple[Work, dict[str, Any]]:
  """Runs the launcher on Breakout with sweeps; measures the second half of the learner steps."""
  program = PROGRAMS[size]
  presets = ["atari_small"] if size == "small" else ["atari100k", "sweep"]
  env_steps = program.stored + int(program.agent_steps * steps)
  overrides = [
    "env.game=Breakout", f"env.frame_size={program.frame_size}",
    f"env.grayscale={str(program.grey).lower()}", f"actor.lanes={program.lanes}",
    f"actor.random_steps={program.stored}", f"run.env_steps={env_steps}",
    f"learner.batch_size={program.batch}", f"learner.steps={steps}",
    f"search.simulations={simulations}", "reanalyse.simulations=0", "reanalyse.max_age=100",
    f"replay.capacity={program.stored}", f"run.log_interval={min(10, steps // 4)}",
    "evaluation.at_end=false", *SET,
  ]  # fmt: skip

  def work() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
      command = [sys.executable, str(ROOT / "launch/multihost.py"), "--config", *presets]
      subprocess.run([*command, *overrides, f"run.dir={folder}/run"], check=True, stdout=sys.stderr)
      rows, _ = jsonl.read_rows(Path(folder) / "run/metrics.jsonl")
    rows = [row for row in rows if row[names.STEP] >= steps // 2]
    taken, seconds = (rows[-1][name] - rows[0][name] for name in (names.STEP, names.TIME))
    return {
      "samples_per_second": program.batch * taken / seconds,
      "searches_per_step": statistics.fmean(
        row["reanalyse/states_per_learner_step"] for row in rows[1:]
      ),
      "target_age_max": max(row["replay/target_age_max"] for row in rows),
    }

  return work, {}


def learn(seed: int, agent_steps: int, interval: int, episodes: int) -> tuple[Work, dict[str, Any]]:
  """Trains on CartPole; returns the curve of evaluations. Its compilation cache is empty."""
  changes = [
    "env.game=CartPole", f"env.max_episode_steps={CARTPOLE_STEPS}", f"run.seed={seed}",
    f"run.env_steps={agent_steps}", f"learner.steps={agent_steps}", f"learner.batch_size={REUSE}",
    f"evaluation.max_episode_steps={CARTPOLE_STEPS}", f"evaluation.episodes={episodes}",
    f"evaluation.interval={interval}", *SET,
  ]  # fmt: skip
  curve, evaluate = Curve(), steps.evaluate_now

  def evaluate_now(experiment: Any, *arguments: Any) -> Any:
    limiter = experiment.limiter
    with curve.evaluation(REUSE * limiter.learner_steps, limiter.env_steps) as point:
      result = evaluate(experiment, *arguments)
      if result is not None:  # else training has failed
        point.append(result.mean)
    return result

  def work() -> dict[str, Any]:
    steps.evaluate_now = evaluate_now
    with tempfile.TemporaryDirectory() as folder, Signals() as signals:
      folders = [f"run.dir={folder}/run", f"run.compile_cache={folder}/cache"]
      config = loader.load(["quickstart"], [*changes, *folders])
      with run_dir.create(config, "run") as opened:
        curve.begin()
        run(config, opened.path, resume=False, signals=signals)
    return {"curve": curve.points}

  return work, {"changes": changes}


PIECES: dict[str, Piece] = {
  piece.__name__: piece for piece in (search, train, draw, fresh, whole, learn)
}

if __name__ == "__main__":
  serve(PIECES)
