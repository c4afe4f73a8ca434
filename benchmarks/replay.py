"""Cost of each replay operation with 100,000, 1,000,000 and 10,000,000 transitions.

    python benchmarks/replay.py --out benchmarks/results/replay.json          # a minute, 4 GB
    python benchmarks/replay.py --slots 100000 --repeat 5 --gather-slots 2000 # seconds

The ring is full, so every append evicts. Frames are four bytes here, because a gather reads as many
frames from a large replay as from a small one. It is timed separately, on frames of the real size,
in a replay of `--gather-slots`.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from common import parser_of, positive, write

ACTIONS = 6
TINY = (1, 1, 4)  # frame shape

Ready = Callable[[], Callable[[], Any]]  # prepares one execution; what it returns is timed


def operations(
  replay: Any, player: Any, begin: int, batch: int, states: int
) -> Iterator[tuple[str, Ready]]:
  """Operations by name; `states` of a sample. Each execution advances the learner step."""
  rng, clock = player.rng, iter(range(begin, 2**31))

  def values(n: int) -> np.ndarray:
    return rng.normal(size=n).astype(np.float32)

  def append() -> Callable[[], Any]:
    segments = player.segments(1, next(clock))
    return lambda: replay.append_many(segments)

  def set_priorities() -> Callable[[], Any]:
    lane, at, _ = replay.sample(batch)
    error = values(batch)
    return lambda: replay.set_priorities(lane, at, error, next(clock))

  def reanalyse_batch() -> Callable[[], Any]:
    lane, at, _ = replay.sample(batch)
    policy, found = rng.random((batch * states, ACTIONS), np.float32), values(batch * states)

    def run() -> None:
      step = next(clock)
      lanes, times = (x.reshape(-1) for x in replay.states_to_search(lane, at))
      replay.write_search(lanes, times, policy, found, found, step)
      lanes, times = (x.reshape(-1) for x in replay.states_to_bootstrap(lane, at))
      replay.write_bootstrap(lanes, times, found, step)

    return run

  def sweep(n: int = 256) -> Callable[[], Any]:
    policy, found, step = rng.random((n, ACTIONS), np.float32), values(n), next(clock)

    def run() -> None:
      lane, at = replay.next_block("reanalyse", n)
      replay.write_search(lane, at, policy, found, found, step)
      replay.write_values(lane, at, found, step)
      replay.refresh_priorities(lane, at, step)

    return run

  def due() -> Any:
    return replay.quota("refresh", 512, 10**6), replay.oldest_step("refresh")

  yield "append, one slot in each lane", append
  yield f"sample {batch}", lambda: lambda: replay.sample(batch)
  yield (
    f"sample and make_batch {batch}, without frames",
    lambda: lambda: replay.make_batch(*replay.sample(batch), next(clock)),
  )
  yield f"set_priorities {batch}", set_priorities
  yield f"batch reanalysis of {batch}: states and writes", reanalyse_batch
  yield "sweep block of 256: states, writes, priorities", sweep
  yield "due: quota and oldest_step", lambda: due
  yield "stats", lambda: lambda: replay.stats(next(clock))
  yield "state_dict", lambda: replay.state_dict


def timed(ready: Ready, repeat: int) -> dict[str, float]:
  """Seconds of `repeat` executions after one that is not counted."""
  times = []
  for _ in range(repeat + 1):
    run = ready()
    begin = time.perf_counter()
    run()
    times.append(time.perf_counter() - begin)
  times = times[1:]
  return {"median_s": statistics.median(times), "min_s": min(times), "max_s": max(times)}


def gather(replay: Any, unroll: int, window_bytes: int, batch: int, repeat: int) -> dict[str, Any]:
  """Windows of a batch from host memory."""

  def windows() -> Callable[[], Any]:
    lane, at, _ = replay.sample(batch)
    return lambda: replay.windows(lane, at, after=unroll)

  row = {"operation": f"windows of {batch}", "bytes": batch * window_bytes}
  return row | timed(windows, repeat)


def main() -> None:
  parser = parser_of(__doc__)
  sizes = [100_000, 1_000_000, 10_000_000]
  parser.add_argument("--slots", type=positive, nargs="+", default=sizes)
  parser.add_argument("--lanes", type=positive, default=16)
  parser.add_argument("--batch", type=positive, default=2048)
  parser.add_argument("--repeat", type=positive, default=20)
  parser.add_argument("--side", type=positive, default=96, help="of the RGB frames gathered")
  parser.add_argument("--gather-slots", type=int, default=50_000, help="0: no gather")
  arguments = parser.parse_args()
  slow = max(arguments.repeat // 5, 1)
  import pieces  # imports jax and the package: not needed for --help

  def config(slots: int) -> Any:
    settings = ["replay.frames=host", f"replay.capacity={slots}", "reanalyse.ratio=1"]
    settings += [f"actor.lanes={arguments.lanes}"]
    return pieces.load(parser, ["efficientzero"], settings)

  unroll = pieces.unroll_steps(config(arguments.slots[0]))
  rows: dict[str, list[dict[str, float]]] = {}
  for slots in arguments.slots:
    replay, player, step = pieces.filled_replay(config(slots), TINY, ACTIONS)
    for name, ready in operations(replay, player, step, arguments.batch, unroll + 1):
      repeat = slow if name.startswith("stat") else arguments.repeat
      rows.setdefault(name, []).append({"slots": slots} | timed(ready, repeat))
    del replay, player
  print(f"{'ms, median':50}" + "".join(f"{slots:>12,}" for slots in arguments.slots))
  for name, row in rows.items():
    print(f"{name:50}" + "".join(f"{1e3 * cell['median_s']:12.3f}" for cell in row))
  gathered = None
  if arguments.gather_slots:
    large, frame = config(arguments.gather_slots), (arguments.side, arguments.side, 3)
    replay, _, _ = pieces.filled_replay(large, frame, ACTIONS)
    window_bytes = (large.env.frame_stack + unroll) * 3 * arguments.side**2
    gathered = gather(replay, unroll, window_bytes, arguments.batch, slow)
    gathered |= {"frame": frame, "slots": arguments.gather_slots}
    rate = gathered["bytes"] / gathered["median_s"] / 1e9
    print(f"{gathered['operation']}: {1e3 * gathered['median_s']:.0f} ms, {rate:.1f} GB/s")
  result = {"lanes": arguments.lanes, "batch": arguments.batch, "tiny_frame": TINY}
  write(arguments.out, result | {"operations": rows, "gather": gathered})


if __name__ == "__main__":
  main()
