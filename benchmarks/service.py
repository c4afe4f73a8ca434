"""What a unit's service carries on loopback: segments, results, weights; with 1, 4 and 16 client processes.

    python benchmarks/service.py --seconds 3 --out benchmarks/results/service.json

Clients call one after the other, as actors and reanalysers do; the hub only counts. One server process; the encoding on
one side and the decoding on the other are part of what is measured.
"""

import argparse
import multiprocessing
import os
import resource
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from common import write

from speedyzero_jax.cluster import codec, messages
from speedyzero_jax.cluster.grpc_client import Client
from speedyzero_jax.cluster.grpc_server import serve
from speedyzero_jax.types import Segment

LANES, ACTIONS, STATES = 16, 18, 256
FRAME = (96, 96, 3)
NETWORK = {
  f"['layer{i}']": jax.ShapeDtypeStruct((512, 1536), np.float32) for i in range(10)
}  # 31.5 MB
FORM = codec.Form(LANES, 1000, ACTIONS, FRAME, np.uint8, NETWORK)
TOKEN = os.urandom(32)


class CountingHub:
  """Answers everything at once and keeps nothing."""

  def __init__(self) -> None:
    self._network = {name: np.zeros(of.shape, of.dtype) for name, of in NETWORK.items()}

  def append(self, request: messages.Append) -> messages.Acknowledged:
    return messages.Acknowledged(
      np.array([segment.start + 1 for segment in request.segments], np.int64)
    )

  def result(self, request: messages.Result) -> messages.Ok:
    return messages.Ok()

  def weights(self, request: messages.WeightsRequest, seconds: float) -> messages.Weights:
    return messages.Weights(request.have + 1, self._network)

  def __getattr__(self, name: str) -> Any:
    if name not in messages.CALLS:
      raise AttributeError(name)
    return None  # not called here


class Load(NamedTuple):
  """What clients send, and what one call counts for."""

  call: str
  request: Any
  unit: str
  per_call: float


def loads() -> tuple[Load, ...]:
  """An actor's step, a reanalyser's block, a subscriber's new version."""
  rng = np.random.default_rng(0)
  no, zero = np.zeros(1, bool), np.zeros(1, np.float32)
  segments = [
    Segment(
      lane, 0, rng.integers(0, 256, (1, *FRAME), np.uint8), no, no, no, np.zeros(1, np.int32), zero,
      np.full((1, ACTIONS), 1 / ACTIONS, np.float32), zero, zero, np.zeros(1, np.int32),
    )
    for lane in range(LANES)
  ]  # fmt: skip
  values = rng.normal(size=(STATES, 1)).astype(np.float32)
  policy = np.full((STATES, 1, ACTIONS), 1 / ACTIONS, np.float32)
  megabytes = sum(of.size * of.dtype.itemsize for of in NETWORK.values()) / 1e6
  return (
    Load(
      "append",
      messages.Append(0, 0, 0, segments, np.zeros(0), np.zeros(0, np.int64)),
      "segments/s",
      LANES,
    ),
    Load("result", messages.Result(0, 0, 0, 0, policy, values, values), "results/s", 1),
    Load("weights", messages.WeightsRequest(0, "actor", 0), "MB/s", megabytes),
  )


def client(load: Load, address: str, token: bytes, start, seconds: float, counts) -> None:
  """Calls for `seconds` and puts how often."""
  with Client(address, token, FORM) as ours:
    call = getattr(ours, load.call)
    call(load.request)  # connects
    start.wait()
    count, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < seconds:
      call(load.request)
      count += 1
    counts.put(count / (time.perf_counter() - begin))


def measure(load: Load, clients: int, seconds: float, context: Any) -> dict[str, Any]:
  """One row: calls a second of all clients together, and the server's use of cores."""
  with serve(CountingHub(), "127.0.0.1:0", TOKEN, FORM, clients=clients) as server:
    start, counts = context.Barrier(clients + 1), context.Queue()
    arguments = (load, server.address, TOKEN, start, seconds, counts)
    processes = [context.Process(target=client, args=arguments) for _ in range(clients)]
    for process in processes:
      process.start()
    start.wait()
    before, begin = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    calls = sum(counts.get() for _ in processes)
    after, wall = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter() - begin
    for process in processes:
      process.join()
  return {
    "call": load.call,
    "clients": clients,
    "calls_per_second": calls,
    "milliseconds": 1000 * clients / calls,
    "unit": load.unit,
    "rate": calls * load.per_call,
    "request_bytes": len(codec.encode(load.request, FORM)),
    "server_cores": (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / wall,
  }


def main() -> None:
  """Measures and reports."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16])
  parser.add_argument("--seconds", type=float, default=3.0, help="each measurement takes")
  parser.add_argument("--out", type=Path)
  arguments = parser.parse_args()
  context = multiprocessing.get_context(
    "forkserver"
  )  # a fork of a process that uses gRPC would not do
  context.set_forkserver_preload(["speedyzero_jax.cluster.grpc_client"])
  rows = []
  print("call     clients   calls/s   ms/call              rate  server's cores")
  for load in loads():
    for clients in arguments.clients:
      row = measure(load, clients, arguments.seconds, context)
      rows.append(row)
      print(
        f"{row['call']:8} {clients:7} {row['calls_per_second']:9.1f} {row['milliseconds']:9.2f} "
        f"{row['rate']:11.1f} {row['unit']:10} {row['server_cores']:9.2f}",
        flush=True,
      )
  load_average = os.getloadavg()[0]
  print(f"load average {load_average:.1f} on {os.cpu_count()} cores")
  write(arguments.out, {"seconds": arguments.seconds, "load_average": load_average, "rows": rows})


if __name__ == "__main__":
  main()
