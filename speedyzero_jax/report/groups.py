"""Groups of runs: repetitions of one another, and methods, which are repetitions over games."""

import collections
import dataclasses
import json
import math
import re
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from speedyzero_jax.envs.scores import human_normalized
from speedyzero_jax.report import aggregates
from speedyzero_jax.report.runs import CURVE, GAME, REPETITION_KEYS, Run

SCORES = ("evaluation_mean", "training_return")  # the first one that all runs of a group have
_NAMED = 2  # settings in a method's name


@dataclasses.dataclass(frozen=True)
class Group:
  """Runs that differ only in their seed, summarized over their scores."""

  runs: list[str]  # paths
  game: str | None
  seeds: list[int | None]
  score: str  # one of SCORES
  mean: float
  stderr: float
  iqm: float  # interquartile mean
  human_normalized: float | None  # mean over the runs, if every run has it


@dataclasses.dataclass(frozen=True)
class Method:
  """Runs that differ only in their game and their seed."""

  name: str
  runs: list[Run]

  def games(self) -> dict[str, list[Run]]:
    """The runs of each game."""
    games = collections.defaultdict(list)
    for run in self.runs:
      games[str(run.game)].append(run)
    return dict(sorted(games.items()))

  def scores(self) -> dict[str, list[float]]:
    """Human-normalized scores of each game of Atari-100k, of the runs that were evaluated."""
    found: dict[str, list[float]] = collections.defaultdict(list)
    for game, runs in self.games().items():
      for run in runs:
        if run.evaluation_mean is not None:
          score = human_normalized(game, run.evaluation_mean)
          found[game] += [] if score is None else [score]
    return {game: scores for game, scores in found.items() if scores}


def group_runs(runs: Sequence[Run]) -> list[Group]:
  """Groups of at least two runs that differ only in their seed and all have a score."""
  groups = []
  for members in _alike(runs):
    for score in SCORES:
      scores = [x for run in members if (x := getattr(run, score)) is not None]
      if 1 < len(scores) == len(members):
        groups.append(_group(members, score, scores))
        break
  return groups


def _group(members: Sequence[Run], score: str, scores: Sequence[float]) -> Group:
  human = [x for run in members if (x := run.human_normalized) is not None]
  return Group(
    runs=[run.path for run in members],
    game=members[0].game,
    seeds=[run.seed for run in members],
    score=score,
    mean=statistics.fmean(scores),
    stderr=statistics.stdev(scores) / math.sqrt(len(scores)),
    iqm=float(aggregates.iqm([np.array(scores)])),
    human_normalized=statistics.fmean(human) if len(human) == len(scores) else None,
  )


def to_json(runs: Sequence[Run], groups: Sequence[Group], **more: Any) -> str:
  """The comparison as JSON, with arrays of numbers on one line."""
  found = {
    **more,
    "curve_columns": CURVE,
    "runs": [run.summary() for run in runs],
    "groups": [vars(group) for group in groups],
  }
  text = json.dumps(found, indent=1) + "\n"
  return re.sub(r"\[\n[^\[\]{}]*\n *\]", lambda array: " ".join(array[0].split()), text)


def methods(runs: Sequence[Run]) -> list[Method]:
  """The methods, named by their agent and what differs among those of the same agent."""
  found = _alike(runs, GAME)
  by_agent = collections.defaultdict(list)
  for members in found:
    by_agent[_agent(members)].append(members)
  made = []
  for number, members in enumerate(found):
    alike = by_agent[_agent(members)]
    changed = [] if len(alike) == 1 else list(differences(alike))
    settings = members[0].settings or {}
    parts = [f"{key.split('.')[-1]}={settings.get(key, '-')}" for key in changed[:_NAMED]]
    more = ["…"] if len(changed) > _NAMED else []
    letter = chr(ord("A") + number) if number < 26 else str(number)
    made.append(Method(f"{letter}: {' '.join([_agent(members), *parts, *more])}", members))
  return made


def differences(groups: Sequence[Sequence[Run]]) -> dict[str, list[Any]]:
  """Settings in which groups of runs differ, with the value in each; None where it has none."""
  settings = [runs[0].settings or {} for runs in groups]
  keys = dict.fromkeys(key for each in settings for key in each)
  values = {key: [each.get(key) for each in settings] for key in keys}
  compared = {key: {str(value) for value in each} for key, each in values.items()}
  repeated = (*REPETITION_KEYS, GAME)
  return {k: each for k, each in values.items() if len(compared[k]) > 1 and k not in repeated}


def _agent(runs: Sequence[Run]) -> str:
  return str((runs[0].settings or {}).get("agent", "agent"))


def _alike(runs: Sequence[Run], *keys: str) -> list[list[Run]]:
  """Runs of equal settings but for `keys` and repetition; those without settings are left out."""
  alike = collections.defaultdict(list)
  for run in runs:
    if (settings := run.settings_but(*keys)) is not None:
      alike[settings].append(run)
  return list(alike.values())
