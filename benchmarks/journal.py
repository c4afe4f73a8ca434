"""What durability costs: bytes a transition takes on disk, and the time of an append, beside an actor's step.

    python benchmarks/journal.py --config atari100k --set env.game=Breakout --folder . --out benchmarks/results/x.json

Plays at random, then journals what was played, k steps of every lane in a transaction, with fsync and (to see what it
costs; the journal itself always does it) without. The actor's step is measured on the same machine with untrained
weights: search, environments, everything but the journal.
"""

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from common import seconds, write

from speedyzero_jax.agents.efficientzero.inference import Inference
from speedyzero_jax.agents.efficientzero.networks import make_blueprint
from speedyzero_jax.config import loader
from speedyzero_jax.config.schema import Config
from speedyzero_jax.envs.batched_env import BatchedEnv, make_env
from speedyzero_jax.metrics.aggregation import EpisodeStats
from speedyzero_jax.replay.journal import Journal
from speedyzero_jax.types import Segment
from speedyzero_jax.workers.actor import Actor
from speedyzero_jax.workers.weights import Version

_BUDGET = 2**31  # agent steps: never the limit here


def make_actor(config: Config, env: BatchedEnv) -> tuple[Actor, Version]:
  """An actor and untrained weights for it."""
  height, width, channels = env.frame_shape
  observation = (height, width, channels * config.env.frame_stack)
  blueprint = make_blueprint(config.agent.network, observation, env.num_actions, axis_name="data")
  variables = jax.jit(blueprint.init)(jax.random.key(0))
  inference = Inference(config, blueprint)
  return Actor(config, env, inference, jax.random.key(1), EpisodeStats(env.num_lanes)), Version(
    0, variables
  )


def join(steps: Sequence[Sequence[Segment]]) -> list[Segment]:
  """One longer segment per lane from those of consecutive steps."""
  lanes = zip(*steps, strict=True)
  return [Segment(*lane[0][:2], *(np.concatenate(arrays) for arrays in zip(*(s[2:] for s in lane), strict=True)))
          for lane in lanes]  # fmt: skip


def journal_all(
  appends: Sequence[Sequence[Segment]], env: BatchedEnv, folder: Path, *, fsync: bool
) -> tuple[list[float], int]:
  """Seconds of each append, and bytes of the closed file."""
  with tempfile.TemporaryDirectory(dir=folder) as temporary:
    path = Path(temporary) / "journal"
    times = []
    with contextlib.closing(
      Journal(path, env.num_lanes, env.frame_shape, env.frame_dtype, env.num_actions)
    ) as journal:
      if not fsync:
        journal._db.execute("PRAGMA synchronous=OFF")
      for segments in appends:
        begin = time.perf_counter()
        journal.append(segments)
        times.append(time.perf_counter() - begin)
    return times, path.stat().st_size


def main() -> None:
  """Measures and reports."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--config", nargs="+", default=["atari100k"])
  parser.add_argument(
    "--set", nargs="*", default=["env.game=Breakout"], metavar="key=value", help="overrides"
  )
  parser.add_argument(
    "--steps", type=int, default=640, help="of all lanes, a multiple of every --group"
  )
  parser.add_argument(
    "--group", type=int, nargs="+", default=[1, 4, 16], help="steps per transaction"
  )
  parser.add_argument("--repeat", type=int, default=3, help="searched steps to time")
  parser.add_argument("--folder", type=Path, default=Path(), help="on the disk to measure")
  parser.add_argument("--out", type=Path)
  arguments = parser.parse_args()
  config = loader.load(arguments.config, arguments.set)
  env = make_env(config.env, config.actor.lanes, config.run.seed, training=True)
  actor, version = make_actor(config, env)

  def play(*, random: bool) -> list[Segment]:
    return actor.step(version, budget=_BUDGET, progress=0.0, random=random)[0]

  begin = time.perf_counter()
  played = [play(random=True) for _ in range(arguments.steps)]
  random_step = (time.perf_counter() - begin) / arguments.steps
  _, actor_step = seconds(lambda: play(random=False), arguments.repeat)
  transitions = sum(int((s.action >= 0).sum()) for segments in played for s in segments)
  raw = sum(array.nbytes for segments in played for s in segments for array in s[2:]) / transitions
  print(
    f"{env.num_lanes} lanes of {list(env.frame_shape)}, {transitions} transitions of {raw:.0f} B; an actor's step: "
    f"{actor_step * 1e3:.1f} ms searched, {random_step * 1e3:.1f} ms random"
  )
  print(
    "steps/append  fsync  B/transition   ms/append: median    99%   mean   ms/step  of a searched  of a random step"
  )
  rows = []
  for group in arguments.group:
    appends = [join(played[i : i + group]) for i in range(0, len(played), group)]
    for fsync in (True, False):
      times, size = journal_all(appends, env, arguments.folder, fsync=fsync)
      mean = statistics.mean(times)
      row = {
        "steps_per_append": group, "fsync": fsync, "bytes_per_transition": size / transitions,
        "append_median_s": statistics.median(times), "append_p99_s": float(np.quantile(times, 0.99)),
        "append_mean_s": mean, "of_searched_step": mean / group / actor_step,
        "of_random_step": mean / group / random_step,
      }  # fmt: skip
      rows.append(row)
      print(
        f"{group:12}  {'yes' if fsync else 'no':>5}  {row['bytes_per_transition']:12.0f}"
        f"  {row['append_median_s'] * 1e3:17.2f} {row['append_p99_s'] * 1e3:7.2f} {mean * 1e3:6.2f}"
        f"  {mean / group * 1e3:8.2f}  {100 * row['of_searched_step']:12.2f}%  {100 * row['of_random_step']:14.1f}%"
      )
  env.close()
  write(
    arguments.out,
    {
      "preset": arguments.config,
      "set": arguments.set,
      "device": jax.local_devices()[0].device_kind,
      "lanes": env.num_lanes,
      "frame_shape": list(env.frame_shape),
      "transitions": transitions,
      "raw_bytes_per_transition": raw,
      "searched_step_s": actor_step,
      "random_step_s": random_step,
      "rows": rows,
    },
  )


if __name__ == "__main__":
  main()
