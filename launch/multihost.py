"""Trains an agent: python launch/multihost.py --config PRESET [PRESET ...] [key=value ...]

A run is one process, unless --processes, a cluster (Slurm, Open MPI, Kubernetes, ...) or
--coordinator makes this process one of several.

Exit codes: 0 finished, or paused (run.pause_at); 1 failed; 2 usage error (such as an unknown key or
an unusable folder); 129, 130 or 143 stopped by a closed terminal, Ctrl-C or SIGTERM after saving a
checkpoint; 134 one of several processes lost another or had an error of a device. Continue with
--resume RUN_DIR.
"""

import argparse
import contextlib
import fcntl
import logging
import os
import re
import socket
import sys
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for uninstalled clones

from speedyzero_jax.config import loader
from speedyzero_jax.config.fields import ConfigError
from speedyzero_jax.config.schema import Config
from speedyzero_jax.run import run_dir, topology
from speedyzero_jax.run.run_dir import RunDir
from speedyzero_jax.system.exit_codes import FAILED, USAGE_ERROR
from speedyzero_jax.system.own_code import location


def parse(argv: Sequence[str]) -> argparse.Namespace:
  """Parses the command line, or prints the help and exits.

  Raises ConfigError if the agent whose settings the help lists is unknown.
  """
  parser = argparse.ArgumentParser(
    prog="launch/multihost.py",
    description="Trains and evaluates an agent.",
    formatter_class=argparse.RawDescriptionHelpFormatter,
    add_help=False,
  )
  add = parser.add_argument
  add("-h", "--help", action="store_true", help="show this message, with all settings, and exit")
  presets = "presets from configs/; later ones take precedence"
  add("--config", nargs="+", action="extend", metavar="PRESET", default=[], help=presets)
  add("--resume", type=Path, metavar="RUN_DIR", help="continue this run")
  started = "start and supervise processes on this machine, e.g. learner=1,actor=1,refresher=2"
  add("--processes", type=process_counts, metavar="KIND=N,...", help=started)
  coordinator = "address of process 0, if there are several"
  add("--coordinator", type=_address, metavar="HOST:PORT", help=coordinator)
  add("--num-processes", type=int, metavar="N", help="total number of processes")
  add("--process-id", type=int, metavar="I", help="index of this process, from 0")
  devices = "ids of the accelerators to use, if there are several processes (default: all)"
  add("--devices", metavar="I,...", type=device_ids, help=devices)
  arguments = parse_with_overrides(parser, argv, "settings, listed below")
  if arguments.help:
    if arguments.resume is None:
      agent = loader.agent_of(arguments.config, arguments.overrides)
    else:
      agent = run_dir.read_config(arguments.resume).agent.name
    parser.epilog = loader.help_text(agent)
    parser.print_help()
    parser.exit()
  if arguments.resume is None and not arguments.config:
    parser.error("--config PRESET or --resume RUN_DIR is required")
  if arguments.resume is not None and arguments.config:
    parser.error("--resume reads the configuration from the run folder; omit --config")
  place = [arguments.coordinator, arguments.num_processes, arguments.process_id]
  if any(x is not None for x in place) and None in place:
    parser.error("--coordinator, --num-processes and --process-id must be given together")
  if arguments.coordinator and not 0 <= arguments.process_id < arguments.num_processes:
    parser.error("--process-id: must be at least 0 and less than --num-processes")
  if arguments.processes and (arguments.coordinator or arguments.devices):
    parser.error("--processes assigns coordinator and devices; omit --coordinator and --devices")
  arguments.overrides += arguments.processes or []
  return arguments


def _address(text: str) -> str:
  host, _, port = text.rpartition(":")
  if not (host and port.isdecimal() and 0 < int(port) < 1 << 16):
    raise argparse.ArgumentTypeError(f"expected HOST:PORT, got {text!r}")
  return text


def device_ids(text: str) -> list[int]:
  """Parses `0,1` as integers. Raises ValueError if it can't."""
  return [int(index) for index in text.split(",")]


def process_counts(text: str) -> list[str]:
  """Parses `learner=1,actor=2` as overrides."""
  counts = dict.fromkeys(("learner", "actor", "refresher"), "0")
  parts = [part.partition("=") for part in text.split(",")]
  for kind, _, count in parts:
    if kind not in counts or not count.isdecimal():
      raise argparse.ArgumentTypeError(f"expected learner=N,actor=N,refresher=N, got {text!r}")
    counts[kind] = count
  if len({kind for kind, *_ in parts}) < len(parts) or not int(counts["learner"]):
    raise argparse.ArgumentTypeError(f"expected each kind once and a learner, got {text!r}")
  return [f"topology.{kind}s={count}" for kind, count in counts.items()]


