"""Duration of each replay operation with 100,000, 1,000,000 and 10,000,000 transitions.

    python benchmarks/replay.py --out benchmarks/results/replay.json          # a minute, 4 GB
    python benchmarks/replay.py --slots 100000 --repeat 5 --gather-slots 2000 # seconds

The ring buffers are full, so every append evicts. Frames have only 16 bytes, because gathering does
not depend on the replay's size. It is timed separately, with frames of realistic size, in a replay
with `--gather-slots` slots.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from common import parser_of, positive, write

ACTIONS = 6
TINY = (4, 4, 1)  # frame shape
BLOCK = 256  # states per block of a sweep

Ready = Callable[[], Callable[[], Any]]  # prepares one execution; returns the function to time


def operations(
  replay: Any, agents: dict[str, Any], player: Any, begin: int, batch: int
) -> Iterator[tuple[str, Ready]]:
  """Yields named operations; `agents` is by reanalysis schedule.

  Each execution advances the learner step.
  """
  import pieces

  rng, clock = player.rng, iter(range(begin, 2**31))
  sweeping, of_batches = agents["sweep"], agents["batch"]
  [sweeper] = pieces.make_sweepers(sweeping, actor_interval=10)

  def append() -> Callable[[], Any]:
    slots = player.slots(1, next(clock))
    return lambda: replay.append(slots)

  def assemble() -> None:
    with replay.lock:
      sweeping.assemble(replay, replay.select(batch), next(clock))

  def update() -> Callable[[], Any]:
    selection, error = replay.select(batch), rng.normal(size=batch)
    return lambda: replay.update(selection, error, next(clock))

  def writing(agent: Any, works: Callable[[], list[Any]]) -> Callable[[], Any]:
    tasks = [(agent.tasks[work.task], work) for work in works()]
    results = [pieces.random_results(task, work, rng) for task, work in tasks]

    def run() -> None:
      for work, result in zip(works(), results, strict=True):
        pieces.write_results(replay, agent.tasks[work.task], work, result, step)

    step = next(clock)
    return run

  def reanalyse_batch() -> Callable[[], Any]:
    selection = replay.select(batch)
    return writing(of_batches, lambda: of_batches.batch_work(replay, selection))

  def sweep() -> Callable[[], Any]:
    return writing(sweeping, lambda: [sweeper.next(replay)])

  def due() -> Any:
    return sweeper.behind(replay, 100), sweeper.overdue(replay, 100)

  yield "append, one slot in each lane", append
  yield f"select {batch}", lambda: lambda: replay.select(batch)
  yield f"select and assemble {batch}, without frames", lambda: assemble
  yield f"update {batch} priorities", update
  yield f"batch reanalysis of {batch}: states and writes", reanalyse_batch
  yield f"sweep block of {BLOCK}: states, writes, priorities", sweep
  yield "due: quota and oldest step", lambda: due
  yield "stats", lambda: lambda: replay.stats(next(clock))
  yield "state_dict", lambda: replay.state_dict


def timed(ready: Ready, repeat: int) -> dict[str, float]:
  """Times `repeat` executions after one warm-up execution, in seconds."""
  times = []
  for _ in range(repeat + 1):
    run = ready()
    begin = time.perf_counter()
    run()
    times.append(time.perf_counter() - begin)
  times = times[1:]
  return {"median_s": statistics.median(times), "min_s": min(times), "max_s": max(times)}


def gather(replay: Any, unroll: int, window_bytes: int, batch: int, repeat: int) -> dict[str, Any]:
  """Times gathering the windows of a batch from host memory."""

  def windows() -> Callable[[], Any]:
    selection = replay.select(batch)
    return lambda: replay.windows(selection.lane, selection.time, after=unroll)

  row = {"operation": f"windows of {batch}", "bytes": batch * window_bytes}
  return row | timed(windows, repeat)


def main() -> None:
  parser = parser_of(__doc__)
  sizes = [100_000, 1_000_000, 10_000_000]
  parser.add_argument("--slots", type=positive, nargs="+", default=sizes)
  parser.add_argument("--lanes", type=positive, default=16)
  parser.add_argument("--batch", type=positive, default=2048)
  parser.add_argument("--repeat", type=positive, default=20)
  parser.add_argument(
    "--side", type=positive, default=96, help="height and width of RGB frames, a multiple of 4"
  )
  parser.add_argument(
    "--gather-slots", type=int, default=50_000, help="replay size for gathering; 0: skip it"
  )
  arguments = parser.parse_args()
  slow = max(arguments.repeat // 5, 1)
  import pieces  # imports jax and the package: not needed for --help

  def config(slots: int, schedule: str = "sweep") -> Any:
    settings = [f"replay.capacity={slots}", f"actor.lanes={arguments.lanes}"]
    settings += ["network.downsample=4", "replay.frames=host", "refresh.enabled=true"]
    settings += ["reanalyse.ratio=1", f"reanalyse.block={BLOCK}"]
    settings.append(f"reanalyse.schedule={schedule}")
    return pieces.load(parser, ["efficientzero", "sweep"], settings)

  rows: dict[str, list[dict[str, float]]] = {}
  for slots in arguments.slots:
    agents = {
      schedule: pieces.make_agent(config(slots, schedule), TINY, ACTIONS)
      for schedule in ("sweep", "batch")
    }
    replay, player, step = pieces.filled_replay(config(slots), agents["sweep"])
    for name, ready in operations(replay, agents, player, step, arguments.batch):
      repeat = slow if name.startswith("stat") else arguments.repeat
      rows.setdefault(name, []).append({"slots": slots} | timed(ready, repeat))
    del replay, player
  print(f"{'ms, median':50}" + "".join(f"{slots:>12,}" for slots in arguments.slots))
  for name, row in rows.items():
    print(f"{name:50}" + "".join(f"{1e3 * cell['median_s']:12.3f}" for cell in row))
  gathered = None
  if arguments.gather_slots:
    large, frame = config(arguments.gather_slots), (arguments.side, arguments.side, 3)
    agent = pieces.make_agent(large, frame, ACTIONS)
    replay, _, _ = pieces.filled_replay(large, agent)
    unroll = agent.window.after
    window_bytes = (large.env.frame_stack + unroll) * 3 * arguments.side**2
    gathered = gather(replay, unroll, window_bytes, arguments.batch, slow)
    gathered |= {"frame": frame, "slots": arguments.gather_slots}
    rate = gathered["bytes"] / gathered["median_s"] / 1e9
    print(f"{gathered['operation']}: {1e3 * gathered['median_s']:.0f} ms, {rate:.1f} GB/s")
  result = {"lanes": arguments.lanes, "batch": arguments.batch, "tiny_frame": TINY}
  write(arguments.out, result | {"operations": rows, "gather": gathered})


if __name__ == "__main__":
  main()
