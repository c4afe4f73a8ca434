"""Tests of the table that a study shows on a terminal."""

import io
import json

from rich.console import Console

from speedyzero_jax.config import loader
from speedyzero_jax.study import table
from speedyzero_jax.study.study import StudyRun

CONFIG = loader.load(["quickstart"], ["learner.steps=10", "run.env_steps=600"])


def run(folder, variant, seed, step=None, score=None):
  """A run after learner step `step` (None: not begun), evaluated with this score."""
  path = folder / f"{variant}-Catch-s{seed}"
  if step is not None:
    path.mkdir()
    (path / "metrics.jsonl").write_text(json.dumps({"step": step, "env_steps": 60 * step}) + "\n")
  if score is not None:
    (path / "evaluation.json").write_text(json.dumps({"mean": score, "step": step}))
  return StudyRun(variant, "Catch", seed, path, [], CONFIG)


def test_every_run_has_a_cell_and_those_in_training_come_first(tmp_path):
  runs = [
    run(tmp_path, "done", 0, 10, 0.5), run(tmp_path, "done", 1, 10, 0.75),
    run(tmp_path, "mixed", 0, 3), run(tmp_path, "mixed", 1, 7),
    run(tmp_path, "new", 0), run(tmp_path, "new", 1, 2),
  ]  # fmt: skip
  drawn = table.draw(runs, running={runs[3].path}, failed={runs[5].path})
  console = Console(width=80, file=io.StringIO())
  console.print(drawn)
  rows = [line.split() for line in console.file.getvalue().splitlines() if "Catch" in line]
  assert rows == [
    ["mixed", "Catch", "30%", "|", "70%"], ["done", "Catch", "0.5", "0.75"],
    ["new", "Catch", "-", "failed"],
  ]  # fmt: skip
