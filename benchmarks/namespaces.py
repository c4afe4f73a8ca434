"""One run on several hosts, each a namespace of this machine: what the wires between them carry per learner step.

    python benchmarks/namespaces.py --out benchmarks/results/namespaces.json      # as root; some minutes on two cores
    python benchmarks/namespaces.py --quick learner.batch_size=16                 # Catch, with whatever settings

Every process of the run has a host of its own (hosts.py), so nothing is mapped and nothing goes by loopback. Beside
what was counted stands what the messages of these shapes add up to, without anybody's headers; what whole batches,
frames and all, would be, had they to travel to the learners; and the same sums for atari100k.
"""

import argparse
import math
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from common import ROOT, write
from hosts import Host, NoHosts, hosts

from speedyzero_jax.agents.efficientzero.reanalyse import block_of
from speedyzero_jax.cluster import codec, learner_process, messages
from speedyzero_jax.config import loader
from speedyzero_jax.config.schema import Config
from speedyzero_jax.metrics import jsonl
from speedyzero_jax.replay.sweep import Sweep
from speedyzero_jax.run.builders import Game, blueprint_of, game_of, replay_capacity, sweeps
from speedyzero_jax.run.topology import Topology, resolve, unit_config
from speedyzero_jax.types import Segment

NO_HOSTS = 3  # exit code
PORT = 6123
KINDS = ("learner", "reanalyser", "actor")
SETTINGS = ["run.log_interval=5", "run.checkpoint_interval=100000", "evaluation.at_end=false"]


class Layout(NamedTuple):
  """What is run, and the learner steps between which is counted."""

  presets: list[str]
  settings: list[str]
  first: int
  last: int


QUICK = {
  "batch": Layout(
    ["quickstart"],
    ["topology.learners=2", "topology.reanalysers=2", "reanalyse.schedule=batch", "actor.lanes=4",
     "actor.random_steps=100", "run.env_steps=200", "learner.steps=30"],
    first=5, last=20,
  )
}  # fmt: skip
FULL = {
  schedule: Layout(
    ["atari_small"],
    ["topology.learners=2", "topology.actors=2", "topology.reanalysers=2", f"reanalyse.schedule={schedule}",
     # The preset's four agent steps per learner step; few simulations, which do not travel.
     "actor.random_steps=400", "run.env_steps=680", "learner.steps=70", "search.simulations=4", "refresh.block=64"],
    first=15, last=55,  # with the intervals of 10 at which weights are sent
  )
  for schedule in ("batch", "sweep")
}  # fmt: skip


class Counted(NamedTuple):
  """The wires at one moment."""

  step: int  # of the learner
  agent_steps: int
  sent: dict[tuple[str, str], int]  # bytes, by sender and receiver; `lo` is a host itself


def run(layout: Layout, config: Config, folder: Path) -> tuple[Counted, Counted]:
  """Runs it to its end; what had been sent at its first and its last learner step of interest.

  Raises RuntimeError if a process fails, NoHosts.
  """
  shape = resolve(config)
  command = [
    sys.executable,
    str(ROOT / "launch/multihost.py"),
    "--config",
    *layout.presets,
    *layout.settings,
  ]
  command += [f"run.dir={folder}/run", "--coordinator", f"{shape.role(0)}:{PORT}"]
  command += ["--num-processes", str(shape.num_processes), "--process-id"]
  os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
  counted: list[Counted] = []
  metrics = folder / "run/metrics.jsonl"
  with hosts(
    {str(shape.role(i)): [*command, str(i)] for i in range(shape.num_processes)}, folder
  ) as made:
    there = list(made.values())
    for host in there:
      host.begin()
    while there[0].process.poll() is None and not any(host.process.poll() for host in there):
      row = jsonl.read_rows(metrics)[0][-1:] if metrics.exists() else []
      if row and len(counted) < 2 and row[0]["step"] >= (layout.first, layout.last)[len(counted)]:
        counted.append(Counted(row[0]["step"], row[0]["env_steps"], _sent(there)))
      time.sleep(0.05)
    failed = [
      f"--- {host.name} has not ended well:\n{host.log.read_text()}"
      for host in there
      if host.process.poll()
    ]
    if (
      there[0].process.poll() != 0
    ):  # once it has ended well, others that it waits for no longer are aborted
      raise RuntimeError("\n".join(failed))
  first, last = counted
  return first, last


