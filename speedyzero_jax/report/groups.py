"""Methods, which are groups of runs with different games and seeds."""

import collections
import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from speedyzero_jax.report.runs import CURVE, EVALUATIONS, GAME, REPETITION_KEYS, Run
from speedyzero_jax.run.run_dir import safe_name

_REPEATED = (*REPETITION_KEYS, GAME)  # settings in which runs of a method always differ
_NAMED = 2  # maximum settings in a method's name


@dataclasses.dataclass(frozen=True)
class Method:
  """Runs that differ only in game and seed, and in the settings of a preset for single games."""

  name: str
  runs: list[Run]

  def games(self) -> dict[str, list[Run]]:
    """The runs of each game."""
    games = collections.defaultdict(list)
    for run in self.runs:
      games[str(run.game)].append(run)
    return dict(sorted(games.items()))

  def scores(self) -> dict[str, list[float]]:
    """Human-normalized scores of the evaluated runs, by game of Atari-100k."""
    each = {
      game: [run.human_normalized for run in runs if run.human_normalized is not None]
      for game, runs in self.games().items()
    }
    return {game: scores for game, scores in each.items() if scores}


def to_json(runs: Sequence[Run], **more: Any) -> str:
  """Serializes the comparison as JSON, with arrays of numbers on one line."""
  content = {
    **more,
    "curve_columns": CURVE,
    "evaluation_columns": EVALUATIONS,
    "runs": [run.summary() for run in runs],
  }
  text = json.dumps(content, indent=1) + "\n"
  return re.sub(r"\[\n[^\[\]{}]*\n *\]", lambda array: " ".join(array[0].split()), text)


def methods(runs: Sequence[Run]) -> list[Method]:
  """Groups runs into methods.

  Names are those of the folders, without game and seed, or if these are missing or not unique,
  agent and the first settings in which the agent's methods differ.
  """
  groups = _across_games(_alike(runs, GAME))
  folders = [_folder_name(members) for members in groups]
  names = folders if len({*folders} - {""}) == len(groups) else _setting_names(groups)
  letters = [chr(ord("A") + i) if i < 26 else str(i) for i in range(len(groups))]
  if len(groups) > 1:
    names = [f"{letter}: {name}" for letter, name in zip(letters, names, strict=True)]
  return [Method(name, members) for name, members in zip(names, groups, strict=True)]


def _across_games(groups: Sequence[list[Run]]) -> list[list[Run]]:
  """Joins groups without a common game in folders PARENT/NAME-GAME-sSEED, as those of a study.

  Agent and kind of evaluation are equal, too. Presets may have settings for single games.
  """
  joined: dict[Any, list[Run]] = {}
  for i, runs in enumerate(groups):
    first = Path(runs[0].path)
    folder = _folder_name(runs)
    key = first.parent, folder, _agent(runs), runs[0].evaluation_explore
    games = {run.game for run in joined.get(key, [])}
    fits = folder not in ("", first.name) and games.isdisjoint(run.game for run in runs)
    joined.setdefault(key if fits else i, []).extend(runs)
  return list(joined.values())


def _folder_name(runs: Sequence[Run]) -> str:
  """The common name of folders NAME-GAME-sSEED; empty if there is none."""
  ends = [safe_name(f"-{run.game}-s{run.seed}") for run in runs]
  names = {Path(run.path).name.removesuffix(end) for run, end in zip(runs, ends, strict=True)}
  return names.pop() if len(names) == 1 else ""


def _setting_names(groups: Sequence[Sequence[Run]]) -> list[str]:
  by_agent = collections.defaultdict(list)
  for members in groups:
    by_agent[_agent(members)].append(members)
  names = []
  for members in groups:
    alike = by_agent[_agent(members)]
    changed = [] if len(alike) == 1 else list(differences(alike))
    settings = members[0].settings or {}
    parts = [f"{key.split('.')[-1]}={settings.get(key, '-')}" for key in changed[:_NAMED]]
    more = ["…"] if len(changed) > _NAMED else []
    names.append(" ".join([_agent(members), *parts, *more]))
  return names


def differences(groups: Sequence[Sequence[Run]]) -> dict[str, list[Any]]:
  """Settings in which groups of runs differ -> each group's value, or None if not set.

  If there are games that all groups have, these are compared. Different values of a group's runs
  are joined in a string.
  """
  games = [{run.game for run in runs} for runs in groups]
  common = set.intersection(*games) if games else set()
  compared = [[run for run in runs if run.game in common or not common] for runs in groups]
  keys = dict.fromkeys(key for runs in compared for run in runs for key in run.settings or {})
  values = {k: [_value(runs, k) for runs in compared] for k in keys if k not in _REPEATED}
  return {key: each for key, each in values.items() if len({*map(str, each)}) > 1}


def _value(runs: Sequence[Run], key: str) -> Any:
  """The runs' value of a setting, or their different values joined in a string."""
  values = {str(value): value for run in runs for value in [(run.settings or {}).get(key)]}
  return next(iter(values.values())) if len(values) == 1 else ", ".join(sorted(values))


def _agent(runs: Sequence[Run]) -> str:
  return str((runs[0].settings or {}).get("agent", "agent"))


def _alike(runs: Sequence[Run], *keys: str) -> list[list[Run]]:
  """Groups runs with equal settings except `keys` and those of repetitions, evaluated alike.

  Runs without settings, and those that repeat another's seed, are omitted.
  """
  alike = collections.defaultdict(list)
  for run in runs:
    if not run.repeats and (settings := run.settings_but(*keys)) is not None:
      alike[settings, run.evaluation_explore].append(run)
  return list(alike.values())
