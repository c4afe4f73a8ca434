"""What each operation of the replay costs as it grows: 100,000, 1,000,000 and 10,000,000 transitions.

    python benchmarks/replay.py --out benchmarks/results/replay.json                   # a minute, 4 GB of memory
    python benchmarks/replay.py --slots 100000 --repeat 5 --gather-slots 2000          # seconds

The ring is full, so every append evicts. Frames are four bytes here: a gather reads as many frames from a large replay
as from a small one, apart from cache misses. It is measured by itself, on frames of the real size, as many as
`--gather-slots`.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from common import write

from speedyzero_jax.config.schema import ReanalyseConfig, ReplayConfig
from speedyzero_jax.replay import Replay
from speedyzero_jax.types import Segment

ACTIONS, STACK, UNROLL, EPISODE = 6, 4, 5, 500
TINY = (1, 1, 4)

Ready = Callable[
  [], Callable[[], Any]
]  # prepares one execution of an operation and returns what is to be timed


class Player:
  """Makes up what actors would collect."""

  def __init__(self, lanes: int, frame_shape: tuple[int, ...]):
    self.rng = np.random.default_rng(0)
    self._heads, self._open, self._frame_shape = [0] * lanes, [False] * lanes, frame_shape

  def segments(self, n: int, step: int) -> list[Segment]:
    """The next n slots of every lane, found with weights of this learner step."""
    return [self._segment(lane, n, step) for lane in range(len(self._heads))]

  def _segment(self, lane: int, n: int, step: int) -> Segment:
    rng, start = self.rng, self._heads[lane]
    end = rng.random(n) < 1 / EPISODE
    values = rng.normal(size=(3, n)).astype(np.float32)
    policy = rng.random((n, ACTIONS), np.float32)
    self._heads[lane] += n
    begins, self._open[lane] = not self._open[lane], not end[-1]
    return Segment(
      lane, start, rng.integers(0, 256, (n, *self._frame_shape), np.uint8), np.concatenate([[begins], end[:-1]]), end,
      np.zeros(n, bool), np.where(end, -1, rng.integers(0, ACTIONS, n)).astype(np.int32), values[0], policy, values[1],
      values[2], np.full(n, step, np.int32),
    )  # fmt: skip


def filled(slots: int, lanes: int, frame_shape: tuple[int, ...]) -> tuple[Replay, Player, int]:
  """A full replay of about so many slots, whose priorities differ and which is 100 learner steps old."""
  capacity = slots // lanes
  replay = Replay(
    lanes=lanes,
    capacity=capacity,
    frame_shape=frame_shape,
    frame_dtype=np.uint8,
    num_actions=ACTIONS,
    replay=ReplayConfig(),
    reanalyse=ReanalyseConfig(),
    unroll_steps=UNROLL,
    value_prefix_horizon=5,
    frame_stack=STACK,
    discount=0.997**4,
    rng_seed=0,
  )
  player = Player(lanes, frame_shape)
  chunk = max(capacity // 100, 1)
  for step in range(-(-capacity // chunk)):
    replay.append_many(player.segments(chunk, step))
  for _ in range(20):
    lane, time, _ = replay.sample(max(slots // 20, 1))
    replay.set_priorities(lane, time, player.rng.exponential(size=len(lane)), 100)
  return replay, player, 100


def operations(
  replay: Replay, player: Player, begin: int, batch: int
) -> Iterator[tuple[str, Ready]]:
  """What is measured, by name. Learner steps go on with every execution."""
  rng, clock = player.rng, iter(range(begin, 2**31))

  def values(n: int) -> np.ndarray:
    return rng.normal(size=n).astype(np.float32)

  def append() -> Callable[[], Any]:
    segments = player.segments(1, next(clock))
    return lambda: replay.append_many(segments)

  def draw() -> Callable[[], Any]:
    return lambda: replay.make_batch(*replay.sample(batch), next(clock))

  def make_batch() -> Callable[[], Any]:
    drawn = replay.sample(batch)
    return lambda: replay.make_batch(*drawn, next(clock))

  def window_cells() -> Callable[[], Any]:
    lane, time, _ = replay.sample(batch)
    return lambda: replay.window_cells(lane, time, UNROLL)

  def set_priorities() -> Callable[[], Any]:
    lane, time, _ = replay.sample(batch)
    error = values(batch)
    return lambda: replay.set_priorities(lane, time, error, next(clock))

  def reanalyse_batch() -> Callable[[], Any]:
    lane, time, _ = replay.sample(batch)
    n = batch * (UNROLL + 1)
    policy, found = rng.random((n, ACTIONS), np.float32), values(n)

    def run() -> None:
      step = next(clock)
      at, when = (x.reshape(-1) for x in replay.states_to_search(lane, time))
      replay.write_search(at, when, policy, found, found, step)
      at, when = (x.reshape(-1) for x in replay.states_to_bootstrap(lane, time))
      replay.write_bootstrap(at, when, found, step)

    return run

  def refresh(n: int = 512) -> Callable[[], Any]:
    found, step = values(n), next(clock)

    def run() -> None:
      lane, time = replay.next_block("refresh", n)
      replay.write_values(lane, time, found, step)
      replay.refresh_priorities(lane, time, step)

    return run

  def sweep(n: int = 256) -> Callable[[], Any]:
    policy, found, step = rng.random((n, ACTIONS), np.float32), values(n), next(clock)

    def run() -> None:
      lane, time = replay.next_block("reanalyse", n)
      replay.write_search(lane, time, policy, found, found, step)
      replay.write_values(lane, time, found, step)
      replay.refresh_priorities(lane, time, step)

    return run

  yield "append, one slot in each of the lanes", append
  yield f"sample {batch}", lambda: lambda: replay.sample(batch)
  yield f"make_batch {batch}: actions and targets", make_batch
  yield f"both: a batch of {batch} without frames", draw
  yield f"window_cells {batch}: where its frames are", window_cells
  yield f"set_priorities {batch}", set_priorities
  yield f"batch reanalysis: which states of {batch}, and writing them", reanalyse_batch
  yield "refresh block of 512: which states, writing, priorities", refresh
  yield "sweep block of 256: the same with policies", sweep
  yield (
    "due: quota and oldest_step",
    lambda: lambda: (replay.quota("refresh", 512, 10**6), replay.oldest_step("refresh")),
  )
  yield "stats, for a line of metrics", lambda: lambda: replay.stats(next(clock))
  yield (
    "export_slots: frames of 16,000 new slots",
    lambda: lambda: replay.export_slots(replay.heads - 1000),
  )
  yield "state_dict, for a checkpoint", lambda: replay.state_dict


def timed(ready: Ready, repeat: int) -> dict[str, float]:
  """Seconds: median, minimum and maximum of `repeat` executions after one that is not counted."""
  times = []
  for _ in range(repeat + 1):
    run = ready()
    begin = time.perf_counter()
    run()
    times.append(time.perf_counter() - begin)
  return {
    "median_s": statistics.median(times[1:]),
    "min_s": min(times[1:]),
    "max_s": max(times[1:]),
  }


def gather(
  slots: int, lanes: int, side: int, channels: int, batch: int, repeat: int
) -> dict[str, Any]:
  """Windows of a batch, with their frames, from host memory."""
  replay, _, _ = filled(slots, lanes, (side, side, channels))

  def windows() -> Callable[[], Any]:
    lane, time, _ = replay.sample(batch)
    return lambda: replay.windows(lane, time, after=UNROLL)

  size = batch * (STACK + UNROLL) * side * side * channels
  row = {
    "operation": f"windows of {batch} from host memory",
    "frame": [side, side, channels],
    "slots": slots,
  }
  return row | timed(windows, repeat) | {"bytes": size}


def main() -> None:
  """Measures and reports."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--slots", type=int, nargs="+", default=[100_000, 1_000_000, 10_000_000])
  parser.add_argument("--lanes", type=int, default=16)
  parser.add_argument("--batch", type=int, default=2048)
  parser.add_argument("--repeat", type=int, default=20)
  parser.add_argument(
    "--frame",
    type=int,
    nargs=2,
    default=[96, 3],
    metavar=("SIDE", "CHANNELS"),
    help="of the gather",
  )
  parser.add_argument(
    "--gather-slots", type=int, default=50_000, help="for the gather; 0: leave it out"
  )
  parser.add_argument("--out", type=Path)
  arguments = parser.parse_args()
  rows: dict[str, list[dict[str, float]]] = {}
  for slots in arguments.slots:
    replay, player, step = filled(slots, arguments.lanes, TINY)
    for name, ready in operations(replay, player, step, arguments.batch):
      repeat = (
        max(arguments.repeat // 5, 1)
        if name.startswith(("stats", "export", "state"))
        else arguments.repeat
      )
      rows.setdefault(name, []).append({"slots": slots} | timed(ready, repeat))
    del replay, player
  print(
    f"{'ms, median':58}" + "".join(f"{slots:>12,}" for slots in arguments.slots) + "   last / first"
  )
  for name, row in rows.items():
    first, last = row[0]["median_s"], row[-1]["median_s"]
    print(
      f"{name:58}"
      + "".join(f"{1e3 * cell['median_s']:12.3f}" for cell in row)
      + f"{last / first:15.1f}"
    )
  gathered = None
  if arguments.gather_slots:
    gathered = gather(
      arguments.gather_slots,
      arguments.lanes,
      *arguments.frame,
      arguments.batch,
      max(arguments.repeat // 5, 1),
    )
    print(
      f"{gathered['operation']}: {1e3 * gathered['median_s']:.0f} ms for {gathered['bytes'] / 1e6:.0f} MB, "
      f"{gathered['bytes'] / gathered['median_s'] / 1e9:.1f} GB/s"
    )
  write(
    arguments.out,
    {
      "lanes": arguments.lanes,
      "batch": arguments.batch,
      "tiny_frame": TINY,
      "operations": rows,
      "gather": gathered,
    },
  )


if __name__ == "__main__":
  main()
