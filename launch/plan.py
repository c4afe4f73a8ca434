"""Plans a run on GPUs that need not be present: launch/plan.py --config PRESET ... --target h200

Compiles every program of the run's learner processes for the target. Prints memory, kernel
launches, collectives, host round trips, FLOPs, bytes and projected time per device, and the minutes
of the whole run; --out writes them as JSON, too. `make gpu-plan` installs the compiler.

Exit codes: 0 done; 1 jax can't compile for GPUs on this machine; 2 usage error; 3 the run needs
more than 75% of a device's memory.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for uninstalled clones

from launch import multihost
from speedyzero_jax.config import loader
from speedyzero_jax.system.exit_codes import FAILED, USAGE_ERROR

ROOT = Path(__file__).resolve().parent.parent
_COMPILER = re.compile(r"jax|jaxlib|jax-cuda\d+-pjrt")  # packages
TOO_LARGE = 3  # exit code besides those of `system.exit_codes`


def parse(argv: Sequence[str]) -> argparse.Namespace:
  """Parses the command line."""
  parser = argparse.ArgumentParser(
    prog="launch/plan.py", description="Plans a run on GPUs that need not be present."
  )
  add = parser.add_argument
  add("--config", nargs="+", action="extend", required=True, metavar="PRESET", help="presets")
  add("--target", default="h200", help="GPU: a100, h100 or h200 (default: h200)")
  add(
    "--devices", type=multihost.device_ids, default=[1], metavar="N,...",
    help="numbers of devices of all learner processes, with a plan for each (default: 1)",
  )  # fmt: skip
  add(
    "--processes", type=multihost.process_counts, metavar="KIND=N,...",
    help="learner=N,actor=N,refresher=N: work of actors and refreshers is left out of the plan",
  )  # fmt: skip
  add("--only", metavar="NAME,...", help="programs to plan: train, act, evaluate, publish, tasks")
  add("--out", type=Path, metavar="FILE", help="JSON file to write")
  arguments = multihost.parse_with_overrides(parser, argv)
  arguments.overrides += arguments.processes or []
  return arguments


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line. Returns the exit code."""
  arguments = parse(sys.argv[1:] if argv is None else argv)
  sys.path.append(str(ROOT / ".venv" / "gpu-compiler"))  # from `make gpu-plan`
  os.environ["JAX_PLATFORMS"] = "cpu"  # otherwise jax looks for the target's driver
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
  from speedyzero_jax.plan import plan, target
  from speedyzero_jax.run import topology

  try:
    device = target.load(arguments.target)
    config = topology.with_learners(loader.load(arguments.config, arguments.overrides))
    shape = topology.resolve(config)
    if config.topology.gradients == "actors":
      raise ValueError("topology.gradients: only programs of a learner that trains can be planned")
    for devices in arguments.devices:
      if devices < 1 or devices % shape.learners:
        raise ValueError(f"--devices: {devices} can't be divided among {shape.learners} learners")
    if arguments.out:
      _check_writable(arguments.out)
    plans = {
      devices: plan.make_plan(
        config,
        device,
        devices,
        only=arguments.only.split(",") if arguments.only else None,
        report=_report,
      )
      for devices in arguments.devices
    }
  except ValueError as error:
    _report(f"error: {error}")
    return USAGE_ERROR
  except RuntimeError as error:
    _report(f"error: {error}")
    return FAILED
  for devices, each in plans.items():
    print(plan.tables(each, device, devices))
  if arguments.out:
    given = sys.argv[1:] if argv is None else argv
    result = {
      "command": " ".join(["python", "launch/plan.py", *given]),
      "target": device.name,
      "processes": shape.learners,
      "versions": {x.name: x.version for x in distributions() if _COMPILER.fullmatch(x.name or "")},
      "assumptions": plan.ASSUMPTIONS,
      "plans": [{"devices": devices} | each.as_dict() for devices, each in plans.items()],
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
  return 0 if arguments.only or all(each.fits for each in plans.values()) else TOO_LARGE


def _check_writable(path: Path) -> None:
  if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
    raise ValueError(f"--out: can't write {path}")


def _report(line: str) -> None:
  print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
  sys.exit(main())
