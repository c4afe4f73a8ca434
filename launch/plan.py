"""Plans a run on GPUs that need not be there: launch/plan.py --config PRESET ... --target h200

Compiles every program of the run's learner processes for the target and prints, for each device,
memory, kernel launches, collectives, host round trips, FLOPs, bytes and projected time, and the
minutes of the whole run; --out writes the same as JSON. `make gpu-plan` installs what it needs.

Exit codes: 0 done; 1 jax can't compile for GPUs here; 2 wrong use; 3 the run needs more memory than
a device has.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone works uninstalled

from launch import multihost
from speedyzero_jax.config import loader
from speedyzero_jax.config.loader import ConfigError
from speedyzero_jax.system.exit_codes import FAILED, USAGE_ERROR

ROOT = Path(__file__).resolve().parent.parent
TOO_LARGE = 3  # exit code besides those of `system.exit_codes`


def parse(argv: Sequence[str]) -> argparse.Namespace:
  """The command line."""
  parser = argparse.ArgumentParser(
    prog="launch/plan.py", description="Plans a run on GPUs that need not be there."
  )
  add = parser.add_argument
  add("--config", nargs="+", action="extend", required=True, metavar="PRESET", help="presets")
  add("--target", default="h200", help="GPU: a100, h100 or h200 (default: h200)")
  add(
    "--devices", type=multihost.device_ids, default=[1], metavar="N,...",
    help="of all learner processes (default: 1); a plan for each number",
  )  # fmt: skip
  add(
    "--processes", type=multihost.process_counts, metavar="KIND=N,...",
    help="learner=N,actor=N,refresher=N: what actors and refreshers do is not on these devices",
  )  # fmt: skip
  add("--only", metavar="NAME,...", help="programs: train, act, evaluate, publish, or tasks")
  add("--out", type=Path, metavar="FILE", help="JSON to write")
  add("overrides", nargs="*", metavar="key=value", help="settings (see launch/multihost.py --help)")
  arguments = parser.parse_args(argv)
  multihost.separate_overrides(arguments, argv)
  arguments.overrides += arguments.processes or []
  return arguments


def main(argv: Sequence[str] | None = None) -> int:
  """Returns the exit code."""
  arguments = parse(sys.argv[1:] if argv is None else argv)
  sys.path.append(str(ROOT / ".venv" / "gpu-compiler"))  # from `make gpu-plan`
  os.environ["JAX_PLATFORMS"] = "cpu"  # or jax looks for the target's driver
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
  from speedyzero_jax.plan import plan, target
  from speedyzero_jax.plan.programs import ROLES
  from speedyzero_jax.run import topology

  try:
    device = target.load(arguments.target)
    config = topology.with_learners(loader.load(arguments.config, arguments.overrides))
    shape = topology.resolve(config)
    for devices in arguments.devices:
      if devices < 1 or devices % shape.learners:
        raise ValueError(f"--devices: {devices} can't be divided over {shape.learners} learners")
    if arguments.out and not arguments.out.parent.is_dir():
      raise ValueError(f"--out: there is no folder {arguments.out.parent}")
    roles = frozenset(kind for kind in ROLES if not shape.serving(kind, 0))
    found = {
      devices: plan.make_plan(
        config,
        device,
        devices,
        processes=shape.learners,
        roles=roles,
        only=arguments.only.split(",") if arguments.only else None,
        report=_report,
      )
      for devices in arguments.devices
    }
  except (ConfigError, ValueError) as error:
    _report(f"error: {error}")
    return USAGE_ERROR
  except RuntimeError as error:
    _report(f"error: {error}")
    return FAILED
  for devices, each in found.items():
    print(plan.tables(each, device, devices))
  if arguments.out:
    given = sys.argv[1:] if argv is None else argv
    result = {
      "command": " ".join(["python", "launch/plan.py", *given]),
      "target": device.name,
      "processes": shape.learners,
      "versions": {name: version(name) for name in ("jax", "jaxlib", "jax-cuda12-pjrt")},
      "assumptions": plan.ASSUMPTIONS,
      "plans": [{"devices": devices} | each.as_dict() for devices, each in found.items()],
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
  return 0 if arguments.only or all(each.fits for each in found.values()) else TOO_LARGE


def _report(line: str) -> None:
  print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
  sys.exit(main())
