"""Plays board games with trained agents: python launch/match.py RUN_DIR --against minimax

Opponents are random, minimax (tic-tac-toe only), mcts:N (UCT with N rollouts per move), and runs,
given by their folders. RUN_DIR plays with its newest checkpoint, RUN_DIR@STEP with that of learner
step STEP. Agents play without noise and alternate sides. Prints wins, draws and losses; `--out`
also writes them as JSON.

Exit codes: 0 done; 1 no readable checkpoint, or the result can't be written; 2 usage error; 130
stopped by Ctrl-C.
"""

import argparse
import functools
import itertools
import json
import logging
import math
import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for uninstalled clones
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import jax
import numpy as np

from speedyzero_jax.agents.base import ActInputs
from speedyzero_jax.config import loader
from speedyzero_jax.envs.opponents import Opponent, play_at_random, play_mcts, play_minimax
from speedyzero_jax.envs.rules import RULES
from speedyzero_jax.run import factories, run_dir
from speedyzero_jax.run.checkpoint import CheckpointError
from speedyzero_jax.system.exit_codes import FAILED, USAGE_ERROR
from speedyzero_jax.system.files import write_atomically
from speedyzero_jax.workers import evaluator


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line. Returns the exit code."""
  parser = argparse.ArgumentParser(
    prog="launch/match.py", description="Plays board games with trained agents."
  )
  add = parser.add_argument
  add("runs", nargs="+", metavar="RUN_DIR[@STEP]", help="players: folders of runs")
  opponents = "random, minimax, mcts:N, or RUN_DIR[@STEP]; each plays all runs"
  add("--against", nargs="+", required=True, metavar="OPPONENT", help=opponents)
  add("--games", type=_positive, default=100, metavar="N", help="games per pair (default: 100)")
  opening = "random moves that open each game, for both sides (default: 2 against runs, else 0)"
  add("--opening", type=int, metavar="N", help=opening)
  add("--seed", type=int, default=0, help="seed of openings and opponents (default: 0)")
  add("--out", type=Path, metavar="FILE.json", help="JSON file to write (replaced if it exists)")
  arguments = parser.parse_args(argv)
  out = arguments.out
  if arguments.seed < 0:
    parser.error("--seed: must be at least 0")
  if out and (out.is_dir() or not out.parent.is_dir()):
    parser.error(f"--out: {out} is a folder or in a folder that does not exist")
  logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
  try:
    factories.device_count()
    pairs = list(itertools.product(arguments.runs, arguments.against))
    for run, name in pairs:  # before the first match
      game = _restore(run)[0].env.game
      _opening(arguments.opening, _opponent(name, game)[0], game)
    results = []
    for run, name in pairs:
      results.append(match(run, name, arguments))
      if out:
        write_atomically(out, json.dumps(results, indent=1) + "\n")
  except (CheckpointError, OSError) as error:
    print(f"error: {error}", file=sys.stderr)
    return FAILED
  except ValueError as error:
    print(f"error: {error}", file=sys.stderr)
    return USAGE_ERROR
  except KeyboardInterrupt:
    print("stopped", file=sys.stderr)
    return 128 + signal.SIGINT
  return 0


def match(run: str, name: str, arguments: argparse.Namespace) -> dict[str, Any]:
  """Plays a run against an opponent; returns the results for each side and the Elo difference."""
  config, agent, inference, version = _restore(run)
  config = loader.override(config, ["evaluation.explore=false"], check=False)
  kind, opponent = _opponent(name, config.env.game)
  opening = _opening(arguments.opening, kind, config.env.game)
  played = evaluator.evaluate(
    config, agent, inference, version,
    episodes=arguments.games, seed=arguments.seed, opponent=opponent, opening=opening,
  )  # fmt: skip
  assert played is not None  # without `should_stop`
  returns = np.array(played.returns)
  score = float((returns.mean() + 1) / 2)
  result = {
    "game": config.env.game,
    "run": str(_player(run)[0]),
    "seed": config.run.seed,
    "step": version.step,
    "against": str(_player(name)[0]) if kind == "run" else name,
    "against_step": _restore(name)[3].step if kind == "run" else None,
    "games": len(returns),
    "opening": opening,
    "match_seed": arguments.seed,
    "moving_first": _counts(returns[::2]),
    "moving_second": _counts(returns[1::2]),
    "score": score,  # a draw is half a win
    "elo_difference": 400 * math.log10(score / (1 - score)) if 0 < score < 1 else None,
  }
  print(
    f"{config.env.game}: {run} at step {version.step} against {name}, "
    f"{', '.join(f'{n} {what}' for what, n in _counts(returns).items())}; "
    f"moving first {result['moving_first']}, second {result['moving_second']}"
  )
  return result


def _opening(requested: int | None, kind: str, game: str) -> int:
  """Number of random moves that open a game. Raises ValueError if `requested` is out of range."""
  if requested is None:
    return 2 if kind == "run" else 0  # two agents without noise would repeat one game
  # After a longer opening, a game could be over before the second side's first turn.
  longest = RULES[game].longest_opening
  if not 0 <= requested <= longest:
    raise ValueError(f"--opening: must lie in [0, {longest}] in {game}, got {requested}")
  return requested


def _positive(text: str) -> int:
  if not text.isdecimal() or int(text) < 1:
    raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text!r}")
  return int(text)


def _counts(returns: np.ndarray) -> dict[str, int]:
  kinds = {"wins": returns > 0, "draws": returns == 0, "losses": returns < 0}
  return {name: int(which.sum()) for name, which in kinds.items()}


def _player(text: str) -> tuple[Path, int | None]:
  """Parses RUN_DIR[@STEP]."""
  if Path(text).is_dir():
    return Path(text), None
  step = re.search(r"@(\d+)$", text)
  return (Path(text[: step.start()]), int(step[1])) if step else (Path(text), None)


@functools.cache
def _restore(run: str) -> tuple:
  """Restores the configuration, agent, inference and weights of RUN_DIR[@STEP]."""
  folder, step = _player(run)
  config = run_dir.read_config(folder)
  factories.enable_compilation_cache(config)
  agent, inference, version = factories.restore_for_evaluation(
    config,
    folder,
    newest=step,
    warn=lambda line: print(f"warning: {line}", file=sys.stderr),
    report=lambda _: None,
  )
  if step is not None and version.step != step:
    raise ValueError(f"{folder} has no checkpoint of step {step}; the one before is {version.step}")
  return config, agent, inference, version


def _opponent(name: str, game: str) -> tuple[str, Opponent]:
  """Returns an opponent's kind and policy. Raises ValueError if it can't play the game."""
  if game not in RULES:
    raise ValueError(f"{game} is not a board game")
  rules = RULES[game]
  kind, _, rollouts = name.partition(":")
  if name == "random":
    return kind, play_at_random(rules)
  if name == "minimax":
    if game != "TicTacToe":
      raise ValueError(f"--against: minimax can't search the whole game tree of {game}")
    return kind, play_minimax(rules)
  if kind == "mcts" and rollouts.isdecimal() and int(rollouts):
    return kind, play_mcts(rules, int(rollouts))
  if not _player(name)[0].is_dir():
    raise ValueError(f"--against: expected random, minimax, mcts:N or a run folder, got {name!r}")
  config, _, inference, version = _restore(name)
  if config.env.game != game:
    raise ValueError(f"--against: {name} plays {config.env.game}, not {game}")

  def play(board: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    no, lanes = np.zeros(len(board), bool), np.arange(len(board), dtype=np.int32)
    inputs = ActInputs(board[:, None], no, lanes, ())
    key = jax.random.key(0)  # has no effect without exploration
    output = inference.act(version.variables, inputs, key, np.float32(1), explore=False)
    return np.asarray(output.action)

  return "run", play


if __name__ == "__main__":
  sys.exit(main())
