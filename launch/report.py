"""Compares runs: a row per run folder, a summary over seeds, and an HTML page with the details.

  python launch/report.py runs/*
  python launch/report.py runs/* --out report.html --json report.json

Reads `config.yaml`, `starts.jsonl`, `metrics.jsonl` and `evaluation.json` of finished and
unfinished runs, and reports missing and damaged files. Needs neither jax nor the machine that
trained the runs. Exit codes: 0 done; 1 a file can't be written; 2 there is no run to report.
"""

import argparse
import io
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for uninstalled clones

from speedyzero_jax.report import page, terminal
from speedyzero_jax.report.groups import to_json
from speedyzero_jax.report.runs import read_runs
from speedyzero_jax.system.exit_codes import FAILED, USAGE_ERROR


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the command line. Returns the exit code."""
  parser = argparse.ArgumentParser(
    prog="launch/report.py", description=(__doc__ or "").split("\n\n")[0]
  )
  parser.add_argument(
    "runs", nargs="+", type=Path, metavar="RUN_DIR", help="run folders, or folders of runs"
  )
  parser.add_argument("--out", type=Path, metavar="PATH", help="HTML page to write")
  parser.add_argument(
    "--json", type=Path, metavar="PATH", help="JSON file to write: scores, curves, hardware"
  )
  options = parser.parse_args(arguments)
  runs = read_runs(options.runs)
  if all(run.problems == ["no run here"] for run in runs):
    print(f"report.py: no run in {', '.join(map(str, options.runs))}", file=sys.stderr)
    return USAGE_ERROR
  try:
    if options.json:
      options.json.write_text(to_json(runs))
    if options.out:
      options.out.write_bytes(page.render(runs))
      print(f"wrote {options.out}", file=sys.stderr)
  except OSError as error:
    print(f"report.py: {error}", file=sys.stderr)
    return FAILED
  terminal.show(runs, Console())  # last, as a closed pipe ends the process
  return 0


if __name__ == "__main__":
  signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `report.py ... | head` ends as other programs do
  if isinstance(sys.stdout, io.TextIOWrapper):
    sys.stdout.reconfigure(errors="replace")  # for encodings without "±"
  sys.exit(main())