def parse_with_overrides(
  parser: argparse.ArgumentParser,
  argv: Sequence[str],
  help_: str = "settings (see launch/multihost.py --help)",
) -> argparse.Namespace:
  """Parses a command line with `--config` and `key=value` overrides, in any order.

  An argument that is neither an option's nor an override is an error.
  """
  parser.add_argument("overrides", nargs="*", metavar="key=value", help=help_)
  arguments = parser.parse_intermixed_args(argv)
  stray = arguments.overrides
  arguments.overrides = separate_overrides(argv, stray, arguments.config)
  if stray:
    parser.error(f"presets follow --config and settings are key=value; got {' '.join(stray)}")
  return arguments


def separate_overrides(argv: Sequence[str], *lists: list[str]) -> list[str]:
  """Removes overrides from lists of arguments, and returns them in the order of `argv`.

  Argparse adds those that follow an option with several arguments, such as presets, to these.
  """
  overrides = dict.fromkeys(text for texts in lists for text in texts if "=" in text)
  for texts in lists:
    texts[:] = [text for text in texts if "=" not in text]
  ordered = [text for text in argv if text in overrides]  # the last of a key applies
  return ordered + [text for text in overrides if text not in ordered]  # of --config=key=value


def configuration(arguments: argparse.Namespace, num_processes: int | None) -> Config:
  """Returns the configuration for `num_processes` processes; None: the number configured.

  Raises ConfigError if a setting is invalid, or there is no run to resume.
  """
  if arguments.resume is not None:
    return run_dir.resumed(arguments.resume, arguments.overrides)
  # Stored with the resolved number of learners, among which the run is divided.
  return topology.with_learners(loader.load(arguments.config, arguments.overrides), num_processes)


def open_folder(arguments: argparse.Namespace, config: Config) -> RunDir:
  """Creates or opens the run folder. Raises ConfigError if it can't be used."""
  if arguments.resume is not None:
    return run_dir.open_existing(arguments.resume)
  preset = "+".join(Path(name).stem for name in arguments.config)
  return run_dir.create(config, f"{preset}-{config.env.game}-s{config.run.seed}")


def check_env(config: Config) -> None:
  """Raises ConfigError for environments that can't be created; writes nothing."""
  from speedyzero_jax.envs.batched_env import check_game, make_env

  try:
    check_game(config.env.game)
    cap = config.evaluation.max_episode_steps
    make_env(config.env, 1, config.run.seed, training=False, max_episode_steps=cap).close()
  except (ValueError, TypeError) as error:  # TypeError: from envpool, for invalid numbers
    raise ConfigError(f"env: {_first_line(error)}{location(error)}") from error


def check_possible(config: Config) -> None:
  """Raises ConfigError for settings that can't be used on machines like this; writes nothing."""
  import jax

  from speedyzero_jax.run.factories import device_count, make_agent
  from speedyzero_jax.workers.sweeper import make_sweepers

  learners, local = max(config.topology.learners, 1), device_count()
  if jax.process_count() > 1:
    local = min(len(jax.local_devices(unit)) for unit in range(learners))
  devices = (config.learner.devices or local) * learners
  if config.learner.batch_size % devices:
    raise ConfigError(
      f"learner.batch_size: must be a multiple of the {devices} devices used, "
      f"got {config.learner.batch_size}"
    )
  if config.learner.devices > local:
    raise ConfigError(
      f"learner.devices: must be at most {local}, the fewest devices of any learner process, "
      f"got {config.learner.devices}"
    )
  check_env(config)
  try:
    agent = make_agent(config)
    make_sweepers(agent, config.actor.weights_interval)
  except (ValueError, TypeError, ArithmeticError) as error:
    raise ConfigError(f"{_first_line(error)}{location(error)}") from error
  if config.topology.gradients == "actors" and (agent.tasks or agent.target_interval):
    raise ConfigError(
      f"topology.gradients: must be learner, as {config.agent.name} with these settings has "
      f"{'background tasks' if agent.tasks else 'a target network'}, got actors"
    )


def _first_line(error: Exception) -> str:
  return str(error).strip().partition("\n")[0]