def _sent(there: list[Host]) -> dict[tuple[str, str], int]:
  return {(host.name, other): count for host in there for other, count in host.sent().items()}


def per_step(first: Counted, last: Counted, shape: Topology) -> dict[str, Any]:
  """Bytes per learner step: of each wire and direction, and of all between roles of these kinds."""
  roles = {str(shape.role(number)): shape.role(number) for number in range(shape.num_processes)}
  wires, sums = {}, {}
  for (sender, receiver), count in last.sent.items():
    rate = (count - first.sent[sender, receiver]) / (last.step - first.step)
    wires[f"{sender} to {receiver}"] = rate
    if receiver == "lo":
      between = "loopback"
    elif (
      roles[sender].unit == roles[receiver].unit
      or roles[sender].kind == roles[receiver].kind == "learner"
    ):
      between = ", ".join(sorted((roles[sender].kind, roles[receiver].kind), key=KINDS.index))
    else:
      between = "jax's coordinator"  # on the first learner's host, with processes of other units
    sums[between] = sums.get(between, 0.0) + rate
  return {"wires": wires, "sums": {between: rate for between, rate in sums.items() if rate}}


def arithmetic(
  config: Config, shape: Topology, transitions: float, agent_steps: float
) -> dict[str, dict[str, float]]:
  """Bytes per learner step of all units that the messages add up to.

  Args:
    config: of the run.
    shape: of the run, with a reanalyser for each unit, and an actor or none.
    transitions: held by all units.
    agent_steps: taken per learner step.
  """
  units, own, game = shape.learners, unit_config(config, 0, shape.learners), game_of(config)
  form = learner_process.form_of(config, own)
  version = sum(leaf.size * leaf.dtype.itemsize for leaf in form.weights.values())
  parameters = jax.eval_shape(blueprint_of(config, game).init, jax.random.key(0)).params
  samples, states = own.learner.batch_size, config.agent.loss.unroll_steps + 1
  blocks = versions = 0.0
  if config.agent.reanalyse.schedule == "batch":
    searched = round(config.agent.reanalyse.ratio * samples)
    blocks += looked_at(form, config, searched, states, True) + looked_at(
      form, config, samples, states, False
    )
    versions += 1 / config.agent.reanalyse.weights_interval
  for kind in sweeps(config):
    part = config.agent.refresh if kind == "refresh" else config.agent.reanalyse
    queue = Sweep(own.actor.lanes, replay_capacity(own))
    for lane in range(own.actor.lanes):
      queue.grow(lane, 0, round(transitions / config.actor.lanes))
    block = block_of(part)
    quota = queue.quota(
      block, part.max_age, max(part.weights_interval, config.actor.weights_interval)
    )
    blocks += quota / block * looked_at(form, config, block, 1, kind == "reanalyse")
    versions += 1 / part.weights_interval
  frames, experience = shown(form, own.actor.lanes)
  gradients = sum(4 * leaf.size for leaf in jax.tree.leaves(parameters))
  found = {
    "learner, learner": {"gradients": 2.0 * (units - 1) * gradients},  # as a ring; none is shorter
    "learner, reanalyser": {
      "weights": units * versions * version,
      "frames": agent_steps * frames,
      "blocks and results": units * blocks,
    },
  }
  if shape.actors:
    found["learner, actor"] = {
      "weights": units * version / config.actor.weights_interval,
      "experience": agent_steps * experience,
    }
  return found


def looked_at(form: codec.Form, config: Config, n: int, states: int, search: bool) -> int:
  """Bytes of a block of n times so many states in a row, and of its result."""
  number = np.zeros((n, config.env.frame_stack - 1 + states), np.int32)
  block = messages.Block(0, search, "reanalyser", number[:, 0], number, 0, 0)
  value = np.zeros((n, states), np.float32)
  policy = np.zeros((n, states, form.actions), np.float32)
  result = messages.Result(0, 0, 0, 0, policy[: n * search], value[: n * search], value)
  return len(codec.encode(block, form)) + len(codec.encode(result, form))


