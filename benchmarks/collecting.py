"""Agent steps a second of the actor, with its search and without, beside its environments alone; and what it could win.

    python benchmarks/collecting.py --config atari_small --out benchmarks/results/collecting.json
    python benchmarks/collecting.py --config atari100k --set env.game=Breakout --lanes 16 32 64

An actor searches all its lanes, then steps them all: neither waits for the other half. Two halves could take turns, one
searched while the other is stepped. With search and environments on different hardware a round would then take
2 max(search of a half, step of a half) and what is left of the actor's own work, instead of all three one after the
other. The table says what that would be worth here, from times that are measured; on cores that both share it is worth
nothing. Weights are untrained.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from common import load, positive, write
from journal import make_actor

from speedyzero_jax.config.schema import Config
from speedyzero_jax.envs.batched_env import make_env
from speedyzero_jax.run.builders import enable_compilation_cache

_BUDGET = 2**31  # agent steps: never the limit here


def timed(call: Callable[..., Any], times: list[float]) -> Callable[..., Any]:
  """The same, but its result is waited for, and the time it took is noted."""

  def run(*args: Any, **kwargs: Any) -> Any:
    begin = time.perf_counter()
    result = jax.block_until_ready(call(*args, **kwargs))
    times.append(time.perf_counter() - begin)
    return result

  return run


class Player:
  """An actor with so many lanes, and the seconds its steps of all lanes take."""

  def __init__(self, config: Config, lanes: int):
    env = make_env(config.env, lanes, 0, training=True)
    actor, version = make_actor(config, env)
    step = functools.partial(actor.step, version, budget=_BUDGET, progress=0.0)
    for random in (False, True):  # compiles
      step(random=random)
    self.times: dict[str, list[float]] = {
      "actor": [],
      "random": [],
      "search": [],
      "environments": [],
    }
    self._search = timed(functools.partial(step, random=False), self.times["actor"])
    self._random = timed(functools.partial(step, random=True), self.times["random"])
    actor._inference.search = timed(actor._inference.search, self.times["search"])
    env.step = timed(env.step, self.times["environments"])
    self.close = env.close

  def play(self) -> None:
    """A step with a search and one without."""
    self._search()
    self._random()

  def medians(self) -> dict[str, float]:
    """Of all steps so far: all of it, all of one without a search, and what search and environments take of it."""
    return {name: statistics.median(times) for name, times in self.times.items()}


def measure(config: Config, lanes: int, repeat: int) -> dict[str, float]:
  """A row of the table."""
  players = Player(config, lanes), Player(config, lanes // 2)
  for _ in range(repeat):
    for player in players:
      player.play()
  whole, half = (player.medians() for player in players)
  for player in players:
    player.close()
  own = whole["actor"] - whole["search"] - whole["environments"]
  turns = 2 * max(half["search"], half["environments"]) + own
  return {
    "lanes": lanes,
    **{f"{name}_s": seconds for name, seconds in whole.items()},
    **{f"half_{name}_s": seconds for name, seconds in half.items()},
    "own_s": own,
    "taking_turns_s": turns,
    "gain": whole["actor"] / turns,
  }


def main() -> None:
  """Measures and reports."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--config", nargs="+", default=["atari_small"])
  parser.add_argument("--set", nargs="*", default=[], metavar="key=value", help="overrides")
  parser.add_argument("--lanes", type=int, nargs="+", default=[16], help="even numbers")
  parser.add_argument("--repeat", type=positive, default=20)
  parser.add_argument("--out", type=Path)
  arguments = parser.parse_args()
  if any(lanes < 2 or lanes % 2 for lanes in arguments.lanes):
    parser.error(f"--lanes: must be even numbers, at least 2, got {arguments.lanes}")
  config = load(parser, arguments.config, arguments.set)
  enable_compilation_cache(config)
  rows = []
  print("           agent steps/s               ms of a step of all lanes")
  print("lanes  actor  random  environments     search  environments  own   if halves took turns")
  for lanes in arguments.lanes:
    row = measure(config, lanes, arguments.repeat)
    rows.append(row)
    print(
      f"{lanes:5} {lanes / row['actor_s']:6.0f} {lanes / row['random_s']:7.0f} "
      f"{lanes / row['environments_s']:13.0f} {1e3 * row['search_s']:10.1f} {1e3 * row['environments_s']:13.1f} "
      f"{1e3 * row['own_s']:4.1f} {1e3 * row['taking_turns_s']:17.1f}, {row['gain']:.2f}x"
    )
  write(
    arguments.out,
    {
      "preset": arguments.config,
      "set": arguments.set,
      "device": jax.local_devices()[0].device_kind,
      "rows": rows,
    },
  )


if __name__ == "__main__":
  main()
