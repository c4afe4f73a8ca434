"""Sends metrics of runs to Weights & Biases: python launch/wandb_sync.py RUN_DIR ... --project NAME

Metrics have the same names as in metrics.jsonl and TensorBoard, over learner steps. Repeating the
command sends only new lines, or those of an interrupted upload again; RUN_DIR/wandb.json records
what was sent; another project gets all lines again. Training needs neither the package nor a
network. WANDB_MODE=offline keeps everything in RUN_DIR/wandb.

Exit codes: 0 done; 1 an upload failed; 2 usage error.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for uninstalled clones

from speedyzero_jax.metrics import names
from speedyzero_jax.report.runs import read_runs
from speedyzero_jax.system.exit_codes import USAGE_ERROR
from speedyzero_jax.system.files import write_atomically


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line. Returns the exit code."""
  parser = argparse.ArgumentParser(
    prog="launch/wandb_sync.py", description="Sends metrics of runs to Weights & Biases."
  )
  parser.add_argument(
    "runs", nargs="+", type=Path, metavar="RUN_DIR", help="run folders, or folders of runs"
  )
  parser.add_argument("--project", required=True, metavar="NAME", help="Weights & Biases project")
  arguments = parser.parse_args(argv)
  try:
    import wandb
  except ImportError:
    print("error: wandb is not installed: make wandb", file=sys.stderr)
    return USAGE_ERROR
  runs = read_runs(arguments.runs)
  if all(run.problems == ["no run here"] for run in runs):
    print(f"error: no run in {', '.join(run.path for run in runs)}", file=sys.stderr)
    return USAGE_ERROR
  for read in runs:
    folder = Path(read.path)
    state = folder / "wandb.json"
    try:
      sent = {} | json.loads(state.read_text()) if state.exists() else {}
    except (ValueError, TypeError):
      print(f"error: {state} is damaged; remove it to send all lines again", file=sys.stderr)
      return USAGE_ERROR
    if sent.get("project", arguments.project) != arguments.project:
      sent = {}
    sent = {"id": None, "time": -1.0} | sent | {"project": arguments.project}
    rows = [row for row in read.rows if row.get(names.TIME, -1) > sent["time"]]  # time increases
    print(f"{folder}: {len(rows)} new lines of {len(read.rows)} {'; '.join(read.problems)}")
    if rows:
      options = {"name": folder.resolve().name, "config": read.settings, "dir": folder}
      with wandb.init(project=arguments.project, id=sent["id"], resume="allow", **options) as run:
        # If the upload is cut short, the next call sends its lines again, to the same run.
        write_atomically(state, json.dumps(sent | {"id": run.id}))
        run.define_metric("*", step_metric=names.STEP)
        for row in rows:
          run.log(row)
      sent |= {"id": run.id, "time": rows[-1][names.TIME]}  # all lines have been sent
      write_atomically(state, json.dumps(sent))
  return 0


if __name__ == "__main__":
  sys.exit(main())
