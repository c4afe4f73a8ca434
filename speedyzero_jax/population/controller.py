"""Controller of a population: rounds of training, each followed by exploit and explore.

Every decision is appended to an event log before it is carried out, and every operation is
idempotent, so a killed controller resumes where it stopped.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from speedyzero_jax.population import selection
from speedyzero_jax.population.config import Population

Settings = dict[str, float]  # dotted key of a knob -> value
Event = dict[str, Any]


class Outcome(NamedTuple):
  """Result of a member's round; `returns` is empty if it diverged or failed."""

  member: int
  returns: list[float]  # returns of the evaluation after the round


class NoMemberFinished(Exception):
  """Raised if all members fail in a round; the next call trains them again."""


class Trainer(Protocol):
  """Trains and copies members. Both methods are idempotent."""

  def train(self, members: Mapping[int, Settings], round_: int) -> Iterable[Outcome]:
    """Trains members to the end of a round (counted from 0) and yields outcomes in any order."""

  def copy(self, member: int, source: int, settings: Settings, round_: int) -> None:
    """Replaces a member by a copy of `source` with these settings, at most once per round."""


class EventLog:
  """File of events as JSON lines. An incomplete last line is dropped."""

  def __init__(self, path: Path):
    self._path = path
    path.touch()
    *lines, torn = path.read_bytes().split(b"\n")
    self.events: list[Event] = [json.loads(line) for line in lines]
    os.truncate(path, path.stat().st_size - len(torn))

  def append(self, event: Event) -> None:
    """Appends an event and syncs it to disk."""
    with self._path.open("ab") as file:
      file.write(json.dumps(event).encode() + b"\n")
      file.flush()
      os.fsync(file.fileno())
    self.events.append(event)

  def of(self, name: str, round_: int) -> Iterator[Event]:
    """Yields the events of this name in a round."""
    return (e for e in self.events if e["event"] == name and e["round"] == round_)


def run(
  population: Population,
  trainer: Trainer,
  log: EventLog,
  report: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
  """Runs all rounds, or continues them from the log.

  Returns:
    `best`, the member with the highest score after the last round; its `settings`; and `scores`
    [rounds][members], None where a member failed.

  Raises:
    NoMemberFinished: all members failed in a round.
  """
  settings = initial(population)
  table = []
  for round_ in range(population.rounds):
    outcomes = _train(population, trainer, log, settings, round_, report)
    scores = [_mean(outcomes[member]) for member in range(population.members)]
    if max(scores) == -math.inf and not any(log.of("selected", round_)):
      raise NoMemberFinished(f"no member finished round {round_ + 1}; see the logs of the members")
    table.append([score if math.isfinite(score) else None for score in scores])
    report(f"round {round_ + 1} of {population.rounds}: best {max(scores):.4g}, "
           f"median {np.median(scores):.4g}")  # fmt: skip
    if not any(log.of("selected", round_)):
      last = round_ == population.rounds - 1
      copies = [] if last else _select(population, settings, outcomes, scores, round_)
      log.append({"event": "selected", "round": round_, "copies": copies})
    (selected,) = log.of("selected", round_)
    if not any(log.of("copied", round_)):
      for copy in selected["copies"]:
        trainer.copy(**copy, round_=round_)
        report(_text(copy, scores))
      log.append({"event": "copied", "round": round_})
    settings |= {copy["member"]: copy["settings"] for copy in selected["copies"]}
  best = int(np.argmax(scores))
  return {"best": best, "settings": settings[best], "scores": table}


def initial(population: Population) -> dict[int, Settings]:
  """Draws every member's initial settings."""
  rng = np.random.default_rng([population.seed, 0])
  return {
    member: {knob.key: knob.draw(rng) for knob in population.knobs}
    for member in range(population.members)
  }


def _train(
  population: Population,
  trainer: Trainer,
  log: EventLog,
  settings: Mapping[int, Settings],
  round_: int,
  report: Callable[[str], None],
) -> dict[int, list[float]]:
  """Trains the members that have not finished the round. Returns evaluation returns by member.

  Members without a score are trained again, until the round is complete.
  """
  complete = any(log.of("selected", round_))
  outcomes = {
    event["member"]: event["returns"]
    for event in log.of("trained", round_)
    if complete or _mean(event["returns"]) > -math.inf
  }
  missing = {m: settings[m] for m in range(population.members) if m not in outcomes}
  for member, returns in trainer.train(missing, round_):
    log.append({"event": "trained", "round": round_, "member": member,
                "settings": settings[member], "returns": returns})  # fmt: skip
    outcomes[member] = returns
    report(f"  member {member}: {_mean(returns):.4g}")
  return outcomes


def _select(
  population: Population,
  settings: Mapping[int, Settings],
  outcomes: Mapping[int, list[float]],
  scores: list[float],
  round_: int,
) -> list[Event]:
  rng = np.random.default_rng([population.seed, 1 + round_])
  copies: list[selection.Copy] = []
  if population.selection == "truncation":
    copies = selection.truncation(scores, population.share, rng)
  elif population.selection == "t_test":
    each = [outcomes[m] if scores[m] > -math.inf else [] for m in range(population.members)]
    copies = selection.t_test(each, population.level, rng)

  def explored(source: int) -> Settings:
    return {
      knob.key: knob.draw(rng)
      if rng.random() < population.resample
      else knob.perturb(settings[source][knob.key], population.factors, rng)
      for knob in population.knobs
    }

  return [{**copy._asdict(), "settings": explored(copy.source)} for copy in copies]


def _text(copy: Event, scores: list[float]) -> str:
  member, source = copy["member"], copy["source"]
  values = ", ".join(f"{key}={value:.4g}" for key, value in copy["settings"].items())
  return f"  {member} ({scores[member]:.4g}) copies {source} ({scores[source]:.4g}): {values}"


def _mean(returns: list[float]) -> float:
  mean = float(np.mean(returns)) if returns else -math.inf
  return mean if math.isfinite(mean) else -math.inf
