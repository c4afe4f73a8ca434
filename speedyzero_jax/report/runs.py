"""Reader of run folders for reports; tolerates missing and damaged files."""

import dataclasses
import json
import math
import os
import pathlib
import sys
from collections.abc import Iterable
from typing import Any

import yaml

from speedyzero_jax.envs.scores import human_normalized
from speedyzero_jax.metrics import jsonl, names
from speedyzero_jax.metrics.progress import format_number

GAME = "env.game"
CURVE = (names.STEP, names.ENV_STEPS, names.TIME, names.EPISODE_RETURN)
EVALUATIONS = (names.EVALUATION_STEP, names.EVALUATION_MEAN, names.EVALUATION_STD)
_POINTS = 50  # maximum points of a curve in JSON
REPETITION_KEYS = (  # repetitions may differ in these
  "run.seed", "run.dir", "run.compile_cache", "run.pause_at", "run.keep_checkpoints",
  "run.log_interval", "topology.host", "topology.token_file", "profile.steps",
)  # fmt: skip


@dataclasses.dataclass
class Run:
  """Contents of one run folder; fields are None or empty if its files lack them."""

  path: str
  game: str | None = None
  seed: int | None = None
  steps: int | None = None  # learner steps
  env_steps: float | None = None  # agent steps
  wall_seconds: float | None = None
  device_seconds: float | None = None  # wall-clock seconds times learner devices
  training_return: float | None = None  # mean raw return of the last 100 training games
  curve: list[float] = dataclasses.field(default_factory=list)  # training_return over time
  evaluation_step: int | None = None
  evaluation_mean: float | None = None
  evaluation_std: float | None = None
  evaluation_episodes: int | None = None
  evaluation_explore: bool = False
  human_normalized: float | None = None
  repeats: str | None = None  # path of a run with the same settings and seed, which counts instead
  problems: list[str] = dataclasses.field(default_factory=list)
  settings: dict[str, Any] | None = None  # by dotted key
  rows: list[dict[str, float]] = dataclasses.field(default_factory=list)  # of metrics.jsonl
  starts: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # of starts.jsonl
  device_seconds_by_row: list[float] = dataclasses.field(default_factory=list)  # up to each row

  @property
  def episodes(self) -> str:
    """Number and kind of the evaluated episodes."""
    explored = ", explored" if self.evaluation_explore and self.evaluation_episodes else ""
    return f"{format_number(self.evaluation_episodes)}{explored}"

  def summary(self) -> dict[str, Any]:
    """Summary for JSON.

    Has a curve of at most `_POINTS` points, all evaluations, and the last start's hardware.
    """
    omitted = {"settings", "rows", "starts", "curve", "device_seconds_by_row"}
    kept = {k: v for k, v in vars(self).items() if k not in omitted}
    points = [[row.get(name) for name in CURVE] for row in self.rows if CURVE[-1] in row]
    kept["curve"] = [*points[: -1 : len(points) // (_POINTS - 1) + 1], *points[-1:]]
    rows = ([row.get(name) for name in EVALUATIONS] for row in self.rows if EVALUATIONS[1] in row)
    kept["evaluations"] = list({row[0]: row for row in rows}.values())  # repeated in many rows
    return kept | {"start": self.starts[-1] if self.starts else None}

  def settings_but(self, *keys: str) -> str | None:
    """Key for comparing runs: all settings except `keys` and those of repetitions."""
    if self.settings is None:
      return None
    left = {k: v for k, v in self.settings.items() if k not in (*REPETITION_KEYS, *keys)}
    return json.dumps(left, sort_keys=True, default=str)


def read_runs(paths: Iterable[pathlib.Path]) -> list[Run]:
  """Reads run folders, each once, and marks those that repeat another's seed.

  Of several runs with the same settings and seed, the one with most learner steps counts, of equal
  ones one that is evaluated. A folder of runs, such as a study's, stands for all of them. Beside
  folders, files are ignored.
  """
  given = list(paths)
  folders = [path for path in given if not os.path.isfile(path)] or given
  unique = {path.resolve(): path for folder in folders for path in _runs_in(folder)}
  runs = [read_run(path) for path in unique.values()]
  counted: dict[tuple, str] = {}
  for run in sorted(runs, key=_progress, reverse=True):
    if run.settings is not None:
      key = run.settings_but(), run.evaluation_explore, run.seed
      same = counted.setdefault(key, run.path)
      if same != run.path:
        run.repeats = same
        run.problems.append(f"repeats the seed of {same}: not an independent run, not counted")
  return runs


def _progress(run: Run) -> tuple[int, bool]:
  return run.steps or 0, run.evaluation_mean is not None


def _runs_in(folder: pathlib.Path) -> list[pathlib.Path]:
  within = [path for path in sorted(folder.glob("*/")) if _is_run(path)]
  return [folder] if _is_run(folder) or not within else within


def _is_run(path: pathlib.Path) -> bool:
  # Unlike in `Path.exists`, a folder without permission is no error.
  return any(os.path.exists(path / name) for name in _READERS)


def read_run(path: pathlib.Path) -> Run:
  """Reads a run folder; missing and damaged files become `problems`."""
  run = Run(str(path))
  if not _is_run(path):
    run.problems.append("no run here")
    return run
  for name, read in _READERS.items():
    try:
      read(run, path / name)
    except FileNotFoundError:
      run.problems.append(f"no {name}")
    except OSError as error:
      run.problems.append(f"{name}: {error.strerror}")
    except (
      ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError,
      yaml.YAMLError,
    ):  # fmt: skip
      run.problems.append(f"{name} is damaged")
  return run


def _read_config(run: Run, path: pathlib.Path) -> None:
  settings = _flat(yaml.safe_load(path.read_text()))
  run.game, run.seed = str(settings[GAME]), int(_finite(settings["run.seed"]))
  run.settings = settings
  run.evaluation_explore = bool(settings.get("evaluation.explore"))  # until there is an evaluation


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
  flat: dict[str, Any] = {}
  for key, value in tree.items():
    flat |= (
      _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    )
  return flat


def _read_starts(run: Run, path: pathlib.Path) -> None:
  starts, damaged = jsonl.read_rows(path)
  _note_damaged(run, path, damaged)
  for start in starts:
    versions = {str(name): str(version) for name, version in start["versions"].items()}
    run.starts.append(start | {"devices": int(_finite(start["devices"])), "versions": versions})


def _read_metrics(run: Run, path: pathlib.Path) -> None:
  rows, damaged = jsonl.read_rows(path)
  _note_damaged(run, path, damaged)
  finite = [{sys.intern(name): x for name, x in row.items() if _is_finite(x)} for row in rows]
  run.rows = [row for row in finite if names.STEP in row]
  if not run.rows:
    run.problems.append("metrics.jsonl is empty")
    return
  run.steps, last = max(int(row[names.STEP]) for row in run.rows), run.rows[-1]
  run.env_steps, run.wall_seconds = last.get(names.ENV_STEPS), last.get(names.TIME)
  if run.starts:
    run.device_seconds_by_row = _device_seconds(run)
    run.device_seconds = run.device_seconds_by_row[-1]
  run.curve = [row[names.EPISODE_RETURN] for row in run.rows if names.EPISODE_RETURN in row]
  run.training_return = run.curve[-1] if run.curve else None
  settings = run.settings or {}
  total = settings.get("learner.steps")
  early = settings.get("topology.gradients") == "actors" and (
    (run.env_steps or 0) >= settings.get("run.env_steps", math.inf)
  )
  if total and run.steps < total and not early:
    run.problems.append(f"unfinished: learner step {run.steps:,} of {total:,}")


def _device_seconds(run: Run) -> list[float]:
  """Cumulative wall-clock seconds times devices at each row.

  Each row counts with the devices of the start that wrote it.
  """
  total, before, each = 0.0, 0.0, []
  for row in run.rows:
    # Resuming removes lines of later steps, so a row was written by the last start before it.
    starts = [start for start in run.starts if start[names.STEP] < row[names.STEP]]
    now = row.get(names.TIME, before)
    total += (starts or run.starts)[-1 if starts else 0]["devices"] * (now - before)
    before = now
    each.append(total)
  return each


def _is_finite(value: object) -> bool:
  """Whether a value is a number, and small enough to be summed without overflow."""
  return isinstance(value, int | float) and -1e300 < value < 1e300


def _finite(value: Any) -> float:
  if not _is_finite(value):
    raise ValueError(f"{value!r} is not a finite number")
  return value


def _note_damaged(run: Run, path: pathlib.Path, damaged: int) -> None:
  if damaged:
    run.problems.append(f"{path.name}: {damaged} damaged line{'s' * (damaged > 1)} skipped")


def _read_evaluation(run: Run, path: pathlib.Path) -> None:
  evaluation = json.loads(path.read_text())
  mean, std, step, episodes = (_finite(evaluation[k]) for k in ("mean", "std", "step", "episodes"))
  run.game = run.game or str(evaluation["game"])
  run.evaluation_mean, run.evaluation_std = mean, std
  run.human_normalized = human_normalized(run.game, mean)
  run.evaluation_step, run.evaluation_episodes = int(step), int(episodes)
  run.evaluation_explore = bool(evaluation.get("explore"))
  newest = max((row.get(names.CHECKPOINT_STEP, 0) for row in run.rows), default=0)
  if newest > step:
    run.problems.append(
      f"evaluated at learner step {step:,}, not at the last checkpoint ({newest:,})"
    )


_READERS = {
  "config.yaml": _read_config, "starts.jsonl": _read_starts, "metrics.jsonl": _read_metrics,
  "evaluation.json": _read_evaluation,
}  # fmt: skip
