"""AlphaZero's results against random play, minimax and plain tree search, over several seeds.

    python benchmarks/boards.py --out benchmarks/results/alphazero-TicTacToe.json
    python benchmarks/boards.py --game ConnectFour --against random mcts:200

Run folders are kept: seeds that have finished are not repeated and interrupted ones resume.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import ROOT, parser_of, positive, write
from runs import ENV_STEPS, STEP, TIME, Row, Run, run_all


def size(rows: list[Row]) -> dict[str, Any]:
  """What a run has cost."""
  last = rows[-1]
  return {"learner_steps": last[STEP], "env_steps": last[ENV_STEPS], "minutes": last[TIME] / 60}


def main() -> None:
  parser = parser_of(__doc__)
  parser.add_argument("--game", default="TicTacToe")
  parser.add_argument("--against", nargs="+", default=["random", "minimax"], metavar="OPPONENT")
  parser.add_argument("--games", type=positive, default=100, metavar="N", help="of each pair")
  parser.add_argument("--set", nargs="*", default=[], metavar="key=value", help="overrides")
  parser.add_argument("--seeds", type=positive, default=5, metavar="N", help="run.seed=0 to N-1")
  parser.add_argument("--work", type=Path, default=ROOT / "runs/boards", help="run folders")
  arguments = parser.parse_args()
  settings = [f"env.game={arguments.game}", *arguments.set]
  runs = {
    seed: Run(
      arguments.work / f"{arguments.game}-s{seed}", ["alphazero"], [*settings, f"run.seed={seed}"]
    )
    for seed in range(arguments.seeds)
  }
  try:
    found = run_all(runs, size, parallel=False)
    command = [sys.executable, "launch/match.py", *(str(run.folder) for run in runs.values())]
    command += ["--against", *arguments.against, "--games", str(arguments.games)]
    subprocess.run(command, cwd=ROOT, check=True)
  except KeyboardInterrupt:
    sys.exit("stopped; the same command resumes")
  except (RuntimeError, subprocess.CalledProcessError) as error:
    sys.exit(f"error: {error}")
  matches = json.loads((runs[0].folder / "matches.json").read_text())
  write(arguments.out, {"settings": settings, "runs": list(found.values()), "matches": matches})


if __name__ == "__main__":
  main()