def shown(form: codec.Form, lanes: int) -> tuple[float, float]:
  """Bytes per agent step, of frames for a reanalyser and of experience, where a message holds a step of all lanes."""
  frame, number = np.zeros((lanes, *form.frame_shape), form.frame_dtype), np.zeros(lanes, np.int32)
  no, zero, policy = (
    np.zeros(1, bool),
    np.zeros(1, np.float32),
    np.zeros((1, form.actions), np.float32),
  )
  taken = [
    Segment(lane, 0, frame[:1], no, no, no, number[:1], zero, policy, zero, zero, number[:1])
    for lane in range(lanes)
  ]
  chunk = messages.FramesChunk(0, number, number, frame)
  append = messages.Append(0, 0, 0, taken, np.zeros(0), np.zeros(0, np.int64))
  return len(codec.encode(chunk, form)) / lanes, len(codec.encode(append, form)) / lanes


def batch_bytes(config: Config, game: Game) -> int:
  """Of a `LearnerBatch`."""
  unrolled = config.agent.loss.unroll_steps
  frames = (
    (config.env.frame_stack + unrolled) * math.prod(game.frame_shape) * game.frame_dtype.itemsize
  )
  numbers = 1 + 4 * unrolled + (unrolled + 1) * (3 + game.num_actions)
  return config.learner.batch_size * (frames + 4 * numbers)


def report(
  name: str,
  config: Config,
  shape: Topology,
  transitions: float,
  agent_steps: float,
  counted: dict[str, float],
) -> dict[str, Any]:
  """Prints what was counted, if it was, beside what messages add up to; returns both. Arguments as of `arithmetic`."""
  added, whole = (
    arithmetic(config, shape, transitions, agent_steps),
    batch_bytes(config, game_of(config)),
  )
  print(
    f"{name}: {shape}, batch {config.learner.batch_size}, {agent_steps:.1f} agent steps a learner step"
  )
  print(f"  {'bytes per learner step':24}{'counted':>14}{'messages':>14}  of which")
  for between in dict.fromkeys([*added, *counted]):
    parts = added.get(between, {})
    total = f"{sum(parts.values()):14,.0f}" if parts else f"{'':14}"
    count = f"{counted[between]:14,.0f}" if between in counted else f"{'':14}"
    print(
      f"  {between:24}{count}{total}  {', '.join(f'{part} {size:,.0f}' for part, size in parts.items())}"
    )
  instead = sum(added["learner, reanalyser"][part] for part in ("frames", "blocks and results"))
  times = f"{whole / instead:.0f} times frames, blocks and results"
  print(f"  {'whole batches':24}{'':14}{whole:14,.0f}  {times}", flush=True)
  return {
    "name": name,
    "topology": str(shape),
    "batch_size": config.learner.batch_size,
    "transitions": transitions,
    "agent_steps_per_learner_step": agent_steps,
    "counted_bytes_per_learner_step": counted,
    "messages_bytes_per_learner_step": added,
    "whole_batches_bytes_per_learner_step": whole,
    "times_frames_blocks_and_results": whole / instead,
  }


def main() -> int:
  """Measures and reports."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--quick", action="store_true", help="Catch instead of Atari")
  parser.add_argument("--out", type=Path, help="JSON file")
  parser.add_argument("settings", nargs="*", metavar="key=value", help="more settings of the run")
  arguments = parser.parse_args()
  rows = []
  for schedule, layout in (QUICK if arguments.quick else FULL).items():
    layout = layout._replace(settings=[*layout.settings, *SETTINGS, *arguments.settings])
    config = loader.load(layout.presets, layout.settings)
    shape = resolve(config)
    with tempfile.TemporaryDirectory(prefix="hosts-") as folder:
      try:
        first, last = run(layout, config, Path(folder))
      except NoHosts as error:
        print(f"no hosts can be made here: {error}", file=sys.stderr)
        return NO_HOSTS
    rates = per_step(first, last, shape)
    agent_steps = (last.agent_steps - first.agent_steps) / (last.step - first.step)
    held = (first.agent_steps + last.agent_steps) / 2
    name = f"{layout.presets[0]}, {schedule}"
    row = report(name, config, shape, held, agent_steps, rates["sums"])
    rows.append(
      row
      | {"learner_steps": [first.step, last.step], "wires_bytes_per_learner_step": rates["wires"]}
    )
  for presets in () if arguments.quick else (["atari100k"], ["atari100k", "sweep"]):
    config = loader.load(presets, [])
    steps = (config.run.env_steps - config.actor.random_steps) / config.learner.steps
    rows.append(
      report("+".join(presets), config, Topology(2, 2, 2), config.run.env_steps, steps, {})
    )
  write(arguments.out, {"load_average": os.getloadavg()[0], "rows": rows})
  return 0


if __name__ == "__main__":
  sys.exit(main())