def supervise(arguments: argparse.Namespace) -> int:
  """Starts and restarts all processes on this machine. Returns the exit code."""
  from speedyzero_jax.cluster import devices
  from speedyzero_jax.cluster.child import Child
  from speedyzero_jax.cluster.supervisor import Supervisor
  from speedyzero_jax.metrics.progress import TERMINAL
  from speedyzero_jax.system.gpus import local_gpus

  count, config = local_gpus(), configuration(arguments, None)
  shape = topology.resolve(config)
  central = config.topology.inference == "central"
  gpus = devices.assign_devices(
    shape, count, config.learner.batch_size, per_learner=config.learner.devices, central=central
  )
  check_env(config)  # the agent and the devices are checked by process 0
  with open_folder(arguments, config) as folder:  # process 0 opens it again
    path = folder.path
  print(f"processes: {shape.counts}", flush=True)
  if count:
    print(f"GPUs: {devices.describe_devices(shape, gpus, count)}", flush=True)
  changes = arguments.overrides if arguments.resume is not None else []

  terminal = fcntl.fcntl(sys.stdout.fileno(), fcntl.F_DUPFD, 3)  # not 0, if stdin is closed

  def saved(unit: Path) -> int:  # the learner step of a unit's newest checkpoint
    names = (re.fullmatch(r"(\d+)-\d+", each.name) for each in unit.glob("checkpoints/*"))
    return max((int(name[1]) for name in names if name), default=-1)

  def progress() -> int:
    return min(saved(unit) for unit in (path, *path.glob("units/*")))

  def child(process_id: int) -> Child:
    role, assigned = shape.role(process_id), gpus[process_id]
    command = [sys.executable, __file__, "--resume", str(path), "--coordinator", address]
    command += ["--num-processes", str(shape.num_processes), "--process-id", str(process_id)]
    command += changes
    environment: dict[str, str] = {}
    files: tuple[int, ...] = ()
    if assigned is not None:
      command += ["--devices", ",".join(map(str, assigned.ids))]
      environment |= devices.memory_variables(assigned.memory)
    if process_id == 0:  # shows the run's progress on this terminal; its output goes to a log
      environment[TERMINAL], files = str(terminal), (terminal,)
    return Child(str(role), command, environment, role.kind == "learner", files)

  with run_dir.supervised(path), socket.socket() as held:
    # Reserves the port across restarts; only sockets with SO_REUSEPORT (gRPC's) may share it.
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{held.getsockname()[1]}"
    children = [child(process_id) for process_id in range(shape.num_processes)]
    report = partial(print, flush=True)
    return Supervisor(children, path / "logs", report, progress=progress).run()


def run_process(arguments: argparse.Namespace) -> int:
  """Runs this process' part of the run. Returns the exit code."""
  from speedyzero_jax.cluster import process, rendezvous
  from speedyzero_jax.run.signals import Signals
  from speedyzero_jax.run.train import train
  from speedyzero_jax.system import memory

  memory.retain_freed()
  place = (
    rendezvous.detect()
    if arguments.coordinator is None
    else rendezvous.Place(arguments.coordinator, arguments.num_processes, arguments.process_id)
  )
  resume, count = arguments.resume is not None, place and place.num_processes

  def configure() -> Config:
    return configuration(arguments, count)

  def open_checked(config: Config) -> RunDir:
    check_possible(config)
    return open_folder(arguments, config)

  if place is not None:
    return process.main(place, configure, open_checked, resume=resume, devices=arguments.devices)
  if arguments.devices:
    raise ConfigError("--devices is for one of several processes; set CUDA_VISIBLE_DEVICES instead")
  with Signals() as signals:
    config = configure()
    shape = topology.resolve(config)
    if shape.num_processes > 1:
      raise ConfigError(
        "topology: several processes are configured; start them on a cluster, or on this machine "
        f"with --processes {shape.counts}"
      )
    with open_checked(config) as folder:
      print(f"processes: {shape.counts}", flush=True)
      return train(config, folder.path, resume=resume, signals=signals)


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line. Returns the exit code."""
  for name in ("stdout", "stderr"):
    if getattr(sys, name) is None:  # closed before the start (>&-)
      setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA's messages about its cache
  os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # gRPC's messages when servers stop
  logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
  try:
    arguments = parse(sys.argv[1:] if argv is None else argv)
    return supervise(arguments) if arguments.processes else run_process(arguments)
  except ConfigError as error:
    print(f"error: {error}", file=sys.stderr)
    return USAGE_ERROR


if __name__ == "__main__":
  try:
    code = main()
  except Exception:
    traceback.print_exc()
    code = FAILED
  for stream in (sys.stdout, sys.stderr):
    with contextlib.suppress(OSError):  # a closed terminal
      stream.flush()
  os._exit(code)  # everything is saved; library threads must not delay the exit
